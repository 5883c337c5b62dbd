"""Messages that travel in fewer bits than their gradients have: `WireGroup`, where a Reducer's process group stands.

[Note: how a message travels in low precision]
A rank converts its gradients once (the Reducer has divided them by the number of ranks, so that sums are averages and
fp16 does not overflow where the average does not). An all-to-all gives each of the N ranks one N-th of everybody's; it
adds these up in fp32, in the order of ranks, and converts the sum once. An all-gather brings the sums back. So a
gradient is rounded twice, whatever N is; a ring that adds up 16 bits rounds at every hop. The bytes are the same. Each
sum is made by one rank only: the result is the same on all ranks, bitwise, and what is not finite stays so on all.

Both collectives carry bytes: no backend has to know the precision. They travel through a `Channel`; over gloo all
messages do, over nccl those in low precision.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.errors import PlanError
from mgwfbp.measure.halves import exchange, queue_collective, wait_for
from mgwfbp.runtime.channel import Channel, work_of
from mgwfbp.runtime.gloo import store_of
from mgwfbp.runtime.stand_ins import MessageGroup

__all__ = ["WireGroup", "average_in", "cannot_wire", "check_wire", "dtype_of"]

# On a CPU messages are converted, sent and summed in blocks of so many numbers.
BLOCK = 2**19


def dtype_of(wire: str) -> torch.dtype:
    """Return the dtype that a plan's word for a precision stands for.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, wire)
    assert isinstance(found, torch.dtype)  # noqa: S101 - a plan has checked it
    return found


def cannot_wire(ddp: Any) -> str:
    """Say why messages of a model cannot travel in low precision; empty where they can."""
    if getattr(ddp, "mixed_precision", None) is not None:
        return "mixed_precision says itself how gradients travel"
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return "messages without a used gradient are skipped (skip_all_reduce_unused_params)"
    if store_of(ddp.process_group, "") is None:
        return f"torch {torch.__version__} does not give away the store of the process group"
    devices = {parameter.device.type for parameter in ddp.module.parameters() if parameter.requires_grad}
    backend = str(dist.get_backend(ddp.process_group))
    if devices == {"cpu"} or (devices == {"cuda"} and "nccl" in backend):
        return ""
    return f"gradients on {', '.join(sorted(devices))} go through {backend}, expected nccl on a GPU, or a CPU"


def average_in(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Sum a message over ranks, in place, as [Note: how a message travels in low precision] says.

    On a CPU it waits until the message has arrived; on a GPU everything is queued on the current stream.

    Args:
        dtype: the precision in which it travels, of 16 bits.
        message: this rank's, already divided by the number of ranks.
        group: the ranks.
    """
    if not message.is_cuda:
        _average_on_host(dtype, message, group)
        return
    low = _lowered(message, dtype, group.size())
    received = torch.empty_like(low)
    queue_collective(dist.all_to_all_single, received.view(torch.uint8), low.view(torch.uint8), group)
    summed = _summed(received)
    queue_collective(dist.all_gather_into_tensor, low.view(torch.uint8), summed.view(torch.uint8), group)
    message.copy_(low.flatten()[: message.numel()])


def _average_on_host(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Do it block by block, so that one is converted and summed while others are on the link.

    With sends and receives, all posted at once: gloo's own all-to-all leaves the link idle half of the time
    (benchmarks/wire.md).
    """
    under_way: deque[tuple[Tensor, Tensor, Tensor, list[Any]]] = deque()
    for place, block in enumerate(message.split(BLOCK)):
        low = _lowered(block, dtype, group.size())
        received = torch.empty_like(low)
        under_way.append((block, low, received, exchange(received, low, group, 2 * place)))
    gathers = []
    for place in range(len(under_way)):
        block, low, received, works = under_way.popleft()  # and what was received is freed, block by block
        wait_for(works)
        gathers.append((block, low, exchange(low, _summed(received).expand_as(low), group, 2 * place + 1)))
    for block, low, works in gathers:
        wait_for(works)
        block.copy_(low.flatten()[: block.numel()])


def _lowered(message: Tensor, dtype: torch.dtype, world: int) -> Tensor:
    """Return a message in low precision, a row for each rank; what is missing in the last is 0."""
    count = message.numel()
    low = message.new_empty(world, -(-count // world), dtype=dtype)
    low.flatten()[:count].copy_(message)
    low.flatten()[count:].zero_()
    return low


def _summed(rows: Tensor) -> Tensor:
    return rows.sum(dim=0, dtype=torch.float32).to(rows.dtype)


class WireGroup(MessageGroup):
    """The process group of a Reducer, some of whose all-reduces are sent in low precision.

    A Reducer sends all its buckets in every reduction, in order, or fails: so it is counted which one is meant.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._wires: tuple[str, ...] = ()
        self._next = 0
        self._channel: Channel | None = None

    def take(self, wires: Sequence[str]) -> None:
        """Send the messages of later steps so, one word each; between two steps."""
        self._wires, self._next = tuple(wires), 0

    def send_message(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send a message as the plan says."""
        message, wire = tensors[0], self._wires[self._next]
        self._next = (self._next + 1) % len(self._wires)
        # Sparse gradients are as large as each batch makes them; others than fp32 travel as they are.
        dtype = dtype_of(wire) if wire and not message.is_sparse and message.dtype is torch.float32 else None
        if message.is_cuda and dtype is None:
            return self.group.allreduce(tensors, *options)
        channel = self._channel = self._channel or Channel(self.group, message.device)

        def job() -> None:
            if dtype is None:
                channel.group.allreduce(tensors, *options).wait()
            else:
                average_in(dtype, message, channel.group)

        return work_of(channel.send(job, tensors))


def check_wire(wires: Sequence[str], allowed: str | None) -> None:
    """Raise unless a plan's messages travel only as the model was told they may."""
    for one in sorted(set(filter(None, wires))):
        if one != allowed:
            told = "without wire=" if allowed is None else f"with wire={allowed!r}"
            raise PlanError(
                f"the plan sends messages in {one}, and the model was made {told}: make it with wire={one!r}, or give "
                "another plan"
            )
