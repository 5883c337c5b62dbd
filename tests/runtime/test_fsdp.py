"""`fully_shard` on real processes, beside torch's FSDP2 wrapped block by block."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from tests.runtime.launch import run_ranks

pytestmark = [
    pytest.mark.timeout(300),  # of processes that may share their cores
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no public fully_shard"
    ),
]
RANKS = "tests.runtime.fsdp_ranks"
HAS_REPLICAS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    scenarios = ["trained", "odd", "ignored", "scheduled", "saved", "refused", "without"]
    return run_ranks(RANKS, scenarios, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 4 ranks saw."""
    scenarios = ["mixed", "saved", *(["meshes"] if HAS_REPLICAS else [])]
    return run_ranks(RANKS, scenarios, tmp_path_factory.mktemp("four"), 4)


def test_losses_and_parameters_are_bitwise_torchs_whatever_the_plan_at_2_ranks(two: list[Any]) -> None:
    for found in (told["trained"] for told in two):
        assert len(found) == 54
        assert {name: error for name, error in found.items() if error} == {}


def test_so_they_are_at_4_ranks_up_to_the_order_of_sums(four: list[Any]) -> None:
    for found in (told["mixed"] for told in four):
        assert len(found) == 6
        assert {
            name: error for name, error in found.items() if error > 1e-4
        } == {}  # Adam divides by what may be nearly 0


@pytest.mark.skipif(not HAS_REPLICAS, reason="this torch cannot average over replicas of FSDP2 over gloo")
def test_a_mesh_may_have_replicas_and_parts_of_all_ranks_may_have_plans_of_their_own(four: list[Any]) -> None:
    for found in (told["meshes"] for told in four):
        assert max(found["replicas"], found["parts"]) <= 1e-6


def test_what_cannot_be_wrapped_by_itself_stays_with_the_root_and_is_said_once(two: list[Any]) -> None:
    begin = "INFO fully_shard keeps with the root, gathered first and never resharded: "
    lost = "WARNING the plan has {} in groups, not with the root: it predicts another step and its memory"
    expected = {
        "Blocks": ([], ["h.0", "h.1", "h.2", "h.3", "h.4", "head", "stem"]),
        "Transformer": (
            [f"{begin}'embed' (has a parameter that a module outside of it uses too)", lost.format("'embed'")],
            ["layers.0", "layers.1", "layers.2", "norm"],
        ),
        "Containers": (
            [f"{begin}'extra' (has parameters and no forward pass)", lost.format("'extra'")],
            ["h.0.0", "h.0.1.narrow", "h.1.0", "h.1.1.narrow", "stem"],
        ),
        "Partly": ([], ["attention", "head", "stem"]),
        "PartlyPlanned": (
            [
                f"{begin}'attention.out_proj' (is inside a MultiheadAttention, which reads its weights without calling "
                "it); 4 frozen parameters of 624 B (in no module of the plan)",
                lost.format("'attention.out_proj'"),
            ],
            ["head"],
        ),
        "Shared": (
            [f"{begin}'h.0' (has a parameter that a module outside of it uses too)", lost.format("'h.0'")],
            ["h.1.wide", "h.2", "stem"],
        ),
    }
    for rank, found in enumerate(told["odd"] for told in two):
        assert list(found) == list(expected)
        for name, (lines, wrapped) in expected.items():
            assert found[name]["units"], name
            assert found[name]["said"] == ([] if rank else lines)
            assert found[name]["wrapped"] == ["", *wrapped]
            assert found[name]["difference"] == 0.0, name


def test_arguments_reach_torch_for_every_group_and_a_group_may_have_nothing_to_gather(two: list[Any]) -> None:
    for found in (told["ignored"] for told in two):
        assert found["differences"] == [0.0] * 6
        parts = [f"h.0.{layer}.{kind}" for layer in ("narrow", "wide") for kind in ("bias", "weight")]
        assert found["left"] == [*parts, "head.bias"]


def test_groups_are_asked_for_as_early_as_the_plan_says_and_only_resharded_ones_again(two: list[Any]) -> None:
    groups = ["root", "stem+h.0", "h.1+h.2", "h.3+h.4", "head"]
    for found in (told["scheduled"] for told in two):
        for name, ahead, resharded in (("near", 1, [1, 2, 4]), ("far", 2, [1, 2, 3, 4])):
            events = found[name]
            middle = events.index("pre_backward head")
            forward, backward = events[:middle], events[middle:]
            gathers = [one for one in forward if one.startswith("all_gather")]
            assert gathers == [f"all_gather {group}" for group in groups]
            again = [one for one in backward if one.startswith("all_gather")]
            assert again == [f"all_gather {groups[place]}" for place in reversed(resharded)]
            assert sorted(one for one in events if one.startswith("reduce")) == sorted(
                f"reduce {one}" for one in groups
            )
            for place, group in enumerate(groups[:-1]):  # what it asks for comes before the next one begins
                last = min(place + ahead, len(groups) - 1)
                begins = forward.index(f"pre_forward {groups[place + 1]}")
                asked = [one for one in forward[:begins] if one.startswith("all_gather")]
                assert asked == gathers[: last + 1], (name, group)
            for place in range(len(groups) - 1, 1, -1):
                first = max(1, place - ahead)
                begins = backward.index(f"pre_backward {groups[place - 1]}")
                asked = [one for one in backward[:begins] if one.startswith("all_gather")]
                assert asked == [f"all_gather {groups[one]}" for one in reversed(resharded) if one >= first], name


@pytest.mark.parametrize("world", ["two", "four"])
def test_checkpoints_are_torchs_and_either_goes_on_with_the_others(world: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(world)
    for found in (told["saved"] for told in ranks):
        assert len(found) == 6
        for way in ("ours in torch's", "torch's in ours"):
            assert max(found[f"{way}, full"], found[f"{way}, sharded"]) <= (0.0 if world == "two" else 1e-4)
            assert found[f"{way}, share"] < 1.3 / len(ranks)  # of the numbers, on a rank


def test_a_plan_that_is_not_the_models_or_not_that_of_all_ranks_is_one_line_before_anything_is_wrapped(
    two: list[Any],
) -> None:
    again = "make a new one with `mgwfbp plan --engine fsdp2`"
    same = "give every rank the same plan"
    expected = {
        "unknown": f"the plan for 'toy' has 1 module, the model 7 ('h.0' is in the model only): {again}",
        "too few": f"the plan for 'toy' has 6 modules, the model 7 ('stem' is in the model only): {again}",
        "one rank's": f"the plan for 'toy' has 8 modules, the model 7 ('more' is in the plan only): {again}",
        "groups": "the ranks have different plans: group 0 holds 3 modules on rank 0 and 7 on rank 1, and there 'h.2' "
        f"comes after 'h.1'; {same}",
        "reshard": "the ranks have different plans: the resharding of group 1 is True on rank 0 and False on rank 1; "
        + same,
        "prefetch": f"the ranks have different plans: backward_prefetch is 1 on rank 0 and 2 on rank 1; {same}",
        "reshard_after_forward": "reshard_after_forward is given, and the plan says it for each group: leave it out",
        "twice": "the model is fully sharded already: give a model as made",
    }
    for rank, found in enumerate(told["refused"] for told in two):
        for name, line in expected.items():
            other = "rank 1 has no plan to run: PlanError: " if name == "one rank's" and rank == 0 else ""
            assert found[name] == f"PlanError: {other}{line}"
        begin = "FileError: " if rank else "PlanError: rank 1 has no plan to run: FileError: "
        assert found["no file"].startswith(begin)
        assert found["no file"].endswith("none.json: cannot be read: No such file or directory")
        assert (found["wrapped"], found["path"]) == ("[]", "nothing")


def test_a_torch_without_it_is_told(two: list[Any]) -> None:
    for found in (told["without"] for told in two):
        assert found["told"].startswith("StrategyError: torch ")
        assert found["told"].endswith(" has no public fully_shard (FSDP2): install torch 2.6 or newer")
