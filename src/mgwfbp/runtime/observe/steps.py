"""What ranks saw of steps, as numbers to be reduced over them: `PackedSteps` of one rank, `AgreedSteps` of all."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Literal, Self

import torch.distributed as dist

from mgwfbp.errors import MeasureError
from mgwfbp.measure.agreement import reduce_values
from mgwfbp.runtime.observe.observer import ObservedMessage, ObservedStep

__all__ = ["AgreedSteps", "Gradients", "Note", "PackedSteps", "Seen", "sends"]

# What is noted of a step: each in steps of its own, since each disturbs the others.
Note = Literal["settle", "plain", "gradients", "messages", "gathers", "alone"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that a Reducer sends, by the place that an `ObservedStep` knows them by."""

    model: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes

    @property
    def size_of(self) -> dict[str, int]:
        """Bytes by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    def sizes_of(self, groups: Iterable[Sequence[str]]) -> list[int]:
        """Return the bytes of groups of gradients, or of their parameters."""
        size_of = self.size_of
        return [sum(size_of[name] for name in group) for group in groups]

    def ready_s(self, step: ObservedStep) -> list[float]:
        """Return when each gradient was ready, by place; one that never came had nothing to wait for."""
        return [max(step.forward_s, step.ready_s.get(place, step.forward_s)) for place in range(len(self.names))]


def sends(step: ObservedStep, sizes: Sequence[int]) -> bool:
    """Say whether a step's messages are these."""
    return [message.num_bytes for message in step.messages] == list(sizes)


@dataclass(frozen=True, slots=True)
class AgreedSteps:
    """What all ranks observed of some steps; the same on every rank, step by step."""

    forward_s: tuple[float, ...]  # of the slowest rank
    compute_s: tuple[float, ...]  # of the slowest rank: until its backward pass had ended
    mean_compute_s: tuple[float, ...]  # over ranks
    length_s: tuple[float, ...]  # of the slowest rank: until all gradients were averaged
    exposed_s: tuple[float, ...]  # of the rank that computed longest: the others also wait for it
    ready_s: tuple[tuple[float, ...], ...]  # of each gradient, on the last rank; empty where not noted
    message_s: tuple[tuple[float, ...], ...]  # of each message, or of each gather; empty where not noted
    pieces_s: tuple[tuple[float, ...], ...] = ()  # of the forward pass, by gather; empty where not noted

    def only(self, places: Sequence[int]) -> Self:
        """Return some of the steps."""

        def some(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[place] for place in places) if values else ()

        return type(self)(**{one.name: some(getattr(self, one.name)) for one in fields(self)})


@dataclass(frozen=True, slots=True)
class PackedSteps:
    """What one rank observed of some steps, as numbers that can be reduced over ranks."""

    num_steps: int
    num_gradients: int  # noted of each step; 0 where not
    num_messages: int  # likewise
    highest: tuple[float, ...]  # of which the largest over ranks counts
    totals: tuple[float, ...]  # of which the sum counts
    are_gathers: bool = False  # rather than messages

    @classmethod
    def of(cls, steps: Sequence[ObservedStep], gradients: Gradients, sizes: Sequence[int], *notes: str) -> Self:
        """Pack steps; ``notes`` says whether "gradients" and "messages" were noted, ``sizes`` are the plan's messages.

        A rank that is ready early also waits for the others, so of a message that some rank sent as soon as it was
        ready the shortest time counts. Of one that was queued behind another on every rank the times differ only by
        when each rank was told of an arrival; they add up to the same on every rank, and the mean counts.
        """
        ready = [moment for step in steps for moment in gradients.ready_s(step)] if "gradients" in notes else []
        messages = [message for step in steps for message in step.messages] if "messages" in notes else []
        if "messages" in notes and any(not sends(step, sizes) for step in steps):
            raise MeasureError("messages were sent that the plan does not have, or did not arrive")
        gathers, pieces_s = _gathers_of(steps, sizes) if "gathers" in notes else ([], [])
        messages += gathers
        taken_s = [message.end_s - message.start_s for message in messages]
        highest = [
            *(step.forward_s for step in steps),
            *(step.compute_s for step in steps),
            *(step.end_s for step in steps),
            *(-step.exposed_s for step in steps),
            *ready,
            *(-seconds for seconds in taken_s),
            *(-float(message.start_s > message.ready_s) for message in messages),
            *pieces_s,
        ]
        totals = [*(step.compute_s for step in steps), *taken_s]
        num_gradients = len(gradients.names) if ready else 0
        num_messages = len(sizes) if messages else 0
        return cls(len(steps), num_gradients, num_messages, tuple(highest), tuple(totals), bool(gathers))

    def agreed(self, group: dist.ProcessGroup | None = None) -> AgreedSteps:
        """Combine what every rank observed of the same steps. All ranks must call it, with as many of everything."""
        return self.reduced(group).unpacked(dist.get_world_size(group))

    def reduced(self, group: dist.ProcessGroup | None = None) -> Self:
        """Reduce the numbers over ranks, and nothing else. All ranks must call it, with as many of everything."""
        highest, totals = reduce_values(self.highest, "max", group), reduce_values(self.totals, "sum", group)
        return replace(self, highest=tuple(highest), totals=tuple(totals))

    def unpacked(self, world: int) -> AgreedSteps:
        """Return what the numbers say that were reduced over so many ranks."""
        highest, totals, count = iter(self.highest), iter(self.totals), self.num_steps
        forward_s, compute_s, length_s, exposed_s = (_next(highest, count) for _ in range(4))
        ready_s = tuple(_next(highest, self.num_gradients) for _ in range(count if self.num_gradients else 0))
        num_messages = count * self.num_messages
        shortest_s, all_queued = _next(highest, num_messages), _next(highest, num_messages)
        mean_compute_s = tuple(total / world for total in _next(totals, count))
        mean_s = [total / world for total in _next(totals, num_messages)]
        agreed_s = [
            mean if -is_queued else -shortest
            for mean, shortest, is_queued in zip(mean_s, shortest_s, all_queued, strict=True)
        ]
        pieces_s = _next(highest, num_messages if self.are_gathers else 0)

        def by_step(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            starts = range(0, len(values), self.num_messages or 1)
            return tuple(tuple(values[start : start + self.num_messages]) for start in starts)

        if any(math.isinf(one) for one in pieces_s):  # some rank did not see them all
            agreed_s, pieces_s = [], ()
        return AgreedSteps(
            forward_s=forward_s,
            compute_s=compute_s,
            mean_compute_s=mean_compute_s,
            length_s=length_s,
            exposed_s=tuple(max(0.0, -value) for value in exposed_s),
            ready_s=ready_s,
            message_s=by_step(agreed_s),
            pieces_s=by_step(pieces_s),
        )


def _gathers_of(steps: Sequence[ObservedStep], sizes: Sequence[int]) -> tuple[list[ObservedMessage], list[float]]:
    """Return the gathers of steps and the pieces of forward passes, as many on every rank: infinite where unknown.

    A rank does not see them where it runs other forward passes before the one of the step.
    """
    if all([one.num_bytes for one in step.gathers] == list(sizes) for step in steps):
        return [one for step in steps for one in step.gathers], [one for step in steps for one in step.pieces_s]
    unknown = [ObservedMessage(size, 0.0, 0.0, 0.0) for _ in steps for size in sizes]
    return unknown, [math.inf] * len(unknown)


def _next(values: Iterator[float], number: int) -> tuple[float, ...]:
    return tuple(islice(values, number))


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a turn, over all ranks, by what was noted."""

    plain: AgreedSteps | None = None
    gradients: AgreedSteps | None = None
    messages: AgreedSteps | None = None
    gathers: AgreedSteps | None = None
    alone: AgreedSteps | None = None  # the forward pass, without gathers beside it
