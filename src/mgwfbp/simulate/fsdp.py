"""FSDP2 among the points of a sweep: its step on every cluster, number of workers and scale, planned anew for each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.costs import part_by_part
from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, precision_of, predict_fsdp, reported_bound_s
from mgwfbp.fsdp_step import FsdpStep
from mgwfbp.simulate.limits import find_limit
from mgwfbp.simulate.sweep import Grid, SweepRow
from mgwfbp.trace import ModelTrace

__all__ = ["FsdpPlanner", "sweep_fsdp"]

FsdpPlanner = Callable[[ModelTrace, Cost], FsdpPlan | None]  # None: there is no plan for this point


def sweep_fsdp(trace: ModelTrace, grid: Grid, planners: Mapping[str, FsdpPlanner]) -> Iterator[SweepRow]:
    """Predict FSDP2's step at all points of a grid, by every planner; one undisturbed step, since all are alike."""
    for scale in grid.scales:
        scaled = trace.scaled(scale)
        for workers in grid.workers:
            for source in grid.sources:
                cost = source.cost(workers)
                for name, planner in planners.items():
                    plan = planner(scaled, cost)
                    if plan is not None:
                        yield _row((source.name, scale, workers, name), scaled, cost, plan)


def _row(point: tuple[str, float, int, str], trace: ModelTrace, cost: Cost, plan: FsdpPlan) -> SweepRow:
    precision = precision_of(plan)
    step, compute_s = predict_fsdp(trace, cost, plan, precision=precision), trace.compute_s
    free, bound_s = part_by_part(cost, _without_startup), fsdp_lower_bound_s(trace, cost, precision=precision)
    bandwidth_s = fsdp_lower_bound_s(trace, free, precision=precision)
    free_s = predict_fsdp(trace, free, plan, precision=precision).iteration_s
    efficiency = compute_s / step.iteration_s if step.iteration_s else 1.0
    return SweepRow(
        *point,
        num_groups=len(step.groups),
        iteration_s=step.iteration_s,
        iteration_std_s=0.0,
        iteration_p95_s=step.iteration_s,
        compute_s=compute_s,
        exposed_s=step.iteration_s - compute_s,
        speedup=point[2] * efficiency,
        efficiency=efficiency,
        bandwidth_bound_s=bandwidth_s,
        limit=find_limit(step.iteration_s, compute_s, bandwidth_s, without_startup_s=free_s),
        steps=1,
        num_gathers=num_gathers(step),
        all_reduced_bytes=0,
        lower_bound_s=reported_bound_s(plan.predicted.get("lower_bound_s", bound_s), step.iteration_s),
        memory_bytes=step.memory_bytes,
    )


def num_gathers(step: FsdpStep) -> int:
    """Return how often groups are gathered in a step, in both passes."""
    return len(step.gathers_s) + sum(again is not None for again in step.gathers_again_s)


def _without_startup(cost: LinearCost | PiecewiseCost) -> LinearCost | PiecewiseCost:
    """Return what bytes cost where a message itself is free."""
    if isinstance(cost, LinearCost):
        return replace(cost, startup_s=0.0)
    return replace(cost, points=tuple((size, time_s - cost(0)) for size, time_s in cost.points))
