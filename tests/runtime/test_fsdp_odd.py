"""Odd ways to use `fully_shard`, on real processes, beside torch's FSDP2 wrapped block by block."""

from typing import Any

import pytest
import torch.distributed.fsdp

from mgwfbp import FsdpPlan, ModelTrace
from mgwfbp.planners.fsdp_by_hand import BY_HAND
from tests.runtime.launch import run_ranks

pytestmark = [
    pytest.mark.timeout(300),  # of processes that may share their cores
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no public fully_shard"
    ),
]
HAS_REPLICAS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
RANKS = "tests.runtime.fsdp_odd_ranks"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    return run_ranks(
        RANKS,
        [
            "again",
            "predicting",
            "elsewhere",
            "arguments",
            "reached",
            "checkpointed",
            "on_meta",
            "silent",
            "compiled",
            "evaluated",
        ],
        tmp_path_factory.mktemp("two"),
        2,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 4 ranks saw."""
    return run_ranks(RANKS, ["meshes"], tmp_path_factory.mktemp("four"), 4)


def test_modules_that_run_again_in_a_step_are_merged_with_no_other_and_train_as_torchs_do(two: list[Any]) -> None:
    for rank, found in enumerate(told["again"] for told in two):
        assert (found["kept"], found["resharded"]) == (0.0, 0.0)
        trace, plan = ModelTrace.from_json(found["trace"]), FsdpPlan.from_json(found["plan"])
        assert set(trace.source["repeated"]) >= {"h.1", "head"}
        assert plan.groups == (("h.0",), ("h.1",), ("h.2", "h.3", "h.4"))
        for made in (plan, *(by_hand(trace, ()) for by_hand in BY_HAND.values())):
            for name in ("h.1", "head"):
                assert (name,) in made.groups or name in made.root
            # A list of modules cannot be called, so that those in it would be one group.
            assert {"parts.0", "parts.1"} <= set(made.root)
        said = [line for line in found["said"] if "which run again in a step" in line]
        assert len(said) == (rank == 0)
        assert all("'head'" in line for line in said)


def test_a_head_that_runs_again_does_not_fail_in_the_backward_pass(two: list[Any]) -> None:
    for found in (told["predicting"] for told in two):
        assert ["head"] in found["groups"]
        assert found["difference"] == 0.0


def test_what_is_read_while_it_does_not_run_or_returns_its_own_stays_with_the_root_and_trains_as_torchs(
    two: list[Any],
) -> None:
    for rank, found in enumerate(told["elsewhere"]["Read"] for told in two):
        assert found["difference"] == 0.0
        plan = FsdpPlan.from_json(found["plan"])
        assert set(plan.root) == {"stem", "head", "shift"}
        said = [line for line in found["said"] if "keeps with the root" in line]
        assert len(said) == (rank == 0)
        for line in said:
            assert "'head' (each has parameters that are read while it does not run)" in line
            assert "'shift' (returns a parameter of its own, or a view of one)" in line


def test_what_runs_without_gradients_is_gathered_in_its_turn_and_not_in_the_backward_pass(two: list[Any]) -> None:
    for found in (told["elsewhere"]["Stopped"] for told in two):
        assert found["difference"] == 0.0
        plan = FsdpPlan.from_json(found["plan"])
        order = ["stem", "h.0", "h.1", "h.2", "h.3", "head", "h.4"]
        assert ([name for group in plan.groups for name in group], plan.idle) == (order, ())
        gathers = [one.removeprefix("all_gather ") for one in found["events"] if one.startswith("all_gather")]
        assert gathers == ["root", *order, "head", "h.3", "h.1"]


@pytest.mark.skipif(not HAS_REPLICAS, reason="this torch cannot average over replicas of FSDP2 over gloo")
def test_ranks_of_every_dimension_of_a_mesh_have_one_plan(four: list[Any]) -> None:
    for rank, found in enumerate(told["meshes"] for told in four):
        assert found["other plans"] == (
            "PlanError: the ranks have different plans: group 0 holds 7 modules on rank 0 and 3 on rank 1, and on rank "
            "0 'h.2' comes after 'h.1'; give every rank the same plan"
        )
        for name in ("parts", "all"):
            assert found[name]["groups"] == four[rank - rank % 2]["meshes"][name]["groups"], name
            assert found[name]["difference"] <= 1e-6
        assert found["measured"] <= 1e-6


def test_offloaded_shares_ignored_parameters_and_types_are_planned_as_torch_has_them(two: list[Any]) -> None:
    for rank, found in enumerate(told["arguments"] for told in two):
        whole = sum(found["plain"]["sizes"].values())
        begin = f"WARNING the plan is for {whole} B of parameters, {whole} of them trained, the model has "
        end = " of them trained: it predicts another step and its memory"
        assert found["warned"]["same"] == []
        if rank == 0:
            assert found["warned"]["in 16 bits"] == [f"{begin}{whole // 2} B, {whole // 2}{end}"]
            assert found["warned"]["frozen"] == [f"{begin}{whole} B, {whole - 5 * found['plain']['sizes']['h.1']}{end}"]
        plain, ignored, mixed = found["plain"], found["ignored"], found["mixed"]
        assert found["offloaded"]["memory"] == plain["memory"] - 4 * whole // 2
        block = plain["sizes"]["h.1"]
        assert ignored["sizes"] == {**plain["sizes"], "h.1": 0, "head": 3 * 4}
        assert (ignored["gathers"]["h.1"], plain["gathers"]["h.1"] > 0) == (0.0, True)
        assert ignored["memory"] < plain["memory"] - 4 * block // 2
        # Blocks in 16 bits are gathered as they are, the rest in half of its bytes, and its gradients are sent in all.
        frozen, trained = 5 * block // 2, whole - 5 * block
        gather = (frozen + trained / 2) / (frozen + trained)
        assert mixed["precision"] == {"gather": pytest.approx(gather), "reduce": 1.0, "states": 2, "kept": 1.0}
        assert found["as stored"]["precision"] == {"gather": 1.0, "reduce": 1.0, "states": 2, "kept": 1.0}
        assert found["wrapped"]


def test_frozen_groups_are_asked_for_ahead_where_the_backward_pass_reaches_them(two: list[Any]) -> None:
    for events in (told["reached"]["events"] for told in two):
        for place in range(3):  # before the group behind it ends
            again = len(events) - 1 - events[::-1].index(f"all_gather h.{place}")
            assert events.index(f"pre_backward h.{place + 1}") < again < events.index(f"pre_backward h.{place}")


def test_where_activations_are_computed_again_training_is_bitwise_torchs_whatever_the_plan(two: list[Any]) -> None:
    for found in (told["checkpointed"] for told in two):
        assert len(found) == 14
        assert {name: error for name, error in found.items() if error} == {}


def test_a_model_on_the_meta_device_is_planned_and_wrapped_and_gets_its_memory_later(two: list[Any]) -> None:
    for found in (told["on_meta"] for told in two):
        assert found == {"difference": 0.0, "was_meta": True, "same": True}


def test_groups_end_with_what_a_gradient_reaches_and_no_plan_fails_in_the_backward_pass(two: list[Any]) -> None:
    for found in (told["silent"] for told in two):
        assert len(found["differences"]) >= 3
        assert set(found["differences"]) == {0.0}
        assert any(found["merged"])
        assert {"probe", "teacher.h.0", "teacher.head"} <= set(found["no_gradient"])
        assert found["again"]
        assert not any(name.startswith("teacher") for name in found["again"])
        assert "ends with 'probe', whose output gets no gradient" in found["refused"]


def test_blocks_that_are_graphs_of_their_own_are_measured_from_outside(two: list[Any]) -> None:
    for found in (told["compiled"] for told in two):
        assert found == {"in place": 0.0, "around": 0.0}


def test_an_evaluation_leaves_nothing_gathered_and_the_next_sees_what_changed(two: list[Any]) -> None:
    for found in (told["evaluated"] for told in two):
        assert found["before"] > 0
        assert (found["whole"], found["after"]) == (0, 0.0)
