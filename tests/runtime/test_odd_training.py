"""Training loops that are not forward, backward, step: the tuner and the observer beside torch's own DDP."""

from typing import Any

import pytest

from tests.runtime.launch import run_ranks
from tests.runtime.odd_ranks import STEPS

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["ways", "unseen", "adversaries", "observing", "frozen_copy", "late", "seen_by_some"]
    return run_ranks("tests.runtime.odd_ranks", scenarios, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("way", ["autograd.grad", "head by head", "again", "freezing", "thawing"])
def test_only_backward_passes_that_end_a_reduction_count_and_training_is_stock_ddps(
    two_ranks: list[Any], way: str
) -> None:
    for found in (told["ways"][way] for told in two_ranks):
        assert found["same"] is True
        assert found["state"] != "off", found["reason"]
        assert found["steps"] == STEPS or found["state"] == "settled"


def test_a_model_that_is_frozen_while_another_learns_from_it_is_tuned_in_its_own_turns(two_ranks: list[Any]) -> None:
    for found in (told["adversaries"] for told in two_ranks):
        assert (found["maker"]["same"], found["judge"]["same"]) == (True, True)
        assert found["judge"]["steps"] == STEPS


def test_what_the_model_returns_does_not_matter(two_ranks: list[Any]) -> None:
    for found in (told["unseen"] for told in two_ranks):
        assert found["same"] is True
        assert found["state"] != "off", found["reason"]
        assert found["steps"] == STEPS


def test_a_weight_that_a_model_returns_keeps_no_hook(two_ranks: list[Any]) -> None:
    for found in (told["observing"] for told in two_ranks):
        assert (found["steps"], found["left"]) == (4, [])


def test_a_model_is_observed_by_one_block_at_a_time_and_for_a_step_or_more(two_ranks: list[Any]) -> None:
    for found in (told["observing"] for told in two_ranks):
        assert found["nested"] == "the model is being observed already: leave that block first"
        assert found["outer"] == 4
        assert found["no steps"] == "steps is 0, expected 1 or more"


def test_a_copy_with_other_frozen_parameters_trains_without_the_plan_and_says_so(two_ranks: list[Any]) -> None:
    for found in (told["frozen_copy"] for told in two_ranks):
        (warning,) = found["warnings"]
        assert warning.startswith("the plan is not used and DDP's own buckets are: it is a copy's")
        assert (found["planner"], found["losses"]) == ("ddp", 3)


def test_what_was_frozen_or_thawed_after_wrapping_is_not_taken_for_the_reducers(two_ranks: list[Any]) -> None:
    changed = "parameters were frozen, thawed or replaced since the model was wrapped: wrap it again"
    for found in (told["late"] for told in two_ranks):
        for way in ("thawed", "frozen"):
            assert found[way] == [f"no plan can be held: {changed}", f"cannot observe: {changed}", None]
            assert found[f"{way} and back"] == [True, 2]


def test_where_one_rank_has_observed_nothing_all_are_told_so_and_none_waits(two_ranks: list[Any]) -> None:
    for found in (told["seen_by_some"] for told in two_ranks):
        for asked in ("trace", "notes"):
            assert found[asked].startswith("rank 1 failed: nothing was observed: no step whose gradients were averaged")
        assert found["in step"] == 2
