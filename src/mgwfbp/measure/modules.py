"""Units of a model that is there, and which of them FSDP2 cannot gather by themselves: `unit_names`, `kept_units`."""

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mgwfbp.fsdp_units import ROOT, units_of_names
from mgwfbp.units import format_dtype

__all__ = [
    "called_of",
    "kept_units",
    "open_modules",
    "outer_of",
    "outside_of_compiled",
    "own_bytes",
    "owned_by",
    "shared_units",
    "trained_dtypes",
    "unit_bytes",
    "unit_names",
]

TIED = "has a parameter that a module outside of it uses too"
NO_FORWARD = "has parameters and no forward pass"
NEVER_CALLED = "is inside a MultiheadAttention, which reads its weights without calling it"


def unit_names(model: nn.Module, *, is_trained: bool = False) -> set[str]:
    """Return the units of a model, of all parameters or of those alone that are trained."""
    names = [name for name, one in model.named_parameters() if one.requires_grad or not is_trained]
    return set(units_of_names(names).values()) - {ROOT}


def unit_bytes(
    model: nn.Module, *, is_trained: bool = False, ignored: Collection[int] = ()
) -> dict[str, tuple[int, int]]:
    """Return the bytes of each unit's parameters that this rank has, and of those that are trained; the rest is `ROOT`.

    Args:
        model: of which tensor parallelism may have cut parameters into a part for each rank.
        is_trained: leaves out frozen parameters, and so units of them.
        ignored: ids of parameters that do not count.
    """
    sizes = {
        name: (0 if id(one) in ignored else own_bytes(one), one.requires_grad)
        for name, one in model.named_parameters()
        if one.requires_grad or not is_trained
    }
    found: dict[str, tuple[int, int]] = {}
    for name, unit in units_of_names(list(sizes)).items():
        size, gets_gradient = sizes[name]
        stored, trained = found.get(unit, (0, 0))
        found[unit] = stored + size, trained + size * gets_gradient
    return found


def trained_dtypes(
    model: nn.Module, *, is_trained: bool = False, ignored: Collection[int] = ()
) -> dict[str, list[str]]:
    """Return by dtype which units have trained parameters of it, and `ROOT` where the rest has; as `unit_bytes`."""
    every = {name: one for name, one in model.named_parameters() if one.requires_grad or not is_trained}
    found: dict[str, dict[str, None]] = {}
    for name, unit in units_of_names(list(every)).items():
        if every[name].requires_grad and id(every[name]) not in ignored:
            found.setdefault(format_dtype(every[name].dtype), {})[unit] = None
    return {dtype: list(units) for dtype, units in found.items()}


def own_bytes(parameter: Any) -> int:
    """Return the bytes of a parameter that this rank has."""
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(own.numel() * own.element_size())


def kept_units(model: nn.Module, units: Collection[str]) -> dict[str, str]:
    """Return the units that FSDP2 cannot gather by themselves, and why, in the order of the model's modules."""
    shared, found = shared_units(model, units), {}
    modules = dict(model.named_modules())
    for name in modules:
        if name in shared:
            found[name] = TIED
        elif name in units and called_of(modules[name]) is None:
            found[name] = NO_FORWARD
        elif name in units and any(isinstance(modules[outer], nn.MultiheadAttention) for outer in outer_of(name)):
            found[name] = NEVER_CALLED
    return found


def outer_of(name: str) -> list[str]:
    """Return the names of the modules that something is in.

    >>> outer_of("h.0.weight")
    ['', 'h', 'h.0']
    """
    return [ROOT, *accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}")]


def shared_units(model: nn.Module, units: Collection[str]) -> set[str]:
    """Return the units with a parameter that can also be reached without passing through their module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of = {id(modules[name]): name for name in units if name in modules}
    reached: dict[int, list[set[str]]] = {}  # by parameter, for each of its names: the unit it is in, if any
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = {unit_of[id(modules[outer])] for outer in outer_of(name) if id(modules[outer]) in unit_of}
        reached.setdefault(id(parameter), []).append(inside)
    return {unit for ways in reached.values() for unit in set().union(*ways) if any(unit not in way for way in ways)}


def called_of(module: nn.Module) -> list[nn.Module] | None:
    """Return the module; of one without a forward pass those in it that have one; None where they are not all of it."""
    if getattr(module.forward, "__func__", module.forward) is not nn.Module.forward:
        return [module]
    if next(module.parameters(recurse=False), None) is not None:
        return None
    found = [called_of(child) for child in module.children() if next(child.parameters(), None) is not None]
    return None if None in found else [one for called in found if called is not None for one in called]


def owned_by(modules: Collection[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return those of some parameters that are directly in one of these modules, by name."""
    return {name: one for name, one in parameters.items() if name.rpartition(".")[0] in modules}


def open_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose hooks are called, by name: none that is compiled or scripted, or inside of such."""
    found, closed = dict[str, nn.Module](), list[str]()
    for name, module in model.named_modules():
        if any(outer in closed for outer in outer_of(name)):
            continue
        if _is_opaque(module):
            closed.append(name)
        else:
            found[name] = module
    return found


def outside_of_compiled(model: nn.Module) -> list[nn.Module]:
    """Return the modules that Python calls: not those inside of compiled ones, which are compiled with them."""
    inside: set[nn.Module] = {
        inner for module in model.modules() if _is_compiled(module) for inner in module.modules() if inner is not module
    }
    return [module for module in model.modules() if module not in inside]


def _is_opaque(module: nn.Module) -> bool:
    """Whether what is inside of a module runs without hooks."""
    return _is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
