"""What training itself shows: messages and gradients observed while others are under way.

A sweep times messages beside idle processors, and a trace is recorded without messages. In training both happen at
once, on every rank, and some rank is late. So a few plans are run and watched before anything is predicted: what their
messages took corrects the cost, and when their gradients were ready becomes the trace.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import Contender
from mgwfbp.cost import PiecewiseCost
from mgwfbp.measure.agreement import gather
from mgwfbp.runtime.load import agreed_time_s, cost_under_load
from mgwfbp.runtime.observer import Observation
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import plural

__all__ = ["Learnt", "Terms", "after_backward", "learn", "message_times", "observe", "trace_of_steps", "undisturbed"]

RanksStep = tuple[Timeline, ...]  # one step, as each rank saw it
# A step that is longer than most by this factor was held up by something that is no part of training.
DISTURBED = 1.3


@dataclass(frozen=True, slots=True)
class Learnt:
    """Traces and a cost as they are in training, and what they differ by from those measured apart, term by term."""

    trace: ModelTrace  # beside messages
    trace_apart: ModelTrace  # of a step that sends nothing before the last gradient is ready
    cost: PiecewiseCost
    terms: tuple["Terms", ...] = ()  # one for every plan that was watched


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
    """Watch steps of a strategy; what is seen is this rank's. All ranks must call it."""
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
    """Run one or more plans, watch them, and correct what was measured apart. All ranks must call it.

    The gradients of the last plan make the trace: let it be one whose messages overlap with the backward pass, and the
    first one of a single message. Steps that something else held up are left out, as the median of a turn leaves them
    out.
    """
    messages_s: dict[int, list[float]] = {}
    terms, traces = [], []
    for contender in contenders:
        seen = observe(arena, contender, steps)
        on_steps(1 + steps)
        watched = undisturbed(_from_all_ranks(seen.timelines))
        of_plan = message_times(watched)
        for size, times_s in of_plan.items():
            messages_s.setdefault(size, []).extend(times_s)
        ends_s = [median(timeline.compute_s for timeline in of_rank) for of_rank in zip(*watched, strict=True)]
        terms.append(_terms(contender, ends_s, of_plan, recorded, swept))
        traces.append(trace_of_steps(watched, recorded.model))
    # A step is as long as all its messages together, the few slow ones too: means, where medians would leave them out.
    means_s = {size: [mean(times_s)] * len(times_s) for size, times_s in messages_s.items()}
    return Learnt(traces[-1], traces[0], cost_under_load(swept, means_s), tuple(terms))


def _terms(
    contender: Contender,
    ends_s: Sequence[float],
    messages_s: Mapping[int, Sequence[float]],
    recorded: ModelTrace,
    swept: PiecewiseCost,
) -> Terms:
    mean_s = mean(ends_s)
    taken_s = sum(sum(times_s) for times_s in messages_s.values())
    expected_s = sum(swept(size) * len(times_s) for size, times_s in messages_s.items())
    return Terms(
        contender.strategy,
        contender.plan.num_groups,
        mean_s,
        mean_s / recorded.compute_s - 1,
        max(ends_s) / mean_s - 1,
        taken_s / expected_s - 1,
    )


def undisturbed(steps: Sequence[RanksStep]) -> list[RanksStep]:
    """Return the steps that are about as long as most; half of them at least."""
    lengths_s = [mean(timeline.iteration_s for timeline in step) for step in steps]
    return [step for step, length_s in zip(steps, lengths_s, strict=True) if length_s <= DISTURBED * median(lengths_s)]


def trace_of_steps(steps: Sequence[RanksStep], model: str) -> ModelTrace:
    """Return when each gradient was ready on whichever rank was the last in a step, the median over steps.

    A message waits for the last rank, and in every step that is another one.
    """
    forward_s = median(max(timeline.forward.end_s for timeline in step) for step in steps)
    by_step = [_last_s(step) for step in steps]
    ready_s = {name: median(last_s[name] for last_s in by_step) for name in by_step[0]}
    sizes = {name: span.num_bytes for span in steps[0][0].backward for name in span.layers}
    order = sorted(sizes, key=lambda name: ready_s[name])
    layers = layers_of([(name, ready_s[name], sizes[name]) for name in order], forward_s)
    return ModelTrace(
        model, forward_s, layers, {"measured": "observed in training", "steps": len(steps), "ranks": len(steps[0])}
    )


def _last_s(step: RanksStep) -> dict[str, float]:
    by_rank = [{name: span.end_s for span in timeline.backward for name in span.layers} for timeline in step]
    return {name: max(ready_s[name] for ready_s in by_rank) for name in by_rank[0]}


def after_backward(timeline: Timeline) -> Timeline:
    """Return what was seen of a strategy that holds messages back until the last gradient is ready."""
    messages = [
        replace(message, start_s=min(max(message.start_s, timeline.compute_s), message.end_s))
        for message in timeline.messages
    ]
    return replace(timeline, messages=tuple(messages))


def message_times(steps: Sequence[RanksStep]) -> dict[int, list[float]]:
    """Return by bytes what messages took, from what every rank saw of some steps."""
    found: dict[int, list[float]] = {}
    for same_step in steps:
        for same_message in zip(*(timeline.messages for timeline in same_step), strict=True):
            queued = all(message.wait_s > 0 for message in same_message)
            seconds = agreed_time_s([message.duration_s for message in same_message], queued=queued)
            found.setdefault(same_message[0].num_bytes, []).append(seconds)
    return found


def _from_all_ranks(timelines: Sequence[Timeline]) -> list[RanksStep]:
    mine = json.dumps([timeline.to_json() for timeline in timelines])
    by_rank = [[Timeline.from_json(one) for one in json.loads(text)] for text in gather(mine)]
    return list(zip(*by_rank, strict=True))
