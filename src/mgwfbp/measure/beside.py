"""What messages take from the computation: a model's passes with messages beside them, and without: `measure_taken`.

On a GPU the kernels of a message occupy processors and memory that the passes would have, and on a host its threads do.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mgwfbp.costs import ShardedCost
from mgwfbp.measure.agreement import reduce_values, together
from mgwfbp.measure.backward import Passes

__all__ = ["Load", "load_beside", "measure_taken"]

# Passes are timed so often with messages and without, behind one that is not counted.
TURNS = 3
# Messages beside one pass: enough to share it between them, and few enough that the host is never waited for.
FEWEST, MOST = 8, 128
# Of messages that are made larger so that few are enough: the memory of one.
MOST_BYTES = 2**26


class Load(NamedTuple):
    """Messages to send beside the passes: all-gathers and reduce-scatters in turns."""

    num_bytes: int  # of each
    pairs: int


def load_beside(cost: ShardedCost, compute_s: float, num_bytes: int) -> Load:
    """Return messages of about this size that keep the link busy for so long; other sizes where too few or many would.

    >>> from mgwfbp.cost import LinearCost
    >>> half = LinearCost(2, 0.5, 0.25)
    >>> load_beside(ShardedCost(half, half, half), 100.0, 4)
    Load(num_bytes=4, pairs=33)
    >>> load_beside(ShardedCost(half, half, half), 100.0, 400)
    Load(num_bytes=12, pairs=14)
    >>> load_beside(ShardedCost(half, half, half), 1000.0, 4)
    Load(num_bytes=16, pairs=111)
    """

    def pair_s(size: int) -> float:
        return cost.all_gather(size) + cost.reduce_scatter(size)

    num_bytes = min(num_bytes, MOST_BYTES)
    while num_bytes > 1 and FEWEST * pair_s(num_bytes) > compute_s:
        num_bytes //= 2
    while 2 * num_bytes <= MOST_BYTES and MOST * pair_s(num_bytes) < compute_s:
        num_bytes *= 2
    took_s = pair_s(num_bytes)
    return Load(num_bytes, max(1, min(MOST, int(compute_s / took_s))) if took_s else MOST)


def measure_taken(
    passes: Passes, cost: ShardedCost, load: Load, group: dist.ProcessGroup | None, device: torch.device
) -> ShardedCost:
    """Return the cost with what a byte of a message takes from the computation. All ranks of the group must call it.

    Passes run alone and, in turns with that, beside messages that begin with them. What they take longer, for each byte
    that travels until they end, is ``taken_per_byte_s``: of both halves alike, 0 where they take no longer. Of the
    ranks the mean counts, and of turns the least: what steps scatter by is no cost of messages.

    Args:
        passes: of the model, `mgwfbp.measure.backward.plain_passes`.
        cost: what the halves take by themselves.
        load: what is sent; the same on all ranks.
        group: whom messages are between.
        device: where they lie.

    Raises:
        MeasureError: on every rank, where there is no room for a message or a pass fails.
    """
    world = dist.get_world_size(group)
    length = -(-load.num_bytes // (4 * world))  # of a row, in numbers
    rows, own = together(
        lambda: (torch.zeros(length * world, device=device), torch.zeros(length, device=device)), group
    )

    def send() -> Callable[[], object]:
        works: list[Any] = []
        for _ in range(load.pairs):
            works.append(dist.all_gather_into_tensor(rows, own, group=group, async_op=True))
            works.append(dist.reduce_scatter_tensor(own, rows, group=group, async_op=True))
        return lambda: [work.wait() for work in works]

    sent_bytes, turns_s = 2 * load.pairs * rows.nbytes, list[float]()
    for _ in range(1 + TURNS):
        # A rank whose pass fails has sent what the others wait for, or nobody has sent anything.
        alone_s, _ = together(partial(passes, lambda: lambda: None), group)
        beside_s, arrived_s = together(partial(passes, send), group)
        turns_s.append(_taken_per_byte_s(alone_s, beside_s, arrived_s, sent_bytes))
    taken_s = max(0.0, min(reduce_values(turns_s[1:], "sum", group)) / world)
    return ShardedCost(
        replace(cost.all_reduce, taken_per_byte_s=2 * taken_s),
        replace(cost.reduce_scatter, taken_per_byte_s=taken_s),
        replace(cost.all_gather, taken_per_byte_s=taken_s),
    )


def _taken_per_byte_s(alone_s: float, beside_s: float, arrived_s: float, sent_bytes: int) -> float:
    """Return what passes take longer for each byte that travels beside them; others travel when they have ended.

    >>> _taken_per_byte_s(2.0, 3.0, 6.0, 10)  # beside 5 bytes
    0.2
    """
    return (beside_s - alone_s) / (sent_bytes * beside_s / arrived_s)
