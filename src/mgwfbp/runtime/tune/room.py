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
    spare, part = USED * _spare_bytes(reducer), 2**20
    device, world = reducer.parameters[0].device, reducer.ddp.process_group.size()
    low = math.inf if wire is None else spare * part / extra_bytes(dtype_of(wire), part, world, device)
    if not reducer.ddp.gradient_as_bucket_view:
        return math.inf, low
    most = max(0.0, min(spare / 2, spare - max(_bucket_bytes(reducer, held))))
    return most, min(most, low)


def check_room(reducer: ReducerHandle, before: Buckets, after: Buckets, wires: Sequence[str]) -> None:
    """Raise where a plan would need more memory at once than training has needed so far.

    Old buckets are freed before new ones are made. But gradients that are views of buckets keep these until they have
    been moved, bucket by bucket: the largest old and the largest new one are there at the same time. And a message in
    low precision needs `extra_bytes` while it travels, which are allocated in the backward pass, where a failure on one
    rank would leave the others in the message.

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
    device, world = reducer.parameters[0].device, reducer.ddp.process_group.size()
    low = max(
        (
            extra_bytes(dtype_of(wire), num_bytes, world, device)
            for num_bytes, wire in zip(new, wires, strict=bool(wires))
            if wire
        ),
        default=0,
    )
    spare = _spare_bytes(reducer)
    left = format_bytes(spare)
    if moved > spare:
        raise PlanError(
            f"gradients are views of buckets, and to change these would take {format_bytes(moved)} more memory for a "
            f"moment, where {left} are to spare"
        )
    if low > spare:
        raise PlanError(
            f"a message in low precision would take {format_bytes(low)} more memory for a moment, where {left} are to "
            "spare"
        )


def _bucket_bytes(reducer: ReducerHandle, buckets: Buckets) -> list[int]:
    return [sum(reducer.sizes[place] for place in bucket) for bucket in buckets]


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
