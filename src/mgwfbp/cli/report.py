"""``mgwfbp report``: pages, figures, text and traces from the files that other commands write."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from mgwfbp.cli.networks import Inside, Links, PerNode
from mgwfbp.cli.options import (
    DEFAULT_BUCKET_MB,
    DEFAULT_FIRST_BUCKET_MB,
    BucketMb,
    FirstBucketMb,
    find_planner,
    planners,
    worker_counts,
)
from mgwfbp.cli.output import check_not_input, talk
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
from mgwfbp.errors import FileError, ReportError
from mgwfbp.files import show_path, write_bytes, write_text
from mgwfbp.network import PRESETS, load_network
from mgwfbp.planners import PLANNERS, Planner, wire_planner_name
from mgwfbp.report.fsdp import draw_fsdp_case, find_fsdp_cases, fsdp_events
from mgwfbp.report.inputs import Inputs, load_inputs
from mgwfbp.report.matching import find_cases
from mgwfbp.report.page import build_page
from mgwfbp.report.paper import FIGURES, Figure, Panel, paper_figure
from mgwfbp.report.perfetto import timelines_of, to_perfetto
from mgwfbp.report.text import draw_case
from mgwfbp.report.words import summarize_runs, summarize_scaling
from mgwfbp.run import TrainingRun
from mgwfbp.units import plural, printable

__all__ = ["report"]

Format = Literal["html", "png", "svg", "pdf", "text", "perfetto"]
_BY_SUFFIX: dict[str, Format] = {
    ".html": "html",
    ".htm": "html",
    ".png": "png",
    ".svg": "svg",
    ".pdf": "pdf",
    ".txt": "text",
    ".json": "perfetto",
}
_FIGURE_NAMES = ("timelines", "all", *(str(number) for number in FIGURES))


def report(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="Traces, costs, networks, plans, timelines, benchmark results, `simulate --json`, folders of runs, "
            "profiles of FSDP2 by torch.profiler; names of recorded traces and networks, too.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write; its ending says the format.")
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="html is the page, perfetto a trace for ui.perfetto.dev.", show_default=False),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="N|timelines|all",
            help="For png, svg, pdf: a figure of the paper, the timelines (if not given), or all to the folder -o.",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help=f"A network to plan for: network.json or one of {', '.join(PRESETS)}."),
    ] = None,
    workers: Annotated[str | None, typer.Option(metavar="N,N,...", help="Workers on these networks.")] = None,
    per_node: PerNode = 1,
    inside: Inside = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help=f"Whose plans to predict, if not all: any of {', '.join(PLANNERS)}."),
    ] = None,
    wire: Wire = None,
    wire_cost: WireCostFile = None,
    wire_tolerance: WireTolerance = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    bucket_mb: BucketMb = DEFAULT_BUCKET_MB,
    first_bucket_mb: FirstBucketMb = DEFAULT_FIRST_BUCKET_MB,
) -> None:
    """Show where the time goes: a page, figures, text or Perfetto."""
    chosen = form or _BY_SUFFIX.get(Path(output).suffix.lower() if output else ".txt", "html")
    if figure is not None and (chosen not in ("png", "svg", "pdf") or figure not in _FIGURE_NAMES):
        wanted = "1 to 9, timelines or all, with --format png, svg or pdf"
        raise typer.BadParameter(f"{figure!r} with format {chosen}, expected {wanted}", param_hint="--figure")
    check_not_input(output, [*(inputs or ()), *([wire_cost] if wire_cost is not None else [])])
    given = load_inputs(inputs or ())
    named = tuple((name, load_network(name)) for name in network or ())
    given = replace(given, networks=(*given.networks, *named))
    counts = worker_counts(workers) if workers is not None else []
    if given.networks and given.traces and not counts and figure in (None, "timelines"):
        raise typer.BadParameter("missing; a network does not say how many there are", param_hint="--workers")
    given = _on_nodes(given, counts, Links(per_node, inside)) if inside is not None or per_node > 1 else given
    everyone = _chosen_planners(planner, planners(bucket_mb, first_bucket_mb))
    sent = sent_wire(wire, (plan for _, plan in given.plans))
    given = _with_low_cost(given, counts, read_low_cost(sent, wire_cost))
    check_tolerance(wire, wire_tolerance)
    if sent is not None:
        given = replace(given, lows=tuple((name, both) for name, both in given.lows if both.wire == sent))
        runs = _planned_runs(given) if wire is not None else []  # files of plans are not for runs
        has_trace = bool(given.traces and (given.costs or given.networks))
        if wire is not None and (not (has_trace or runs) or figure not in (None, "timelines")):
            missing = "nothing is planned here: give a trace and a cost, or a trace and a network with --workers"
            raise typer.BadParameter(missing, param_hint="--wire")
        # A run's tuner may have learnt it, or it was measured when the run began.
        knows = [isinstance(run.cost, WireCost) or "low_cost" in (run.tuning or {}) for run in runs]
        if has_trace:
            knows += [given.low_of(name) is not None for name, _ in given.costs]
            knows += [given.low_cost is not None for _ in given.networks]
        talk_of_low_cost(sent, is_known=given.low_cost is not None or all(knows))
    if wire is not None:
        everyone[wire_planner_name(wire)] = wire_planner(wire, wire_tolerance)
    if chosen == "html":
        heading = None if title is None else printable(title)
        _write(build_page(given, workers=counts, planners=everyone, title=heading), output)
    elif chosen == "text":
        _write(_text(given, counts, everyone), output)
    elif chosen == "perfetto":
        timelines = timelines_of(find_cases(given, workers=counts, planners=everyone))
        fsdp = find_fsdp_cases(given, counts)
        if not timelines and not fsdp:
            raise ReportError("there is no timeline: give a trace and a cost, a timeline, a benchmark or a run")
        found = to_perfetto(timelines)
        first = 1 + max((event["pid"] for event in found["traceEvents"]), default=0)
        found["traceEvents"] += fsdp_events(fsdp, first)
        _write(json.dumps(found, allow_nan=False) + "\n", output)
    else:
        _write_figures(given, counts, everyone, chosen, figure or "timelines", output)


def _on_nodes(given: Inputs, counts: Sequence[int], links: Links) -> Inputs:
    """Put what workers on nodes pay for a message in the place of the networks between nodes."""
    clusters = [links.join(network) for _, network in given.networks]
    costs = tuple((cluster.name, cluster.cost(count)) for cluster in clusters for count in counts)
    return replace(given, networks=(), costs=(*given.costs, *costs))


def _planned_runs(given: Inputs) -> list[TrainingRun]:
    """Return the training runs that can be planned for: they know when gradients are ready and what messages cost."""
    return [run for _, run in given.runs if run.trace is not None and run.cost is not None]


def _with_low_cost(given: Inputs, counts: Sequence[int], low: LowCost | None) -> Inputs:
    """Add the cost of messages in low precision, which must be of as many workers as all that is planned for."""
    if low is None:
        return given
    run_costs = [run.cost for run in _planned_runs(given) if run.cost is not None]
    planned = {cost.workers for cost in (*(cost for _, cost in given.costs), *run_costs)}
    planned |= set(counts) if given.networks else set()
    if others := planned - {low.cost.workers}:
        numbers = ", ".join(str(count) for count in sorted(others))
        raise typer.BadParameter(
            f"is of {plural(low.cost.workers, 'worker')}, what is planned for of {numbers}; give all of as many",
            param_hint="--wire-cost",
        )
    return replace(given, low_cost=low)


def _chosen_planners(names: list[str] | None, everyone: dict[str, Planner]) -> dict[str, Planner]:
    chosen = ",".join(names).split(",") if names else list(everyone)
    return {name: find_planner(name, everyone) for name in chosen}


def _write(text: str, output: str | None) -> None:
    if output is None:
        typer.echo(text.encode(), nl=False)  # bytes: a page says that it is UTF-8, whatever the terminal's encoding
        return
    write_text(output, text)
    talk(f"wrote {output}")


def _text(given: Inputs, counts: list[int], everyone: dict[str, Planner]) -> str:
    width = min(200, max(40, shutil.get_terminal_size((100, 24)).columns))
    parts = [draw_case(case, width=width) for case in find_cases(given, workers=counts, planners=everyone)]
    parts += [draw_fsdp_case(case, width=width) for case in find_fsdp_cases(given, counts)]
    parts += [printable(words) + "\n" for words in summarize_scaling([row for _, rows in given.sweeps for row in rows])]
    parts += [printable(words) + "\n" for words in summarize_runs(given.runs)]
    if not parts:
        raise ReportError("there is nothing to show: give a trace and a cost, a timeline, a benchmark or a run")
    return "\n".join(parts)


def _write_figures(
    given: Inputs,
    counts: list[int],
    everyone: dict[str, Planner],
    form: Literal["png", "svg", "pdf"],
    figure: str,
    output: str | None,
) -> None:
    from mgwfbp.report.figures import render_figure  # matplotlib takes a while to load

    if output is None:
        raise typer.BadParameter("missing; a picture is not for a terminal (try --format text)", param_hint="--output")
    if figure == "all":
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{show_path(output)}: cannot be made a folder: {error.strerror or error}") from error
        for number in FIGURES:
            _write_picture(
                render_figure(paper_figure(number, given), form), str(Path(output) / f"figure{number}.{form}")
            )
        return
    if figure == "timelines":
        timelines = timelines_of(find_cases(given, workers=counts, planners=everyone))
        if not timelines:
            raise ReportError("there is no timeline to draw: give a trace and a cost, or --figure 1 to 9 of the paper")
        title = timelines[0].case if len({entry.case for entry in timelines}) == 1 else "Timelines"
        shown = [
            (entry.label if entry.case == title else f"{entry.case}: {entry.label}", entry.timeline)
            for entry in timelines
        ]
        picture = Figure(title, (Panel("", timelines=tuple(shown)),))
    else:
        picture = paper_figure(int(figure), given)
    _write_picture(render_figure(picture, form), output)


def _write_picture(content: bytes, output: str) -> None:
    write_bytes(output, content)
    talk(f"wrote {output}")
