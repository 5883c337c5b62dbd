"""Torch's FSDP2 with the groups, the resharding and the prefetching of a plan: `fully_shard`."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from mgwfbp.errors import PlanError, StrategyError
from mgwfbp.fsdp import ROOT, FsdpPlan, units_of_names
from mgwfbp.measure.agreement import agree_on_fsdp_plan
from mgwfbp.units import plural, quote

__all__ = ["fully_shard"]

_log = logging.getLogger("mgwfbp")
AnyModule = TypeVar("AnyModule", bound=nn.Module)

TIED = "has a parameter that a module outside of it uses too"
NO_FORWARD = "has parameters and no forward pass"
NEVER_CALLED = "is inside a MultiheadAttention, which reads its weights without calling it"


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """What becomes of a plan for a model."""

    groups: tuple[tuple[nn.Module, ...], ...]  # in forward order, none empty
    reshard: tuple[bool, ...]  # of each
    kept: Mapping[str, str]  # units that stay with the root, and why
    frozen: int  # parameters that get no gradient and are in no unit


def fully_shard(model: AnyModule, plan: FsdpPlan | str | os.PathLike[str], **arguments: Any) -> AnyModule:
    """Apply torch's FSDP2 to a model, in the groups of a plan, with its resharding and its prefetching.

    Each group of the plan becomes one call of `torch.distributed.fsdp.fully_shard`, and what is in none becomes the
    root's, which is gathered first and stays. What comes out is FSDP2's in every way: parameters are `DTensor`, and
    checkpoints, clipping and ``set_requires_gradient_sync`` are torch's. Make the optimizer afterwards.

    A unit of the plan stays with the root where FSDP2 cannot gather it by itself: it shares a parameter with a module
    outside of it (an embedding that is tied to the head), has parameters and no forward pass, or is read by a
    `torch.nn.MultiheadAttention` without being called. A container without a forward pass is wrapped as the modules in
    it. Rank 0 logs what stays and why.

    All ranks of the mesh must call it, with the same plan. Ranks of a mesh of several dimensions that is not all ranks
    compare plans along its last dimension only.

    Args:
        model: whose parameters are not sharded yet.
        plan: an `FsdpPlan` for this model or the path of one (``mgwfbp plan --engine fsdp2``).
        **arguments: what torch's ``fully_shard`` takes besides (``mesh``, ``mp_policy``, ``offload_policy``,
            ``ignored_params``, ``shard_placement_fn``), for every group; not ``reshard_after_forward``, which the plan
            says.

    Returns:
        The model itself.

    Raises:
        PlanError: on every rank and before anything is wrapped, where the plan is not one for this model, or not that
            of all ranks.
        StrategyError: where this torch has no public ``fully_shard``.
    """
    shard: Any = getattr(torch.distributed.fsdp, "fully_shard", None)
    if shard is None:
        raise StrategyError(f"torch {torch.__version__} has no public fully_shard (FSDP2): install torch 2.6 or newer")
    if not dist.is_initialized():
        dist.init_process_group()  # as torch's does
    wrapping: _Wrapping | None = None

    def prepare() -> FsdpPlan:
        nonlocal wrapping
        if "reshard_after_forward" in arguments:
            raise PlanError("reshard_after_forward is given, and the plan says it for each group: leave it out")
        loaded = plan if isinstance(plan, FsdpPlan) else FsdpPlan.load(plan)
        wrapping = _wrapping_of(model, loaded)
        return loaded

    agreed = agree_on_fsdp_plan(prepare, _group_of(arguments.get("mesh")))
    assert wrapping is not None  # noqa: S101 - the plan was prepared
    if dist.get_rank() == 0:
        _tell(wrapping)
    # Units never nest, so that groups may be wrapped in any order; the root comes last.
    for group, is_resharded in zip(wrapping.groups, wrapping.reshard, strict=True):
        shard(group[0] if len(group) == 1 else list(group), reshard_after_forward=is_resharded, **arguments)
    shard(model, reshard_after_forward=False, **arguments)
    _set_prefetching(model, wrapping, agreed)
    return model


def _group_of(mesh: Any) -> dist.ProcessGroup | None:
    """Return the ranks that must have the same plan; None stands for all."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group(mesh.ndim - 1)  # type: ignore[no-any-return]


def _wrapping_of(model: nn.Module, plan: FsdpPlan) -> _Wrapping:
    """Check the plan against the model, and return which modules are wrapped together."""
    modules = dict(model.named_modules())
    sharded = next((name for name, one in modules.items() if isinstance(one, torch.distributed.fsdp.FSDPModule)), None)
    if sharded is not None:
        raise PlanError(f"{quote(sharded) if sharded else 'the model'} is fully sharded already: give a model as made")
    trained = [name for name, one in model.named_parameters() if one.requires_grad]  # as a trace has them
    units = set(units_of_names(trained).values()) - {ROOT}
    plan.check_covers(units)
    shared = _shared_units(model, units)
    groups, reshard, kept = [], [], {}
    for names, is_resharded in zip(plan.groups, plan.reshard, strict=True):
        group: list[nn.Module] = []
        for name in names:
            called = _called(modules[name])
            if name in shared:
                kept[name] = TIED
            elif called is None:
                kept[name] = NO_FORWARD
            elif any(isinstance(modules[outer], nn.MultiheadAttention) for outer in _outer(name)):
                kept[name] = NEVER_CALLED
            else:
                group += called
        if group:
            groups.append(tuple(group))
            reshard.append(is_resharded)
    frozen = [
        name for name, one in model.named_parameters() if not one.requires_grad and units.isdisjoint(_outer(name))
    ]
    return _Wrapping(tuple(groups), tuple(reshard), kept, len(frozen))


def _outer(name: str) -> list[str]:
    """Return the names of the modules that something is in.

    >>> _outer("h.0.weight")
    ['', 'h', 'h.0']
    """
    return [ROOT, *accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}")]


def _shared_units(model: nn.Module, units: set[str]) -> set[str]:
    """Return the units with a parameter that can also be reached without passing through their module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of = {id(modules[name]): name for name in units}
    reached: dict[int, list[set[str]]] = {}  # by parameter, for each of its names: the unit it is in, if any
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = {unit_of[id(modules[outer])] for outer in _outer(name) if id(modules[outer]) in unit_of}
        reached.setdefault(id(parameter), []).append(inside)
    return {unit for ways in reached.values() for unit in set().union(*ways) if any(unit not in way for way in ways)}


def _called(module: nn.Module) -> list[nn.Module] | None:
    """Return the module; of one without a forward pass those in it that have one; None where they are not all of it."""
    if getattr(module.forward, "__func__", module.forward) is not nn.Module.forward:
        return [module]
    if next(module.parameters(recurse=False), None) is not None:
        return None
    found = [_called(child) for child in module.children() if next(child.parameters(), None) is not None]
    return None if None in found else [one for called in found if called is not None for one in called]


def _set_prefetching(model: nn.Module, wrapping: _Wrapping, plan: FsdpPlan) -> None:
    """Say which groups each group asks for ahead; the root asks for the first ones of the forward pass.

    In the backward pass the root comes first, and asks for the last group without being told.
    """
    firsts: Sequence[Any] = [group[0] for group in wrapping.groups]
    root: Any = model
    root.set_modules_to_forward_prefetch(firsts[: plan.forward_prefetch])
    for place, first in enumerate(firsts):
        first.set_modules_to_forward_prefetch(firsts[place + 1 : place + 1 + plan.forward_prefetch])
        before = range(place - 1, max(0, place - plan.backward_prefetch) - 1, -1)
        first.set_modules_to_backward_prefetch([firsts[one] for one in before if wrapping.reshard[one]])


def _tell(wrapping: _Wrapping) -> None:
    """Log what stays with the root though the plan has it in groups, and what the plan does not have."""
    because: dict[str, list[str]] = {}
    for name, why in wrapping.kept.items():
        because.setdefault(why, []).append(name)
    parts = [
        f"{', '.join(quote(name) for name in names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} "
        f"({'each ' if len(names) > 1 else ''}{why})"
        for why, names in because.items()
    ]
    if wrapping.frozen:
        parts.append(f"{plural(wrapping.frozen, 'frozen parameter')} (in no module of the plan)")
    if parts:
        _log.info("fully_shard keeps with the root, gathered first and never resharded: %s", "; ".join(parts))
