"""What an all-reduce costs on this network, measured: `measure_allreduce`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import fit
from mgwfbp.measure.agreement import backend_name, first_line, gather, together
from mgwfbp.units import format_bytes, format_dtype

__all__ = ["measure_allreduce"]

# A burst of this many messages stands for a training step that sends one after another.
BURST = 8
# At this size a message's bytes count beside its start-up time, on a link of 10 Mbit as on one of 100 Gbit.
TELLING_BYTES = 2**16
# What gradients are made of.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every size is timed at least so often, and, unless told otherwise, at most.
MIN_ROUNDS, MAX_ROUNDS = 3, 30


@dataclass(frozen=True, slots=True)
class _Timing:
    """One size, timed once; already that of the slowest rank, so the same on every rank."""

    isolated_s: float  # one message on an idle link
    streamed_s: float  # one of a burst
    spent_s: float  # on both, with waiting for one another


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
    if max_bytes < 8 or not budget_s > 0 or max_rounds < MIN_ROUNDS:
        raise MeasureError(
            f"max_bytes is {max_bytes}, budget_s {budget_s}, max_rounds {max_rounds}: "
            f"expected 8 or more, above 0 and {MIN_ROUNDS} or more"
        )
    if dtype not in DTYPES:
        raise MeasureError(f"dtype is {format_dtype(dtype)}, expected float32, bfloat16 or float16")
    workers = dist.get_world_size(group)
    if workers < 2:
        raise MeasureError("the group has 1 rank, an all-reduce needs 2 or more; start more workers")
    settings = {"max_bytes": max_bytes, "budget_s": budget_s, "max_rounds": max_rounds, "dtype": format_dtype(dtype)}
    _check_same(", ".join(f"{name}={value}" for name, value in settings.items()), group)
    # Where one rank has no room the others must not wait for it.
    sweep = together(lambda: _Sweep(group, torch.device(device), dtype, max_bytes), group)
    report = on_progress or (lambda _: None)
    try:
        timings = _first_round(sweep, max_bytes, budget_s, report)
        spent_s = 2 * sum(row[0].spent_s for row in timings.values())
        round_s, rounds = spent_s / 2, 1
        while rounds < MIN_ROUNDS or (rounds < max_rounds and spent_s + round_s <= budget_s):
            for size, row in timings.items():
                row.append(sweep.time(size))
            round_s = sum(row[-1].spent_s for row in timings.values())
            spent_s += round_s
            rounds += 1
            report(min(1.0, max(rounds / max_rounds, spent_s / budget_s)))
        once = _largest_once(sweep, max_bytes, budget_s, timings)
    except (RuntimeError, dist.DistError) as error:
        raise MeasureError(f"the all-reduce sweep failed, a rank may have died: {first_line(error)}") from error
    report(1.0)
    isolated = [(size, median(timing.isolated_s for timing in row)) for size, row in timings.items()] + once
    streamed = [(size, median(timing.streamed_s for timing in row)) for size, row in timings.items()] + once
    source = {
        "measured": "allreduce",
        "backend": backend_name(group),
        "dtype": format_dtype(dtype),
        "device": torch.cuda.get_device_name(sweep.device) if sweep.device.type == "cuda" else "cpu",
        "rounds": rounds,
        "streamed": streamed,
        "isolated": isolated,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    cost = fit(streamed, workers, kind="piecewise", source=source).cost
    if not isinstance(cost, PiecewiseCost):  # what kind="piecewise" asks for
        raise MeasureError("the sweep gave no curve")
    return cost


def _check_same(settings: str, group: dist.ProcessGroup | None) -> None:
    """Raise, on every rank, unless all ranks were called alike: they would wait for messages that never come."""
    said = gather(settings, group)
    for rank, other in enumerate(said):
        if other != said[0]:
            raise MeasureError(f"the ranks sweep differently: rank 0 was given {said[0]}, rank {rank} {other}")


def _first_round(
    sweep: "_Sweep", max_bytes: int, budget_s: float, report: Callable[[float], object]
) -> dict[int, list[_Timing]]:
    """Time every size once while the budget allows: first a few that span the range, then those between, doubling.

    A smallest and a telling size come whatever the budget: from two tiny ones nothing follows about large messages.
    """
    largest = max_bytes // 4 * 4
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
    sweep: "_Sweep", max_bytes: int, budget_s: float, timings: Mapping[int, Sequence[_Timing]]
) -> list[tuple[int, float]]:
    """Time one message of the largest size where no round reached it, unless it alone would exceed the budget."""
    largest, top = max_bytes // 4 * 4, max(timings)
    per_byte_s = min(timing.isolated_s for timing in timings[top]) / top
    if top >= largest or largest * per_byte_s > budget_s:
        return []
    return [(largest, sweep.once_s(largest))]


class _Sweep:
    """Times all-reduces of any size on one group; every method is called by all ranks at once."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype, max_bytes: int
    ) -> None:
        self._group = group
        self.device = device
        try:
            # Bursts reuse one buffer: it holds zeros, whose sum stays zero however often they are added.
            self._buffer = torch.zeros(max_bytes // dtype.itemsize + 1, dtype=dtype, device=device)
        except RuntimeError as error:
            raise MeasureError(
                f"no room for a message of {format_bytes(max_bytes)} on {device}: {first_line(error)}"
            ) from error

    def time(self, num_bytes: int) -> _Timing:
        """Time one isolated message and one burst."""
        started_s = time.perf_counter()
        isolated_s = self._elapsed(num_bytes, 1)
        streamed_s = self._elapsed(num_bytes, BURST) / BURST
        return _Timing(*self._slowest([isolated_s, streamed_s, time.perf_counter() - started_s]))

    def once_s(self, num_bytes: int) -> float:
        """Time one isolated message."""
        return self._slowest([self._elapsed(num_bytes, 1)])[0]

    def _slowest(self, values: list[float]) -> list[float]:
        agreed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return agreed.tolist()

    def _elapsed(self, num_bytes: int, count: int) -> float:
        message = self._buffer[: max(1, num_bytes // self._buffer.element_size())]
        dist.barrier(group=self._group)
        self._synchronize()
        start_s = time.perf_counter()
        works = [dist.all_reduce(message, group=self._group, async_op=True) for _ in range(count)]
        for work in works:
            if work is not None:  # None on a rank outside the group
                work.wait()
        self._synchronize()
        return time.perf_counter() - start_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
