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
from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.costs import WireCost
from mgwfbp.runtime.observe.learn import Learner
from mgwfbp.runtime.observe.observation import Observation
from mgwfbp.runtime.observe.steps import AgreedSteps, Note, Seen
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Learnt", "Terms", "after_backward", "in_means", "learn", "observe", "undisturbed"]

# A step that is longer than most by this factor was held up by something that is no part of training.
DISTURBED = 1.3
# What is noted of a plan's steps, each in steps of its own: hooks on gradients slow messages, and the other way round.
NOTES: tuple[Note, ...] = ("plain", "gradients", "messages") * 3


@dataclass(frozen=True, slots=True)
class Learnt:
    """A trace and a cost as they are in training, and what they differ by from those measured apart, term by term."""

    trace: ModelTrace  # as it would be without what messages take from the computation
    cost: PiecewiseCost  # with what they take
    terms: tuple["Terms", ...] = ()  # one for every plan that was observed
    low_cost: PiecewiseCost | None = None  # of messages in low precision, by bytes of gradients, where such were

    @property
    def both(self) -> Cost:
        """The cost, with that of low precision where it is known."""
        return self.cost if self.low_cost is None else WireCost(self.cost, self.low_cost)


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


def observe(
    arena: Arena, contender: Contender, steps: int, *, settle: int = 1, notes: Sequence[Note] | None = None
) -> Observation:
    """Observe steps of a strategy; what is seen is this rank's. All ranks must call it."""
    step = arena.enter(contender)
    for _ in range(settle):
        step()
    with arena.model_for(contender).observe(steps, notes=notes) as seen:
        for _ in range(steps):
            step()
    return seen


def learn(
    arena: Arena,
    contenders: Sequence[Contender],
    recorded: ModelTrace,
    swept: PiecewiseCost,
    *,
    on_steps: Callable[[int], object] = lambda _: None,
) -> Learnt:
    """Run one or more plans, observe them, and correct what was measured apart. All ranks must call it.

    It learns as the tuner does, `Learner`: gradients and messages in steps of their own. The gradients of the last plan
    make the trace: let it be one whose messages overlap with the backward pass. What plans of other messages do to the
    backward pass tells what a message takes from it. Steps that something else held up are left out, as the median of a
    turn leaves them out.
    """
    known: Learner | None = None
    terms = []
    for contender in contenders:
        observed = observe(arena, contender, len(NOTES), notes=NOTES)
        on_steps(1 + len(NOTES))
        seen = observed.agreed()
        seen = replace(seen, **{note: undisturbed(getattr(seen, note)) for note in ("plain", "gradients", "messages")})
        known = known or Learner(observed.gradients, swept.workers, swept)
        known.learn(contender.plan, seen)
        if contender.wire is not None:  # whose messages are not those of the sweep
            continue
        terms.append(_terms(contender, seen, known.gradients.sizes_of(contender.plan.groups), recorded, swept))
    assert known is not None  # noqa: S101 - there is a contender
    known = in_means(known)
    return Learnt(replace(known.trace, model=recorded.model), known.cost, tuple(terms), known.low_cost)


def in_means(known: Learner) -> Learner:
    """Return what was learnt with the mean of what messages of each size took, in either precision.

    A step is as long as all its messages together, the few slow ones too, which the learner's medians leave out.
    """

    def means_s(seen: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        return {size: [fmean(times_s)] * len(times_s) for size, times_s in seen.items()}

    return replace(known, messages_s=means_s(known.messages_s), low_messages_s=means_s(known.low_messages_s))


def _terms(contender: Contender, seen: Seen, sizes: Sequence[int], recorded: ModelTrace, swept: PiecewiseCost) -> Terms:
    assert seen.plain is not None  # noqa: S101 - such steps were asked for
    assert seen.messages is not None  # noqa: S101 - and such
    mean_s = median(seen.plain.mean_compute_s)
    taken_s = fmean(sum(taken_s) for taken_s in seen.messages.message_s)
    return Terms(
        contender.strategy,
        contender.plan.num_groups,
        mean_s,
        mean_s / recorded.compute_s - 1,
        median(seen.plain.compute_s) / mean_s - 1,
        taken_s / sum(swept(size) for size in sizes) - 1,
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
