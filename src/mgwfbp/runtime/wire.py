"""Messages that travel in fewer bits than their gradients have: `WireGroup`, where a Reducer's process group stands.

[Note: how a message travels in low precision]
A rank converts its gradients once (the Reducer has divided them by the number of ranks, so that sums are averages and
fp16 does not overflow where the average does not). An all-to-all gives each of the N ranks one N-th of everybody's; it
adds these up in fp32, in the order of ranks, and converts the sum once. An all-gather brings the sums back. So a
gradient is rounded twice, whatever N is; a ring that adds up 16 bits rounds at every hop. The bytes are the same. Each
sum is made by one rank only: the result is the same on all ranks, bitwise, and what is not finite stays so on all.

Both collectives carry bytes: no backend has to know the precision.

- nccl: everything is queued on a stream of its own by the thread that runs the backward pass. Ranks queue in the same
  order, and nothing waits on the host.
- gloo: a call waits, so all messages go through one thread, one after another. Ranks may not mix the order of
  collectives in one group, and other collectives (those of SyncBatchNorm, say) are called by other threads: so the
  thread has a group of its own, made when the first message is sent. Torch does not list it (`gloo_beside`): it ends
  with the model, and groups that the user makes later get the names that they would get without it.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.errors import PlanError
from mgwfbp.runtime.gloo import gloo_beside, store_of
from mgwfbp.runtime.stand_ins import StandInGroup

__all__ = ["WireGroup", "average_in", "cannot_wire", "check_wire", "dtype_of"]

Job = Callable[[], None]

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
    # Asynchronous calls run on nccl's own stream in every torch, behind the messages before them.
    _queue(dist.all_to_all_single, received, low, group)
    _queue(dist.all_gather_into_tensor, low, _summed(received), group)
    message.copy_(low.flatten()[: message.numel()])


def _queue(collective: Callable[..., Any], received: Tensor, sent: Tensor, group: Any) -> None:
    """Let the current stream wait for a collective over bytes."""
    collective(received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True).wait()


def _average_on_host(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Do it block by block, so that one is converted and summed while others are on the link.

    With sends and receives, all posted at once: gloo's own all-to-all leaves the link idle half of the time
    (benchmarks/wire.md).
    """
    under_way: deque[tuple[Tensor, Tensor, Tensor, list[Any]]] = deque()
    for place, block in enumerate(message.split(BLOCK)):
        low = _lowered(block, dtype, group.size())
        received = torch.empty_like(low)
        under_way.append((block, low, received, _exchange(received, low, group, 2 * place)))
    gathers = []
    for place in range(len(under_way)):
        block, low, received, works = under_way.popleft()  # and what was received is freed, block by block
        _wait(works)
        gathers.append((block, low, _exchange(low, _summed(received).expand_as(low), group, 2 * place + 1)))
    for block, low, works in gathers:
        _wait(works)
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


def _exchange(received: Tensor, sent: Tensor, group: Any, tag: int) -> list[Any]:
    """Begin to send a row to every rank and to receive one from each; return what must be waited for."""
    rank, world = group.rank(), group.size()
    received[rank].copy_(sent[rank])
    others = [(rank + shift) % world for shift in range(1, world)]
    works = [group.recv([received[other].view(torch.uint8)], other, tag) for other in reversed(others)]
    return works + [group.send([sent[other].view(torch.uint8)], other, tag) for other in others]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


class WireGroup(StandInGroup):
    """The process group of a Reducer, some of whose all-reduces are sent in low precision.

    A Reducer sends all its buckets in every reduction, in order, or fails: so it is counted which one is meant.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._wires: tuple[str, ...] = ()
        self._next = 0
        self.sent = 0  # messages so far: ``group`` does not count those that travel beside it
        self._stream: torch.cuda.Stream | None = None
        self._thread: _Thread | None = None

    def take(self, wires: Sequence[str]) -> None:
        """Send the messages of later steps so, one word each; between two steps."""
        self._wires, self._next = tuple(wires), 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send a message as the plan says; what holds no gradients as it is."""
        message = tensors[0]
        if not message.is_floating_point():  # which parameters were used is said in whole numbers
            return self.group.allreduce(tensors, *options)
        self.sent += 1
        wire = self._wires[self._next]
        self._next = (self._next + 1) % len(self._wires)
        # Sparse gradients are as large as each batch makes them; others than fp32 travel as they are.
        dtype = dtype_of(wire) if wire and not message.is_sparse and message.dtype is torch.float32 else None
        if message.is_cuda:
            return self.group.allreduce(tensors, *options) if dtype is None else self._queue_on_gpu(dtype, message)
        self._thread = self._thread or _Thread(self.group)
        return self._thread.send(dtype, tensors, options)

    def _queue_on_gpu(self, dtype: torch.dtype, message: Tensor) -> Any:
        device = message.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # see `CudaClock` for why of high priority
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            average_in(dtype, message, self.group)
            future.set_result([message])
        return torch._C._distributed_c10d._create_work_from_future(future)


class _Thread:
    """A thread that sends messages one after another, through a group of its own."""

    def __init__(self, group: Any) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._group = gloo_beside(group)
        # It waits in C++ when the interpreter ends, and must not keep it from ending.
        threading.Thread(target=_work, args=(self._jobs,), name="mgwfbp: messages", daemon=True).start()

    def __del__(self) -> None:
        self._jobs.put(_stop)

    def send(self, dtype: torch.dtype | None, tensors: list[Tensor], options: Sequence[Any]) -> Any:
        """Queue a message; in no other precision where ``dtype`` is None."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        group = self._group

        def job() -> None:
            try:
                if dtype is None:
                    group.allreduce(tensors, *options).wait()
                else:
                    with torch.no_grad():
                        average_in(dtype, tensors[0], group)
            except Exception as error:  # the Reducer raises it in the backward pass
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is of the result
            else:
                future.set_result(tensors)

        # Python's futures hold an exception as a result, which the Reducer would take for gradients: only `then` fails.
        arrived = future.then(lambda sent: sent.wait())
        self._jobs.put(job)
        return torch._C._distributed_c10d._create_work_from_future(arrived)


def _stop() -> None:
    raise SystemExit


def _work(jobs: "queue.SimpleQueue[Job]") -> None:
    while True:
        jobs.get()()


def check_wire(wires: Sequence[str], allowed: str | None) -> None:
    """Raise unless a plan's messages travel only as the model was told they may."""
    for one in sorted(set(filter(None, wires))):
        if one != allowed:
            told = "without wire=" if allowed is None else f"with wire={allowed!r}"
            raise PlanError(
                f"the plan sends messages in {one}, and the model was made {told}: make it with wire={one!r}, or give "
                "another plan"
            )
