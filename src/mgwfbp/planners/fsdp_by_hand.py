"""What people wrap by hand with FSDP2, as plans: `plan_by_block`, `plan_blocks_alone`."""

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

from mgwfbp.fsdp import FsdpPlan
from mgwfbp.fsdp_units import ROOT, blocks_of, idle_of, reaches_of, root_of, units_of
from mgwfbp.trace import ModelTrace

__all__ = ["BY_HAND", "plan_blocks_alone", "plan_by_block"]


def plan_by_block(trace: ModelTrace, root: Collection[str] = ()) -> FsdpPlan:
    """Return what torchtitan wraps: each block, each module before them, and all behind them as one, which is kept.

    The backward pass begins with what the forward pass ends with, so that torch would gather it at once again: the
    modules behind the last block (``fully_shard([norm, output], reshard_after_forward=False)``), or the last block.
    Prefetching is what torch does by itself. Modules that run again in a step are by themselves, and those behind the
    last block are as many groups as they have dtypes in turn.

    >>> from mgwfbp.trace import LayerTrace
    >>> names = ["head.w", "norm.w", "h.1.b.w", "h.1.a.w", "h.0.b.w", "h.0.a.w", "embed.w"]
    >>> plan = plan_by_block(ModelTrace("toy", 2.0, tuple(LayerTrace(name, 2.0, 10) for name in names)))
    >>> plan.groups, plan.reshard
    ((('embed',), ('h.0',), ('h.1',), ('norm', 'head')), (True, True, True, False))
    """
    idle, at_root = idle_of(trace), root_of(trace, root)
    units = [unit for unit in units_of(trace, at_root, idle) if unit.name != ROOT]
    names, number = [unit.name for unit in units], len(units)
    blocks = blocks_of(names)
    first = min(names.index(blocks[-1]) + 1 if blocks else number, number - 1)
    ends, reaches = list(range(max(0, first) + 1)), reaches_of(units)
    while ends[-1] < number:
        ends.append(reaches[ends[-1]])
    groups = tuple(tuple(names[start:end]) for start, end in pairwise(ends))
    reshard = tuple(end <= first for end in ends[1:])
    return FsdpPlan(trace.model, groups, reshard, root=tuple(at_root), idle=tuple(idle))


def plan_blocks_alone(trace: ModelTrace, root: Collection[str] = ()) -> FsdpPlan:
    """Return what Transformers and Accelerate wrap: each block, and the rest with the root's group.

    Of the rest that is what has the dtype of the root's own parameters, or else of the first of the rest: modules of
    other dtypes are by themselves, like blocks.

    >>> from mgwfbp.trace import LayerTrace
    >>> names = ["head.w", "h.1.b.w", "h.1.a.w", "h.0.b.w", "h.0.a.w", "embed.w"]
    >>> plan = plan_blocks_alone(ModelTrace("toy", 2.0, tuple(LayerTrace(name, 2.0, 10) for name in names)))
    >>> plan.groups, plan.root
    ((('h.0',), ('h.1',)), ('embed', 'head'))
    """
    idle = idle_of(trace)
    units = [unit for unit in units_of(trace, idle=idle) if unit.name != ROOT]
    own = set(root_of(trace, root))
    alone = {name for name in blocks_of(unit.name for unit in units) if name not in own}
    dtypes = next((unit.dtypes for unit in units_of(trace, own, idle) if unit.name == ROOT), frozenset[str]())
    for unit in units:
        if unit.name in alone or unit.name in own:
            continue
        if len(dtypes | unit.dtypes) > 1:
            alone.add(unit.name)
        else:
            dtypes |= unit.dtypes
    groups = tuple((unit.name,) for unit in units if unit.name in alone)
    rest = tuple(unit.name for unit in units if unit.name not in alone)
    return FsdpPlan(trace.model, groups, (True,) * len(groups), root=rest, idle=tuple(idle))


BY_HAND: Mapping[str, Callable[[ModelTrace, Collection[str]], FsdpPlan]] = {
    "fsdp2-block": plan_by_block,
    "fsdp2-rest-in-root": plan_blocks_alone,
}
