"""Whether a model can have a sharded optimizer: `problem_of_sharding` says why not."""

import gc
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import Tensor, optim
from torch.utils.weak import WeakTensorKeyDictionary

from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.messages.gloo import sends_over_gloo
from mgwfbp.runtime.reducer.parameters import Parameters
from mgwfbp.runtime.reducer.support import cannot_hold, lacks, missing
from mgwfbp.runtime.rows.rows import Owned, is_dense
from mgwfbp.units import quote

__all__ = ["ELEMENTWISE", "NOT_ELEMENTWISE", "problem_of_groups", "problem_of_sharding", "take_parameters"]

# What updates every number by itself, so that it may be given rows of parameters.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
NOT_ELEMENTWISE = {
    "Adafactor": "keeps averages of whole rows and columns of a matrix",
    "Muon": "makes whole matrices orthogonal",
    "LBFGS": "looks at all parameters together",
    "SparseAdam": "is for sparse gradients",
}

# The sharded optimizer of each parameter, in whichever model; neither is kept.
_OPTIMIZERS = WeakTensorKeyDictionary()


def take_parameters(optimizer: optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Note whose parameters these are, as long as the optimizer is there."""
    for parameter in parameters:
        _OPTIMIZERS[parameter] = weakref.ref(optimizer)


def _is_taken(parameter: Tensor) -> bool:
    return parameter in _OPTIMIZERS and _OPTIMIZERS[parameter]() is not None


def problem_of_sharding(
    model: DistributedDataParallel, optimizer_class: type[optim.Optimizer], groups: list[dict[str, Any]]
) -> str:
    """Say why a model cannot have such an optimizer; empty where it can."""
    name = getattr(optimizer_class, "__name__", quote(optimizer_class))
    if optimizer_class not in ELEMENTWISE:
        reason = NOT_ELEMENTWISE.get(name, "is not known to update every number by itself")
        return f"{name} {reason}, and a rank has only rows of parameters: expected one of {_names()}"
    return _cannot_shard(model) or _problem_with_parameters(model._handle or Parameters(model), groups)


def problem_of_groups(groups: list[dict[str, Any]], owned: Mapping[int, Owned], needed: Iterable[str]) -> str:
    """Say why an optimizer cannot have these groups once it was made; empty where it can.

    ``owned`` is what a rank owns by the id of the parameter; ``needed`` are the options that a group must have.
    """
    for number, group in enumerate(groups):
        if absent := [key for key in ("params", *needed) if key not in group]:
            return f"group {number} has no {absent[0]!r}: give it, or call add_param_group(), which does"
    listed = [one for group in groups for one in group["params"]]
    if problem := _problem_with_listed(listed, owned):
        return problem
    counts = Counter(map(id, listed))
    if repeated := [one.name for place, one in owned.items() if counts[place] > 1]:
        return f"the parameter {repeated[0]} is listed more than once: list it in one group"
    return ""


def _problem_with_listed(listed: list[Any], known: Container[int]) -> str:
    """Say what in groups is no parameter; ``known`` are the ids of those that the model averages gradients of."""
    if odd := [one for one in listed if not isinstance(one, Tensor)]:
        return f"a parameter is {quote(odd[0])}, expected a tensor"
    if strangers := [one for one in listed if id(one) not in known and one.requires_grad]:
        return f"a parameter of shape {list(strangers[0].shape)} is not one that the model averages gradients of"
    return ""


def _cannot_shard(model: DistributedDataParallel) -> str:
    """Say why no sharded optimizer can have a model's gradients; empty where one can."""
    if absent := missing():
        return lacks(absent)
    if model.device is not None and model.device.type == "cuda" and sends_over_gloo(model.process_group, model.device):
        return "the model is on a GPU and its process group is gloo, which cannot reduce-scatter there: use nccl"
    if model._wire is not None:
        return f"wire={model._wire!r} and a sharded optimizer each say how gradients travel: leave one out"
    if model._comm_hooks or model._builtin_hook is not None:
        return "a communication hook says how gradients travel, and so does a sharded optimizer: leave one out"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "messages without a used gradient are skipped (skip_all_reduce_unused_params), and rows wait for all"
    if getattr(model, "mixed_precision", None) is not None:
        return "mixed_precision says itself what parameters and gradients are (autocast is fine)"
    return cannot_hold(model)


def _problem_with_parameters(own: Parameters, groups: list[dict[str, Any]]) -> str:
    listed = [one for group in groups for one in group["params"]]
    given, names = set(map(id, listed)), dict(zip(map(id, own.parameters), own.names, strict=True))
    if problem := _problem_with_listed(listed, names):
        return problem
    if absent := [name for place, name in names.items() if place not in given]:
        return f"the parameter {absent[0]} is trained by the model and was not given: give all of them"
    if any(own.sparse):
        return "gradients are sparse, and a rank has only rows of dense ones"
    for name, one in zip(own.names, own.parameters, strict=True):
        if not one.is_floating_point():
            return f"the parameter {name} is {one.dtype}, expected floating-point numbers"
        if one.numel() and not is_dense(one):
            return f"the parameter {name} has strides {one.stride()}, expected one that fills its memory"
    devices = {one.device for one in own.parameters}
    if len(devices) > 1:
        return f"parameters are on {len(devices)} devices, expected one"
    if (kind := next(iter(devices)).type) not in ("cpu", "cuda"):
        return f"parameters are on a device of type {kind!r}, expected cpu or cuda: use a plain optimizer"
    if any(map(_is_taken, own.parameters)):
        gc.collect()  # an optimizer that nobody needs any more may be held by a scheduler that it holds
    if taken := [name for name, one in zip(own.names, own.parameters, strict=True) if _is_taken(one)]:
        return f"the parameter {taken[0]} has a sharded optimizer already: delete all references to that one first"
    return ""


def _names() -> str:
    return ", ".join(one.__name__ for one in ELEMENTWISE)
