"""``mgwfbp compare``: every planner on one line each."""

import json
import math
from typing import Annotated, Any

import typer

from mgwfbp.cli.networks import CostOrNetwork, Inside, Links, NetworkWorkers, PerNode, read_cost
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    TraceFile,
    planners,
)
from mgwfbp.cli.output import print_table, talk
from mgwfbp.cost import Cost
from mgwfbp.planners import Planner, find_plan
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_range, format_seconds

__all__ = ["compare", "comparison", "print_comparison"]


def compare(
    trace: TraceFile,
    cost: CostOrNetwork,
    workers: NetworkWorkers = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Compare the steps that all planners' plans would give."""
    chosen = planners(bucket_mb, first_bucket_mb)
    model, network = load_trace(trace), read_cost(cost, workers, Links(per_node, inside))
    rows = comparison(model, network, chosen)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    talk(repr(model))
    talk(repr(network))
    print_comparison(rows)


def comparison(trace: ModelTrace, cost: Cost, chosen: dict[str, Planner]) -> list[dict[str, Any]]:
    """Return one row per planner: what its plan would give."""
    rows = []
    for name, planner in chosen.items():
        plan = find_plan(trace, cost, planner)
        timeline = predict(trace, cost, plan)
        rows.append(
            {
                "planner": name,
                "num_groups": plan.num_groups,
                **plan.predicted,
                "communication_s": timeline.communication_s,
                "ratio": timeline.ratio if math.isfinite(timeline.ratio) else None,
                "speedup": timeline.speedup,
                "efficiency": timeline.efficiency,
                "case": timeline.case,
            }
        )
    return rows


def print_comparison(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `comparison` as a table."""
    by_planner = {row["planner"]: row for row in rows}
    default_s = by_planner["bucket"]["iteration_s"]
    has_range = all("low_s" in row for row in rows)
    print_table(
        (
            *("planner", "messages", "step"),
            *(("between",) if has_range else ()),
            *("exposed", "vs bucket", "above bound", "efficiency", "case"),
        ),
        [
            (
                row["planner"],
                str(row["num_groups"]),
                format_seconds(row["iteration_s"]),
                *((format_range(row["low_s"], row["high_s"]),) if has_range else ()),
                format_seconds(row["exposed_s"]),
                f"{default_s / row['iteration_s']:.2f}x" if row["iteration_s"] else "-",
                f"{row['gap']:.1%}",
                f"{row['efficiency']:.0%}",
                str(row["case"]),
            )
            for row in rows
        ],
    )
