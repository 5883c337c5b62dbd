"""The halves of an all-reduce as a sharded optimizer sends them, a row for each rank: `reduce_scatter`, `all_gather`.

Over nccl they are its own; over gloo, whose own all-to-all leaves the link idle half of the time (benchmarks/wire.md),
messages from every rank to every other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GATHER", "REDUCE", "all_gather", "exchange", "queue_collective", "reduce_scatter", "tag_of", "wait_for"]

REDUCE, GATHER = range(2)  # kinds of messages
_TAGS = 2**31  # gloo's tags are whole numbers of 32 bits


def tag_of(number: int, kind: int) -> int:
    """Return a tag for the message with this number, unlike that of any other kind and of others near it.

    >>> tag_of(1, REDUCE), tag_of(1, GATHER), tag_of(2**30, GATHER)
    (2, 3, 1)
    """
    return (2 * number + kind) % _TAGS


def exchange(received: Tensor, sent: Tensor, group: Any, tag: int = 0) -> list[Any]:
    """Begin to send a row to every rank and to receive one from each, over gloo; return what must be waited for."""
    return [work for shift in range(group.size()) for work in _swap(received, sent, shift, group, tag)]


def _exchange_in_turn(received: Tensor, sent: Tensor, group: Any, tag: int) -> None:
    """Send a row to every rank and receive one from each, over gloo: to one rank after another, and from one.

    What all ranks send to one at once meets in front of its link: with three and four hosts of 625 Mbit/s messages of
    1 MB and more took 14 to 42 % longer so (benchmarks/sharded.md).
    """
    for shift in range(group.size()):
        wait_for(_swap(received, sent, shift, group, tag))


def _swap(received: Tensor, sent: Tensor, shift: int, group: Any, tag: int) -> list[Any]:
    """Begin to send a row to the rank that is ``shift`` after this one, and to receive one from that before it."""
    rank, world = group.rank(), group.size()
    source, target = (rank - shift) % world, (rank + shift) % world
    if source == rank:
        received[rank].copy_(sent[rank])
        return []
    receiving = group.recv([received[source].view(torch.uint8)], source, tag)
    return [receiving, group.send([sent[target].view(torch.uint8)], target, tag)]


def reduce_scatter(rows: Tensor, own: Tensor, received: Tensor, group: Any, tag: int = 0) -> None:
    """Sum one row over ranks, this rank's, of those that each has for every rank; on a CPU it waits.

    ``received`` is room for as much as ``rows``, which over nccl is not needed, nor is the ``tag``: ranks whose
    messages have different ones do not take them for one another's, but wait until the group's timeout.
    """
    if rows.is_cuda:
        queue_collective(dist.reduce_scatter_tensor, own, rows.flatten(), group)
        return
    _exchange_in_turn(received, rows, group, tag)
    # In the order of ranks, so that the sum does not depend on who came first; 16 bits would round at every rank.
    if rows.dtype in (torch.float16, torch.bfloat16):
        own.copy_(received.sum(dim=0, dtype=torch.float32))
    else:
        torch.sum(received, dim=0, out=own)


def all_gather(rows: Tensor, own: Tensor, group: Any, tag: int = 0) -> None:
    """Bring every rank's row to all ranks; on a CPU it waits. ``tag`` is as for `reduce_scatter`."""
    if rows.is_cuda:
        queue_collective(dist.all_gather_into_tensor, rows.flatten(), own, group)
    else:
        _exchange_in_turn(rows, own.expand_as(rows), group, tag)


def queue_collective(collective: Callable[..., Any], received: Tensor, sent: Tensor, group: Any) -> None:
    """Let the current stream wait for a collective over nccl, whose asynchronous calls run on its own stream."""
    collective(received, sent, group=group, async_op=True).wait()


def wait_for(works: Sequence[Any]) -> None:
    """Wait for what `exchange` has begun."""
    for work in works:
        work.wait()
