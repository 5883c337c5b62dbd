"""``mgwfbp simulate``: what N workers would give."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from mgwfbp.bounds import lower_bound_s, sharded_lower_bound_s
from mgwfbp.cli.engine import Engines, read_engines, talk_of_halves
from mgwfbp.cli.fsdp import (
    FSDP2,
    FsdpOptions,
    FsdpPlanners,
    MemoryLimit,
    ParamDtype,
    ReduceDtype,
    States,
    fastest_words,
    memory_bytes,
    memory_words,
    read_options,
)
from mgwfbp.cli.networks import Inside, Links, PerNode
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    TraceFile,
    find_planner,
    planners,
    worker_counts,
)
from mgwfbp.cli.output import print_line, print_table, talk, talk_of_padding
from mgwfbp.cli.progress import show_progress
from mgwfbp.cli.wire import (
    Wire,
    WireCostFile,
    WireTolerance,
    check_tolerance,
    read_low_cost,
    sent_wire,
    talk_of_low_cost,
    wire_planner,
)
from mgwfbp.costs import LowCost, WireCost
from mgwfbp.memory import STATES
from mgwfbp.network import ALGORITHMS, PRESETS
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, SHARDED, Planner, plan_sharded, wire_planner_name
from mgwfbp.simulate import (
    BASELINES,
    CostSource,
    Grid,
    MeasuredCluster,
    Scenario,
    Strategy,
    SweepRow,
    WireCluster,
    find_gains,
    find_limits,
    sweep,
)
from mgwfbp.simulate.findings import where_words
from mgwfbp.simulate.fsdp import sweep_fsdp
from mgwfbp.simulate.scenario import IDEAL, MAX_JITTER
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_bytes, format_seconds, plural, printable

__all__ = ["print_rows", "simulate", "strategy_of"]

DEFAULT_JITTERED_STEPS = 100


def simulate(
    trace: TraceFile,
    network: Annotated[
        list[str],
        typer.Option(
            "--network",
            metavar="NAME|FILE",
            help=f"network.json, a measured cost.json, or one of {', '.join(PRESETS)}; may be repeated.",
        ),
    ],
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Numbers of workers; a measured cost has its own."),
    ] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Any of {', '.join((*PLANNERS, *BASELINES))}; may be repeated. If not given, all planners.",
        ),
    ] = None,
    plan: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="plan.json, simulated as it is; may be repeated.")
    ] = None,
    wire: Wire = None,
    wire_cost: WireCostFile = None,
    wire_tolerance: WireTolerance = None,
    engine: Engines = "ddp",
    memory_limit: MemoryLimit = None,
    param_dtype: ParamDtype = "float32",
    reduce_dtype: ReduceDtype = None,
    states: States = STATES,
    scale: Annotated[
        str, typer.Option(metavar="X,X,...", help="Computation times this: batch above 1, faster device below.")
    ] = "1",
    algorithm: Annotated[
        str | None, typer.Option(metavar="|".join(ALGORITHMS), help="All-reduce over the networks with this algorithm.")
    ] = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    slow_link: Annotated[
        float, typer.Option(min=1, metavar="FACTOR", help="The slowest link is this many times slower.")
    ] = 1.0,
    jitter: Annotated[
        float, typer.Option(min=0, max=MAX_JITTER, help="Spread of the computation (log-normal, 0.05: about 5 %).")
    ] = 0.0,
    jitter_shared: Annotated[
        float, typer.Option(min=0, max=1, help="Share of it that a worker's whole step has in common.")
    ] = 1.0,
    straggler: Annotated[
        list[float] | None,
        typer.Option(min=1, metavar="FACTOR", help="One worker is always so many times slower; may be repeated."),
    ] = None,
    contention: Annotated[
        float, typer.Option(min=1, metavar="FACTOR", help="Computation is so many times slower beside a message.")
    ] = 1.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Messages under way at the same time, at most.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Steps to simulate: {DEFAULT_JITTERED_STEPS} with jitter, else 1.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same jitter.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Simulate training steps on many workers.

    Every planner plans anew for every point.
    """
    if steps is None:
        steps = DEFAULT_JITTERED_STEPS if jitter else 1
    scenario = Scenario(jitter, jitter_shared, tuple(straggler or ()), contention, in_flight, steps, seed)
    engines = read_engines(engine, wire)
    is_sharded, is_fsdp = "sharded" in engines, FSDP2 in engines
    options = read_options(engine, memory_limit, param_dtype, reduce_dtype, states)
    limit = options.limit
    if is_fsdp and scenario != replace(IDEAL, jitter_shared=jitter_shared, steps=steps, seed=seed):
        raise typer.BadParameter(
            "fsdp2 is predicted undisturbed: leave out jitter, stragglers, contention and messages in flight",
            param_hint="--engine",
        )
    names = ",".join(planner).split(",") if planner else [] if plan else list(PLANNERS)
    chosen = planners(bucket_mb, first_bucket_mb)
    plans = [MergePlan.load(path) for path in plan or ()]
    strategies = [strategy_of(name, chosen) for name in names]
    strategies += [_fixed(path, given) for path, given in zip(plan or (), plans, strict=True)]
    sent = sent_wire(wire, plans)
    check_tolerance(wire, wire_tolerance)
    if wire:
        strategies.append(Strategy(wire_planner_name(wire), wire_planner(wire, wire_tolerance)))
    if is_sharded:
        strategies.append(Strategy(SHARDED, plan_sharded, bound=sharded_lower_bound_s))
    links = Links(per_node, inside, algorithm, slow_link)
    sources = [links.source(name, with_halves=len(engines) > 1, wire=sent) for name in network]
    counts = worker_counts(workers) if workers is not None else _measured_counts(sources)
    if wire_cost is not None and len(engines) > 1:
        raise typer.BadParameter("such a cost knows no halves of all-reduces; leave it out", param_hint="--wire-cost")
    low = read_low_cost(sent, wire_cost)
    if low is not None:
        sources = [_with_low_cost(sources, counts, low)]
    grid = Grid(tuple(sources), tuple(counts), tuple(strategies), tuple(_scales(scale)))
    model = load_trace(trace)
    if sent:
        costs = (source.cost(count) for source in sources for count in counts)
        talk_of_low_cost(sent, is_known=all(isinstance(cost, WireCost) for cost in costs))
    for source in sources:
        talk_of_padding(source.cost(counts[0]))
    if len(engines) > 1:
        talk_of_halves(model, [source.cost(count) for source in sources for count in counts])
    rows = list(show_progress(sweep(model, grid, scenario), grid.num_points, "simulating"))
    if is_fsdp:
        rows = _with_fsdp(rows, model, grid, options)
    has_wire = wire is not None or any(row.low_bytes for row in rows)
    if as_json:
        found = [row.to_json(with_gathers=len(engines) > 1, with_wire=has_wire) for row in rows]
        if limit is not None:
            found = [{**row, "fits": row["memory_bytes"] <= limit} for row in found]
        if options.is_short:
            found = [{**row, "bits": options.bits(row["planner"])} for row in found]
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
        return
    talk(repr(model))
    by_network = sorted(rows, key=lambda row: [source.name for source in sources].index(row.network))
    if is_fsdp:
        options.talk()
    print_rows(by_network, with_gathers=len(engines) > 1, with_wire=has_wire, options=options)
    # What merging gains is said of messages as they are, and all-reduced.
    others = (SHARDED if is_sharded else None, wire_planner_name(wire) if wire else None)
    for finding in find_limits(row for row in rows if row.planner not in others and not row.num_gathers):
        print_line(str(finding))
    for name in (*((SHARDED,) if is_sharded else ()), *((FSDP2,) if is_fsdp else ())):
        for gain in find_gains(rows, name):
            print_line(str(gain))
    if is_fsdp:
        for line in _fastest(by_network, limit):
            print_line(line)


def _with_fsdp(rows: list[SweepRow], trace: ModelTrace, grid: Grid, options: FsdpOptions) -> list[SweepRow]:
    """Add what a rank holds to every row, and the rows of FSDP2 behind those of their point."""
    fsdp, states = FsdpPlanners(options), options.precision.states
    found = list(sweep_fsdp(trace, grid, fsdp.listed()))
    fsdp.check_any()
    held = [replace(row, memory_bytes=memory_bytes(trace, row.all_reduced_bytes, row.workers, states)) for row in rows]
    points = dict.fromkeys((row.scale, row.workers, row.network) for row in rows)
    every = [*held, *found]
    return [row for point in points for row in every if (row.scale, row.workers, row.network) == point]


def _fastest(rows: Sequence[SweepRow], limit: int | None) -> Iterator[str]:
    """Say for every point what is the fastest that fits."""
    points: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.planner not in BASELINES:
            points.setdefault((row.network, row.scale, row.workers), []).append(row.to_json())
    for (network, scale, workers), here in points.items():
        yield f"{where_words(network, scale, (workers,))}: {fastest_words(here, limit)}"


def _with_low_cost(sources: list[CostSource], counts: list[int], low: LowCost) -> CostSource:
    if len(sources) != 1 or set(counts) != {low.cost.workers}:
        raise typer.BadParameter(
            f"is of {plural(low.cost.workers, 'worker')}; give one --network, and that number", param_hint="--wire-cost"
        )
    return WireCluster(sources[0], low)


def _measured_counts(sources: list[CostSource]) -> list[int]:
    counts = {source.measured.workers for source in sources if isinstance(source, MeasuredCluster)}
    if len(counts) != 1 or not all(isinstance(source, MeasuredCluster) for source in sources):
        raise typer.BadParameter("missing; only a measured cost has a number of its own", param_hint="--workers")
    return sorted(counts)


def strategy_of(name: str, chosen: dict[str, Planner]) -> Strategy:
    """Return a planner of ours or a baseline as a strategy."""
    if name in BASELINES:
        return BASELINES[name]
    return Strategy(name, find_planner(name, chosen))


def _fixed(path: str, plan: MergePlan) -> Strategy:
    bound = sharded_lower_bound_s if plan.gathers else lower_bound_s
    return Strategy(printable(path), lambda trace, cost: plan, bound=bound)  # noqa: ARG005 - every planner takes both


def _scales(text: str) -> list[float]:
    scales = []
    for part in text.split(","):
        try:
            scales.append(float(part))
        except ValueError:
            raise typer.BadParameter(f"{part!r} is not a number", param_hint="--scale") from None
        if not 0 < scales[-1] < float("inf"):
            raise typer.BadParameter(f"{part}, expected finite numbers above 0", param_hint="--scale")
    return scales


def print_rows(
    rows: list[SweepRow],
    *,
    with_gathers: bool = False,
    with_wire: bool = False,
    options: FsdpOptions = FsdpOptions(),  # noqa: B008 - never changed
) -> None:
    """Print a sweep as a table; columns that say the same of all are left out.

    With bounds and gathers or without; with bytes sent, and the share of gradients in low precision, or without.

    What needs more memory than the limit is marked, and in which precision engines send where these differ.
    """
    several_networks = len({row.network for row in rows}) > 1
    several_scales = len({row.scale for row in rows}) > 1
    several_steps = any(row.steps > 1 for row in rows)
    has_taken = any(row.taken_s for row in rows)
    titles = ["planner", "workers", "messages", "step", "exposed", *["taken"] * has_taken]
    titles += ["speedup", "efficiency", "made of"]
    titles += ["sent", "low precision"] if with_wire else []
    titles += ["bound", "gathers", "all-reduced"] if with_gathers else []
    has_memory = any(row.memory_bytes is not None for row in rows)
    titles += ["memory a rank"] if has_memory else []
    titles += ["bits"] if options.is_short else []
    table = []
    for row in rows:
        cells = [
            row.planner,
            str(row.workers),
            str(row.num_groups),
            format_seconds(row.iteration_s),
            format_seconds(row.exposed_s),
            *([format_seconds(row.taken_s)] if has_taken else []),
            f"{row.speedup:.4g}",
            f"{row.efficiency:.1%}",
            row.limit,
        ]
        if with_wire:
            cells += [format_bytes(row.sent_bytes), f"{row.low_share:.0%}"]
        if with_gathers:
            cells += [
                "-" if row.lower_bound_s is None else format_seconds(row.lower_bound_s),
                str(row.num_gathers),
                format_bytes(row.all_reduced_bytes),
            ]
        if has_memory:
            cells.append("-" if row.memory_bytes is None else memory_words(row.memory_bytes, options.limit))
        cells += [options.bits(row.planner)] if options.is_short else []
        if several_steps:
            cells.insert(4, format_seconds(row.iteration_p95_s))
        if several_scales:
            cells.insert(1, f"{row.scale:g}")
        if several_networks:
            cells.insert(0, row.network)
        table.append(cells)
    if several_steps:
        titles.insert(4, "95 %")
    if several_scales:
        titles.insert(1, "scale")
    if several_networks:
        titles.insert(0, "network")
    print_table(titles, table)
