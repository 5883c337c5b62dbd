"""A step of FSDP2 laid out in time: `Group` and `lay_out` make an `FsdpStep`.

[Note: how FSDP2 runs a step]
Parameters are sharded, and all-gathered group by group before a group computes; gradients are reduce-scattered when a
group's backward pass has ended. Groups are runs of modules in forward order; what stands outside of all modules in
groups is the root's: it is gathered first, and stays. From torch's code (2.5 to 2.15; the lines are those of 2.15 in
``torch/distributed/fsdp/_fully_shard``), for groups 0..K in forward order and a host that runs ahead of its device, on
one communicator, which sends in the order in which it is asked:

- forward: group j is gathered once group j-1-p has begun, where p is how many groups are prefetched (1 also where that
  is not set): what a group asks for waits for the copy out of the gather before its own
  (``release_all_gather_state_for_comm_reuse``);
- a group computes once it is gathered and the one before it has ended;
- backward, from K to 0: a group that was resharded is gathered again. It is asked for when the backward pass of the
  group q before it in this order begins, in the order of its turn and before the gradients of that group. It waits for
  no computation but the last copy out of a gather (``wait_all_gather_streams_on_event``): that of the last group that
  was gathered again, and before there is one that of the forward pass. So first gathers run beside the end of the
  forward pass (``_register_root_post_backward_final_callback``), and a kept group, which copies nothing out
  (``wait_for_unshard`` returns at once), holds none back;
- gradients of a group are sent when its backward pass has ended and those before have been sent, and the next group
  computes behind that: torch holds one buffer of gradients that are being sent (``reduce_scatter_max_input_buffers``).

What a message takes from the computation (`mgwfbp.cost.taken_by`) is laid out where FSDP2 copies around it: that of a
gather before its group computes, that of a reduce-scatter behind it. Measured it is what passes take longer beside
messages (`mgwfbp.measure.beside`), without these copies, which are in no number. The step is a forward pass and a
backward pass until all gradients are sent; the update is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import sharded_cost
from mgwfbp.fsdp_units import Unit
from mgwfbp.memory import AS_STORED, GroupBytes, Precision, Schedule, Shares, fsdp_memory_bytes

__all__ = ["FsdpStep", "Group", "lay_out"]


@dataclass(frozen=True, slots=True)
class FsdpStep:
    """A step of FSDP2; each moment by group in forward order, the root's first where it has parameters."""

    groups: tuple[tuple[str, ...], ...]
    group_bytes: tuple[int, ...]  # of the parameters of each, as they are gathered
    sent_bytes: tuple[int, ...]  # of the gradients of each, as they are sent
    gathers_s: tuple[tuple[float, float], ...]  # start and end, in the forward pass
    forward_s: tuple[tuple[float, float], ...]
    gathers_again_s: tuple[tuple[float, float] | None, ...]  # in the backward pass; None where not resharded
    backward_s: tuple[tuple[float, float], ...]
    sent_s: tuple[tuple[float, float], ...]  # reduce-scatters
    memory_bytes: int  # at most, per rank: parameters, gradients and the optimizer's state; no activations

    @property
    def iteration_s(self) -> float:
        """The whole step, without the update."""
        return max(self.backward_s[0][1], *(end for _, end in self.sent_s))

    @property
    def compute_s(self) -> float:
        """What it computes, with what messages take from that."""
        return sum(end - start for start, end in (*self.forward_s, *self.backward_s))

    @property
    def again_bytes(self) -> int:
        """What is gathered again."""
        spans = zip(self.group_bytes, self.gathers_again_s, strict=True)
        return sum(size for size, span in spans if span is not None)


@dataclass(frozen=True, slots=True)
class Group:
    """Units that travel together: what they need."""

    names: tuple[str, ...]
    sizes: GroupBytes
    forward_s: float
    backward_s: float
    gather_s: float
    again_s: float  # the gather in the backward pass; 0 where that does not reach it
    send_s: float
    copy_out_s: float  # what a gather takes from the computation, as if in its copy out
    copy_in_s: float  # and a reduce-scatter, as if in its copy in

    @classmethod
    def of(cls, units: Sequence[Unit], cost: Cost, precision: Precision = AS_STORED) -> Self:
        """Merge units."""
        reduce_scatter, all_gather = sharded_cost(cost)
        stored, trained = sum(unit.num_bytes for unit in units), sum(unit.trained_bytes for unit in units)
        gathered, sent = round(precision.gather * stored), round(precision.reduce * trained)
        goes_back = any(unit.goes_back for unit in units)
        sizes = GroupBytes(
            stored, trained, gathered, gathered if goes_back else 0, round(precision.gather * trained), sent
        )
        gather_s = all_gather(gathered) if gathered else 0.0  # parameters may be left to each rank
        return cls(
            tuple(unit.name for unit in units),
            sizes,
            sum(unit.forward_s for unit in units),
            sum(unit.backward_s for unit in units),
            gather_s,
            gather_s if goes_back else 0.0,
            reduce_scatter(sent) if trained else 0.0,
            taken_by(all_gather, gathered) if gathered else 0.0,
            taken_by(reduce_scatter, sent) if trained else 0.0,
        )


def lay_out(groups: Sequence[Group], schedule: Schedule, shares: Shares) -> FsdpStep:
    """Return the step of groups, the root's rest among them."""
    number, reshard = len(groups), schedule.reshard
    gathers, forward = list[tuple[float, float]](), list[tuple[float, float]]()
    link_s = now_s = 0.0
    copies_s = list[float]()  # out of gathers, when they have ended
    for place, group in enumerate(groups):
        allowed = place - 1 - schedule.forward_prefetch
        start_s = max(link_s, copies_s[allowed] if allowed >= 0 else 0.0)
        link_s = start_s + group.gather_s
        gathers.append((start_s, link_s))
        start_s = max(now_s, link_s)
        copies_s.append(start_s + group.copy_out_s)
        now_s = copies_s[-1] + group.forward_s
        forward.append((start_s, now_s))
    again: list[tuple[float, float] | None] = [None] * number
    backward, sent = [(0.0, 0.0)] * number, [(0.0, 0.0)] * number
    copied_s = copies_s[-1]  # the last copy out of a gather
    asked = number  # the groups from `asked` on have been asked for again

    def gather_until(first: int) -> None:
        nonlocal link_s, asked
        while asked > max(0, first):
            asked -= 1
            if reshard[asked] and groups[asked].sizes.again:
                start_s = max(link_s, copied_s)
                link_s = start_s + groups[asked].again_s
                again[asked] = (start_s, link_s)

    for place in reversed(range(number)):
        group = groups[place]
        gather_until(place)
        gathered = again[place]
        start_s = max(now_s, gathered[1] if gathered else 0.0)
        now_s = start_s
        if gathered:
            now_s = copied_s = start_s + group.copy_out_s
        gather_until(place - schedule.backward_prefetch)
        now_s += group.backward_s
        backward[place] = (start_s, now_s + group.copy_in_s)
        # Gradients are copied where those before were sent from.
        now_s = max(now_s, sent[place + 1][1] if place + 1 < number else 0.0) + group.copy_in_s
        sent[place] = (now_s, now_s)
        if group.sizes.trained:
            start_s = max(link_s, now_s)
            link_s = start_s + group.send_s
            sent[place] = (start_s, link_s)
    return FsdpStep(
        tuple(group.names for group in groups),
        tuple(group.sizes.gathered for group in groups),
        tuple(group.sizes.sent for group in groups),
        tuple(gathers),
        tuple(forward),
        tuple(again),
        tuple(backward),
        tuple(sent),
        fsdp_memory_bytes([group.sizes for group in groups], schedule, shares),
    )
