"""What is learnt of watched messages: worked by hand."""

import pytest

from mgwfbp import Span, Timeline
from mgwfbp.bench.learning import message_times


def timeline(*messages: tuple[int, float, float, float]) -> Timeline:
    """A step whose messages are (bytes, ready, start, end)."""
    spans = tuple(Span(("a",), *message) for message in messages)
    return Timeline("toy", "by hand", 2, Span((), 0, 0.0, 0.0, 1.0), (Span(("a",), 4, 1.0, 1.0, 2.0),), spans)


def test_of_a_message_that_a_rank_sent_at_once_the_last_ranks_time_counts() -> None:
    early, late = timeline((4, 1.0, 1.0, 9.0)), timeline((4, 6.0, 6.0, 9.5))
    assert message_times([[early], [late]]) == {4: [3.5]}


def test_in_a_queue_times_add_up_to_what_every_rank_saw_in_all() -> None:
    one = timeline((8, 0.0, 0.0, 2.0), (4, 0.0, 2.0, 3.0), (4, 0.0, 3.0, 6.0))
    other = timeline((8, 0.0, 0.0, 2.0), (4, 0.0, 2.0, 5.0), (4, 0.0, 5.0, 6.0))
    found = message_times([[one], [other]])
    assert found == {8: [2.0], 4: [2.0, 2.0]}
    assert sum(found[4]) == pytest.approx(6.0 - 2.0)  # the shortest of each would be 2 in all


def test_steps_are_kept_apart() -> None:
    steps = [timeline((4, 0.0, 0.0, 1.0)), timeline((4, 0.0, 0.0, 2.0), (8, 0.0, 2.0, 3.0))]
    assert message_times([steps, steps]) == {4: [1.0, 2.0], 8: [1.0]}
