"""Stand-ins for what torch's Reducer uses: process groups that answer from a script or observe, and dispatch modes."""

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FreesFirst",
    "MessageGroup",
    "NoZeros",
    "ObservedGroup",
    "OnMessage",
    "Script",
    "StandInGroup",
    "holds_gradients",
    "observed",
]

# Called with each message before it is sent; returns what shall be called with its future, if anything.
OnMessage = Callable[[Tensor], Callable[[Any], None] | None]

# Looked up, not named: on a torch without it ``support.py`` can still say what is missing.
_StockGroup: Any = getattr(dist, "ProcessGroup", object)


class Script(_StockGroup):  # type: ignore[misc]
    """A process group of one that answers broadcasts from a script, and all else by doing nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.answers: list[list[int]] = []

    def broadcast(self, tensors: list[Tensor], _: object = None) -> Any:
        """Write the next answer into the tensor, if there is one."""
        if self.answers:
            tensors[0].copy_(torch.tensor(self.answers.pop(0), dtype=tensors[0].dtype))
        return self._done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: object = None) -> Any:
        """Gather from this rank alone."""
        for output, one in zip(outputs, inputs, strict=True):
            output[0].copy_(one)
        return self._done(outputs)

    def _done(self, result: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Say what the log shall call this group."""
        return "script"


class StandInGroup(_StockGroup):  # type: ignore[misc]
    """Stands where a Reducer's process group stands; whoever inherits sends its messages.

    A compiled model calls it from the Reducer; torch would try to compile what it does, and fail.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def broadcast(self, *arguments: Any) -> Any:
        """Send: it is no message of a step."""
        return self.group.broadcast(*arguments)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Say what the real group says."""
        return str(self.group.name())


class MessageGroup(StandInGroup):
    """The process group of a Reducer whose gradients are sent in another way than it asks for."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.sent = 0  # messages so far: ``group`` does not count those that travel beside it

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send a message in that way; what holds no gradients as it is."""
        if not holds_gradients(tensors[0]):
            return self.group.allreduce(tensors, *options)
        self.sent += 1
        return self.send_message(tensors, *options)

    def send_message(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send the gradients of a bucket; return what the Reducer waits for."""
        raise NotImplementedError


def holds_gradients(message: Tensor) -> bool:
    """Say whether a Reducer sends a bucket, or in whole numbers which parameters were used.

    Buckets of complex numbers come as such from some versions of torch, from others as real ones.
    """
    return message.is_floating_point() or message.is_complex()


class ObservedGroup(StandInGroup):
    """The process group of a Reducer, whose all-reduces are observed."""

    def __init__(self, group: Any, on_message: OnMessage) -> None:
        super().__init__(group)
        self._on_message = on_message

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send, and tell."""
        follow = self._on_message(tensors[0])
        work = self.group.allreduce(tensors, *options)
        if follow is not None:
            follow(work.get_future())
        return work


def observed(hook: Any, on_message: OnMessage) -> Any:
    """Return a communication hook whose messages are observed."""

    @wraps(hook)
    def send(state: object, bucket: Any) -> Any:
        follow = on_message(bucket.buffer())
        future = hook(state, bucket)
        if follow is not None:
            follow(future)
        return future

    return send


class NoZeros(TorchDispatchMode):
    """Lets the Reducer list its buckets without allocating as many zeros: it gets back what it has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.zeros_like:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


class FreesFirst(TorchDispatchMode):
    """Gives memory that is free back to the system before the first new bucket is allocated.

    By then the Reducer has freed its old buckets. Allocators keep what was freed, and blocks that new buckets do not
    fit into would come on top of these: one more set of gradients.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._has_freed = device, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Tensors of whole numbers hold indices.
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        is_bucket = func.overloadpacket is torch.ops.aten.empty and dtype.is_floating_point
        if is_bucket and not self._has_freed:
            self._has_freed = True
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
                trim(0)
        return func(*args, **kwargs)
