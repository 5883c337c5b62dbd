"""`fully_shard` without a plan, on real processes: what it measures, what it plans, what it refuses."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp

from mgwfbp import FsdpPlan, LinearCost, ModelTrace
from mgwfbp.measure.fsdp_profile import steps_from_profile
from mgwfbp.report.fsdp import find_fsdp_cases
from mgwfbp.report.inputs import load_inputs
from tests.runtime.launch import run_ranks

COST = LinearCost(workers=2, startup_s=1e-4, per_byte_s=1e-6)

pytestmark = [
    pytest.mark.timeout(300),  # of processes that may share their cores
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no public fully_shard"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks write."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Any]:
    """What 2 ranks saw."""
    scenarios = ["measured", "untouched", "beside", "precision", "limits", "odd", "profiled", "refused"]
    return run_ranks("tests.runtime.fsdp_planning_ranks", scenarios, folder, 2)


def test_a_profile_of_torchs_shows_each_gather_pass_and_message_of_a_plan(two: list[Any], folder: Path) -> None:
    plan = FsdpPlan.from_json(two[0]["profiled"]["Blocks"])
    for rank in range(2):
        steps = steps_from_profile(folder / f"Blocks{rank}.json")
        assert len(steps) == 2
        for step in steps:
            assert step.groups == (("",), *plan.groups)
            assert [again is not None for again in step.gathers_again_s] == [False, *plan.reshard]
            for before, after in pairwise(step.forward_s):
                assert before[1] <= after[0]
            for later, earlier in pairwise(step.backward_s[1:]):
                assert earlier[1] <= later[0]
            for place in range(len(step.groups)):
                assert step.gathers_s[place][1] <= step.forward_s[place][0]  # over gloo gathers are waited for
                assert step.backward_s[place][1] <= step.sent_s[place][0]
                again = step.gathers_again_s[place]
                assert again is None or again[0] >= step.forward_s[-1][0]
            assert step.iteration_s >= step.compute_s > 0
    plan.save(folder / "fsdp-plan.json")
    COST.save(folder / "cost.json")
    names = ("trace0.json", "cost.json", "fsdp-plan.json", "Blocks0.json")
    (case,) = find_fsdp_cases(load_inputs(folder / name for name in names))
    assert [(entry.name, entry.how) for entry in case.entries] == [
        ("fsdp-plan.json", "predicted"),
        ("by block", "predicted"),
        ("fsdp-plan.json", "measured"),
    ]
    assert case.entries[0].step.group_bytes == case.entries[2].step.group_bytes


def test_a_profile_shows_no_backward_pass_of_groups_before_all_that_is_trained(two: list[Any], folder: Path) -> None:
    plan = FsdpPlan.from_json(two[0]["profiled"]["Tower"])
    for rank in range(2):
        steps = steps_from_profile(folder / f"Tower{rank}.json")
        assert len(steps) == 2
        for step in steps:
            assert step.groups == (("",), *plan.groups)
            assert [again is not None for again in step.gathers_again_s] == [False] * 3 + [True] * 4
            end_s = max(moments[1] for moments in step.backward_s)
            assert step.backward_s[1:3] == step.sent_s[1:3] == ((end_s, end_s),) * 2
            assert all(start_s < stop_s <= end_s for start_s, stop_s in step.backward_s[3:])


def test_training_is_bitwise_torchs_whatever_is_measured_and_rank_0_says_the_plan(two: list[Any]) -> None:
    for rank, found in enumerate(told["measured"] for told in two):
        assert len(found) == 8
        for name, one in found.items():
            assert one["difference"] == 0.0, name
            planned = [line for line in one["said"] if line.startswith("INFO planned FsdpPlan(")]
            assert len(planned) == (rank == 0), one["said"]
            kept = [line for line in one["said"] if "uses too)" in line]
            assert len(kept) == (rank == 0 and name.startswith("Transformer")), one["said"]


def test_measuring_leaves_the_model_and_random_numbers_as_they_were_and_ranks_agree(two: list[Any]) -> None:
    first, second = (told["untouched"] for told in two)
    for found in (first, second):
        assert (found["same"], found["hooks"], found["cost"]) == (True, 0, "ShardedCost")
        plan, trace = FsdpPlan.from_json(found["plan"]), ModelTrace.from_json(found["trace"])
        assert (trace.source["ranks"], trace.source["measured"]) == (2, "backward")
        assert all(layer.forward_s is not None for layer in trace.layers)
        assert "head" in plan.root
        planned = {*plan.root, *(name for group in plan.groups for name in group)}
        assert planned == {"head", "norm", "stem", *(f"h.{n}" for n in range(5))}
        assert plan.predicted["iteration_s"] == pytest.approx(found["predicted"])
    assert (first["plan"], first["trace"]) == (second["plan"], second["trace"])


def test_where_passes_fail_beside_messages_planning_goes_on_without_what_these_take_and_says_why(
    two: list[Any],
) -> None:
    for found in (rank["beside"] for rank in two):
        assert found["Blocks"]["taken"] >= 0
        assert found["Blocks"]["said"] == []
        why = "rank 1 failed: ValueError: no luck"
        assert found["Failing"]["same"]
        assert found["Failing"]["said"] == [f"WARNING planned without what messages take from the computation: {why}"]
    assert two[0]["beside"]["Blocks"]["taken"] == two[1]["beside"]["Blocks"]["taken"]


def test_what_is_gathered_and_sent_is_what_the_precision_policy_says(two: list[Any]) -> None:
    for found in (told["precision"] for told in two):
        assert found == {"gathers": [0.5, 1.0], "both": [0.5, 0.5], "none": [1.0, 1.0], "sent wider": [1.0, 2.0]}


def test_without_a_limit_a_plan_that_holds_more_than_wrapping_by_block_says_so_once(two: list[Any]) -> None:
    for rank, found in enumerate(told["limits"] for told in two):
        assert found["none, kept"]
        assert found["enough"] == []
        assert len(found["none"]) == (rank == 0)
        assert all("a rank holds " in line and "; give memory_limit= to reshard" in line for line in found["none"])


def test_frozen_modules_are_groups_what_is_read_stays_with_the_root_and_what_nothing_runs_is_not_gathered(
    two: list[Any],
) -> None:
    blocks = [*(f"tower.{place}" for place in range(2)), "stem", *(f"h.{place}" for place in range(3))]
    begin = "INFO fully_shard keeps with the root, gathered first and never resharded: 'read', 'head' (each is"
    for rank, found in enumerate(told["odd"] for told in two):
        plan = FsdpPlan.from_json(found["plan"])
        assert (set(plan.root), set(plan.idle)) == ({"head", "read"}, {"extra", "spare"})
        assert found["planned"]["said"] == [] if rank else [f"{begin} not called by itself)"]
        assert found["resharded"]["said"] == [] if rank else [f"{begin} put there by the plan)"]
        assert [name for group in plan.groups for name in group] == blocks
        assert len(found["frozen"]) == 14
        assert found["planned"]["difference"] == found["resharded"]["difference"] == 0.0
        every = " ".join(event for title in ("planned", "resharded") for event in found[title]["events"])
        assert "extra" not in every
        assert "spare" not in every
        events = found["resharded"]["events"]
        gathers = [one.removeprefix("all_gather ") for one in events if one.startswith("all_gather")]
        # The backward pass ends with the stem: what is frozen before it is not gathered again.
        assert gathers == ["root", *blocks, *reversed(blocks[2:])]
        assert "no plan for 'Tower' fits into 1 B: the least is " in found["least"]


def test_what_cannot_be_planned_is_one_line_on_all_ranks_before_anything_is_wrapped(two: list[Any]) -> None:
    alien = "the trace of 'toy' is not one of this model ({}): measure it again, or give batch="
    expected = {
        "nothing": "there is no plan and nothing to make one of: give batch=, what the model is called with, so that "
        "it can be measured, or trace=, or plan=",
        "one rank's trace": "trace is not the same on all ranks: give it to every rank or to none",
        "one rank's plan": "plan is given on some ranks only: give it to every rank or to none",
        "size": "memory_limit is 'much', expected a size such as 40GiB or 512MB",
        "workers": "cost is of 4 workers, and parameters are sharded over 2: measure it there",
        "other": "the trace of 'other' is not one of this model ('alone' is in the trace only): measure it again, or "
        "give batch=",
        "larger": alien.format("'head' has 84 B, 84 of them trained, and in the trace 140 B, 140 of them trained"),
        "in 16 bits": alien.format(
            "what is in no module has 4 B, 4 of them trained, and in the trace 2 B, 2 of them trained"
        ),
        "thawed": alien.replace("toy", "Tower").format(
            "'h.1' has 492 B, 492 of them trained, and in the trace 492 B, 252 of them trained"
        ),
        "plan too": "plan is given, and batch and cost to make one of: leave out one or the other",
        "reshard_after_forward": "reshard_after_forward is given, and the plan says it for each group: leave it out",
        "twice": "the model is fully sharded already: give a model as made",
        "frozen": "624 B of the model's 876 B of parameters are frozen, and the trace of 'toy' does not have them: "
        "measure it again, or give batch=",
        "dp_mesh_dims": "dp_mesh_dims is given, and a plan is made for a mesh whose last dimension shards: give plan=, "
        "or such a mesh",
        "meta": "parameter 'scale' is on meta, and FSDP2 trains on cpu: move the model there, so that it can be "
        "measured, or give trace=",
    }
    for rank, found in enumerate(told["refused"] for told in two):
        for name, line in expected.items():
            assert found[name] == f"PlanError: {line}"
        assert found["cost alone"] == found["nothing"]
        assert found["batch"].startswith("MeasureError: rank 1 failed: RuntimeError: ")
        other = "rank 0 cannot plan: " if rank else ""
        assert found["limit"].startswith(f"PlanError: {other}no plan for 'toy' fits into 10 B: the least is ")
        begin = "FileError: " if rank else "PlanError: rank 1 cannot plan: "
        assert found["no file"].startswith(begin)
        assert (found["wrapped"], found["paths"]) == ("[]", "nothing")
