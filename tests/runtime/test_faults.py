"""What goes wrong on one rank while the tuner works, and steps that one rank does differently: training goes on."""

from typing import Any

import pytest
import torch

from mgwfbp.runtime.tune.self_tuning import NOT_COUNTED
from tests.runtime.fault_ranks import MODES, ODD, STEPS, WAYS
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ranks met, of which one met it alone."""
    return run_ranks(
        "tests.runtime.fault_ranks", ["steps", "faults", "early_faults"], tmp_path_factory.mktemp("r"), request.param
    )


def check_training_is_stocks(found: dict[str, Any], world: int) -> None:
    if world == 2:
        assert found["bitwise"] is True
    assert found["distance"] < 1e-6


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_steps_that_one_rank_does_differently_are_counted_alike_and_tuning_goes_on(ranks: list[Any], way: str) -> None:
    for found in (told["steps"][way] for told in ranks):
        check_training_is_stocks(found, len(ranks))
        assert found["state"] != "off", found["reason"]
        assert found["steps"] == STEPS


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("stage", "reason"), [("warming_up", "OSError: no time"), ("beginning", "it was compiled meanwhile")]
)
def test_a_fault_before_the_first_plan_ends_tuning_on_all_ranks_and_none_waits_for_one_that_has_nothing_to_undo(
    ranks: list[Any], stage: str, reason: str, rank: int
) -> None:
    for found in (told["early_faults"][f"{stage} {rank}"] for told in ranks):
        check_training_is_stocks(found, len(ranks))
        assert (found["state"], found["reason"], found["planner"], found["left"]) == ("off", reason, "ddp", [])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_ranks_tell_one_another_needs_no_memory_on_the_device_that_is_not_there_from_the_start(
    ranks: list[Any], rank: int
) -> None:
    for found in (told["early_faults"][f"agreement {rank}"] for told in ranks):
        check_training_is_stocks(found, len(ranks))
        assert found["state"] != "off", found["reason"]
        assert found["steps"] == STEPS


def test_a_rank_that_cannot_tune_from_the_start_keeps_the_others_from_it(ranks: list[Any]) -> None:
    lacks = f"torch {torch.__version__} lacks what it has elsewhere"
    for rank, found in enumerate(told["faults"]["construction"] for told in ranks):
        check_training_is_stocks(found, len(ranks))
        assert (found["state"], found["steps"], found["planner"]) == ("off", 0, "ddp")
        assert found["reason"] == (lacks if rank == ODD else f"rank {ODD} cannot tune: {lacks}")


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("rebuild_fails", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("second_rebuild", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("planner", "ZeroDivisionError: no plan today"),
        ("learning", "FloatingPointError: no cost today"),
        ("clock", "OSError: the clock stopped"),
        ("reading", "KeyError: 'no such parameter'"),
        ("packing", "MemoryError: no room for numbers"),
        ("unfit", "it was compiled meanwhile"),
        ("moments", "OSError: no time"),
        ("noting", "MemoryError: no hooks"),
        ("unpacking", "OverflowError: too many numbers"),
    ],
)
def test_a_fault_in_any_stage_ends_tuning_on_all_ranks_and_training_on_none(
    ranks: list[Any], stage: str, reason: str
) -> None:
    for found in (told["faults"][stage] for told in ranks):
        check_training_is_stocks(found, len(ranks))
        assert (found["state"], found["reason"]) == ("off", reason)
        assert found["planner"] == "ddp"
        assert found["left"] == []
        assert found["steps"] < STEPS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met in ways of training that give a Reducer its buckets otherwise."""
    scenarios = [
        "changes",
        "late_rebuild",
        "watching",
        "wire",
        "wire_without_room",
        "replanned",
        "looking_again",
        "steps_in_other_modes",
    ]
    return run_ranks("tests.runtime.fault_ranks", scenarios, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("mode", ["views", "unused", "static", "hook"])
def test_steps_that_one_rank_does_differently_are_counted_alike_however_buckets_are_given(
    pair: list[Any], mode: str
) -> None:
    for told in pair:
        for way, found in told["steps_in_other_modes"][mode].items():
            check_training_is_stocks(found, 2)
            assert (found["state"] != "off", found["steps"]) == (True, 30), (way, found["reason"])


NO_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("mode", list(MODES))
def test_a_change_of_buckets_that_fails_is_undone_on_all_ranks(
    pair: list[Any], mode: str, rank: int, times: int
) -> None:
    for found in (told["changes"][f"{mode} {rank} {times}"] for told in pair):
        check_training_is_stocks(found, 2)
        assert (found["state"], found["reason"], found["planner"]) == ("off", NO_MEMORY, "ddp")
        assert found["left"] == []


def test_buckets_that_are_made_when_a_step_begins_are_made_again_where_that_fails(pair: list[Any]) -> None:
    for found in (told["late_rebuild"] for told in pair):
        check_training_is_stocks(found, 2)
        assert (found["state"], found["reason"]) == ("off", NO_MEMORY)


def test_steps_that_cannot_be_watched_for_change_are_trained(pair: list[Any]) -> None:
    for rank, found in enumerate(told["watching"] for told in pair):
        check_training_is_stocks(found, 2)
        assert found["state"] == "settled"
        not_watched = "steps are not watched for change: "
        # Older torch does not count our group's collectives.
        problems = [f"{not_watched}RuntimeError: no store"] if rank == ODD else ["", f"{not_watched}{NOT_COUNTED}"]
        assert found["problem"] in problems


def test_low_precision_that_cannot_be_sent_is_not_tried_and_ranks_do_not_wait_for_their_timeout(
    pair: list[Any],
) -> None:
    for found in (told["wire"] for told in pair):
        check_training_is_stocks(found, 2)
        # Not what the others met, who waited.
        assert (found["state"], found["reason"], found["left"]) == ("off", "RuntimeError: no group", [])


def test_low_precision_that_one_rank_has_no_memory_for_is_tried_on_none_and_tuning_goes_on(pair: list[Any]) -> None:
    for found in (told["wire_without_room"] for told in pair):
        check_training_is_stocks(found, 2)
        assert (found["state"], found["low"], found["left"]) == ("settled", [], []), found["reason"]


@pytest.mark.parametrize("mode", ["plain", "unused", "static", "hook"])
def test_a_plan_that_one_rank_has_no_memory_for_is_refused_on_all(pair: list[Any], mode: str) -> None:
    for found in (told["replanned"] for told in pair):
        check_training_is_stocks(found[mode], 2)
        assert found["errors"] == [f"rank {ODD} cannot have the plan, and the one in force stays: {NO_MEMORY}"] * 4
        assert found["messages"] == [2] * 4


def test_a_tuner_that_cannot_begin_again_on_one_rank_begins_on_none(pair: list[Any]) -> None:
    for found in (told["looking_again"] for told in pair):
        assert found["failing"] == ["off", "MemoryError: no room", []]
        compiled = "the model is compiled, and every change of buckets would compile it again"
        assert found["refused"] == ["off", compiled, []]
