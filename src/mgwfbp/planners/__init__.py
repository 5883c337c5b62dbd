"""Planners: a trace and a cost in, a plan out.

A planner is a function ``(trace, cost) -> MergePlan``; adding one is writing it and naming it in `PLANNERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mgwfbp.bounds import lower_bound_s, sharded_lower_bound_s
from mgwfbp.cost import Cost
from mgwfbp.costs import cheaper_cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.planners.cautious import plan_cautiously
from mgwfbp.planners.fixed import plan_bucket, plan_single, plan_wfbp
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.published import plan_mgwfbp
from mgwfbp.planners.sharded import SHARDED, plan_sharded
from mgwfbp.planners.wire import DEFAULT_TOLERANCE, plan_wire, wire_planner_name
from mgwfbp.ranges import predict_range
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = [
    "PLANNERS",
    "SHARDED",
    "Planner",
    "find_plan",
    "find_sharded_plan",
    "find_wire_plan",
    "plan_bucket",
    "plan_cautiously",
    "plan_mgwfbp",
    "plan_optimal",
    "plan_sharded",
    "plan_single",
    "plan_wfbp",
    "plan_wire",
    "planner_of",
    "wire_planner_name",
]

Planner = Callable[[ModelTrace, Cost], MergePlan]

PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "wfbp": plan_wfbp,
        "single": plan_single,
        "bucket": plan_bucket,
        "mgwfbp": plan_mgwfbp,
        "optimal": plan_optimal,
    }
)
# Equal to one of the others, but in some cases: not in lists of all planners.
_ALSO: Mapping[str, Planner] = MappingProxyType({"ddp": plan_bucket, "cautious": plan_cautiously})


def planner_of(name: str) -> Planner:
    """Return a planner by its name: one of `PLANNERS`, ``cautious``, or a name that strategies have for one.

    ``cautious`` is `plan_cautiously`, equal to ``optimal`` for a cost that does not know how far it may be off. ``ddp``
    is ``bucket``: torch's own sizes. ``bucket-5`` fills buckets of 5 MiB, the first one too, as torch does with
    ``bucket_cap_mb=5``.

    >>> planner_of("ddp") is PLANNERS["bucket"]
    True
    """
    if name in _ALSO:
        return _ALSO[name]
    if isinstance(name, str) and name.startswith("bucket-"):
        try:
            size_bytes = int(float(name.removeprefix("bucket-")) * 2**20)
        except (ValueError, OverflowError):
            size_bytes = 0
        if size_bytes > 0:
            return partial(plan_bucket, first_bucket_bytes=size_bytes, bucket_bytes=size_bytes)
    if name not in PLANNERS:
        raise PlanError(
            f"planner {quote(name)} is unknown, expected one of {', '.join(PLANNERS)}, cautious or bucket-N for N MiB"
        )
    return PLANNERS[name]


def find_plan(trace: ModelTrace, cost: Cost, planner: str | Planner = "optimal") -> MergePlan:
    """Make a plan and write into it what it promises.

    ``plan.predicted`` holds ``iteration_s``, ``exposed_s``, ``lower_bound_s`` (which no plan can undercut) and ``gap``
    (how far above it the plan is, as a fraction); and where it is known how far the cost may be off ``low_s`` and
    ``high_s``, between which the step is expected.

    Args:
        trace: when each gradient is ready.
        cost: what a message takes.
        planner: a name that `planner_of` knows, or a function of the two.

    Raises:
        PlanError: where the planner is unknown.
        CostError: where the cost gives no numbers that can be planned with.
    """
    plan = (planner if callable(planner) else planner_of(planner))(trace, cost)
    bound_s = lower_bound_s(trace, cheaper_cost(cost) if plan.wire else cost)
    return replace(plan, predicted=_promise(trace, cost, plan, bound_s))


def find_wire_plan(
    trace: ModelTrace, cost: Cost, wire: str = "bfloat16", *, tolerance: float = DEFAULT_TOLERANCE
) -> MergePlan:
    """Make a plan in which messages may travel in low precision, `plan_wire`, and write into it what it promises.

    ``plan.predicted`` holds what `find_plan` writes, with a ``lower_bound_s`` that no plan of either precision can
    undercut; ``low_bytes`` and ``low_bytes_bound`` of `plan_wire`; and ``sent_bytes``, the bytes of a set of gradients
    as they travel.

    Args:
        trace: when each gradient is ready.
        cost: what a message takes; in low precision as `low_precision_cost` has it.
        wire: the low precision, one of `WIRES`.
        tolerance: which part longer than the shortest the step may be.

    Raises:
        PlanError: where there is no such precision, or the tolerance is no number of 0 or more.
        CostError: where the cost gives no numbers that can be planned with.
    """
    plan = plan_wire(trace, cost, wire, tolerance=tolerance)
    promise = _promise(trace, cost, plan, lower_bound_s(trace, cheaper_cost(cost)))
    sent_bytes = trace.grad_bytes - plan.predicted["low_bytes"] // 2
    return replace(plan, predicted={**promise, **plan.predicted, "sent_bytes": sent_bytes})


def find_sharded_plan(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Make a plan for a sharded optimizer, `plan_sharded`, and write into it what it promises.

    ``plan.predicted`` holds what `find_plan` writes, where ``iteration_s`` is the period of training, ``exposed_s``
    counts what the forward pass waits for gathers, and ``lower_bound_s`` is `sharded_lower_bound_s`; and
    ``all_reduced_bytes`` and ``iteration_bound_s`` of `plan_sharded`.

    Args:
        trace: when each gradient is ready, and what its layer takes in the forward pass.
        cost: what an all-reduce takes, and its halves as `sharded_cost` has them.

    Raises:
        CostError: where the cost gives no numbers that can be planned with.
    """
    plan = plan_sharded(trace, cost)
    promise = _promise(trace, cost, plan, sharded_lower_bound_s(trace, cost))
    return replace(plan, predicted={**promise, **plan.predicted})


def _promise(trace: ModelTrace, cost: Cost, plan: MergePlan, bound_s: float) -> dict[str, Any]:
    """Return what a plan says of its step."""
    timeline = predict(trace, cost, plan)
    predicted = {
        "workers": cost.workers,
        "iteration_s": timeline.iteration_s,
        "exposed_s": timeline.exposed_s,
        "lower_bound_s": bound_s,
        "gap": max(0.0, timeline.iteration_s / bound_s - 1) if bound_s else 0.0,
    }
    between_s = predict_range(trace, cost, plan)
    if between_s is not None:
        predicted["low_s"], predicted["high_s"] = between_s
    return predicted
