"""What training itself shows: messages and gradients observed while others are under way.

A sweep times messages beside idle processors, and a trace is recorded without messages. In training both happen at
once, on every rank, and some rank is late. So a few plans are run and watched before anything is predicted: what their
messages took corrects the cost, and when their gradients were ready becomes the trace.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import Contender
from mgwfbp.cost import PiecewiseCost
from mgwfbp.measure.agreement import agree_on_trace, gather
from mgwfbp.runtime.load import agreed_time_s, cost_under_load
from mgwfbp.runtime.observer import Observation
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace

__all__ = ["Learnt", "Terms", "learn", "message_times", "observe"]


@dataclass(frozen=True, slots=True)
class Learnt:
    """A trace and a cost as they are in training, and what they differ by from those measured apart, term by term."""

    trace: ModelTrace
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
            f"{self.strategy}, {self.num_messages} messages: computation {self.computation_slowed:+.1%}, slowest rank "
            f"{self.slowest_rank:+.1%}, messages {self.messages_slowed:+.1%}"
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
    steps: int = 2,
    on_steps: Callable[[int], object] = lambda _: None,
) -> Learnt:
    """Run one or more plans, watch them, and correct what was measured apart. All ranks must call it.

    The gradients of the last plan make the trace: let it be one whose messages overlap with the backward pass.
    """
    messages_s: dict[int, list[float]] = {}
    terms = []
    for contender in contenders:
        seen = observe(arena, contender, steps)
        on_steps(1 + steps)
        of_plan = message_times(_from_all_ranks(seen.timelines))
        for size, times_s in of_plan.items():
            messages_s.setdefault(size, []).extend(times_s)
        ends_s = [float(text) for text in gather(repr(seen.trace.compute_s))]
        terms.append(_terms(contender, ends_s, of_plan, recorded, swept))
    trace = replace(agree_on_trace(seen.trace), model=recorded.model)
    # A step is as long as all its messages together, the few slow ones too: means, where medians would leave them out.
    means_s = {size: [mean(times_s)] * len(times_s) for size, times_s in messages_s.items()}
    return Learnt(trace, cost_under_load(swept, means_s), tuple(terms))


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


def message_times(by_rank: Sequence[Sequence[Timeline]]) -> dict[int, list[float]]:
    """Return by bytes what messages took, from every rank's timelines of the same steps."""
    found: dict[int, list[float]] = {}
    for same_step in zip(*by_rank, strict=True):
        for same_message in zip(*(timeline.messages for timeline in same_step), strict=True):
            queued = all(message.wait_s > 0 for message in same_message)
            seconds = agreed_time_s([message.duration_s for message in same_message], queued=queued)
            found.setdefault(same_message[0].num_bytes, []).append(seconds)
    return found


def _from_all_ranks(timelines: Sequence[Timeline]) -> list[list[Timeline]]:
    mine = json.dumps([timeline.to_json() for timeline in timelines])
    return [[Timeline.from_json(one) for one in json.loads(text)] for text in gather(mine)]
