"""What is made of observed steps: worked by hand."""

from mgwfbp import PiecewiseCost, Span, Timeline
from mgwfbp.bench.learning import after_backward, in_means, undisturbed
from mgwfbp.runtime.observe.learn import Learner
from mgwfbp.runtime.observe.steps import AgreedSteps, Gradients


def timeline(*messages: tuple[int, float, float, float]) -> Timeline:
    """A step whose messages are (bytes, ready, start, end)."""
    spans = tuple(Span(("a",), *message) for message in messages)
    return Timeline("toy", "by hand", 2, Span((), 0, 0.0, 0.0, 1.0), (Span(("a",), 4, 1.0, 1.0, 2.0),), spans)


def steps_of(*lengths_s: float) -> AgreedSteps:
    return AgreedSteps(lengths_s, lengths_s, lengths_s, lengths_s, lengths_s, (), tuple((one,) for one in lengths_s))


def test_steps_that_something_held_up_are_left_out() -> None:
    assert undisturbed(steps_of(9, 29, 10, 60)) == steps_of(9, 10)
    assert undisturbed(steps_of(9)) == steps_of(9)


def test_messages_that_are_held_back_start_after_the_backward_pass() -> None:
    held = after_backward(timeline((4, 1.0, 1.0, 3.0), (4, 1.5, 3.0, 4.0), (4, 1.0, 1.0, 1.5)))
    assert [(span.ready_s, span.start_s, span.end_s) for span in held.messages] == [
        (1.0, 2.0, 3.0),
        (1.5, 3.0, 4.0),
        (1.0, 1.5, 1.5),  # no longer than it was seen
    ]


def test_the_few_slow_messages_count_in_either_precision() -> None:
    swept = PiecewiseCost(2, ((0, 1e-3), (1000, 2e-3)))
    known = Learner(Gradients("toy", ("a",), (1000,)), 2, swept, {1000: [2e-3, 2e-3, 8e-3]}, {1000: [1e-3, 1e-3, 4e-3]})
    means = in_means(known)
    assert [dict(cost.source["under_load"]) for cost in (means.both.full, means.both.low)] == [
        {1000: 4e-3},
        {1000: 2e-3},
    ]
