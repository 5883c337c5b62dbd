"""Buckets for all ranks together: `give_first`, and `give_together`, which tells who could not; `take_back` undoes it.

[Note: how ranks go back]
A rank whose change fails has the buckets that it had ([Note: a change that fails] in ``handle.py``), the others have
the new ones. Then all ranks, also the one that failed, are given the old buckets, in the same way: what a Reducer
forgets when it is made anew (which gradients a static graph has, say) it forgets on all ranks or on none.
"""

from mgwfbp.errors import PlanError
from mgwfbp.measure.agreement import reduce_values, try_together
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.parameters import Buckets

__all__ = ["give_first", "give_together", "take_back"]

# How often all ranks try to go back; who has no memory left for the buckets that it had cannot train.
ATTEMPTS = 3


def give_together(reducer: ReducerHandle, buckets: Buckets | None, wires: tuple[str, ...]) -> tuple[int, str] | None:
    """Give the Reducers of all ranks these buckets. All ranks must call it, with the same, between two steps.

    Returns:
        The first rank that failed and why: then `take_back` must follow. None where all have them.
    """
    group = reducer.ddp.process_group
    if reducer.needs_wire(wires):
        number, failed, _ = try_together(reducer.make_wire, group)
        if failed is None:
            (highest,) = reduce_values([number], "max", group)
            _, failed, _ = try_together(lambda: reducer.open_wire(int(highest)), group)
        if failed is not None:
            reducer.close_wire()
            return failed
    return try_together(lambda: reducer.set_buckets(buckets, wires), group)[1]


def give_first(reducer: ReducerHandle, buckets: Buckets, wires: tuple[str, ...], *, together: bool) -> None:
    """Give a Reducer that is new the buckets of a plan, with ``together`` those of all ranks.

    Raises:
        PlanError: with ``together`` on every rank, where one failed.
    """
    if not together:
        reducer.set_buckets(buckets, wires)
    elif (failed := give_together(reducer, buckets, wires)) is not None:
        raise PlanError(f"rank {failed[0]} cannot have the plan: {failed[1]}")


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
