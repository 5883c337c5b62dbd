"""FSDP2's way to train: which modules' parameters travel together, and how a step then runs: `FsdpPlan`.

[Note: how FSDP2 runs a step]
Parameters are sharded, and all-gathered group by group before a group computes; gradients are reduce-scattered when a
group's backward pass has ended. Groups are runs of modules in forward order; what stands outside of all modules in
groups is the root's: it is gathered first, and stays. From torch's code (2.5 to 2.15), for groups 0..K in forward
order and a host that runs ahead of its device, on one communicator:

- forward: group j is gathered once group j-1 was, and once group j-1-p has begun, where p is how many groups are
  prefetched (1 also without being told so);
- a group computes once it is gathered and the one before it has ended;
- backward, from K to 0: a group that was resharded after the forward pass is gathered again, no earlier than the
  backward pass of the group q before it in this order begins, and in the order in which it is asked for: before the
  gradients of that group are sent;
- gradients of a group are sent when its backward pass has ended, and the group after the next one waits for that,
  since torch holds one buffer of gradients that are being sent.

The step is a forward pass and a backward pass until all gradients are sent; the update is left out.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, ClassVar, Self

from mgwfbp.cost import Cost
from mgwfbp.costs import cheapest_s, sharded_cost
from mgwfbp.errors import PlanError
from mgwfbp.record import (
    Fields,
    Record,
    check_count,
    check_free_form,
    check_items,
    check_text,
    first_repeated,
)
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural, quote

__all__ = [
    "ROOT",
    "FsdpPlan",
    "FsdpStep",
    "Group",
    "Unit",
    "fsdp_lower_bound_s",
    "lay_out",
    "predict_fsdp",
    "units_of",
    "units_of_names",
]

# What the rest of the model is called: parameters of no module that is a unit.
ROOT = ""
# Copies of a parameter's bytes that an optimizer keeps besides: Adam has two averages.
STATES = 2


@dataclass(frozen=True, slots=True, repr=False)
class FsdpPlan(Record):
    """Which modules FSDP2 groups, in forward order; the rest of the model is the root's group.

    >>> FsdpPlan("toy", (("embed", "h.0"), ("h.1",)), (True, False))
    FsdpPlan('toy': 3 modules in 2 groups, 1 of them resharded, prefetching 1 forward and 1 backward)
    """

    FORMAT: ClassVar[str] = "mgwfbp.fsdp-plan/1"

    model: str
    groups: tuple[tuple[str, ...], ...]  # names of modules
    reshard: tuple[bool, ...]  # whether each group is resharded after the forward pass, and gathered again
    forward_prefetch: int = 1  # how many groups are gathered ahead
    backward_prefetch: int = 1
    predicted: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what the planner expects; free-form

    def __post_init__(self) -> None:
        check_text(self.model, "model", PlanError)
        listed = check_items(self.groups, object, "groups", PlanError)
        groups = tuple(check_items(one, str, f"groups[{place}]", PlanError) for place, one in enumerate(listed))
        for place, group in enumerate(groups):
            if not group:
                raise PlanError(f"groups[{place}]: empty, expected at least one module")
            for name in group:
                check_text(name, f"groups[{place}]: a module's name", PlanError)
        repeated = first_repeated(chain.from_iterable(groups))
        if repeated is not None:
            raise PlanError(f"groups: {quote(repeated)} stands twice, expected every module once")
        reshard = check_items(self.reshard, bool, "reshard", PlanError)
        if len(reshard) != len(groups):
            raise PlanError(f"reshard has {len(reshard)} entries, expected one for each of {len(groups)} groups")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "reshard", reshard)
        for name in ("forward_prefetch", "backward_prefetch"):
            object.__setattr__(self, name, check_count(getattr(self, name), name, PlanError, minimum=1))
        object.__setattr__(self, "predicted", check_free_form(self.predicted, "predicted", PlanError))

    def __repr__(self) -> str:
        modules = plural(sum(map(len, self.groups)), "module")
        return (
            f"FsdpPlan({quote(self.model)}: {modules} in {plural(len(self.groups), 'group')}, {sum(self.reshard)} of "
            f"them resharded, prefetching {self.forward_prefetch} forward and {self.backward_prefetch} backward)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "groups": [list(group) for group in self.groups],
            "reshard": list(self.reshard),
            "forward_prefetch": self.forward_prefetch,
            "backward_prefetch": self.backward_prefetch,
            "predicted": dict(self.predicted),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a plan from the content of its file."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        return cls(
            fields["model"],
            tuple(fields.items("groups")),
            tuple(fields.items("reshard")),
            fields["forward_prefetch"],
            fields["backward_prefetch"],
            fields.get("predicted", {}),
        )

    def check_covers(self, units: Iterable[str]) -> None:
        """Raise unless the plan holds exactly these units, in whatever order."""
        mine, theirs = set(chain.from_iterable(self.groups)), set(units)
        if mine != theirs:
            differing = min(mine ^ theirs)
            where = "the plan only" if differing in mine else "the model only"
            raise PlanError(
                f"the plan for {quote(self.model)} has {plural(len(mine), 'module')}, the model {len(theirs)} "
                f"({quote(differing)} is in {where}): make a new one with `mgwfbp plan --engine fsdp2`"
            )


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters always travel together; the last one of a model may be the root's rest, `ROOT`."""

    name: str
    num_bytes: int  # of its parameters, and of their gradients
    forward_s: float
    backward_s: float


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


def units_of(trace: ModelTrace) -> tuple[Unit, ...]:
    """Return the units of a model in forward order, which is the opposite of the ready order; the root's rest first."""
    unit_of = units_of_names([layer.name for layer in trace.layers])
    found: dict[str, list[float]] = {ROOT: [0, 0.0, 0.0]} if ROOT in unit_of.values() else {}
    for layer, forward_s in zip(reversed(trace.layers), reversed(trace.layer_forward_s), strict=True):
        sums = found.setdefault(unit_of[layer.name], [0, 0.0, 0.0])
        for place, value in enumerate((layer.grad_bytes, forward_s, layer.backward_s)):
            sums[place] += value
    return tuple(Unit(name, int(size), forward_s, backward_s) for name, (size, forward_s, backward_s) in found.items())


@dataclass(frozen=True, slots=True)
class FsdpStep:
    """A step of FSDP2; each moment by group in forward order, the root's first where it has parameters."""

    groups: tuple[tuple[str, ...], ...]
    gathers_s: tuple[tuple[float, float], ...]  # start and end, in the forward pass
    forward_s: tuple[tuple[float, float], ...]
    gathers_again_s: tuple[tuple[float, float] | None, ...]  # in the backward pass; None where not resharded
    backward_s: tuple[tuple[float, float], ...]
    sent_s: tuple[tuple[float, float], ...]  # reduce-scatters
    memory_bytes: int  # at most, per rank: parameters, gradients and the optimizer's state; no activations

    @property
    def iteration_s(self) -> float:
        """The whole step, without the update."""
        return max(self.backward_s[0][1], *(end for _, end in self.sent_s))

    @property
    def compute_s(self) -> float:
        """What it computes."""
        return sum(end - start for start, end in (*self.forward_s, *self.backward_s))


def predict_fsdp(trace: ModelTrace, cost: Cost, plan: FsdpPlan, *, states: int = STATES) -> FsdpStep:
    """Return what a step takes and how much memory, see [Note: how FSDP2 runs a step].

    Args:
        trace: when each gradient is ready, and what its layer takes in the forward pass.
        cost: what a reduce-scatter and an all-gather take, as `sharded_cost` has it.
        plan: the groups.
        states: how many copies of a parameter's bytes the optimizer keeps.

    Raises:
        PlanError: where the plan is not one of this model's units, or not in forward order.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "cba"))
    >>> plan = FsdpPlan("toy", (("a",), ("b",), ("c",)), (False, False, False))
    >>> step = predict_fsdp(trace, LinearCost(workers=2, startup_s=2.0, per_byte_s=0.2), plan)
    >>> step.gathers_s, step.forward_s  # each gather takes 2, each layer 1
    (((0.0, 2.0), (2.0, 4.0), (4.0, 6.0)), ((2.0, 3.0), (4.0, 5.0), (6.0, 7.0)))
    >>> step.backward_s, step.iteration_s
    (((11.0, 13.0), (9.0, 11.0), (7.0, 9.0)), 15.0)
    """
    units = units_of(trace)
    plan.check_covers(unit.name for unit in units if unit.name != ROOT)
    place_of = {unit.name: place for place, unit in enumerate(units)}
    root = [(ROOT,)] if units[0].name == ROOT else []
    groups = (*root, *plan.groups)
    order = [place_of[name] for group in groups for name in group]
    if order != sorted(order):
        late = next(units[one].name for one, other in pairwise(order) if one > other)
        raise PlanError(f"groups: {quote(late)} stands before a module that the forward pass uses first")
    merged = [Group.of([units[place_of[name]] for name in group], cost) for group in groups]
    reshard = (*([False] if root else []), *plan.reshard)
    return lay_out(merged, reshard, plan.forward_prefetch, plan.backward_prefetch, cost.workers, states)


@dataclass(frozen=True, slots=True)
class Group:
    """Units that travel together: what they need."""

    names: tuple[str, ...]
    num_bytes: int
    forward_s: float
    backward_s: float
    gather_s: float
    send_s: float

    @classmethod
    def of(cls, units: Sequence[Unit], cost: Cost) -> Self:
        """Merge units."""
        reduce_scatter, all_gather = sharded_cost(cost)
        num_bytes = sum(unit.num_bytes for unit in units)
        forward_s, backward_s = sum(unit.forward_s for unit in units), sum(unit.backward_s for unit in units)
        names = tuple(unit.name for unit in units)
        return cls(names, num_bytes, forward_s, backward_s, all_gather(num_bytes), reduce_scatter(num_bytes))


def lay_out(
    groups: Sequence[Group],
    reshard: Sequence[bool],
    forward_prefetch: int,
    backward_prefetch: int,
    workers: int,
    states: int,
) -> FsdpStep:
    """Return the step of groups, the root's rest among them, on so many workers."""
    number = len(groups)
    gathers, forward = list[tuple[float, float]](), list[tuple[float, float]]()
    link_s = now_s = 0.0
    for place, group in enumerate(groups):
        allowed = place - 1 - forward_prefetch
        start_s = max(link_s, forward[allowed][0] if allowed >= 0 else 0.0)
        link_s = start_s + group.gather_s
        gathers.append((start_s, link_s))
        start_s = max(now_s, link_s)
        now_s = start_s + group.forward_s
        forward.append((start_s, now_s))
    again: list[tuple[float, float] | None] = [None] * number
    backward, sent = [(0.0, 0.0)] * number, [(0.0, 0.0)] * number
    link_s, asked = now_s, number  # the groups from `asked` on have been asked for again

    def gather_until(first: int, from_s: float) -> None:
        nonlocal link_s, asked
        while asked > max(0, first):
            asked -= 1
            if reshard[asked]:
                start_s = max(link_s, from_s)
                link_s = start_s + groups[asked].gather_s
                again[asked] = (start_s, link_s)

    for place in reversed(range(number)):
        gather_until(place, now_s)
        gathered, buffered_s = again[place], sent[place + 2][1] if place + 2 < number else 0.0
        start_s = max(now_s, gathered[1] if gathered else 0.0, buffered_s)
        gather_until(place - backward_prefetch, start_s)
        now_s = start_s + groups[place].backward_s
        backward[place] = (start_s, now_s)
        start_s = max(link_s, now_s)
        link_s = start_s + groups[place].send_s
        sent[place] = (start_s, link_s)
    sizes, names = [group.num_bytes for group in groups], tuple(group.names for group in groups)
    memory = memory_of(sizes, reshard, forward_prefetch, backward_prefetch, workers, states)
    return FsdpStep(names, tuple(gathers), tuple(forward), tuple(again), tuple(backward), tuple(sent), memory)


def memory_of(
    sizes: Sequence[int],
    reshard: Sequence[bool],
    forward_prefetch: int,
    backward_prefetch: int,
    workers: int,
    states: int,
) -> int:
    """Return the most bytes a rank holds of parameters, gradients and the optimizer's state; activations come on top.

    Its share of everything. Besides, in the forward pass: groups that are kept, the one that computes twice (torch
    holds what was gathered until the next group is copied out of it), and those that are prefetched. In the backward
    pass: groups that are kept, those prefetched again, the one that computes, its gradients, a copy of these to send,
    and that of the group before.
    """
    share = -(-sum(sizes) * (2 + states) // workers)
    kept, most = 0, 0
    for place, size in enumerate(sizes):
        ahead = sum(sizes[place + 1 : place + 1 + forward_prefetch])
        most = max(most, kept + 2 * size + ahead)
        kept += 0 if reshard[place] else size
    for place in reversed(range(len(sizes))):
        size, first = sizes[place], max(0, place - backward_prefetch)
        ahead = sum(one for one, is_gone in zip(sizes[first:place], reshard[first:place], strict=True) if is_gone)
        before = sizes[place + 1] if place + 1 < len(sizes) else 0
        kept -= 0 if reshard[place] else size
        most = max(most, kept + ahead + 3 * size + before)
    return share + most


def fsdp_lower_bound_s(trace: ModelTrace, cost: Cost) -> float:
    """Return a time below which no plan's step is, with any groups, prefetching and resharding.

    Gathers of the first units, through any of them, end before that one computes, and what follows it is computed
    then; gradients of units up to any one are sent after the backward pass of all behind it and its own.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "cba"))
    >>> fsdp_lower_bound_s(trace, LinearCost(workers=2, startup_s=2.0, per_byte_s=0.2))
    13.0
    """
    reduce_scatter, all_gather = sharded_cost(cost)
    units = units_of(trace)
    forward_s, left_s, gathered = 0.0, sum(unit.forward_s for unit in units), 0
    for unit in units:
        gathered += unit.num_bytes
        forward_s = max(forward_s, cheapest_s(all_gather, gathered) + left_s)
        left_s -= unit.forward_s
    backward_s, done_s, rest = 0.0, 0.0, sum(unit.num_bytes for unit in units)
    for unit in reversed(units):
        done_s += unit.backward_s
        backward_s = max(backward_s, done_s + cheapest_s(reduce_scatter, rest))
        rest -= unit.num_bytes
    return forward_s + backward_s
