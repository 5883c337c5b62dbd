"""Modules whose parameters travel together under FSDP2: `Unit`, `units_of`; found by the names of parameters."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mgwfbp.errors import TraceError
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = [
    "ROOT",
    "Unit",
    "as_if_reached",
    "blocks_of",
    "frozen_bytes_of",
    "idle_of",
    "knows_modules",
    "mixed_words",
    "reaches_of",
    "root_of",
    "units_of",
    "units_of_names",
    "whole_units",
    "with_dtypes",
    "without_bytes",
]

# What the rest of the model is called: parameters of no module that is a unit.
ROOT = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters always travel together; the first one of a model may be the root's rest, `ROOT`."""

    name: str
    num_bytes: int = 0  # of its parameters
    trained_bytes: int = 0  # of those that get gradients
    forward_s: float = 0.0
    backward_s: float = 0.0
    goes_back: bool = False  # whether the backward pass reaches it
    is_alone: bool = False  # it runs again in a step: no group may have others beside it
    dtypes: frozenset[str] = frozenset()  # of its parameters that get gradients, where they are known

    def plus(self, other: "Unit") -> "Unit":
        """Return it with the parameters of another, and what these compute."""
        return replace(
            self,
            num_bytes=self.num_bytes + other.num_bytes,
            trained_bytes=self.trained_bytes + other.trained_bytes,
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            goes_back=self.goes_back or other.goes_back,
            is_alone=self.is_alone or other.is_alone,
            dtypes=self.dtypes | other.dtypes,
        )


def units_of_names(names: Sequence[str]) -> dict[str, str]:
    """Return for every parameter the module that is its unit, or `ROOT`; from the names of parameters alone.

    Units are blocks: modules that are numbered, like others beside them, and hold several modules with parameters; a
    block that consists of blocks is taken apart. Elsewhere a module with parameters is a unit, with all that is in it:
    `torch.nn.MultiheadAttention` uses the weights of a module in it whose forward pass never runs. Parameters of a
    module that blocks are in are the root's.

    >>> names = ["cls", "conv.weight", "enc.pos", "enc.h.0.a.w", "enc.h.0.b.w", "enc.h.1.a.w", "enc.h.1.b.w", "head.w"]
    >>> units_of_names(names)["enc.pos"], sorted(set(units_of_names(names).values()))
    ('', ['', 'conv', 'enc.h.0', 'enc.h.1', 'head'])
    """
    inside: dict[str, set[str]] = {}  # by module: the modules in it, itself too, that have parameters
    children: dict[str, dict[str, None]] = {}
    for name in names:
        path = name.split(".")[:-1]
        for depth in range(len(path) + 1):
            module = ".".join(path[:depth])
            inside.setdefault(module, set()).add(".".join(path))
            if depth:
                children.setdefault(".".join(path[: depth - 1]), {})[module] = None
    stems = {module: _stem(module) for module in inside}

    def is_block(module: str) -> bool:
        parent = module.rpartition(".")[0]
        alike = [one for one in children.get(parent, ()) if stems[one] == stems[module]]
        return stems[module] is not None and len(alike) > 1 and len(inside[module]) > 1

    blocks = {module for module in inside if is_block(module)}

    def blocks_in(module: str) -> set[str]:
        return {one for one in blocks if one != module and (not module or one.startswith(f"{module}."))}

    unit_of: dict[str, str] = {}

    def visit(module: str) -> None:
        within = blocks_in(module)
        covered = set().union(*(inside[one] for one in within)) if within else set[str]()
        is_whole = module in blocks and covered != inside[module]
        if is_whole or (module != ROOT and module in inside[module] and not within):
            unit_of.update(dict.fromkeys(inside[module], module))
            return
        unit_of[module] = ROOT  # its own parameters, if it has any
        for child in children.get(module, ()):
            visit(child)

    visit(ROOT)
    return {name: unit_of[name.rpartition(".")[0]] for name in names}


def _stem(module: str) -> str | None:
    """Return what comes before the number that a module's name ends with; None where it has none."""
    found = re.fullmatch(r"(.*?)[0-9]+", module.rpartition(".")[2])
    return None if found is None else found[1]


def blocks_of(units: Iterable[str]) -> list[str]:
    """Return those that people wrap by hand: numbered ones.

    >>> blocks_of(["embed", "h.0", "h.1", "head"])
    ['h.0', 'h.1']
    """
    return [name for name in units if _stem(name) is not None]


def units_of(trace: ModelTrace, root: Iterable[str] = (), idle: Collection[str] = ()) -> tuple[Unit, ...]:
    """Return the units of a model in forward order, which is the opposite of the ready order; the root's rest first.

    Parameters of units that stay with the root travel with its rest. What they compute needs no gather of its own: it
    counts as that of the unit before them. Idle ones are left out.

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "cba"))
    >>> [(unit.name, unit.num_bytes, unit.forward_s) for unit in units_of(trace, ["c"])]
    [('', 10, 0.0), ('a', 10, 1.0), ('b', 10, 2.0)]
    """
    whole = {name: unit for name, unit in whole_units(trace).items() if name not in idle}
    at_root = {ROOT, *root}.intersection(whole)
    found = {ROOT: Unit(ROOT)} if at_root else {}
    before = ROOT
    for name, one in whole.items():
        if name in at_root:
            found[ROOT] = found[ROOT].plus(replace(one, forward_s=0.0, backward_s=0.0))
            computes = ROOT if name == ROOT else before
            work = Unit(name, forward_s=one.forward_s, backward_s=one.backward_s, goes_back=one.goes_back)
            found[computes] = found[computes].plus(work)
        else:
            found[name], before = one, name
    return tuple(found.values())


def whole_units(trace: ModelTrace) -> dict[str, Unit]:
    """Return the units by name, in forward order, and what is in none as `ROOT`."""
    parts = _parts(trace)
    unit_of = units_of_names([part.name for part in parts])
    repeated, dtypes, whole = set(trace.source.get("repeated", ())), _dtypes(trace), dict[str, Unit]()
    for part in parts:
        name = unit_of[part.name]
        if name not in whole:
            mine = frozenset(dtype for dtype, units in dtypes.items() if name in units)
            whole[name] = Unit(name, is_alone=name in repeated, dtypes=mine)
        whole[name] = whole[name].plus(part)
    for name in _no_gradient(trace).intersection(whole):
        if not whole[name].trained_bytes:  # else it stays with the root
            whole[name] = replace(whole[name], goes_back=False)
    return whole


def reaches_of(units: Sequence[Unit]) -> tuple[int, ...]:
    """Return for each unit where a group that begins with it must have ended.

    A unit that runs again is alone, and FSDP2 gathers only parameters together whose gradients have one dtype; frozen
    ones go with any. It gathers a group for the backward pass when a gradient reaches what the last module returned: so
    behind a unit that this pass reaches a group has none that it does not.

    >>> reaches_of([Unit("a"), Unit("b"), Unit("c", is_alone=True), Unit("d")])
    (2, 2, 3, 4)
    >>> reaches_of([Unit("frozen"), Unit("a", goes_back=True), Unit("b", goes_back=True), Unit("teacher")])
    (3, 3, 3, 4)
    >>> half, whole = frozenset({"bfloat16"}), frozenset({"float32"})
    >>> reaches_of([Unit("a", dtypes=half), Unit("frozen"), Unit("head", dtypes=whole)])
    (2, 3, 3)
    """
    found = list[int]()
    for start, unit in enumerate(units):
        end, dtypes = start + 1, unit.dtypes
        while end < len(units) and not unit.is_alone and not units[end].is_alone:
            dtypes |= units[end].dtypes
            if len(dtypes) > 1 or units[end - 1].goes_back > units[end].goes_back:
                break
            end += 1
        found.append(end)
    return tuple(found)


def mixed_words(what: str, dtypes: Iterable[str]) -> str:
    """Say what FSDP2 cannot gather at once, and why.

    >>> mixed_words("'h.0'", {"float32", "bfloat16"})
    "'h.0' has trained parameters of bfloat16 and float32, and FSDP2 gathers those of one dtype together"
    """
    found = " and ".join(sorted(dtypes))
    return f"{what} has trained parameters of {found}, and FSDP2 gathers those of one dtype together"


def idle_of(trace: ModelTrace) -> list[str]:
    """Return the units that a step has no use for: no parameter gets a gradient, or is called or read without one."""
    runs = {one["name"] for one in _resting(trace, "not_reached")}
    unused = {*trace.source.get("unused", ()), *trace.source.get("unread", ())} - runs
    parts = _parts(trace)
    unit_of = units_of_names([part.name for part in parts])
    used = {unit_of[part.name] for part in parts if part.name not in unused}
    return [name for name in dict.fromkeys(unit_of.values()) if name != ROOT and name not in used]


def root_of(trace: ModelTrace, root: Iterable[str] = ()) -> list[str]:
    """Return the units that stay with the root, in forward order: those given, that share parameters, or must be there.

    FSDP2 gathers a parameter with one group, and a module's parameters while the module runs: those of a head whose
    weight another function reads it does not gather by themselves, what a module returns of its own is gone when it
    has run, and one that is trained and returns nothing that a gradient reaches is not gathered for the backward pass.
    Where nothing was seen to be called (a compiled model) this says nothing.
    """
    whole, idle = whole_units(trace), set(idle_of(trace))
    units = [name for name in whole if name != ROOT]
    silent = set(trace.source.get("not_called", ()))
    if silent.issuperset(units):
        silent = set()
    others = (trace.source.get(kind, ()) for kind in ("shared", "read_elsewhere", "returned"))
    missed = {name for name in _no_gradient(trace).intersection(units) if whole[name].trained_bytes}
    stays = {*root, *silent, *missed, *chain(*others)} - idle
    return [name for name in units if name in stays]


def frozen_bytes_of(trace: ModelTrace) -> int:
    """Return how large the frozen parameters are that a trace names."""
    return sum(one["bytes"] for one in _resting(trace, "frozen"))


def without_bytes(trace: ModelTrace, names: Collection[str]) -> ModelTrace:
    """Return a trace in which some parameters compute and do not travel, since each rank has them whole."""
    if not names:
        return trace
    layers = tuple(replace(layer, grad_bytes=0) if layer.name in names else layer for layer in trace.layers)
    resting = {
        kind: [{**one, "bytes": 0} if one["name"] in names else one for one in _resting(trace, kind)]
        for kind in ("frozen", "not_reached")
        if kind in trace.source
    }
    return replace(trace, layers=layers, source={**trace.source, **resting})


def as_if_reached(trace: ModelTrace) -> ModelTrace:
    """Return a trace in which all that is trained gets a gradient, as one would say who only sees the model."""
    source = {name: value for name, value in trace.source.items() if name not in ("unused", "not_reached")}
    return replace(trace, source=source)


def with_dtypes(trace: ModelTrace, dtypes: Mapping[str, Sequence[str]]) -> ModelTrace:
    """Return a trace that knows which units have trained parameters of each dtype, and so does what is made of it."""
    return replace(trace, source={**trace.source, "dtypes": dtypes})


def knows_modules(trace: ModelTrace) -> bool:
    """Say whether a model was there when the trace was made, so that its names are those of parameters in modules."""
    return "dtypes" in trace.source


def _no_gradient(trace: ModelTrace) -> set[str]:
    """Return the units that run, and return nothing that gets a gradient, where that was seen."""
    return set(trace.source.get("no_gradient", ()))


def _dtypes(trace: ModelTrace) -> Mapping[str, Sequence[str]]:
    """Return the units that have trained parameters of each dtype; see `mgwfbp.measure.modules.trained_dtypes`."""
    found = trace.source.get("dtypes", {})
    if not isinstance(found, Mapping) or any(isinstance(units, str) for units in found.values()):
        raise TraceError(f"source: dtypes is {quote(found)}, expected lists of modules by dtype")
    return found


def _parts(trace: ModelTrace) -> list[Unit]:
    """Return parameters in forward order; those that get a gradient take what the others do not."""
    frozen, not_reached = _resting(trace, "frozen"), _resting(trace, "not_reached")
    unused, placed = set(trace.source.get("unused", ())), {one["name"] for one in not_reached}
    shares: dict[str, float] = {}
    following: dict[str | None, list[Mapping[str, Any]]] = {}  # by the layer that is used next
    for one in (*frozen, *not_reached):
        shares[one["within"]] = shares.get(one["within"], 0.0) + one["share"]
        following.setdefault(one["next"], []).append(one)
    layers = list(zip(reversed(trace.layers), reversed(trace.layer_forward_s), strict=True))
    forward_s = {layer.name: layer_s for layer, layer_s in layers}

    def add_before(name: str | None) -> None:
        for one in following.get(name, ()):
            own_s = one["share"] / max(1.0, shares[one["within"]]) * forward_s[one["within"]]
            # The backward pass ends where what is trained begins, and goes around what is trained and gets no gradient.
            goes_back = name != trace.layers[-1].name and one["name"] not in placed
            found.append(Unit(one["name"], one["bytes"], 0, own_s, goes_back=goes_back))

    found: list[Unit] = []
    for layer, layer_s in layers:
        add_before(layer.name)
        if layer.name in placed:
            continue
        own_s, is_used = layer_s * max(0.0, 1.0 - shares.get(layer.name, 0.0)), layer.name not in unused
        size = layer.grad_bytes
        found.append(Unit(layer.name, size, size * is_used, own_s, layer.backward_s, goes_back=is_used))
    add_before(None)
    return found


def _resting(trace: ModelTrace, kind: str) -> Sequence[Mapping[str, Any]]:
    """Return the parameters without a gradient that a measured trace names: frozen ones, or trained but not reached.

    See `mgwfbp.measure.backward`.
    """
    found = trace.source.get(kind, ())
    known = {layer.name for layer in trace.layers}
    for one in found:
        if not isinstance(one, Mapping) or not {"name", "bytes", "within", "share", "next"} <= set(one):
            raise TraceError(f"source: {kind} holds {quote(one)}, expected name, bytes, within, share and next")
        if one["within"] not in known or one["next"] not in {*known, None}:
            raise TraceError(f"source: {kind}: {quote(one['name'])} stands at a layer that the trace has not")
    return found  # type: ignore[no-any-return]
