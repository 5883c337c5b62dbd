"""What must be equal within a message, `Kind`, and plans that are read and checked for it."""

import logging
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.messages.wire import check_wire
from mgwfbp.runtime.reducer.parameters import Parameters, uncompiled
from mgwfbp.units import plural, quote

__all__ = ["Kind", "PlanLike", "check_kinds", "kinds_of", "read_plan", "split_by_kind"]

_log = logging.getLogger("mgwfbp")

PlanLike = MergePlan | str | os.PathLike[str]


class Kind(NamedTuple):
    """What must be equal within a message."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


def kinds_of(own: Parameters) -> dict[str, Kind]:
    """Return the kind of every gradient of a model."""
    named = zip(own.names, own.parameters, own.sparse, strict=True)
    return {name: Kind(parameter.dtype, parameter.device, is_sparse) for name, parameter, is_sparse in named}


def check_kinds(plan: MergePlan, kinds: Mapping[str, Kind]) -> None:
    """Raise unless the plan covers the model's gradients and each of its messages and gathers can be sent."""
    plan.check_covers(list(kinds), what="the model")
    numbered = [(f"message {index}", group) for index, group in enumerate(plan.groups)]
    for what, group in numbered + [(f"gather {index}", group) for index, group in enumerate(plan.gathers)]:
        first_name, first = group[0], kinds[group[0]]
        for name in group:
            if kinds[name].is_sparse and len(group) > 1:
                raise PlanError(
                    f"{what} of the plan merges {quote(name)}, whose gradient is sparse, with others; "
                    "DDP sends a sparse gradient alone: give it a message of its own"
                )
            if kinds[name] != first:
                raise PlanError(
                    f"{what} of the plan merges {quote(first_name)} ({first}) with {quote(name)} "
                    f"({kinds[name]}); a message holds one dtype on one device: split it"
                )


def read_plan(
    plan: PlanLike, own: Parameters, wire: str | None, workers: int, *, is_sharded: bool = False
) -> MergePlan:
    """Read a plan and check that a model's gradients can be sent as it says; one worker alone gives up no precision."""
    loaded = plan if isinstance(plan, MergePlan) else MergePlan.load(plan)
    if any(name != uncompiled(name) for name in loaded.layer_names):  # made for the compiled model
        groups, gathers = (
            tuple(tuple(map(uncompiled, group)) for group in some) for some in (loaded.groups, loaded.gathers)
        )
        loaded = replace(loaded, groups=groups, gathers=gathers)
    if not is_sharded:
        loaded.check_all_reduced("mgwfbp.DistributedDataParallel without a ShardedOptimizer that has it as plan=")
    check_wire(loaded.wire, wire)
    kinds = kinds_of(own)
    check_kinds(loaded, kinds)
    return replace(loaded, wire=(), predicted={}) if loaded.wire and workers == 1 else _as_sent(loaded, kinds)


def _as_sent(plan: MergePlan, kinds: Mapping[str, Kind]) -> MergePlan:
    """Return a plan as it is sent: what cannot travel in low precision travels as it is, and is said to be.

    A trace holds no dtypes, so planners count all gradients as such that can. Predictions are dropped then.
    """
    wires = tuple(
        wire if all(_may_be_low(kinds[name]) for name in group) else ""
        for group, wire in zip(plan.groups, plan.wires, strict=True)
    )
    if wires == plan.wires:
        return plan
    changed = [group for group, before, now in zip(plan.groups, plan.wires, wires, strict=True) if before != now]
    _log.warning(
        "%s of the plan, of gradients such as %s (%s), cannot travel in low precision, which only dense fp32 gradients "
        "can: sent as they are, so steps are longer than was predicted",
        plural(len(changed), "message"),
        quote(changed[0][0]),
        kinds[changed[0][0]],
    )
    return replace(plan, wire=wires, predicted={})


def _may_be_low(kind: Hashable) -> bool:
    """Whether gradients of this kind can travel in low precision; of a kind that says nothing they may."""
    return not isinstance(kind, Kind) or (kind.dtype is torch.float32 and not kind.is_sparse)


def split_by_kind(plan: MergePlan, kinds: Mapping[str, Hashable]) -> MergePlan:
    """Split every message, and gather, that holds several kinds into one for each; predictions are dropped then.

    Planners know nothing of kinds. What cannot travel in low precision travels as it is. Gradients of no known kind are
    left for the check of the plan against the model.

    >>> plan = MergePlan("toy", "by hand", (("d", "c", "b"), ("a",)))
    >>> split_by_kind(plan, {"d": "float32", "c": "float64", "b": "float32", "a": "float32"}).groups
    (('c',), ('d', 'b'), ('a',))
    """
    gathers: list[tuple[str, ...]] = []
    for group in plan.gathers:
        alike: dict[Hashable, list[str]] = {}
        for name in group:
            alike.setdefault(kinds.get(uncompiled(name), ""), []).append(name)
        gathers += map(tuple, alike.values())
    groups: list[tuple[str, ...]] = []
    wire: list[str] = []
    for group, precision in zip(plan.groups, plan.wires, strict=True):
        parts: dict[tuple[Hashable, str], list[str]] = {}
        for name in group:
            kind = kinds.get(uncompiled(name), "")
            kind_of_part = kind, name if isinstance(kind, Kind) and kind.is_sparse else ""  # DDP sends these alone
            # In the order in which they are complete.
            parts[kind_of_part] = [*parts.pop(kind_of_part, []), name]
        groups += [tuple(part) for part in parts.values()]
        wire += [precision if _may_be_low(kind) else "" for kind, _ in parts]
    is_whole = (len(groups), len(gathers)) == (plan.num_groups, len(plan.gathers))
    if is_whole and (not plan.wire or tuple(wire) == plan.wire):
        return plan
    return replace(plan, groups=tuple(groups), wire=tuple(wire), gathers=tuple(gathers), predicted={})
