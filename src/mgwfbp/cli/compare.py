"""``mgwfbp compare``: every planner on one line each."""

import json
import math
from functools import partial
from typing import Annotated, Any

import typer

from mgwfbp.cli.engine import Engines, read_engines, talk_of_halves
from mgwfbp.cli.fsdp import (
    FSDP2,
    FsdpPlanners,
    MemoryLimit,
    ParamDtype,
    ReduceDtype,
    States,
    fastest_words,
    fsdp_rows,
    memory_words,
    read_options,
    with_memory,
)
from mgwfbp.cli.networks import CostOrNetwork, Inside, Links, NetworkWorkers, PerNode, read_cost, read_cost_with_halves
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    TraceFile,
    planners,
)
from mgwfbp.cli.output import print_line, print_table, talk, talk_of_padding
from mgwfbp.cli.wire import (
    Wire,
    WireCostFile,
    WireTolerance,
    check_tolerance,
    read_low_cost,
    talk_of_low_cost,
    with_low_cost,
)
from mgwfbp.cost import Cost
from mgwfbp.costs import WireCost
from mgwfbp.memory import STATES
from mgwfbp.planners import Planner, find_plan, find_sharded_plan, find_wire_plan
from mgwfbp.planners.wire import DEFAULT_TOLERANCE
from mgwfbp.ranges import RANGE_WORDS, spread_of
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
    wire_tolerance: WireTolerance = None,
    engine: Engines = "ddp",
    memory_limit: MemoryLimit = None,
    param_dtype: ParamDtype = "float32",
    reduce_dtype: ReduceDtype = None,
    states: States = STATES,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Compare the steps that all planners' plans would give."""
    chosen, engines = planners(bucket_mb, first_bucket_mb), read_engines(engine, wire)
    options = read_options(engine, memory_limit, param_dtype, reduce_dtype, states)
    fsdp = FsdpPlanners(options)
    model, low, links = load_trace(trace), read_low_cost(wire, wire_cost), Links(per_node, inside)
    network = (
        read_cost_with_halves(cost, workers, links)
        if len(engines) > 1
        else with_low_cost(read_cost(cost, workers, links, wire), low)
    )
    talk_of_low_cost(wire, is_known=isinstance(network, WireCost))
    check_tolerance(wire, wire_tolerance)
    tolerance = DEFAULT_TOLERANCE if wire_tolerance is None else wire_tolerance
    both = partial(find_wire_plan, wire=wire, tolerance=tolerance) if wire is not None else None
    rows = comparison(model, network, chosen, both, is_sharded="sharded" in engines)
    if FSDP2 in engines:
        rows += fsdp_rows(model, network, fsdp, options.precision)
        rows = [with_memory(row, model, network.workers, options) for row in rows]
    talk_of_padding(network)
    if len(engines) > 1:
        talk_of_halves(model, [network])
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        fsdp.check_any()
        return
    talk(repr(model))
    talk(repr(network))
    if FSDP2 in engines:
        options.talk()
    print_comparison(rows, options.limit)
    if any("low_s" in row for row in rows):
        talk(f"between: {RANGE_WORDS}")
    if FSDP2 in engines:
        print_line(fastest_words(rows, options.limit))
        fsdp.check_any()


def comparison(
    trace: ModelTrace, cost: Cost, chosen: dict[str, Planner], both: Planner | None = None, *, is_sharded: bool = False
) -> list[dict[str, Any]]:
    """Return one row per planner: what its plan would give.

    And where the cost knows how far it may be off one of ``cautious``; one of the plan of both precisions, where a
    planner of such is given; if ``is_sharded`` one of the plan for a sharded optimizer.
    """
    plans = {name: find_plan(trace, cost, planner) for name, planner in chosen.items()}
    if any(spread_of(cost) or ()):
        plans["cautious"] = find_plan(trace, cost, "cautious")
    in_full = {}
    if is_sharded:
        plan = find_sharded_plan(trace, cost)
        plans[plan.planner] = plan
        in_full = {"num_gathers": 0, "all_reduced_bytes": trace.grad_bytes}
    if both is not None:
        plan = both(trace, cost)
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
                "taken_s": timeline.taken_s if timeline.takes else 0.0,
                "ratio": timeline.ratio if math.isfinite(timeline.ratio) else None,
                "speedup": timeline.speedup,
                "efficiency": timeline.efficiency,
                "case": timeline.case,
            }
        )
    return rows


def print_comparison(rows: list[dict[str, Any]], limit: int | None = None) -> None:
    """Print the rows of `comparison` as a table; what needs more memory than the limit is marked."""
    by_planner = {row["planner"]: row for row in rows}
    default_s = by_planner["bucket"]["iteration_s"]
    has_range, takes = any("low_s" in row for row in rows), any(row.get("taken_s") for row in rows)
    has_wire, has_gathers = "sent_bytes" in rows[0], "num_gathers" in rows[-1]
    has_memory, has_bits = "memory_bytes" in rows[0], "bits" in rows[0]
    print_table(
        (
            *("planner", "messages", "step"),
            *(("between",) if has_range else ()),
            "exposed",
            *(("taken",) if takes else ()),
            *("vs bucket", "above bound", "efficiency", "case"),
            *(("sent", "low precision") if has_wire else ()),
            *(("bound", "gathers", "all-reduced") if has_gathers else ()),
            *(("memory a rank",) if has_memory else ()),
            *(("bits",) if has_bits else ()),
        ),
        [
            (
                row["planner"],
                str(row["num_groups"]),
                format_seconds(row["iteration_s"]),
                *((_range_cell(row),) if has_range else ()),
                format_seconds(row["exposed_s"]),
                *((format_seconds(row.get("taken_s", 0.0)),) if takes else ()),
                f"{default_s / row['iteration_s']:.2f}x" if row["iteration_s"] else "-",
                f"{row['gap']:.1%}",
                f"{row['efficiency']:.0%}",
                "-" if row["case"] is None else str(row["case"]),
                *((format_bytes(row["sent_bytes"]), _low_share(row)) if has_wire else ()),
                *(_gather_cells(row) if has_gathers else ()),
                *((memory_words(row["memory_bytes"], limit),) if has_memory else ()),
                *((row["bits"],) if has_bits else ()),
            )
            for row in rows
        ],
    )


def _gather_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return below what no plan of the row's kind can be, how many gathers there are, and what is not sharded."""
    all_reduced = format_bytes(row["all_reduced_bytes"]) if "all_reduced_bytes" in row else "all"
    return format_seconds(row["lower_bound_s"]), str(row.get("num_gathers", 0)), all_reduced


def _range_cell(row: dict[str, Any]) -> str:
    """Return what a prediction may be off by, where that is known; of FSDP2 it is not."""
    return format_range(row["low_s"], row["high_s"]) if "low_s" in row else "-"


def _low_share(row: dict[str, Any]) -> str:
    """Return which part of the gradients' bytes travels in low precision, of which half is sent."""
    all_bytes = row["sent_bytes"] + row["low_bytes"] / 2
    return f"{row['low_bytes'] / all_bytes if all_bytes else 0:.0%}"
