"""Ranks that make a group beside the model's, on real processes, of which one cannot."""

from typing import Any

import pytest

from tests.runtime.launch import run_ranks
from tests.runtime.meeting_ranks import PLACES, WAYS

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores

BEGINS = {
    "plan": "rank {} cannot have the plan: ",
    "replan": "rank {} cannot have the plan, and the one in force stays: ",
    "sharded": "rank {}: ",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    return run_ranks("tests.runtime.meeting_ranks", ["failing", "counted_alone"], tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("way", list(WAYS))
def test_all_ranks_name_the_one_that_failed_and_why_and_it_raises_that_from_its_own_error(
    ranks: list[Any], way: str, place: str, failed: int
) -> None:
    for rank, told in enumerate(ranks):
        said, cause = told["failing"][f"{way} {place} {failed}"]["said"]
        assert said == BEGINS[way].format(failed) + "MemoryError: no room"
        if rank == failed:
            assert cause == "no room"
        else:  # which waited where the other had already made its part
            waits = place == "group" or way == "sharded"
            assert cause.startswith("not all ranks came to make a gloo group") if waits else cause == ""


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("way", list(WAYS))
def test_after_one_rank_failed_copies_on_all_ranks_find_one_another(
    ranks: list[Any], way: str, place: str, failed: int
) -> None:
    assert all(told["failing"][f"{way} {place} {failed}"]["copy trains"] for told in ranks)


def test_ranks_that_have_counted_differently_count_alike_once_they_agreed_on_a_number(ranks: list[Any]) -> None:
    assert all(told["counted_alone"]["copy trains"] for told in ranks)
