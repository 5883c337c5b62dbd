"""What training itself shows: messages and gradients observed while others are under way.

A sweep times messages beside idle processors, and a trace is recorded without messages. In training both happen at
once, on every rank, and some rank is late. So a few plans are run and watched before anything is predicted: what their
messages took corrects the cost, and when their gradients were ready becomes the trace.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import Contender
from mgwfbp.cost import PiecewiseCost
from mgwfbp.measure.agreement import agree_on_trace, gather
from mgwfbp.runtime.load import cost_under_load
from mgwfbp.runtime.observer import Observation
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace

__all__ = ["Learnt", "learn", "messages_on_last_rank", "observe"]


@dataclass(frozen=True, slots=True)
class Learnt:
    """A trace and a cost as they are in training; the same on every rank."""

    trace: ModelTrace
    cost: PiecewiseCost
    messages_s: Mapping[int, Sequence[float]]  # what the watched messages took, by bytes


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
    swept: PiecewiseCost,
    *,
    steps: int = 2,
    on_steps: Callable[[int], object] = lambda _: None,
) -> Learnt:
    """Run one or more plans, watch them, and correct what was measured apart. All ranks must call it.

    The gradients of the last plan make the trace: let it be one whose messages overlap with the backward pass.
    """
    messages_s: dict[int, list[float]] = {}
    for contender in contenders:
        seen = observe(arena, contender, steps)
        on_steps(1 + steps)
        for size, times_s in messages_on_last_rank(seen.timelines).items():
            messages_s.setdefault(size, []).extend(times_s)
    trace = replace(agree_on_trace(seen.trace), model=contenders[-1].plan.model)
    return Learnt(trace, cost_under_load(swept, messages_s), messages_s)


def messages_on_last_rank(timelines: Sequence[Timeline]) -> dict[int, list[float]]:
    """Return by bytes what messages took on the rank that was ready last: the others also waited for that one.

    All ranks must call it, each with its own timelines of the same steps.
    """
    mine = [[(message.num_bytes, message.duration_s) for message in timeline.messages] for timeline in timelines]
    by_rank: list[Any] = [json.loads(text) for text in gather(json.dumps(mine))]
    found: dict[int, list[float]] = {}
    for same_step in zip(*by_rank, strict=True):
        for same_message in zip(*same_step, strict=True):
            num_bytes = same_message[0][0]
            found.setdefault(num_bytes, []).append(min(time_s for _, time_s in same_message))
    return found
