"""Planners: a trace and a cost in, a plan out.

A planner is a function ``(trace, cost) -> MergePlan``; adding one is writing it and naming it in `PLANNERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.planners.fixed import plan_bucket, plan_single, plan_wfbp
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.published import plan_mgwfbp
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


def find_plan(trace: ModelTrace, cost: Cost, planner: str | Planner = "optimal") -> MergePlan:
    """Make a plan and write into it what it promises.

    ``plan.predicted`` holds ``iteration_s``, ``exposed_s``, ``lower_bound_s`` (which no plan can undercut) and ``gap``
    (how far above it the plan is, as a fraction). For other bucket sizes pass a function:
    ``functools.partial(plan_bucket, bucket_bytes=5 * 2**20)``.
    """
    if not callable(planner):
        if planner not in PLANNERS:
            raise PlanError(f"planner {quote(planner)} is unknown, expected one of {', '.join(PLANNERS)}")
        planner = PLANNERS[planner]
    plan = planner(trace, cost)
    timeline = predict(trace, cost, plan)
    bound_s = lower_bound_s(trace, cost)
    predicted = {
        "workers": cost.workers,
        "iteration_s": timeline.iteration_s,
        "exposed_s": timeline.exposed_s,
        "lower_bound_s": bound_s,
        "gap": max(0.0, timeline.iteration_s / bound_s - 1) if bound_s else 0.0,
    }
    return replace(plan, predicted=predicted)
