"""Groups of parameters as torch's optimizers take them: `checked_groups`, and what of them ranks must have alike."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch import Tensor, nn, optim

from mgwfbp.errors import ShardError
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.reducer.parameters import uncompiled
from mgwfbp.runtime.sharded.refusals import problem_of_sharding

__all__ = ["Params", "checked_groups", "fields_of", "in_order", "names_of"]

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def checked_groups(
    model: DistributedDataParallel, optimizer_class: type[optim.Optimizer], params: Params | None
) -> list[dict[str, Any]]:
    """Return the groups of parameters.

    Raises:
        ShardError: where the model cannot have such an optimizer of these.
    """
    groups = _groups(model.module.parameters() if params is None else params)
    if problem := problem_of_sharding(model, optimizer_class, groups):
        raise ShardError(problem)
    return groups


def _groups(params: Params) -> list[dict[str, Any]]:
    listed = in_order(params)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    found = []
    for group in listed:
        given = [group["params"]] if isinstance(group["params"], Tensor) else in_order(group["params"])
        if given and all(isinstance(one, tuple) for one in given):  # with names, as torch takes them since 2.6
            group = {**group, "param_names": [name for name, _ in given]}
            given = [parameter for _, parameter in given]
        found.append({**group, "params": given})
    return found


def in_order(params: Iterable[Any]) -> list[Any]:
    """Return the list of what was given.

    Raises:
        ShardError: where it has no order.
    """
    if isinstance(params, Set):
        raise ShardError("parameters are given as a set, which has another order on every rank: give a list")
    return list(params)


def names_of(parameters: Iterable[Tensor], module: nn.Module) -> list[str]:
    """Return what each is called in a module; frozen ones may be others than the module's."""
    names = {id(one): uncompiled(name) for name, one in module.named_parameters()}
    return [names.get(id(one), "none of the model's") for one in parameters]


def fields_of(optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]], module: nn.Module) -> dict[str, Any]:
    """Return what ranks must have alike, of an optimizer with the same options of its groups, by what it is called."""
    fields: dict[str, Any] = {"the optimizer": type(optimizer).__name__, "the number of groups": len(groups)}
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        fields[f"the number of parameters of group {number}"] = len(group["params"])
        for place, name in enumerate(names_of(group["params"], module)):
            fields[f"parameter {place} of group {number}"] = name
        for key in optimizer.defaults:
            value = own[key]
            fields[f"{key} of group {number}"] = repr(value.tolist() if isinstance(value, Tensor) else value)
    return fields
