"""What must be equal within a message: `Kind`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.units import quote

__all__ = ["Kind", "check_kinds", "kinds_of", "split_by_kind"]


class Kind(NamedTuple):
    """What must be equal within a message."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


def kinds_of(named: Iterable[tuple[str, nn.Parameter]], sparse: Sequence[bool]) -> dict[str, Kind]:
    """Return the kind of every gradient."""
    return {
        name: Kind(parameter.dtype, parameter.device, is_sparse)
        for (name, parameter), is_sparse in zip(named, sparse, strict=True)
    }


def check_kinds(plan: MergePlan, kinds: Mapping[str, Kind]) -> None:
    """Raise unless the plan covers the model's gradients and each of its messages can be sent."""
    plan.check_covers(list(kinds), what="the model")
    for index, group in enumerate(plan.groups):
        first_name, first = group[0], kinds[group[0]]
        for name in group:
            if kinds[name].is_sparse and len(group) > 1:
                raise PlanError(
                    f"message {index} of the plan merges {quote(name)}, whose gradient is sparse, with others; "
                    "DDP sends a sparse gradient alone: give it a message of its own"
                )
            if kinds[name] != first:
                raise PlanError(
                    f"message {index} of the plan merges {quote(first_name)} ({first}) with {quote(name)} "
                    f"({kinds[name]}); a message holds one dtype on one device: split it"
                )


def split_by_kind(plan: MergePlan, kinds: Mapping[str, Kind]) -> MergePlan:
    """Cut each message into one per kind, in the order in which these are complete.

    Planners know nothing of kinds. For a model of one kind, nearly every one, the plan stays as it is.
    """
    groups: list[tuple[str, ...]] = []
    for group in plan.groups:
        by_kind: dict[object, list[str]] = {}
        for name in group:
            key = name if kinds[name].is_sparse else kinds[name]
            by_kind.setdefault(key, []).append(name)
        places = {name: place for place, name in enumerate(group)}
        groups += [tuple(part) for part in sorted(by_kind.values(), key=lambda part: places[part[-1]])]
    return MergePlan(plan.model, plan.planner, tuple(groups), plan.predicted)
