"""What memory there is for what a plan needs besides its buckets, before any rank takes it."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from mgwfbp.errors import PlanError
from mgwfbp.measure.low import extra_bytes
from mgwfbp.runtime.messages.wire import dtype_of
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.parameters import Buckets
from mgwfbp.units import format_bytes

__all__ = ["check_room", "most_message_bytes"]

# A plan may need this part of the gradients, or so many bytes, more than training has needed so far.
SPARE, SPARE_BYTES = 0.02, 32 * 2**20
# What a process has to spare differs from step to step; plans are made for so much of it.
USED = 0.9


def most_message_bytes(reducer: ReducerHandle, held: Buckets, wire: str | None) -> tuple[float, float]:
    """Return how large messages may be for which there is room, whichever plan follows which; infinite where any may.

    Where gradients are views of buckets, the largest old and the largest new bucket are there at the same time, see
    `check_room`: two of plans that are tried, or one beside those that are ``held`` or tried as they are. The second
    number is of messages in the precision ``wire``.
    """
    part, low = 2**20, math.inf
    if wire is not None:
        low = USED * _low_spare_bytes(reducer) * part / _low_bytes(reducer, wire, part)
    if not reducer.ddp.gradient_as_bucket_view:
        return math.inf, low
    spare = USED * _spare_bytes(reducer)
    most = max(0.0, min(spare / 2, spare - max(_bucket_bytes(reducer, held))))
    return most, min(most, low)


def check_room(reducer: ReducerHandle, before: Buckets, after: Buckets, wires: Sequence[str]) -> None:
    """Raise where a plan would need more memory at once than training has needed so far, or a GPU has.

    Old buckets are freed before new ones are made. But gradients that are views of buckets keep these until they have
    been moved, bucket by bucket: the largest old and the largest new one are there at the same time. And a message in
    low precision needs `extra_bytes` while it travels, which are allocated in the backward pass, beside activations,
    and where a failure on one rank would leave the others in the message.

    Args:
        reducer: of this rank.
        before: the buckets in force.
        after: those of the plan.
        wires: the precision of each, see `MergePlan.wire`.

    Raises:
        PlanError: it says how much is needed, and how much there is.
    """
    old, new = _bucket_bytes(reducer, before), _bucket_bytes(reducer, after)
    moved = max(old) + max(new) if reducer.ddp.gradient_as_bucket_view else 0
    if moved > (spare := _spare_bytes(reducer)):
        raise PlanError(
            f"gradients are views of buckets, and to change these would take {format_bytes(moved)} more memory for a "
            f"moment, where {format_bytes(spare)} are to spare"
        )
    of_low = [_low_bytes(reducer, wire, size) for size, wire in zip(new, wires, strict=bool(wires)) if wire]
    if (low := max(of_low, default=0)) > (spare := _low_spare_bytes(reducer)):
        raise PlanError(
            f"a message in low precision would take {format_bytes(low)} more memory for a moment, where "
            f"{format_bytes(spare)} are to spare"
        )


def _bucket_bytes(reducer: ReducerHandle, buckets: Buckets) -> list[int]:
    return [sum(reducer.sizes[place] for place in bucket) for bucket in buckets]


def _low_bytes(reducer: ReducerHandle, wire: str, num_bytes: int) -> int:
    return extra_bytes(dtype_of(wire), num_bytes, reducer.ddp.process_group.size(), reducer.parameters[0].device)


def _low_spare_bytes(reducer: ReducerHandle) -> float:
    """Return how much more memory may be taken in the backward pass."""
    device = reducer.parameters[0].device
    if device.type != "cuda":
        return _spare_bytes(reducer)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return bytes_at_peak(free_bytes, torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device))


def bytes_at_peak(free_bytes: int, reserved_bytes: int, most_bytes: int) -> int:
    """Return how much memory a GPU has beside the most that was allocated at a time, activations included.

    That is what nobody has now, and what the allocator of this process has, used or not.
    """
    return max(0, free_bytes + reserved_bytes - most_bytes)


def _spare_bytes(reducer: ReducerHandle) -> float:
    """Return how much more memory may be taken: what training has needed before and does not use now, and a little."""
    return max(0.0, headroom_bytes(reducer.parameters[0].device) + max(SPARE_BYTES, SPARE * sum(reducer.sizes)))


def headroom_bytes(device: torch.device) -> float:
    """Return how much more memory this process has used at some time than it uses now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
    try:  # not getrusage, whose peak is also that of the program which this process was before
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        kib = dict(re.findall(r"^(VmHWM|VmRSS):\s*(\d+) kB$", status, re.MULTILINE))
        return 1024.0 * (int(kib["VmHWM"]) - int(kib["VmRSS"]))
    except (OSError, KeyError):
        return 0.0
