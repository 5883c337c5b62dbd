"""What training itself shows: messages and gradients observed while others are under way.

A sweep times messages beside idle processors, and a trace is recorded without messages. In training both happen at
once: messages wait for room on a busy processor, the computation is slowed by them, and the slowest rank decides. So
some plans are run and observed first, and predictions are made with the cost and the trace that they showed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import Contender
from mgwfbp.cost import PiecewiseCost
from mgwfbp.runtime.learn import AgreedSteps, learn_cost, learn_taken, learn_trace, without_lags
from mgwfbp.runtime.observation import Observation
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Learnt", "Terms", "after_backward", "learn", "observe", "undisturbed"]

# A step that is longer than most by this factor was held up by something that is no part of training.
DISTURBED = 1.3


@dataclass(frozen=True, slots=True)
class Learnt:
    """A trace and a cost as they are in training, and what they differ by from those measured apart, term by term."""

    trace: ModelTrace  # as it would be without what messages take from the computation
    cost: PiecewiseCost  # with what they take
    terms: tuple["Terms", ...] = ()  # one for every plan that was observed


@dataclass(frozen=True, slots=True)
class Terms:
    """What sets a plan's steps apart from a prediction made of a recorded trace and a swept cost."""

    strategy: str
    num_messages: int
    compute_s: float  # until the last gradient is ready, the mean over ranks
    computation_slowed: float  # that, relative to the recorded time
    slowest_rank: float  # the last rank's last gradient, relative to the mean
    messages_slowed: float  # the time of all messages, relative to the sum of the sweep's

    def __str__(self) -> str:
        return (
            f"{self.strategy}, {plural(self.num_messages, 'message')}: computation {self.computation_slowed:+.1%}, "
            f"slowest rank {self.slowest_rank:+.1%}, messages {self.messages_slowed:+.1%}"
        )


def observe(arena: Arena, contender: Contender, steps: int, *, settle: int = 1) -> Observation:
    """Observe steps of a strategy; what is seen is this rank's. All ranks must call it."""
    step = arena.enter(contender)
    for _ in range(settle):
        step()
    with arena.model_for(contender).observe(steps) as seen:
        for _ in range(steps):
            step()
    return seen


def learn(
    arena: Arena,
    contenders: Sequence[Contender],
    recorded: ModelTrace,
    swept: PiecewiseCost,
    *,
    steps: int = 3,
    on_steps: Callable[[int], object] = lambda _: None,
) -> Learnt:
    """Run one or more plans, observe them, and correct what was measured apart. All ranks must call it.

    The gradients of the last plan make the trace: let it be one whose messages overlap with the backward pass. What
    plans of other messages do to the backward pass tells what a message takes from it. Steps that something else held
    up are left out, as the median of a turn leaves them out.
    """
    messages_s: dict[int, list[float]] = {}
    terms, computes_s = [], []
    for contender in contenders:
        seen = observe(arena, contender, steps)
        on_steps(1 + steps)
        agreed = undisturbed(seen.agreed_steps())
        of_plan: dict[int, list[float]] = {}
        for taken_s in agreed.message_s:
            for size, seconds in zip(seen.sizes, taken_s, strict=True):
                of_plan.setdefault(size, []).append(seconds)
        for size, times_s in of_plan.items():
            messages_s.setdefault(size, []).extend(times_s)
        terms.append(_terms(contender, agreed, of_plan, recorded, swept))
        computes_s.append((seen.sizes, agreed.compute_s))
        observed = replace(learn_trace(agreed, seen.gradients), model=recorded.model)
    # A step is as long as all its messages together, the few slow ones too: means, where medians would leave them out.
    means_s = {size: [fmean(times_s)] * len(times_s) for size, times_s in messages_s.items()}
    cost = learn_taken(learn_cost(means_s, swept.workers, swept), computes_s)
    return Learnt(without_lags(observed, contenders[-1].plan, cost), cost, tuple(terms))


def _terms(
    contender: Contender,
    steps: AgreedSteps,
    messages_s: Mapping[int, Sequence[float]],
    recorded: ModelTrace,
    swept: PiecewiseCost,
) -> Terms:
    mean_s = median(steps.mean_compute_s)
    taken_s = sum(sum(times_s) for times_s in messages_s.values())
    expected_s = sum(swept(size) * len(times_s) for size, times_s in messages_s.items())
    return Terms(
        contender.strategy,
        contender.plan.num_groups,
        mean_s,
        mean_s / recorded.compute_s - 1,
        median(steps.compute_s) / mean_s - 1,
        taken_s / expected_s - 1,
    )


def undisturbed(steps: AgreedSteps) -> AgreedSteps:
    """Return the steps that are about as long as most; half of them at least."""
    limit_s = DISTURBED * median(steps.length_s)
    return steps.only([place for place, length_s in enumerate(steps.length_s) if length_s <= limit_s])


def after_backward(timeline: Timeline) -> Timeline:
    """Return what was observed of a strategy that holds messages back until the last gradient is ready."""
    messages = [
        replace(message, start_s=min(max(message.start_s, timeline.compute_s), message.end_s))
        for message in timeline.messages
    ]
    return replace(timeline, messages=tuple(messages))
