"""gloo with one worker thread, on real processes."""

from typing import Any

import pytest

from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 3 ranks saw."""
    scenarios = ["overtaking", "manners", "timeout", "again"]
    return run_ranks("tests.runtime.gloo_ranks", scenarios, tmp_path_factory.mktemp("gloo"), 3)


def test_no_message_overtakes_another_as_messages_of_torchs_gloo_do(ranks: list[Any]) -> None:
    assert [found["overtaking"]["ours"] for found in ranks] == [0, 0, 0]
    assert max(found["overtaking"]["torch's"] for found in ranks) > 0


def test_the_group_says_what_it_is_and_groups_made_from_it_are_the_same(ranks: list[Any]) -> None:
    for found in (rank["manners"] for rank in ranks):
        assert (found["backend"], found["part"], found["source"]) == ("gloo_one_thread", "gloo_one_thread", "gloo")
        assert found["threads"] == 1
        assert found["queues"] == [["", 1], ["", 2]]  # torch's own has two
        assert found["timeout"] == "0:00:20"


def test_collectives_objects_barriers_and_ddp_work(ranks: list[Any]) -> None:
    for rank, found in enumerate(rank["manners"] for rank in ranks):
        assert found["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["total"] == (1 if rank == 2 else 2)
        assert found["gradients"] == [found["gradients"][0]] * 3


def test_a_rank_that_does_not_come_is_an_error_after_the_groups_timeout(ranks: list[Any]) -> None:
    assert "imed out" in ranks[0]["timeout"]["told"]
    assert ranks[0]["timeout"]["waited_s"] >= 1


def test_a_group_can_be_joined_again_and_a_torch_that_lacks_a_name_gives_its_own_gloo_with_one_warning(
    ranks: list[Any],
) -> None:
    for found in (rank["again"] for rank in ranks):
        assert found["backends"] == ["gloo_one_thread", "gloo"]
        (warning,) = found["said"]
        assert warning.startswith("gloo has two worker threads, so that messages may overtake: torch ")
        assert warning.endswith(" lacks ProcessGroupGloo.create_default_device")
