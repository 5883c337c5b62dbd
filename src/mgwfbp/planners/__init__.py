"""Planners: a trace and a cost in, a plan out.

A planner is a function ``(trace, cost) -> MergePlan``; adding one is writing it and naming it in `PLANNERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.planners.fixed import plan_bucket, plan_single, plan_wfbp
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.published import plan_mgwfbp
from mgwfbp.ranges import predict_range
from mgwfbp.timeline import lower_bound_s, predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = [
    "PLANNERS",
    "Planner",
    "find_plan",
    "plan_bucket",
    "plan_mgwfbp",
    "plan_optimal",
    "plan_single",
    "plan_wfbp",
    "planner_of",
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


def planner_of(name: str) -> Planner:
    """Return a planner by its name: one of `PLANNERS`, or a name that strategies have for one.

    ``ddp`` is ``bucket``: torch's own sizes. ``bucket-5`` fills buckets of 5 MiB, the first one too, as torch does with
    ``bucket_cap_mb=5``.

    >>> planner_of("ddp") is PLANNERS["bucket"]
    True
    """
    if name == "ddp":
        return plan_bucket
    if isinstance(name, str) and name.startswith("bucket-"):
        try:
            size_bytes = int(float(name.removeprefix("bucket-")) * 2**20)
        except (ValueError, OverflowError):
            size_bytes = 0
        if size_bytes > 0:
            return partial(plan_bucket, first_bucket_bytes=size_bytes, bucket_bytes=size_bytes)
    if name not in PLANNERS:
        raise PlanError(
            f"planner {quote(name)} is unknown, expected one of {', '.join(PLANNERS)} or bucket-N for N MiB"
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
    timeline = predict(trace, cost, plan)
    bound_s = lower_bound_s(trace, cost)
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
    return replace(plan, predicted=predicted)
