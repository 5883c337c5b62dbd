"""Buckets for all ranks together: `give_first`, and `give_together`, which tells who could not; `take_back` undoes it.

[Note: how ranks go back]
A rank whose change fails has the buckets that it had ([Note: a change that fails] in ``handle.py``), the others have
the new ones. Then all ranks, also the one that failed, are given the old buckets, in the same way: what a Reducer
forgets when it is made anew (which gradients a static graph has, say) it forgets on all ranks or on none.
"""

import traceback
from dataclasses import dataclass

from mgwfbp.errors import PlanError
from mgwfbp.measure.agreement import reduce_values, try_together
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.parameters import Buckets

__all__ = ["Failure", "change_together", "give_first", "give_together", "take_back"]

# How often all ranks try to go back; who has no memory left for the buckets that it had cannot train.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """Why ranks do not have the buckets that they were to have."""

    rank: int  # the first that failed by itself, and not for want of another
    problem: str  # of that rank
    caught: Exception | None  # what this rank raised, if it failed


def give_together(reducer: ReducerHandle, buckets: Buckets | None, wires: tuple[str, ...]) -> Failure | None:
    """Give the Reducers of all ranks these buckets. All ranks must call it, with the same, between two steps.

    Returns:
        What failed: then `take_back` must follow. None where all have them.
    """
    group = reducer.ddp.process_group
    if reducer.needs_wire(wires):
        number, failed, caught = try_together(reducer.make_wire, group)
        if failed is None:
            (highest,) = reduce_values([number], "max", group)
            _, failed, caught = try_together(lambda: reducer.open_wire(int(highest)), group)
        if failed is not None:
            reducer.close_wire()
            return _failure(failed, caught)
    _, failed, caught = try_together(lambda: reducer.set_buckets(buckets, wires), group)
    return None if failed is None else _failure(failed, caught)


def _failure(failed: tuple[int, str], caught: Exception | None) -> Failure:
    if caught is not None:  # whose frames know a Reducer, and ranks are about to need its memory
        traceback.clear_frames(caught.__traceback__)
    return Failure(*failed, caught)


def give_first(reducer: ReducerHandle, buckets: Buckets, wires: tuple[str, ...], *, together: bool) -> None:
    """Give a Reducer that is new the buckets of a plan, with ``together`` those of all ranks.

    Raises:
        PlanError: with ``together`` on every rank, where one failed.
    """
    if not together:
        reducer.set_buckets(buckets, wires)
    elif (failed := give_together(reducer, buckets, wires)) is not None:
        raise PlanError(f"rank {failed.rank} cannot have the plan: {failed.problem}") from failed.caught


def change_together(reducer: ReducerHandle, buckets: Buckets | None, wires: tuple[str, ...]) -> None:
    """Give the Reducers of all ranks these buckets, or on any failure those that they had. All ranks must call it.

    Raises:
        PlanError: on every rank, where one cannot have them.
    """
    before = reducer.in_force
    if (failed := give_together(reducer, buckets, wires)) is not None:
        take_back(reducer, *before)
        raise PlanError(
            f"rank {failed.rank} cannot have the plan, and the one in force stays: {failed.problem}"
        ) from failed.caught


def take_back(reducer: ReducerHandle, buckets: Buckets | None, wires: tuple[str, ...]) -> None:
    """Give the Reducers of all ranks the buckets that they had. All ranks must call it, with the same.

    Args:
        reducer: of this rank.
        buckets: as `ReducerHandle.in_force` was before the change.
        wires: likewise.

    Raises:
        PlanError: on every rank, where one has no memory for them either.
    """
    group = reducer.ddp.process_group
    for left in reversed(range(ATTEMPTS)):
        _, failed, caught = try_together(lambda: reducer.set_buckets(buckets, wires), group)
        if failed is None:
            return
        if not left:
            raise PlanError(f"rank {failed[0]} cannot have back the buckets that it had: {failed[1]}") from caught
