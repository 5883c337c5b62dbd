"""What is learnt of watched messages: worked by hand."""

import pytest

from mgwfbp import Span, Timeline
from mgwfbp.bench.learning import after_backward, message_times, trace_of_steps, undisturbed


def timeline(*messages: tuple[int, float, float, float]) -> Timeline:
    """A step whose messages are (bytes, ready, start, end)."""
    spans = tuple(Span(("a",), *message) for message in messages)
    return Timeline("toy", "by hand", 2, Span((), 0, 0.0, 0.0, 1.0), (Span(("a",), 4, 1.0, 1.0, 2.0),), spans)


def test_of_a_message_that_a_rank_sent_at_once_the_last_ranks_time_counts() -> None:
    early, late = timeline((4, 1.0, 1.0, 9.0)), timeline((4, 6.0, 6.0, 9.5))
    assert message_times([(early, late)]) == {4: [3.5]}


def test_in_a_queue_times_add_up_to_what_every_rank_saw_in_all() -> None:
    one = timeline((8, 0.0, 0.0, 2.0), (4, 0.0, 2.0, 3.0), (4, 0.0, 3.0, 6.0))
    other = timeline((8, 0.0, 0.0, 2.0), (4, 0.0, 2.0, 5.0), (4, 0.0, 5.0, 6.0))
    found = message_times([(one, other)])
    assert found == {8: [2.0], 4: [2.0, 2.0]}
    assert sum(found[4]) == pytest.approx(6.0 - 2.0)  # the shortest of each would be 2 in all


def test_steps_are_kept_apart() -> None:
    steps = [timeline((4, 0.0, 0.0, 1.0)), timeline((4, 0.0, 0.0, 2.0), (8, 0.0, 2.0, 3.0))]
    assert message_times([(step, step) for step in steps]) == {4: [1.0, 2.0], 8: [1.0]}


def gradients(forward_s: float, **ready_s: float) -> Timeline:
    """A step whose gradients are ready at these times, and one message that takes 1 s."""
    ends_s = sorted((end_s, name) for name, end_s in ready_s.items())
    backward = tuple(Span((name,), len(name), end_s, end_s, end_s) for end_s, name in ends_s)
    last_s = ends_s[-1][0]
    message = Span(tuple(ready_s), 4, last_s, last_s, last_s + 1)
    return Timeline("toy", "by hand", 2, Span((), 0, 0.0, 0.0, forward_s), backward, (message,))


def test_a_gradient_is_ready_when_it_is_on_the_rank_that_was_last_in_its_step() -> None:
    # Each rank alone is ready with a at 2 in most steps; in most steps some rank is late.
    steps = [
        (gradients(1, a=2, bb=6), gradients(1, a=5, bb=6)),
        (gradients(1, a=5, bb=6), gradients(1, a=2, bb=6)),
        (gradients(3, a=4, bb=9), gradients(1, a=4, bb=4)),
    ]
    trace = trace_of_steps(steps, "toy")
    assert trace.forward_s == 1
    assert [(layer.name, layer.grad_bytes) for layer in trace.layers] == [("a", 1), ("bb", 2)]
    assert list(trace.ready_s) == [5, 6]
    # No gradient before the forward pass has ended, whichever rank it was ready on.
    late = trace_of_steps([(gradients(1, a=2, bb=9), gradients(5, a=4, bb=9))], "toy")
    assert list(late.ready_s) == [5, 9]


def test_steps_that_something_held_up_are_left_out() -> None:
    steps = [tuple(gradients(1, a=length) for length in lengths) for lengths in ((9, 9), (29, 9), (9, 10), (60, 60))]
    assert undisturbed(steps) == [steps[0], steps[2]]
    assert undisturbed(steps[:1]) == steps[:1]


def test_messages_that_are_held_back_start_after_the_backward_pass() -> None:
    held = after_backward(timeline((4, 1.0, 1.0, 3.0), (4, 1.5, 3.0, 4.0), (4, 1.0, 1.0, 1.5)))
    assert [(span.ready_s, span.start_s, span.end_s) for span in held.messages] == [
        (1.0, 2.0, 3.0),
        (1.5, 3.0, 4.0),
        (1.0, 1.5, 1.5),  # no longer than it was seen
    ]
