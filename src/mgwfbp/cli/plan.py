"""``mgwfbp plan``: write a plan."""

from mgwfbp.cli.networks import CostOrNetwork, Inside, Links, NetworkWorkers, PerNode, read_cost
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    Output,
    PlannerName,
    TraceFile,
    find_planner,
    planners,
)
from mgwfbp.cli.output import check_not_input, talk, write_record
from mgwfbp.planners import find_plan
from mgwfbp.trace import load_trace
from mgwfbp.units import format_seconds

__all__ = ["plan"]


def plan(
    trace: TraceFile,
    cost: CostOrNetwork,
    workers: NetworkWorkers = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    planner: PlannerName = "optimal",
    output: Output = None,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Find which gradients to send together and write the plan."""
    check_not_input(output, [trace, cost])
    chosen = find_planner(planner, planners(bucket_mb, first_bucket_mb))
    found = find_plan(load_trace(trace), read_cost(cost, workers, Links(per_node, inside)), chosen)
    write_record(found, output)
    predicted = found.predicted
    talk(
        f"{found!r}: step {format_seconds(predicted['iteration_s'])}, {format_seconds(predicted['exposed_s'])} of it "
        f"exposed communication; no plan can be below {format_seconds(predicted['lower_bound_s'])}"
    )
