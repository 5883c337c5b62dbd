"""Turns: several ways to do a step, timed in short runs one after another, again and again.

Interleaved, since a machine drifts: what slows one run of turns slows all ways alike. All ranks take the same turns in
the same order, and every time is that of the slowest rank.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.errors import MeasureError

__all__ = ["Schedule", "Step", "slowest", "take_turns", "time_steps"]

Step = Callable[[], object]  # does one training step and returns when its gradients are averaged


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often everything is timed."""

    turns: int = 5  # of every strategy; their median and quartiles are the result
    steps: int = 5  # timed in every turn; their median is the turn
    settle: int = 1  # before them, not timed: a strategy that comes has new buffers

    def __post_init__(self) -> None:
        if self.turns < 1 or self.steps < 1 or self.settle < 0:
            raise MeasureError(
                f"turns is {self.turns}, steps {self.steps}, settle {self.settle}: expected 1, 1 and 0 or more"
            )


def take_turns(
    ways: Mapping[str, Callable[[], Step]],
    schedule: Schedule,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    on_turn: Callable[[int, Mapping[str, float]], object] | None = None,
    on_steps: Callable[[int], object] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Time every way in every turn; return the turns of each, the same on all ranks. All ranks must call it.

    A way is called when its turn has come and returns the step to be timed. Every second turn goes through them in the
    opposite order, so that none always follows the same other. ``on_turn`` gets the number of the turn and its times,
    ``on_steps`` the number of steps just done.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(schedule.turns):
        names = list(ways) if turn % 2 == 0 else list(ways)[::-1]
        local_s = []
        for name in names:
            step = ways[name]()
            for _ in range(schedule.settle):
                step()
            dist.barrier(group=group)
            local_s.append(median(time_steps(step, schedule.steps, device)))
            if on_steps is not None:
                on_steps(schedule.settle + schedule.steps)
        agreed = dict(zip(names, slowest(local_s, device, group), strict=True))
        for name, turn_s in agreed.items():
            found[name].append(turn_s)
        if on_turn is not None:
            on_turn(turn, {name: agreed[name] for name in ways})
    return {name: tuple(turns_s) for name, turns_s in found.items()}


def time_steps(step: Step, count: int, device: torch.device) -> list[float]:
    """Return how long each of several steps took, as they follow one another.

    On a GPU the host runs ahead, as it does in training: events tell when each step had ended.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                step()
                event.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairwise(events)]
    ends_s = [time.perf_counter()]
    for _ in range(count):
        step()
        ends_s.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(ends_s)]


def slowest(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the largest of each value over all ranks. All ranks must call it."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in agreed]
