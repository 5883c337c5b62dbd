"""What two ranks agree on of steps that each observed on its own: worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from mgwfbp import MeasureError, ModelTrace
from mgwfbp.runtime.observe.steps import PackedSteps
from tests.runtime.agreeing_ranks import GRADIENTS, SEEN
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank holds."""
    return [
        found["steps"]
        for found in run_ranks("tests.runtime.agreeing_ranks", ["steps"], tmp_path_factory.mktemp("r"), 2)
    ]


def test_all_ranks_hold_the_same(ranks: list[Any]) -> None:
    assert ranks[0] == ranks[1]


def test_the_slowest_rank_decides_how_long_a_step_is(ranks: list[Any]) -> None:
    agreed = ranks[0]["agreed"]
    assert agreed["forward_s"] == [1.0, 3.0]
    assert agreed["compute_s"] == [6.0, 6.5]
    assert agreed["mean_compute_s"] == [6.0, 6.25]
    assert agreed["length_s"] == [12.5, 8.0]
    # Of the rank that waits least: the others also wait for it.
    assert agreed["exposed_s"] == [4.0, 1.5]


def test_a_gradient_is_ready_when_it_is_on_the_rank_that_was_last_in_its_step(ranks: list[Any]) -> None:
    # In each step another rank is late with a; no gradient comes before the forward pass has ended.
    assert ranks[0]["agreed"]["ready_s"] == [[5.0, 6.0], [5.0, 6.5]]
    trace = ModelTrace.from_json(ranks[0]["trace"])
    assert (trace.forward_s, list(trace.ready_s)) == (2.0, [5.0, 6.25])


def test_of_a_message_that_a_rank_sent_at_once_the_last_ranks_time_counts(ranks: list[Any]) -> None:
    taken = ranks[0]["agreed"]["message_s"]
    assert taken[0][0] == 3.5
    assert taken[1] == [1.0, 1.5]


def test_of_one_that_waited_behind_another_on_every_rank_the_mean_counts(ranks: list[Any]) -> None:
    assert ranks[0]["agreed"]["message_s"][0][1] == 2.0


def test_a_rank_that_knows_of_no_message_when_it_arrived_has_nothing_to_reduce() -> None:
    # It would give fewer numbers than the others, which wait for as many as they have.
    steps = [replace(step, messages=()) for step in SEEN[0]]
    assert PackedSteps.of(steps, GRADIENTS, [1, 2], "plain").num_messages == 0
    with pytest.raises(MeasureError, match=r"did not arrive$"):
        PackedSteps.of(steps, GRADIENTS, [1, 2], "messages")


def test_what_a_rank_says_while_it_tunes_does_not_grow_with_the_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    by_world = {}
    for world in (2, 4):
        ranks = run_ranks("tests.runtime.agreeing_ranks", ["traffic"], tmp_path_factory.mktemp(f"w{world}"), world)
        for found in (told["traffic"] for told in ranks):
            assert found["tuning"] == "working"
            assert {name for name, _ in found["said"]} == {"all_reduce", "broadcast"}
            # Texts differ by digits; numbers do not.
            by_world[world] = [size for name, size in found["said"] if name == "all_reduce"]
    assert len(by_world[2]) > 10
    assert by_world[2] == by_world[4]
