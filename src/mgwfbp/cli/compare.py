"""``mgwfbp compare``: every planner on one line each."""

import json
import math
from typing import Annotated, Any

import typer

from mgwfbp.cli.engine import Engines, read_engines, talk_of_halves
from mgwfbp.cli.networks import CostOrNetwork, Inside, Links, NetworkWorkers, PerNode, read_cost, read_cost_with_halves
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    TraceFile,
    planners,
)
from mgwfbp.cli.output import print_table, talk
from mgwfbp.cli.wire import Wire, WireCostFile, read_low_cost, talk_of_low_cost, with_low_cost
from mgwfbp.cost import Cost
from mgwfbp.planners import Planner, find_plan, find_sharded_plan, find_wire_plan
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_bytes, format_range, format_seconds

__all__ = ["compare", "comparison", "print_comparison"]


def compare(
    trace: TraceFile,
    cost: CostOrNetwork,
    workers: NetworkWorkers = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    wire: Wire = None,
    wire_cost: WireCostFile = None,
    engine: Engines = "ddp",
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Compare the steps that all planners' plans would give."""
    chosen, is_sharded = planners(bucket_mb, first_bucket_mb), read_engines(engine, wire)
    model, low, links = load_trace(trace), read_low_cost(wire, wire_cost), Links(per_node, inside)
    network = (
        read_cost_with_halves(cost, workers, links)
        if is_sharded
        else with_low_cost(read_cost(cost, workers, links), low)
    )
    talk_of_low_cost(wire, wire_cost)
    rows = comparison(model, network, chosen, wire, is_sharded=is_sharded)
    if is_sharded:
        talk_of_halves(model, [network])
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    talk(repr(model))
    talk(repr(network))
    print_comparison(rows)


def comparison(
    trace: ModelTrace, cost: Cost, chosen: dict[str, Planner], wire: str | None = None, *, is_sharded: bool = False
) -> list[dict[str, Any]]:
    """Return one row per planner: what its plan would give.

    And with ``wire`` one of the plan of both precisions; if ``is_sharded`` one of the plan for a sharded optimizer.
    """
    plans = {name: find_plan(trace, cost, planner) for name, planner in chosen.items()}
    in_full = {}
    if is_sharded:
        plan = find_sharded_plan(trace, cost)
        plans[plan.planner] = plan
        in_full = {"num_gathers": 0, "all_reduced_bytes": trace.grad_bytes}
    if wire is not None:
        plan = find_wire_plan(trace, cost, wire)
        plans[plan.planner] = plan
        in_full = {"low_bytes": 0, "low_bytes_bound": 0, "sent_bytes": trace.grad_bytes}
    rows = []
    for name, plan in plans.items():
        timeline = predict(trace, cost, plan)
        rows.append(
            {
                "planner": name,
                "num_groups": plan.num_groups,
                **in_full,
                **plan.predicted,
                **({"num_gathers": len(plan.gathers)} if is_sharded else {}),
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
    has_wire, has_gathers = "sent_bytes" in rows[0], "num_gathers" in rows[0]
    print_table(
        (
            *("planner", "messages", "step"),
            *(("between",) if has_range else ()),
            *("exposed", "vs bucket", "above bound", "efficiency", "case"),
            *(("sent", "low precision") if has_wire else ()),
            *(("bound", "gathers", "all-reduced") if has_gathers else ()),
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
                *((format_bytes(row["sent_bytes"]), _low_share(row)) if has_wire else ()),
                *(_gather_cells(row) if has_gathers else ()),
            )
            for row in rows
        ],
    )


def _gather_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return below what no plan of the row's kind can be, how many gathers there are, and what is not sharded."""
    return format_seconds(row["lower_bound_s"]), str(row["num_gathers"]), format_bytes(row["all_reduced_bytes"])


def _low_share(row: dict[str, Any]) -> str:
    """Return which part of the gradients' bytes travels in low precision, of which half is sent."""
    all_bytes = row["sent_bytes"] + row["low_bytes"] / 2
    return f"{row['low_bytes'] / all_bytes if all_bytes else 0:.0%}"
