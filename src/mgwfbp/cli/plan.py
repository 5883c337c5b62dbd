"""``mgwfbp plan``: write a plan."""

from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    CostFile,
    FirstBucketMb,
    Output,
    PlannerName,
    TraceFile,
    planners,
)
from mgwfbp.cli.output import talk, write_record
from mgwfbp.cost import load_cost
from mgwfbp.planners import find_plan
from mgwfbp.trace import load_trace
from mgwfbp.units import format_seconds

__all__ = ["plan"]


def plan(
    trace: TraceFile,
    cost: CostFile,
    planner: PlannerName = "optimal",
    output: Output = None,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Find which gradients to send together and write the plan."""
    chosen = planners(bucket_mb, first_bucket_mb)[planner]
    found = find_plan(load_trace(trace), load_cost(cost), chosen)
    write_record(found, output)
    predicted = found.predicted
    talk(
        f"{found!r}: step {format_seconds(predicted['iteration_s'])}, {format_seconds(predicted['exposed_s'])} of it "
        f"exposed communication; no plan can be below {format_seconds(predicted['lower_bound_s'])}"
    )
