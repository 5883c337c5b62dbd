"""What torch's FSDP2 refuses only when a part of the model is wrapped, or in the first step; said before anything is.

`checked_arguments` knows the model alone, `check_dtypes` also what is wrapped together.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed.fsdp
from torch import nn

from mgwfbp.errors import PlanError
from mgwfbp.fsdp_units import mixed_words
from mgwfbp.measure.modules import trained_dtypes
from mgwfbp.runtime.fsdp.planning import FsdpInputs
from mgwfbp.units import format_dtype, quote

__all__ = ["check_dtypes", "checked_arguments", "listed"]


def checked_arguments(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given for torch's ``fully_shard``, None standing for its default.

    Raises:
        PlanError: where one of them is not torch's, or the model cannot be sharded however it is grouped.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_names(given)
    if "ignored_params" in given:
        given["ignored_params"] = ignored = set(given["ignored_params"])  # which is gone through for every group
        for one in ignored:
            if not isinstance(one, nn.Parameter):
                raise PlanError(f"ignored_params holds {quote(one)}, expected parameters of the model")
    _check_whole(model)
    _check_parameters(model, set(map(id, given.get("ignored_params", ()))))
    return given


def _check_names(arguments: Collection[str]) -> None:
    if "reshard_after_forward" in arguments:
        raise PlanError("reshard_after_forward is given, and the plan says it for each group: leave it out")
    signature = inspect.signature(torch.distributed.fsdp.fully_shard)
    theirs = set(signature.parameters) - {"module", "reshard_after_forward"}
    for name in arguments:
        if name not in theirs:
            raise PlanError(
                f"there is no argument {quote(name)}: to plan with there are {', '.join(sorted(FsdpInputs.NAMES))}, "
                f"for torch's fully_shard {', '.join(sorted(theirs))}"
            )


def _check_whole(model: nn.Module) -> None:
    """Raise where a part of the model is sharded already."""
    for name, one in model.named_modules():
        if isinstance(one, torch.distributed.fsdp.FSDPModule):
            raise PlanError(f"{quote(name) if name else 'the model'} is fully sharded already: give a model as made")


def _check_parameters(model: nn.Module, ignored: Collection[int]) -> None:
    """Raise where a parameter cannot be sharded, or those of a module that is one unit cannot travel together."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and id(parameter) not in ignored:
            raise PlanError(
                f"parameter {quote(name)} has no dimensions, and FSDP2 cannot shard it: give it the shape (1,), or put "
                "it in ignored_params, where no gradients are averaged"
            )
    dtypes_of: dict[str, list[str]] = {}
    for dtype, units in trained_dtypes(model, ignored=ignored).items():
        for unit in units:
            dtypes_of.setdefault(unit, []).append(dtype)
    for unit, dtypes in dtypes_of.items():
        if len(dtypes) > 1:
            what = quote(unit) if unit else "what is in no module"
            raise PlanError(f"{mixed_words(what, dtypes)}: cast it to one dtype")


def check_dtypes(
    model: nn.Module, groups: Iterable[tuple[Sequence[str], Sequence[nn.Module]]], ignored: Collection[int]
) -> None:
    """Raise unless trained parameters of each group, and of what is in none, have one dtype.

    Args:
        model: of which the rest is the root's.
        groups: of each the names of its units, and what is wrapped.
        ignored: ids of parameters that are not sharded.
    """
    seen = set(ignored)
    for names, parts in (*groups, ((), (model,))):
        mine = {id(one): one for part in parts for one in part.parameters() if id(one) not in seen}
        seen.update(mine)
        dtypes = {format_dtype(one.dtype) for one in mine.values() if one.requires_grad}
        if len(dtypes) > 1:
            what = f"the plan's group of {listed(names)}" if names else "what stays with the root"
            raise PlanError(
                f"{mixed_words(what, dtypes)}: make a new plan, or put modules of different dtypes in different groups"
            )


def listed(names: Sequence[str]) -> str:
    """Name the first of some modules, and say how many more there are."""
    return f"{', '.join(map(quote, names[:3]))}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
