"""``mgwfbp plan``: write a plan."""

import inspect
import json
from typing import Annotated, Literal

import typer

from mgwfbp.cli.engine import Engine, check_without_wire, talk_of_halves
from mgwfbp.cli.fsdp import FsdpOptions, MemoryLimit, ParamDtype, ReduceDtype, States, read_options
from mgwfbp.cli.networks import CostOrNetwork, Inside, Links, NetworkWorkers, PerNode, read_cost, read_cost_with_halves
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
from mgwfbp.cli.output import check_not_input, print_line, talk, talk_of_padding, write_record
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
from mgwfbp.files import write_text
from mgwfbp.fsdp import bound_words
from mgwfbp.memory import STATES
from mgwfbp.plan import MergePlan
from mgwfbp.planners import find_plan, find_sharded_plan, find_wire_plan
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.slack import TIE
from mgwfbp.planners.wire import DEFAULT_TOLERANCE
from mgwfbp.ranges import RANGE_WORDS
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_bytes, format_range, format_seconds

__all__ = ["plan"]


def plan(
    trace: TraceFile,
    cost: CostOrNetwork,
    workers: NetworkWorkers = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    planner: PlannerName = "optimal",
    engine: Engine = "ddp",
    output: Output = None,
    form: Annotated[
        Literal["json", "torch"],
        typer.Option("--format", help="plan.json, or the sizes that torch's own DDP takes as bucket_cap_mb_list."),
    ] = "json",
    wire: Wire = None,
    wire_cost: WireCostFile = None,
    wire_tolerance: WireTolerance = None,
    memory_limit: MemoryLimit = None,
    param_dtype: ParamDtype = "float32",
    reduce_dtype: ReduceDtype = None,
    states: States = STATES,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Find which gradients to send together and write the plan."""
    check_not_input(output, [trace, cost, *([wire_cost] if wire_cost else [])])
    chosen = find_planner(planner, planners(bucket_mb, first_bucket_mb))
    if wire and planner != "optimal":
        raise typer.BadParameter(f"planner {planner} sends messages as they are; give optimal", param_hint="--wire")
    if wire and form == "torch":
        raise typer.BadParameter("torch's DDP has one precision for all messages; give json", param_hint="--format")
    is_sharded = engine == "sharded"
    if engine != "ddp":
        check_without_wire(wire)
        if planner != "optimal":
            raise typer.BadParameter(f"planner {planner} knows no gathers; give optimal", param_hint="--engine")
        if form == "torch":
            raise typer.BadParameter("torch's DDP all-reduces all messages; give json", param_hint="--format")
    options = read_options(engine, memory_limit, param_dtype, reduce_dtype, states)
    model_trace, low, links = load_trace(trace), read_low_cost(wire, wire_cost), Links(per_node, inside)
    check_tolerance(wire, wire_tolerance)
    tolerance = DEFAULT_TOLERANCE if wire_tolerance is None else wire_tolerance
    if engine == "fsdp2":
        _plan_fsdp(model_trace, read_cost_with_halves(cost, workers, links), options, output)
        return
    if is_sharded:
        halves = read_cost_with_halves(cost, workers, links)
        talk_of_padding(halves)
        found = find_sharded_plan(model_trace, halves)
        talk_of_halves(model_trace, [halves])
    else:
        both = with_low_cost(read_cost(cost, workers, links, wire), low)
        talk_of_low_cost(wire, is_known=isinstance(both, WireCost))
        talk_of_padding(both)
        if wire:
            found = find_wire_plan(model_trace, both, wire, tolerance=tolerance)
        else:
            found = find_plan(model_trace, both, chosen)
    if form == "torch":
        _write_caps(found.bucket_cap_mb_list(model_trace), output)
    else:
        write_record(found, output)
    predicted = found.predicted
    between = ""
    if "low_s" in predicted:
        between = f" ({format_range(predicted['low_s'], predicted['high_s'])}: {RANGE_WORDS})"
    talk(
        f"{found!r}: step {format_seconds(predicted['iteration_s'])}{between}, "
        f"{format_seconds(predicted['exposed_s'])} of it exposed communication; no plan can be below "
        f"{format_seconds(predicted['lower_bound_s'])}"
    )
    if wire:
        talk(_low_words(found, wire, model_trace.grad_bytes, tolerance))
    if is_sharded:
        talk(_sharded_words(found, model_trace.grad_bytes))


def _plan_fsdp(trace: ModelTrace, cost: Cost, options: FsdpOptions, output: str | None) -> None:
    """Plan for FSDP2, write the plan and say what it is expected to give."""
    found = plan_fsdp(trace, cost, memory_limit=options.limit, precision=options.precision)
    talk_of_halves(trace, [cost])
    talk_of_padding(cost)
    write_record(found, output)
    predicted = found.predicted
    bound = bound_words(predicted, "no plan" if options.limit is None else "no plan that fits")
    talk(
        f"{found!r}: step {format_seconds(predicted['iteration_s'])}, {format_seconds(predicted['exposed_s'])} of it "
        f"exposed communication; {bound}; "
        f"{format_bytes(predicted['memory_bytes'])} a rank, with {options.states_words} and without activations"
    )


def _low_words(plan: MergePlan, wire: str, all_bytes: int, tolerance: float) -> str:
    """Say how much travels in low precision, and how near that is to the least."""
    low_bytes, bound = plan.predicted["low_bytes"], plan.predicted["low_bytes_bound"]
    least = "the least" if low_bytes == bound else f"no plan has less than {format_bytes(bound)}"
    within = f"within {tolerance * 100:g} % of the shortest step"
    return f"{format_bytes(low_bytes)} of {format_bytes(all_bytes)} in {wire}: {least} {within}"


def _sharded_words(plan: MergePlan, all_bytes: int) -> str:
    """Say how much is all-reduced, and how near the step is to the shortest of the plans that `plan_sharded` covers."""
    step_s, bound_s = plan.predicted["iteration_s"], plan.predicted["iteration_bound_s"]
    best = "the best" if step_s <= bound_s * TIE else f"within {step_s / bound_s - 1:.2%} of the best"
    kept = f"{format_bytes(plan.predicted['all_reduced_bytes'])} of {format_bytes(all_bytes)} all-reduced"
    return f"{kept}, the rest sharded: {best} of plans that shard all or have the same groups in both passes"


def _write_caps(caps: list[float], output: str | None) -> None:
    """Write the list of sizes, which is JSON and Python alike, and say what torch makes of it."""
    text = json.dumps(caps)
    if output is None:
        print_line(text)
    else:
        write_text(output, f"{text}\n")
        talk(f"wrote {output}")
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        talk("torch's DDP holds to bucket_cap_mb_list from its second step on, where gradients have one dtype")
    else:
        talk(
            f"torch {torch.__version__} takes no bucket_cap_mb_list, 2.11 and newer do: here write the plan without "
            "--format and give it to mgwfbp.DistributedDataParallel(model, plan=...)"
        )
