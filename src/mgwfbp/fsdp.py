"""FSDP2's way to train: which modules' parameters travel together, and how a step then runs: `FsdpPlan`.

Parameters are sharded, and all-gathered group by group before a group computes; gradients are reduce-scattered when a
group's backward pass has ended. Groups are runs of modules in forward order; what stands outside of all modules in
groups is the root's: it is gathered first, and stays. [Note: how FSDP2 runs a step] is in `mgwfbp.fsdp_step`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import floor
from typing import Any, ClassVar, Self

from mgwfbp.cost import Cost
from mgwfbp.costs import cheapest_s, sharded_cost
from mgwfbp.errors import PlanError
from mgwfbp.fsdp_step import FsdpStep, Group, lay_out
from mgwfbp.fsdp_units import ROOT, idle_of, units_of, whole_units
from mgwfbp.memory import AS_STORED, Precision, Schedule, Shares
from mgwfbp.record import (
    Fields,
    Record,
    check_count,
    check_free_form,
    check_items,
    check_real,
    check_text,
    first_repeated,
)
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural, quote

__all__ = [
    "FsdpPlan",
    "at_root_of",
    "bound_words",
    "fsdp_lower_bound_s",
    "precision_of",
    "predict_fsdp",
    "reported_bound_s",
    "shares_of",
]

# Times that differ by less are equal.
ROUNDING = 1 + 1e-12


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
    root: tuple[str, ...] = ()  # modules of no group: gathered first with the rest of the model, and kept
    idle: tuple[str, ...] = ()  # modules that no step uses: sharded each by itself, and not asked for ahead

    def __post_init__(self) -> None:
        check_text(self.model, "model", PlanError)
        listed = check_items(self.groups, object, "groups", PlanError)
        groups = tuple(check_items(one, str, f"groups[{place}]", PlanError) for place, one in enumerate(listed))
        for place, group in enumerate(groups):
            if not group:
                raise PlanError(f"groups[{place}]: empty, expected at least one module")
            for name in group:
                check_text(name, f"groups[{place}]: a module's name", PlanError)
        root, idle = (check_items(getattr(self, name), str, name, PlanError) for name in ("root", "idle"))
        repeated = first_repeated(chain(*groups, root, idle))
        if repeated is not None:
            raise PlanError(f"groups: {quote(repeated)} stands twice, expected every module once")
        reshard = check_items(self.reshard, bool, "reshard", PlanError)
        if len(reshard) != len(groups):
            raise PlanError(f"reshard has {len(reshard)} entries, expected one for each of {len(groups)} groups")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "idle", idle)
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
            **({"root": list(self.root)} if self.root else {}),
            **({"idle": list(self.idle)} if self.idle else {}),
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
            tuple(fields.items("root")) if "root" in fields else (),
            tuple(fields.items("idle")) if "idle" in fields else (),
        )

    def check_covers(self, units: Iterable[str]) -> None:
        """Raise unless the plan holds exactly these units, in whatever order."""
        mine, theirs = set(chain(*self.groups, self.root, self.idle)), set(units)
        if mine != theirs:
            differing = min(mine ^ theirs)
            where = "the plan only" if differing in mine else "the model only"
            raise PlanError(
                f"the plan for {quote(self.model)} has {plural(len(mine), 'module')}, the model {len(theirs)} "
                f"({quote(differing)} is in {where}): make a new one with `mgwfbp plan --engine fsdp2`"
            )


def predict_fsdp(trace: ModelTrace, cost: Cost, plan: FsdpPlan, *, precision: Precision = AS_STORED) -> FsdpStep:
    """Return what a step takes and how much memory, see [Note: how FSDP2 runs a step].

    Args:
        trace: when each gradient is ready, and what its layer takes in the forward pass.
        cost: what a reduce-scatter and an all-gather take by the bytes that travel, as `sharded_cost` has it.
        plan: the groups.
        precision: how many bytes are gathered, sent and kept for each byte of a parameter.

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
    whole = whole_units(trace)
    plan.check_covers(set(whole) - {ROOT})
    units = units_of(trace, plan.root, plan.idle)
    place_of = {unit.name: place for place, unit in enumerate(units)}
    root = [(ROOT,)] if units[0].name == ROOT else []
    groups = (*root, *plan.groups)
    order = [place_of[name] for group in groups for name in group]
    if order != sorted(order):
        late = next(units[one].name for one, other in pairwise(order) if one > other)
        raise PlanError(f"groups: {quote(late)} stands before a module that the forward pass uses first")
    merged = [Group.of([units[place_of[name]] for name in group], cost, precision) for group in groups]
    reshard = (*(False for _ in root), *plan.reshard)
    schedule = Schedule(reshard, plan.forward_prefetch, plan.backward_prefetch, bool(root))
    return lay_out(merged, schedule, shares_of(trace, cost, precision, plan.idle))


def precision_of(plan: FsdpPlan) -> Precision:
    """Return the precision that a plan was made for.

    >>> precision_of(FsdpPlan("toy", (("a",),), (True,)))
    Precision(gather=1.0, reduce=1.0, states=2, kept=1.0)
    """
    said = plan.predicted.get("precision", {})
    known = {name: said[name] for name in Precision._fields if isinstance(said, Mapping) and name in said}
    for name, value in known.items():
        check_real(value, f"predicted: precision: {name}", PlanError)
    return AS_STORED._replace(**known)


def at_root_of(plan: FsdpPlan) -> tuple[str, ...]:
    """Return the units that must be the root's, which a planner may have added others to; its root where it says none.

    >>> at_root_of(FsdpPlan("toy", (("a",),), (True,), predicted={"at_root": ["b"]}, root=("b", "c")))
    ('b',)
    """
    return check_items(plan.predicted.get("at_root", plan.root), str, "predicted: at_root", PlanError)


def shares_of(trace: ModelTrace, cost: Cost, precision: Precision, idle: Iterable[str]) -> Shares:
    """Return what each rank keeps a part of, modules that no step uses among it."""
    whole = whole_units(trace)
    idle_bytes = sum(whole[name].num_bytes for name in idle)
    return Shares(cost.workers, precision.states, idle_bytes, precision.kept)


def fsdp_lower_bound_s(
    trace: ModelTrace, cost: Cost, *, precision: Precision = AS_STORED, memory_limit: int | None = None
) -> float:
    r"""Return a time below which no plan's step is, with any groups, prefetching and resharding, within a limit.

    With :math:`G_i, D_i` for what of the i-th unit is gathered and sent, :math:`f_i, b_i` for its passes, and
    :math:`T_g^*(M), T_s^*(M)` for the least time in which M bytes can be gathered and sent, however they are split
    (`cheapest_s`), a step takes at least

    .. math::
        \max_k \Big( T_g^*(\sum_{i \le k} G_i) + \sum_{i \ge k} f_i \Big)
        + \max_k \Big( \sum_{i \ge k} b_i + T_s^*(\sum_{i \le k} D_i) \Big)

    since a unit computes once all up to it are gathered, and gradients up to any one are sent behind all of the
    backward pass that comes before them. And all of it travels on one link, one message after another,

    .. math:: T_g^*(\sum G_i) + T_g^*(R) + T_s^*(\sum D_i)

    where R is gathered again: all of what is kept is held when the backward pass of the last unit begins, beside the
    share and its gradient, so that of a limit :math:`L` no more than :math:`L - share - D_K` is kept.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "cba"))
    >>> cost = LinearCost(workers=2, startup_s=2.0, per_byte_s=0.2)
    >>> fsdp_lower_bound_s(trace, cost)
    13.0
    >>> round(fsdp_lower_bound_s(trace.scaled(0.1), cost), 3)
    8.3
    >>> round(fsdp_lower_bound_s(trace.scaled(0.1), cost, memory_limit=90), 3)
    10.0
    """
    reduce_scatter, all_gather = sharded_cost(cost)
    idle = idle_of(trace)
    units = units_of(trace, idle=idle)
    groups = [Group.of([unit], cost, precision) for unit in units]
    forward_s, left_s, gathered = 0.0, sum(unit.forward_s for unit in units), 0
    for group in groups:
        gathered += group.sizes.gathered
        forward_s = max(forward_s, _least_s(all_gather, gathered) + left_s)
        left_s -= group.forward_s
    backward_s, done_s, sent = 0.0, 0.0, sum(group.sizes.sent for group in groups)
    rest = sent
    for group in reversed(groups):
        done_s += group.backward_s
        backward_s = max(backward_s, done_s + _least_s(reduce_scatter, rest))
        rest -= group.sizes.sent
    link_s = _least_s(all_gather, gathered) + _least_s(reduce_scatter, sent)
    if memory_limit is not None:
        shares = shares_of(trace, cost, precision, idle)
        again = _least_again(groups, memory_limit, shares)
        link_s += _least_s(all_gather, again)
    return max(forward_s + backward_s, link_s)


def _least_s(cost: Cost, num_bytes: int) -> float:
    """Return what so many bytes take at least; none need no message."""
    return cheapest_s(cost, num_bytes) if num_bytes else 0.0


def reported_bound_s(bound_s: float, step_s: float) -> float:
    """Return a bound that is no more than the step but for rounding; one that is wrong stays as it is, to be seen."""
    return step_s if step_s < bound_s <= step_s * ROUNDING else bound_s


def bound_words(predicted: Mapping[str, Any], plans: str = "no plan") -> str:
    """Say how near the best of these plans one is that a planner made.

    >>> bound_words({"lower_bound_s": 2.0, "exact": True}), bound_words({"lower_bound_s": 2.0, "exact": False})
    ('no plan is shorter', 'no plan can be below 2 s')
    """
    if predicted["exact"]:
        return f"{plans} is shorter"
    return f"{plans} can be below {format_seconds(predicted['lower_bound_s'])}"


def _least_again(groups: Sequence[Group], limit: int, shares: Shares) -> int:
    """Return how many bytes a plan that fits gathers again at least."""
    room = limit - shares.held(group.sizes for group in groups) - groups[-1].sizes.gradient
    again = sum(group.sizes.again for group in groups)
    return max(0, floor(again - room))
