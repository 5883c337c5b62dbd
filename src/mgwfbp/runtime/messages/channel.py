"""Where messages travel that a process group cannot send by itself: `Channel`, one message after another.

[Note: beside the process group]
- nccl: everything is queued on a stream of its own by the thread that asks. Ranks queue in the same order, and nothing
  waits on the host.
- gloo: a call waits, so all messages go through one thread, one after another. Ranks may not mix the order of
  collectives in one group, and other collectives (those of SyncBatchNorm, say) are called by other threads: so the
  thread has a group of its own. Torch does not list it (`gloo_beside`): it ends with the channel, and groups that the
  user makes later get the names that they would get without it.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from mgwfbp.runtime.messages.gloo import MOMENT_S, gloo_beside

__all__ = ["Channel", "work_of"]

# How long the last messages of a process may take at its end.
LAST_S = 10.0

Job = Callable[[], None]
Tensors = torch.futures.Future[list[Tensor]]

# What must end before the process does.
_STREAMS: set[torch.cuda.Stream] = set()
_THREADS: weakref.WeakKeyDictionary[threading.Thread, "queue.SimpleQueue[Job]"] = weakref.WeakKeyDictionary()


def work_of(future: Tensors) -> Any:
    """Return what a Reducer takes for a message that is under way."""
    return torch._C._distributed_c10d._create_work_from_future(future)


class Channel:
    """Sends messages beside a process group, see [Note: beside the process group].

    ``group`` is the one that jobs shall use. ``number`` is as for `gloo_beside`.
    """

    def __init__(self, group: Any, device: torch.device, number: int | None = None) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._jobs: queue.SimpleQueue[Job] | None = None
        self._memory: Tensor | None = None
        self.group = group
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # see `CudaClock` for why of high priority
            _STREAMS.add(self._stream)  # torch has 32 of them, and hands them out in turns
        else:
            self.group = gloo_beside(group, number)
            jobs = self._jobs = queue.SimpleQueue()
            # It waits in C++ when the interpreter ends, and must not keep it from ending.
            thread = threading.Thread(target=_work, args=(jobs,), name="mgwfbp: messages", daemon=True)
            thread.start()
            _THREADS[thread] = jobs
            weakref.finalize(self, jobs.put, _stop).atexit = False

    def scratch(self, like: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return room for what is sent and what is received, for as long as a job lasts.

        On a CPU always the same memory: each thread of an allocator keeps what it has freed. On a GPU torch's allocator
        has it again when the stream has done with it, and nccl itself has room for what is received.
        """
        if self._stream is not None:
            sent = like.new_empty(shape)
            return sent, sent
        count = shape[0] * shape[1]
        nbytes = -(-count * like.element_size() // 16) * 16
        if self._memory is None or self._memory.numel() < 2 * nbytes:
            self._memory = torch.empty(2 * nbytes, dtype=torch.uint8)
        halves = self._memory[:nbytes], self._memory[nbytes : 2 * nbytes]
        first, second = (half.view(like.dtype)[:count].view(shape) for half in halves)
        return first, second

    def keep(self, bucket: Tensor) -> None:
        """Let nobody else have a bucket's memory before the jobs so far are done, whoever frees it.

        After a backward pass that failed, buckets may be freed by a stream that has not waited for this one.
        """
        if self._stream is not None:
            bucket.record_stream(self._stream)

    def send(self, job: Job, result: list[Tensor]) -> Tensors:
        """Do a job once those before it are done; return what is fulfilled with ``result`` when it is.

        On a GPU the job queues what it does on the channel's stream, behind what the current stream has been given.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            queued: Tensors = torch.futures.Future(devices=[self._device])
            with torch.cuda.stream(self._stream):
                job()
                queued.set_result(result)
            return queued
        assert self._jobs is not None  # noqa: S101 - there is a thread where there is no stream
        future: Tensors = torch.futures.Future()

        def on_thread() -> None:
            try:
                with torch.no_grad():
                    job()
            except Exception as error:  # whoever waits raises it
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is of the result
            else:
                future.set_result(result)

        # Python's futures hold an exception as a result, which a Reducer would take for gradients: only `then` fails.
        arrived = future.then(lambda sent: sent.wait())
        self._jobs.put(on_thread)
        return arrived


@atexit.register
def _end_messages() -> None:
    """Let threads and streams do what they were given, which other ranks may wait for.

    Parameters that nobody asked for any more are such. A thread that waits in C++ while Python ends would abort the
    process; see also [Note: the end of a process] in ``gloo.py``.
    """
    until_s = time.monotonic() + LAST_S
    threads = dict(_THREADS)
    for jobs in threads.values():
        jobs.put(_stop)
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    with suppress(RuntimeError):  # of a GPU that has failed, or a fork that has none
        while any(not stream.query() for stream in _STREAMS) and time.monotonic() < until_s:
            time.sleep(MOMENT_S)
    if threads:
        time.sleep(MOMENT_S)


def _stop() -> None:
    raise SystemExit


def _work(jobs: "queue.SimpleQueue[Job]") -> None:
    while True:
        jobs.get()()
