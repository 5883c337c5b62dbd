"""What a rank holds of parameters, gradients and the optimizer's state, by who trains; activations come on top."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

__all__ = [
    "AS_STORED",
    "STATES",
    "GroupBytes",
    "Precision",
    "Schedule",
    "Shares",
    "ddp_memory_bytes",
    "fsdp_memory_bytes",
    "sharded_memory_bytes",
    "whole_bytes",
]

# Copies of a parameter's bytes that an optimizer keeps besides: Adam has two averages.
STATES = 2


def ddp_memory_bytes(num_bytes: int, states: float = STATES, frozen_bytes: int = 0) -> int:
    """Return what a rank of torch's DDP holds: parameters, gradients, their buckets, and the optimizer's state.

    >>> ddp_memory_bytes(100), ddp_memory_bytes(100, frozen_bytes=7)
    (500, 507)
    """
    return ceil((3 + states) * num_bytes) + frozen_bytes


def sharded_memory_bytes(
    num_bytes: int, all_reduced_bytes: int, workers: int, states: float = STATES, frozen_bytes: int = 0
) -> int:
    """Return what a rank holds at most with a sharded optimizer: as DDP, but a share of the state of what is sharded.

    Gathered parameters land in memory of their own, which is as large as all that is sharded where no gather was asked
    for yet.

    >>> sharded_memory_bytes(100, 0, workers=4), sharded_memory_bytes(100, 100, workers=4)
    (450, 500)
    """
    sharded = num_bytes - all_reduced_bytes
    state_bytes = ceil(states * all_reduced_bytes) + ceil(states * sharded / workers)
    return 3 * num_bytes + sharded + state_bytes + frozen_bytes


class Precision(NamedTuple):
    """How many bytes FSDP2 gathers, sends and keeps for every byte of a parameter as it is stored.

    >>> Precision(gather=0.5, reduce=1.0)  # of fp32: param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    Precision(gather=0.5, reduce=1.0, states=2, kept=1.0)
    """

    gather: float = 1.0  # a gathered parameter, and its whole gradient
    reduce: float = 1.0  # what is sent of the gradient
    states: float = STATES  # of the optimizer
    kept: float = 1.0  # of a rank's share of parameters, gradients and states on its device; 0 where the host has it


# Everything as parameters are stored.
AS_STORED = Precision()


class Schedule(NamedTuple):
    """How FSDP2 runs groups in forward order."""

    reshard: Sequence[bool]  # after the forward pass
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    has_root: bool = False  # the first group is the rest of the model


class GroupBytes(NamedTuple):
    """What a group of FSDP2 takes."""

    stored: int  # parameters, of which a rank has a share
    trained: int  # those that get gradients
    gathered: int  # parameters as they are gathered
    again: int  # and in the backward pass, where they were resharded
    gradient: int
    sent: int  # the copy of the gradient that is sent


class Shares(NamedTuple):
    """What each rank keeps a part of.

    >>> Shares(4, states=1).held([GroupBytes(100, 80, 0, 0, 0, 0)]), Shares(4, kept=0.0).held([])
    (65.0, 0.0)
    """

    workers: int
    states: float = STATES  # of the optimizer
    idle_bytes: int = 0  # parameters that no step uses
    kept: float = 1.0  # on its device

    def held(self, groups: Iterable[GroupBytes]) -> float:
        """Return the bytes of a rank's share of parameters, gradients and the optimizer's state."""
        stored = sum(group.stored + (1 + self.states) * group.trained for group in groups)
        return self.kept * (self.idle_bytes + stored) / self.workers


def fsdp_memory_bytes(groups: Sequence[GroupBytes], schedule: Schedule, shares: Shares) -> int:
    r"""Return the most bytes a rank of FSDP2 holds, activations apart.

    With :math:`G, D, S` for what of a group is gathered, its gradient, and what is sent of it, :math:`K_j` for groups
    before :math:`j` that are kept, :math:`A_j^n` for the gathers asked for of the next :math:`n` groups, :math:`p, q`
    for the prefetching forward and backward, and :math:`D_0` for the gradient of the root's group, that is the share of
    parameters, gradients and the optimizer's state and the largest of (torch 2.15,
    ``torch/distributed/fsdp/_fully_shard``):

    .. math::
        K_j + 2 G_j + A_j^p & \quad\text{forward: a gather is freed when the next is copied out} \\
        K_j + 2 G_j + S_{j+1} + A_j^{q-1} + D_0 & \quad\text{backward, copied out of the gather} \\
        K_j + G_j + D_j + S_{j+1} + A_j^q + D_0 & \quad\text{computed} \\
        K_j + D_j + S_j + A_j^q + D_0 & \quad\text{resharded, the last message freed, copied to send}

    (``_fsdp_param_group.py``: ``wait_for_unshard``, ``post_backward``). The root's group is gathered first, kept, and
    sent when the backward pass has ended, since nothing else ends its own (``_root_post_backward_final_callback``);
    the first group may wait for that, too, since inputs of a model need no gradients:

    .. math:: D_0 + S_0 + G_1 + D_1

    >>> one = GroupBytes(10, 10, 10, 10, 10, 10)
    >>> fsdp_memory_bytes([one] * 8, Schedule([True] * 8), Shares(8))
    80
    """
    root = groups[0].gradient if schedule.has_root else 0
    kept = accumulate(0 if gone else one.gathered for one, gone in zip(groups, schedule.reshard, strict=True))
    most = max(
        (before + whole_bytes(groups, schedule, place) for place, before in enumerate([0, *kept][:-1])), default=0
    )
    if schedule.has_root:
        first = groups[1].gathered + groups[1].gradient if len(groups) > 1 else 0
        alone = groups[0].gathered + root
        most = max(most, root + groups[0].sent + first, alone if len(groups) == 1 else 0)
    return ceil(shares.held(groups)) + most


def whole_bytes(groups: Sequence[GroupBytes], schedule: Schedule, place: int) -> int:
    """Return the most bytes of whole parameters and gradients in a group's two passes, but for what those before keep.

    These are the terms of `fsdp_memory_bytes` without :math:`K_j`.
    """
    reshard, forward_prefetch, backward_prefetch, has_root = schedule
    group, gathered = groups[place], groups[place].gathered
    most = 2 * gathered + sum([one.gathered for one in groups[place + 1 : place + 1 + forward_prefetch]])
    if has_root and place == 0:
        return most
    late = groups[place + 1].sent if place + 1 < len(groups) else 0
    root = groups[0].gradient if has_root else 0
    again = [groups[one].again if reshard[one] else 0 for one in range(max(0, place - backward_prefetch), place)]
    far = sum(again)
    if reshard[place]:
        near = far - again[0] if len(again) == backward_prefetch else far
        most = max(most, root + gathered + group.again + late + near)
    return max(most, root + gathered + group.gradient + late + far, root + group.gradient + group.sent + far)
