"""What an all-reduce costs on this network, measured: `measure_allreduce`.

With its halves, too: `measure_halves`; and in low precision: `measure_wire`.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.cost import PiecewiseCost
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import fit
from mgwfbp.measure.agreement import backend_name, first_line, gather, together
from mgwfbp.measure.kinds import HALVES, low_kind
from mgwfbp.measure.timing import MAX_ROUNDS, MIN_ROUNDS, Asked, Sweep, Timing
from mgwfbp.plan import WIRES
from mgwfbp.units import format_dtype, quote

__all__ = ["measure_allreduce", "measure_halves", "measure_wire"]

# At this size a message's bytes count beside its start-up time, on a link of 10 Mbit as on one of 100 Gbit.
TELLING_BYTES = 2**16


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
    asked = Asked(max_bytes, budget_s, max_rounds, ("allreduce",), dtype)
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
    _check_backend(group, device, "a sharded optimizer", "the halves")
    asked = Asked(max_bytes, budget_s, max_rounds, HALVES, dtype)
    return ShardedCost(*_measure(group, torch.device(device), asked, on_progress or (lambda _: None)))


def measure_wire(
    wire: str = "bfloat16",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    max_bytes: int = 2**28,
    budget_s: float = 5.0,
    max_rounds: int = MAX_ROUNDS,
    on_progress: Callable[[float], object] | None = None,
) -> WireCost:
    """Measure what an all-reduce takes and, in turns with it, the same gradients in low precision.

    All ranks of the group must call it. Messages in low precision are sent as a model with ``wire=`` sends them:
    converted, exchanged, summed in fp32, converted and exchanged again; all of that counts, by the bytes of their
    gradients in fp32. All the rest is as in `measure_allreduce`; the budget is that of both.

    Args:
        wire: the precision, ``bfloat16`` or ``float16``.
        group: the ranks; all of them if not given. Over gloo or nccl.
        device: where messages lie: ``cpu`` for gloo, ``cuda`` for nccl.
        max_bytes: the largest message, in fp32.
        budget_s: about how long it may take.
        max_rounds: how often each size is timed at most.
        on_progress: called with the fraction that is done.

    Returns:
        The costs, the same on every rank.

    Raises:
        MeasureError: as `measure_allreduce`, and where there is no such precision, or a model cannot send so over the
            group.
    """
    if wire not in WIRES:
        raise MeasureError(f"wire is {quote(wire)}, expected one of {', '.join(WIRES)}")
    _check_backend(group, device, "a model with wire=", "low precision")
    asked = Asked(max_bytes, budget_s, max_rounds, ("allreduce", low_kind(wire)), torch.float32)
    full, low = _measure(group, torch.device(device), asked, on_progress or (lambda _: None))
    return WireCost(full, low, wire)


def _check_backend(group: dist.ProcessGroup | None, device: torch.device | str, sender: str, what: str) -> None:
    """Raise where messages cannot be sent as they are in training."""
    on = torch.device(device).type
    expected, backend = "nccl" if on == "cuda" else "gloo", backend_name(group)
    if backend in ("gloo", "nccl", "mpi") and backend != expected:
        raise MeasureError(
            f"{sender} on {on} sends over {expected}, and the backend is {backend}: measure there, or without {what}"
        )


def _measure(
    group: dist.ProcessGroup | None, device: torch.device, asked: Asked, report: Callable[[float], object]
) -> list[PiecewiseCost]:
    """Measure the costs of all kinds that are asked for."""
    workers = dist.get_world_size(group)
    if workers < 2:
        raise MeasureError("the group has 1 rank, an all-reduce needs 2 or more; start more workers")
    _check_same(str(asked), group)
    # Where one rank has no room the others must not wait for it.
    sweep = together(lambda: Sweep(group, device, asked), group)
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
    for place, kind in enumerate(asked.kinds):
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


def _first_round(sweep: Sweep, asked: Asked, report: Callable[[float], object]) -> dict[int, list[Timing]]:
    """Time every size once while the budget allows: first a few that span the range, then those between, doubling.

    A smallest and a telling size come whatever the budget: from two tiny ones nothing follows about large messages.
    """
    largest, budget_s = asked.max_bytes // 4 * 4, asked.budget_s
    doubling = [4 << power for power in range((largest // 4).bit_length()) if 4 << power < largest]
    timings: dict[int, Timing] = {}

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
    sweep: Sweep, asked: Asked, timings: Mapping[int, Sequence[Timing]]
) -> list[tuple[int, tuple[float, ...]]]:
    """Time one message of the largest size where no round reached it, unless it alone would exceed the budget."""
    largest, top = asked.max_bytes // 4 * 4, max(timings)
    per_byte_s = min(sum(timing.isolated_s) for timing in timings[top]) / top
    if top >= largest or largest * per_byte_s > asked.budget_s:
        return []
    return [(largest, sweep.once_s(largest))]
