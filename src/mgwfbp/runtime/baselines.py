"""What MG-WFBP is compared with and no plan can say: naive S-SGD and the parameter server, as communication hooks.

Both give the averages that torch's Reducer gives without a hook: every rank's gradient is multiplied by 1/N before it
is sent. Both expect a plan of one gradient per message; where a bucket holds more, naive S-SGD still sends gradient by
gradient, and the parameter server treats the bucket as its first gradient.

[Note: order]
A group matches collectives by the order in which each rank calls them. The Reducer calls a hook in the plan's order on
every rank, but what is called when a message has arrived comes in another order on each. So nothing is: naive S-SGD
sends in the last call of a step, and the parameter server has a queue and a thread for each owner, on a group that
nobody else uses, where push and pull of one gradient are over before the next is looked at.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from mgwfbp.runtime.messages.gloo import group_timeout

__all__ = ["NaiveSgd", "ParameterServers", "assign_owners", "push_and_pull", "send_after_backward"]


def _future(tensor: Tensor) -> Future[Tensor]:
    """Return a future for this tensor, which on a GPU carries the streams that its reader must wait for."""
    return Future(devices=[tensor.device] if tensor.is_cuda else None)


@dataclass(slots=True)
class NaiveSgd:
    """The state of `send_after_backward`: what has been held back in this step."""

    group: dist.ProcessGroup
    num_gradients: int  # of a step
    held: dict[int, "_Held"] = field(default_factory=dict)  # by the first parameter of the bucket

    def hold(self, key: int, held: "_Held") -> None:
        """Keep a bucket for the end of the step."""
        if key in self.held:  # a step that failed before it had all gradients
            self.held.clear()
        self.held[key] = held

    def release(self) -> list["_Held"]:
        """Return all buckets of the step, in the order of the plan, once all gradients are there; none before."""
        if sum(held.num_gradients for held in self.held.values()) < self.num_gradients:
            return []
        released = list(self.held.values())
        self.held.clear()
        return released


@dataclass(frozen=True, slots=True)
class _Held:
    """A bucket whose gradients are ready and not sent."""

    num_gradients: int
    buffer: Tensor
    messages: list[Tensor]  # the gradients, as parts of the buffer
    averaged: Future[Tensor]


def send_after_backward(
    state: NaiveSgd,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Hold every gradient back until the last is ready; then send them one by one: naive S-SGD, Eq. (3)."""
    parameters, buffer = bucket.parameters(), bucket.buffer()
    buffer.mul_(1 / state.group.size())
    # A sparse gradient travels alone and is no part of anything.
    messages = [buffer] if buffer.is_sparse else bucket.gradients()
    averaged = _future(buffer)
    # Counted, since is_last() is never true in the first step of a static graph.
    state.hold(id(parameters[0]), _Held(len(parameters), buffer, messages, averaged))
    for held in state.release():
        works = [dist.all_reduce(message, group=state.group, async_op=True) for message in held.messages]
        arrived = torch.futures.collect_all([work.get_future() for work in works if work is not None])
        _settle(arrived, held)
    return averaged


def _settle(arrived: Future[list[Future[Tensor]]], held: _Held) -> None:
    def settle(done: Future[list[Future[Tensor]]]) -> None:
        try:
            for one in done.value():
                reduced = one.value()
        except Exception as error:  # of whatever kind: it belongs to who waits for the average
            held.averaged.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            return
        # A sparse sum is another tensor, since the ranks have other rows; a dense one is in its place.
        held.averaged.set_result(reduced[0] if held.buffer.is_sparse else held.buffer)

    arrived.add_done_callback(settle)


def assign_owners(sizes_bytes: Sequence[int], num_owners: int) -> list[int]:
    """Say which owner holds each gradient, so that owners hold about the same number of bytes.

    The largest first, each to the owner that has least: no owner has more than another by more than one gradient.

    >>> assign_owners([1, 5, 3, 1], 2)
    [1, 0, 1, 1]
    """
    held_bytes = [0] * num_owners
    owners = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        owners[index] = held_bytes.index(min(held_bytes))
        held_bytes[owners[index]] += sizes_bytes[index]
    return owners


class ParameterServers:
    """The state of `push_and_pull`: every rank is the server of some gradients. All ranks must make it together.

    Over gloo every owner has a queue, a thread and a group of its own, so that the links of several owners are busy at
    once. Over nccl, which may hang where two groups work at the same time, all share one.
    """

    def __init__(self, owners: Mapping[int, int], group: dist.ProcessGroup) -> None:
        self._owners = dict(owners)  # a rank in the group, by the id of the parameter
        self.size = group.size()
        backend, ranks = dist.get_backend(group), dist.get_process_group_ranks(group)
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        timeout = group_timeout(group, device)  # that of a new group would be half an hour
        groups = [
            dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
            for _ in range(1 if backend == "nccl" else self.size)
        ]
        self._queues = [_Queue(one) for one in groups if isinstance(one, dist.ProcessGroup)]  # we are in all of them

    @property
    def num_queues(self) -> int:
        """How many messages can be under way at once."""
        return len(self._queues)

    def owner(self, parameters: Iterable[Tensor]) -> int:
        """Return the rank, in the group, of the owner of a message."""
        return self._owners[id(next(iter(parameters)))]

    def average(self, owner: int, buffer: Tensor) -> Future[Tensor]:
        """Queue a message; return what will hold the average."""
        return self._queues[owner % len(self._queues)].put(owner, buffer)


class _Queue:
    """A thread that has messages averaged by their owners, in the order in which they came, one after another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mgwfbp-ps")
        self._stream: torch.cuda.Stream | None = None

    def put(self, owner: int, buffer: Tensor) -> Future[Tensor]:
        averaged, ready = _future(buffer), None
        if buffer.is_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream(buffer.device)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(buffer.device))
        self._thread.submit(self._run, owner, buffer, ready, averaged)
        return averaged

    def _run(self, owner: int, buffer: Tensor, ready: torch.cuda.Event | None, averaged: Future[Tensor]) -> None:
        try:
            with ExitStack() as stack:
                if self._stream is not None and ready is not None:
                    # On a stream of its own: the one of the backward pass must not wait for any message.
                    stack.enter_context(torch.cuda.device(buffer.device))
                    stack.enter_context(torch.cuda.stream(self._stream))
                    self._stream.wait_event(ready)
                self._exchange(owner, buffer)
                averaged.set_result(buffer)  # here, where a GPU's stream is known
        except Exception as error:  # of whatever kind: it belongs to who waits for the average
            averaged.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

    def _exchange(self, owner: int, buffer: Tensor) -> None:
        """Push to the owner, add there, pull. gather and scatter, so that each copy goes over the owner's link."""
        size = self._group.size()
        owned = self._group.rank() == owner
        global_owner = dist.get_global_rank(self._group, owner)  # torch before 2.6 knows no other
        pushed = [torch.empty_like(buffer) for _ in range(size)] if owned else None
        dist.gather(buffer, pushed, dst=global_owner, group=self._group)
        pulled = None
        if pushed is not None:
            total = pushed[0]
            for one in pushed[1:]:
                total.add_(one)
            pulled = [total] * size
        dist.scatter(buffer, pulled, src=global_owner, group=self._group)


def push_and_pull(
    state: ParameterServers,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Push a gradient to its owner and pull the average, during the backward pass: parameter-server S-SGD."""
    buffer = bucket.buffer()
    buffer.mul_(1 / state.size)
    return state.average(state.owner(bucket.parameters()), buffer)
