"""The kinds of messages that a sweep times, each sent as training sends it: `KINDS`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.measure.halves import all_gather, reduce_scatter
from mgwfbp.measure.low import average_in

__all__ = ["HALVES", "KINDS", "Send", "low_kind"]

# Sends a message; returns what must be waited for, or None where it has arrived or is queued on the current stream.
Send = Callable[[Tensor], Any]
# Takes the ranks and a buffer as large as the largest message, which holds zeros; makes what else a kind needs.
MakeSend = Callable[[dist.ProcessGroup | None, Tensor], Send]


def _all_reduce(group: dist.ProcessGroup | None, _: Tensor) -> Send:
    return lambda message: dist.all_reduce(message, group=group, async_op=True)


def _reduce_scatter(group: dist.ProcessGroup | None, buffer: Tensor) -> Send:
    world = dist.get_world_size(group)
    rows_memory, received_memory = torch.zeros_like(buffer), torch.zeros_like(buffer)
    own = buffer.new_zeros(buffer.numel() // world)

    def send(message: Tensor) -> None:
        rows, received = _in_rows(rows_memory, message, world), _in_rows(received_memory, message, world)
        rows.flatten()[: message.numel()].copy_(message)  # as a sharded optimizer copies gradients into rows
        reduce_scatter(rows, own[: rows.shape[1]], received, group or dist.group.WORLD)

    return send


def _all_gather(group: dist.ProcessGroup | None, buffer: Tensor) -> Send:
    world = dist.get_world_size(group)
    memory, own = torch.zeros_like(buffer), buffer.new_zeros(buffer.numel() // world)

    def send(message: Tensor) -> None:
        rows = _in_rows(memory, message, world)
        all_gather(rows, own[: rows.shape[1]], group or dist.group.WORLD)

    return send


def _in_rows(memory: Tensor, message: Tensor, world: int) -> Tensor:
    """Return a row for each rank, together as large as a message; the last may be longer than what is left."""
    length = -(-message.numel() // world)
    return memory[: world * length].view(world, length)


def _low(dtype: torch.dtype, group: dist.ProcessGroup | None, _: Tensor) -> Send:
    return lambda message: average_in(dtype, message, group or dist.group.WORLD)


def low_kind(wire: str) -> str:
    """Return the kind of messages that travel in this precision.

    >>> low_kind("bfloat16")
    'allreduce in bfloat16'
    """
    return f"allreduce in {wire}"


KINDS: Mapping[str, MakeSend] = {
    "allreduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    low_kind("bfloat16"): partial(_low, torch.bfloat16),
    low_kind("float16"): partial(_low, torch.float16),
}
HALVES = ("allreduce", "reduce_scatter", "all_gather")
