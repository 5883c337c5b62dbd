"""The memory through which numbers and texts of the host travel between ranks: one small buffer per group.

[Note: no allocation in an agreement]
A rank that runs out of memory while the others are in a collective leaves them waiting. So an agreement allocates
nothing on the device: what is said goes through a buffer that is made once, when memory is not short yet (`reserve`),
in as many pieces as it takes.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.errors import MeasureError

__all__ = ["Group", "all_reduce", "broadcast", "device_of", "first_line", "on_device", "raise_readably", "reserve"]

Group = dist.ProcessGroup | None

BUFFER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: Tensor  # of bytes
    lock: threading.Lock = field(default_factory=threading.Lock)  # threads may share a group


_BUFFERS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Buffer]]" = weakref.WeakKeyDictionary()

# Where the model is that ranks talk about, if they do; see `device_of`.
_MODEL_DEVICE: ContextVar[torch.device | None] = ContextVar("_MODEL_DEVICE", default=None)

# How errors of gloo, and of sockets under nccl, speak of another rank.
_OTHER_RANK = re.compile(r"gloo/transport|timed? ?out|connection|closed by peer|broken pipe|socket", re.IGNORECASE)


@contextmanager
def on_device(device: torch.device | None) -> Iterator[None]:
    """Talk to other ranks about a model on this device, which need not be the current GPU."""
    is_gpu = device is not None and device.type == "cuda"
    gpu: AbstractContextManager[object] = torch.cuda.device(device) if is_gpu else nullcontext()
    before = _MODEL_DEVICE.set(device)
    try:
        with gpu:
            yield
    finally:
        _MODEL_DEVICE.reset(before)


def reserve(group: Group = None) -> None:
    """Make this rank's buffer of a group now, while there is memory; says nothing to other ranks."""
    _buffer_of(group)


def all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: Group = None) -> Tensor:
    """Reduce a tensor of the host over ranks; every rank has as many values."""

    def send(piece: Tensor) -> None:
        dist.all_reduce(piece, operation, group=group)

    return _through_buffer(values, send, group)


def broadcast(values: Tensor, source: int, group: Group = None) -> Tensor:
    """Return on every rank the tensor of the host that the rank ``source`` of the group has; all are as large."""
    source = dist.get_global_rank(group, source) if group is not None else source

    def send(piece: Tensor) -> None:
        dist.broadcast(piece, source, group=group)

    return _through_buffer(values, send, group)


def _through_buffer(values: Tensor, send: Callable[[Tensor], None], group: Group) -> Tensor:
    """Send a tensor of the host piece by piece; return what came of it."""
    buffer = _buffer_of(group)
    memory, result = buffer.memory.view(values.dtype), torch.empty_like(values)
    with buffer.lock:
        for start in range(0, values.numel(), memory.numel()):
            piece = values[start : start + memory.numel()]
            place = memory[: piece.numel()]
            place.copy_(piece)
            raise_readably(partial(send, place))
            result[start : start + piece.numel()] = place
    return result


def _buffer_of(group: Group) -> _Buffer:
    """Return the buffer of a group on the device that it sends from."""
    owner = group or dist.group.WORLD
    assert owner is not None  # noqa: S101 - there is one where ranks can talk
    device = device_of(owner)
    by_device = _BUFFERS.setdefault(owner, {})
    if device not in by_device:
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            by_device.setdefault(device, _Buffer(torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)))
    return by_device[device]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where tensors must be that a group sends: as torch decides it for objects, the host where it can.

    But what is said about a model on a GPU (`on_device`) is sent from there where the host has another backend. That
    one may be in use by other threads: torch saves checkpoints in the background through it (``async_save``), and ranks
    would call its collectives in different orders. The GPU's sends the model's messages in any case.
    """
    try:
        kinds = [device.type for device in group._device_types]  # of newer torch
    except (AttributeError, RuntimeError):
        kinds = ["cuda"] if dist.get_backend(group) == "nccl" else []
    kind = "cpu" if "cpu" in kinds or not kinds else kinds[0]
    model = _MODEL_DEVICE.get()
    if model is not None and model.type != kind and model.type in kinds:
        kind = kind if _backend(group, model.type) == _backend(group, kind) else model.type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _backend(group: dist.ProcessGroup, kind: str) -> str:
    return str(group._get_backend(torch.device(kind)).name())


def raise_readably(work: Callable[[], object]) -> None:
    """Call a collective.

    Raises:
        MeasureError: where it fails; it says whether that is for want of another rank.
    """
    try:
        work()
    except (RuntimeError, dist.DistError) as error:
        is_others = isinstance(error, dist.DistError) or _OTHER_RANK.search(str(error))
        what = "a rank did not answer, it may have died" if is_others else "this rank cannot talk to the others"
        raise MeasureError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message of one line."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
