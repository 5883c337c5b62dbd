"""One size of message after another, timed on all ranks at once: `Sweep`."""

import time
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from mgwfbp.errors import MeasureError
from mgwfbp.measure.agreement import first_line
from mgwfbp.measure.kinds import KINDS, Send
from mgwfbp.units import format_bytes, format_dtype

__all__ = ["MAX_ROUNDS", "MIN_ROUNDS", "Asked", "Sweep", "Timing"]

# A burst of this many messages stands for a training step that sends one after another.
BURST = 8
# What gradients are made of.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every size is timed at least so often, and, unless told otherwise, at most.
MIN_ROUNDS, MAX_ROUNDS = 3, 30


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller wants; the same on all ranks."""

    max_bytes: int
    budget_s: float
    max_rounds: int
    kinds: tuple[str, ...]  # of messages, of `KINDS`
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.max_bytes < 8 or not self.budget_s > 0 or self.max_rounds < MIN_ROUNDS:
            raise MeasureError(
                f"max_bytes is {self.max_bytes}, budget_s {self.budget_s}, max_rounds {self.max_rounds}: "
                f"expected 8 or more, above 0 and {MIN_ROUNDS} or more"
            )
        if self.dtype not in DTYPES:
            raise MeasureError(f"dtype is {format_dtype(self.dtype)}, expected float32, bfloat16 or float16")

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"kinds": " and ".join(self.kinds), "dtype": format_dtype(self.dtype)}
        return ", ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Timing:
    """One size, timed once; already that of the slowest rank, so the same on every rank."""

    isolated_s: tuple[float, ...]  # one message of each kind on an idle link
    streamed_s: tuple[float, ...]  # one of a burst
    spent_s: float  # on all, with waiting for one another


class Sweep:
    """Times messages of any size on one group; every method is called by all ranks at once."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, asked: Asked) -> None:
        self._group, self._device = group, device
        world = dist.get_world_size(group)
        length = -(-(asked.max_bytes // asked.dtype.itemsize + 1) // world)  # of a row
        try:
            # Bursts reuse one buffer: it holds zeros, whose sum stays zero however often they are added.
            self._buffer = torch.zeros(length * world, dtype=asked.dtype, device=device)
            self._sends: list[Send] = [KINDS[kind](group, self._buffer) for kind in asked.kinds]
        except RuntimeError as error:
            raise MeasureError(
                f"no room for a message of {format_bytes(asked.max_bytes)} on {device}: {first_line(error)}"
            ) from error

    def time(self, num_bytes: int) -> Timing:
        """Time one isolated message and one burst of each kind, in turns."""
        started_s = time.perf_counter()
        isolated_s = [self._elapsed(send, num_bytes, 1) for send in self._sends]
        streamed_s = [self._elapsed(send, num_bytes, BURST) / BURST for send in self._sends]
        spent_s = time.perf_counter() - started_s
        *agreed, spent_s = self._slowest([*isolated_s, *streamed_s, spent_s])
        return Timing(tuple(agreed[: len(self._sends)]), tuple(agreed[len(self._sends) :]), spent_s)

    def once_s(self, num_bytes: int) -> tuple[float, ...]:
        """Time one isolated message of each kind."""
        return tuple(self._slowest([self._elapsed(send, num_bytes, 1) for send in self._sends]))

    def _slowest(self, values: list[float]) -> list[float]:
        agreed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return agreed.tolist()

    def _elapsed(self, send: Send, num_bytes: int, count: int) -> float:
        message = self._buffer[: max(1, num_bytes // self._buffer.element_size())]
        dist.barrier(group=self._group)
        self._synchronize()
        start_s = time.perf_counter()
        works = [send(message) for _ in range(count)]
        for work in works:
            if work is not None:  # None of what is waited for already, and on a rank outside the group
                work.wait()
        self._synchronize()
        return time.perf_counter() - start_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
