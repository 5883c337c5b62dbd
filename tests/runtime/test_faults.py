"""What goes wrong on one rank while the tuner works, and steps that one rank does differently: training goes on."""

from typing import Any

import pytest
import torch

from tests.runtime.fault_ranks import ODD, STEPS
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ranks met, of which one met it alone."""
    return run_ranks("tests.runtime.fault_ranks", ["steps", "faults"], tmp_path_factory.mktemp("r"), request.param)


def check_training_is_stocks(found: dict[str, Any], world: int) -> None:
    if world == 2:
        assert found["bitwise"] is True
    assert found["distance"] < 1e-6


WAYS = ["dummy_loss", "skipped_backward", "caught_exception", "loss_used_twice", "extra_forward"]


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_one_rank_does_differently_are_counted_alike_and_tuning_goes_on(ranks: list[Any], way: str) -> None:
    for found in (told["steps"][way] for told in ranks):
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
