"""What people wrap by hand with FSDP2, as plans: `plan_by_block`, `plan_blocks_alone`."""

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

from mgwfbp.fsdp import FsdpPlan
from mgwfbp.fsdp_units import ROOT, blocks_of, borders_of, idle_of, root_of, units_of
from mgwfbp.trace import ModelTrace

__all__ = ["BY_HAND", "plan_blocks_alone", "plan_by_block"]


def plan_by_block(trace: ModelTrace, root: Collection[str] = ()) -> FsdpPlan:
    """Return what torchtitan wraps: each block, each module before them, and all behind them as one, which is kept.

    The backward pass begins with what the forward pass ends with, so that torch would gather it at once again: the
    modules behind the last block (``fully_shard([norm, output], reshard_after_forward=False)``), or the last block.
    Prefetching is what torch does by itself. Modules that run again in a step are by themselves.

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
    ends = sorted({*range(1, first + 1), *borders_of(units), number} - {0})
    groups = tuple(tuple(names[start:end]) for start, end in pairwise((0, *ends)))
    reshard = tuple(end <= first for end in ends)
    return FsdpPlan(trace.model, groups, reshard, root=tuple(at_root), idle=tuple(idle))


def plan_blocks_alone(trace: ModelTrace, root: Collection[str] = ()) -> FsdpPlan:
    """Return what Transformers and Accelerate wrap: each block, and the rest with the root's group.

    >>> from mgwfbp.trace import LayerTrace
    >>> names = ["head.w", "h.1.b.w", "h.1.a.w", "h.0.b.w", "h.0.a.w", "embed.w"]
    >>> plan = plan_blocks_alone(ModelTrace("toy", 2.0, tuple(LayerTrace(name, 2.0, 10) for name in names)))
    >>> plan.groups, plan.root
    ((('h.0',), ('h.1',)), ('embed', 'head'))
    """
    idle = idle_of(trace)
    names = [unit.name for unit in units_of(trace, idle=idle) if unit.name != ROOT]
    own = set(root_of(trace, root))
    blocks = tuple(name for name in blocks_of(names) if name not in own)
    rest = tuple(name for name in names if name not in blocks)
    return FsdpPlan(trace.model, tuple((name,) for name in blocks), (True,) * len(blocks), root=rest, idle=tuple(idle))


BY_HAND: Mapping[str, Callable[[ModelTrace, Collection[str]], FsdpPlan]] = {
    "fsdp2-block": plan_by_block,
    "fsdp2-rest-in-root": plan_blocks_alone,
}
