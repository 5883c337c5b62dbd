"""Messages that travel in fewer bits than their gradients have: `WireGroup`, where a Reducer's process group stands.

How they do: [Note: how a message travels in low precision] in ``measure/low.py``. They travel through a `Channel`; over
gloo all messages do, over nccl those in low precision.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.errors import PlanError
from mgwfbp.measure.halves import queue_collective
from mgwfbp.measure.low import average_in
from mgwfbp.runtime.messages.channel import Channel, work_of
from mgwfbp.runtime.messages.gloo import store_of
from mgwfbp.runtime.messages.stand_ins import MessageGroup

__all__ = ["WireGroup", "cannot_wire", "check_wire", "dtype_of"]


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
    parameters = [one for one in ddp.module.parameters() if one.requires_grad]
    if any(hasattr(one, "_in_backward_optimizers") for one in parameters):
        return "optimizers run in the backward pass, which torch does in a communication hook"
    if store_of(ddp.process_group, "") is None:
        return f"torch {torch.__version__} does not give away the store of the process group"
    if len({parameter.device for parameter in parameters}) > 1:
        return "gradients are on several devices, and one stream sends messages"
    devices = {parameter.device.type for parameter in parameters}
    backend = str(dist.get_backend(ddp.process_group))
    if devices == {"cpu"} or (devices == {"cuda"} and "nccl" in backend):
        return ""
    return f"gradients on {', '.join(sorted(devices))} go through {backend}, expected nccl on a GPU, or a CPU"


class WireGroup(MessageGroup):
    """The process group of a Reducer, some of whose all-reduces are sent in low precision.

    A Reducer sends all its buckets in every reduction, in order, or fails: so it is counted which one is meant.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group)
        self._wires: tuple[str, ...] = ()
        self._next = 0
        self._device = device
        self._channel: Channel | None = None
        # Allocated before ranks meet: who has no memory for it would leave the others in the collective.
        self._greeting = torch.zeros(2, group.size(), dtype=torch.uint8, device=device)

    @property
    def is_open(self) -> bool:
        """Whether ranks have met; else they meet when the first message is sent: a copy may be made on one alone."""
        return self._channel is not None

    def open(self, number: int) -> None:
        """Let ranks meet now, see `gloo_beside`; nccl connects two of them when they first exchange something."""
        channel = self._channel = Channel(self.group, self._device, number)
        if self._device.type == "cuda":
            received, sent = self._greeting
            channel.send(lambda: queue_collective(dist.all_to_all_single, received, sent, self.group), [])

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
        channel = self._channel = self._channel or Channel(self.group, self._device)

        def job() -> None:
            if dtype is None:
                channel.group.allreduce(tensors, *options).wait()
            else:
                average_in(dtype, message, channel.group)

        channel.keep(message)
        return work_of(channel.send(job, tensors))


def check_wire(wires: Sequence[str], allowed: str | None) -> None:
    """Raise unless a plan's messages travel only as the model was told they may."""
    for one in sorted(set(filter(None, wires))):
        if one != allowed:
            made = "without wire=" if allowed is None else f"with wire={allowed!r}"
            raise PlanError(
                f"the plan sends messages in {one}, and the model was made {made}: make it with wire={one!r}, or give "
                "another plan"
            )
