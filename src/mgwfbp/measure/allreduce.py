"""What an all-reduce costs on this network, measured: `measure_allreduce`, and with its halves `measure_halves`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp.cost import PiecewiseCost
from mgwfbp.costs import ShardedCost
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import fit
from mgwfbp.measure.agreement import backend_name, first_line, gather, together
from mgwfbp.measure.halves import all_gather, reduce_scatter
from mgwfbp.units import format_bytes, format_dtype

__all__ = ["measure_allreduce", "measure_halves"]

# A burst of this many messages stands for a training step that sends one after another.
BURST = 8
# At this size a message's bytes count beside its start-up time, on a link of 10 Mbit as on one of 100 Gbit.
TELLING_BYTES = 2**16
# What gradients are made of.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every size is timed at least so often, and, unless told otherwise, at most.
MIN_ROUNDS, MAX_ROUNDS = 3, 30
# What is timed of every size, all or only the first.
KINDS = ("allreduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the caller wants; the same on all ranks."""

    max_bytes: int
    budget_s: float
    max_rounds: int
    halves: bool
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
        return ", ".join(f"{name}={value}" for name, value in {**values, "dtype": format_dtype(self.dtype)}.items())


@dataclass(frozen=True, slots=True)
class _Timing:
    """One size, timed once; already that of the slowest rank, so the same on every rank."""

    isolated_s: tuple[float, ...]  # one message of each kind on an idle link
    streamed_s: tuple[float, ...]  # one of a burst
    spent_s: float  # on all, with waiting for one another


def measure_allreduce(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    max_bytes: int = 2**28,
    budget_s: float = 5.0,
    max_rounds: int = MAX_ROUNDS,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[float], object] | None = None,
) -> PiecewiseCost:
    """Measure what an all-reduce of M bytes takes, from 4 bytes to ``max_bytes``. All ranks of the group must call it.

    Two times are taken of every size, all ranks starting together, the slowest rank counting: of one message on an idle
    link, and of one message in a burst of them, which is how training sends them and what the cost is made of (the
    isolated times are in ``source``). Sizes are gone through in turns until about ``budget_s`` is spent or each was
    timed ``max_rounds`` times; of each the median counts. Where a slow network does not allow ``max_bytes`` so often,
    one message of it is timed, if that alone is within the budget; larger messages than were measured are taken to go
    on at the last slope.

    Args:
        group: the ranks; all of them if not given.
        device: where messages lie: ``cpu`` for gloo, ``cuda`` for nccl.
        max_bytes: the largest message.
        budget_s: about how long it may take.
        max_rounds: how often each size is timed at most.
        dtype: what messages hold; a backend may add other numbers at another speed.
        on_progress: called with the fraction that is done.

    Returns:
        The cost, the same on every rank.

    Raises:
        MeasureError: on every rank, where there is one rank, no room for ``max_bytes``, ranks were given different
            arguments, or one of them died.
    """
    asked = _Asked(max_bytes, budget_s, max_rounds, False, dtype)
    (cost,) = _measure(group, torch.device(device), asked, on_progress or (lambda _: None))
    return cost


def measure_halves(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    max_bytes: int = 2**28,
    budget_s: float = 5.0,
    max_rounds: int = MAX_ROUNDS,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[float], object] | None = None,
) -> ShardedCost:
    """Measure what an all-reduce takes and, in turns with it, its halves. All ranks of the group must call it.

    The halves are a reduce-scatter and an all-gather as a sharded optimizer sends them, of gradients or parameters of
    as many bytes: gradients are copied into a row for each rank, parameters lie in rows already. What the computation
    does before and after (the rows of parameters are copied when they are asked for) is not in them. All the rest is as
    in `measure_allreduce`; the budget is that of all three.

    Args:
        group: the ranks; all of them if not given. Over gloo or nccl.
        device: where messages lie: ``cpu`` for gloo, ``cuda`` for nccl.
        max_bytes: the largest message.
        budget_s: about how long it may take.
        max_rounds: how often each size is timed at most.
        dtype: what messages hold.
        on_progress: called with the fraction that is done.

    Returns:
        The costs, the same on every rank.

    Raises:
        MeasureError: as `measure_allreduce`, and where a sharded optimizer cannot send over the group.
    """
    expected, backend = "nccl" if torch.device(device).type == "cuda" else "gloo", backend_name(group)
    if backend in ("gloo", "nccl", "mpi") and backend != expected:
        raise MeasureError(
            f"a sharded optimizer on {torch.device(device).type} sends over {expected}, and the backend is {backend}: "
            "measure there, or without the halves"
        )
    asked = _Asked(max_bytes, budget_s, max_rounds, True, dtype)
    return ShardedCost(*_measure(group, torch.device(device), asked, on_progress or (lambda _: None)))


def _measure(
    group: dist.ProcessGroup | None, device: torch.device, asked: _Asked, report: Callable[[float], object]
) -> list[PiecewiseCost]:
    """Measure the costs of all kinds that are asked for."""
    workers = dist.get_world_size(group)
    if workers < 2:
        raise MeasureError("the group has 1 rank, an all-reduce needs 2 or more; start more workers")
    _check_same(str(asked), group)
    # Where one rank has no room the others must not wait for it.
    sweep = together(lambda: _Sweep(group, device, asked), group)
    budget_s = asked.budget_s
    try:
        timings = _first_round(sweep, asked, report)
        spent_s = 2 * sum(row[0].spent_s for row in timings.values())
        round_s, rounds = spent_s / 2, 1
        while rounds < MIN_ROUNDS or (rounds < asked.max_rounds and spent_s + round_s <= budget_s):
            for size, row in timings.items():
                row.append(sweep.time(size))
            round_s = sum(row[-1].spent_s for row in timings.values())
            spent_s += round_s
            rounds += 1
            report(min(1.0, max(rounds / asked.max_rounds, spent_s / budget_s)))
        once = _largest_once(sweep, asked, timings)
    except (RuntimeError, dist.DistError) as error:
        raise MeasureError(f"the all-reduce sweep failed, a rank may have died: {first_line(error)}") from error
    report(1.0)
    costs = []
    for place, kind in enumerate(KINDS[: sweep.num_kinds]):
        last = [(size, times_s[place]) for size, times_s in once]
        isolated = [(size, median(timing.isolated_s[place] for timing in row)) for size, row in timings.items()] + last
        streamed = [(size, median(timing.streamed_s[place] for timing in row)) for size, row in timings.items()] + last
        source = {
            "measured": kind,
            "backend": backend_name(group),
            "dtype": format_dtype(asked.dtype),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "rounds": rounds,
            "streamed": streamed,
            "isolated": isolated,
            "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(),
        }
        cost = fit(streamed, workers, kind="piecewise", source=source).cost
        if not isinstance(cost, PiecewiseCost):  # what kind="piecewise" asks for
            raise MeasureError("the sweep gave no curve")
        costs.append(cost)
    return costs


def _check_same(settings: str, group: dist.ProcessGroup | None) -> None:
    """Raise, on every rank, unless all ranks were called alike: they would wait for messages that never come."""
    said = gather(settings, group)
    for rank, other in enumerate(said):
        if other != said[0]:
            raise MeasureError(f"the ranks sweep differently: rank 0 was given {said[0]}, rank {rank} {other}")


def _first_round(sweep: "_Sweep", asked: _Asked, report: Callable[[float], object]) -> dict[int, list[_Timing]]:
    """Time every size once while the budget allows: first a few that span the range, then those between, doubling.

    A smallest and a telling size come whatever the budget: from two tiny ones nothing follows about large messages.
    """
    largest, budget_s = asked.max_bytes // 4 * 4, asked.budget_s
    doubling = [4 << power for power in range((largest // 4).bit_length()) if 4 << power < largest]
    timings: dict[int, _Timing] = {}

    def fits(expected_s: float) -> bool:
        # The sizes so far were timed twice each and have rounds to come; so will the next.
        spent_s = 2 * sum(timing.spent_s for timing in timings.values())
        return (spent_s / 2 + expected_s) * (MIN_ROUNDS + 1) <= budget_s

    def take(size: int) -> None:
        sweep.time(size)  # the first message of a size sets buffers up
        timings[size] = sweep.time(size)
        spent_s = 2 * sum(timing.spent_s for timing in timings.values())
        report(min(0.9, spent_s / budget_s))

    take(4)
    take(min(TELLING_BYTES, largest))
    while (top := max(timings)) < largest:
        low = max(size for size in timings if size < top)
        slope = max(0.0, timings[top].spent_s - timings[low].spent_s) / (top - low)
        steps = (min(factor * top, largest) for factor in (8, 4, 2))
        size = next((size for size in steps if fits(timings[top].spent_s + slope * (size - top))), None)
        if size is None:
            break
        take(size)
    for size in doubling:
        above = min((other for other in timings if other > size), default=0)
        if size not in timings and above and fits(timings[above].spent_s):
            take(size)
    return {size: [timings[size]] for size in sorted(timings)}


def _largest_once(
    sweep: "_Sweep", asked: _Asked, timings: Mapping[int, Sequence[_Timing]]
) -> list[tuple[int, tuple[float, ...]]]:
    """Time one message of the largest size where no round reached it, unless it alone would exceed the budget."""
    largest, top = asked.max_bytes // 4 * 4, max(timings)
    per_byte_s = min(sum(timing.isolated_s) for timing in timings[top]) / top
    if top >= largest or largest * per_byte_s > asked.budget_s:
        return []
    return [(largest, sweep.once_s(largest))]


class _Sweep:
    """Times messages of any size on one group; every method is called by all ranks at once."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, asked: _Asked) -> None:
        self._group, self._world = group, dist.get_world_size(group)
        self._device = device
        self._sends = (
            (self._all_reduce, self._reduce_scatter, self._all_gather) if asked.halves else (self._all_reduce,)
        )
        self.num_kinds = len(self._sends)
        length = -(-(asked.max_bytes // asked.dtype.itemsize + 1) // self._world)  # of a row
        try:
            # Bursts reuse one buffer: it holds zeros, whose sum stays zero however often they are added.
            self._buffer, *halves = (
                torch.zeros(length * self._world, dtype=asked.dtype, device=device) for _ in self._sends
            )
            self._rows, self._received = halves or (self._buffer, self._buffer)
            self._own = self._buffer.new_zeros(length if asked.halves else 0)
        except RuntimeError as error:
            raise MeasureError(
                f"no room for a message of {format_bytes(asked.max_bytes)} on {device}: {first_line(error)}"
            ) from error

    def time(self, num_bytes: int) -> _Timing:
        """Time one isolated message and one burst of each kind, in turns."""
        started_s = time.perf_counter()
        isolated_s = [self._elapsed(send, num_bytes, 1) for send in self._sends]
        streamed_s = [self._elapsed(send, num_bytes, BURST) / BURST for send in self._sends]
        spent_s = time.perf_counter() - started_s
        *agreed, spent_s = self._slowest([*isolated_s, *streamed_s, spent_s])
        return _Timing(tuple(agreed[: self.num_kinds]), tuple(agreed[self.num_kinds :]), spent_s)

    def once_s(self, num_bytes: int) -> tuple[float, ...]:
        """Time one isolated message of each kind."""
        return tuple(self._slowest([self._elapsed(send, num_bytes, 1) for send in self._sends]))

    def _slowest(self, values: list[float]) -> list[float]:
        agreed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return agreed.tolist()

    def _elapsed(self, send: Callable[[torch.Tensor], Any], num_bytes: int, count: int) -> float:
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

    def _all_reduce(self, message: torch.Tensor) -> Any:
        return dist.all_reduce(message, group=self._group, async_op=True)

    def _reduce_scatter(self, message: torch.Tensor) -> None:
        rows, received = self._in_rows(self._rows, message), self._in_rows(self._received, message)
        rows.flatten()[: message.numel()].copy_(message)  # as a sharded optimizer copies gradients into rows
        reduce_scatter(rows, self._own[: rows.shape[1]], received, self._group or dist.group.WORLD)

    def _all_gather(self, message: torch.Tensor) -> None:
        rows = self._in_rows(self._rows, message)
        all_gather(rows, self._own[: rows.shape[1]], self._group or dist.group.WORLD)

    def _in_rows(self, memory: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Return a row for each rank, together as large as a message; the last may be longer than what is left."""
        length = -(-message.numel() // self._world)
        return memory[: self._world * length].view(self._world, length)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
