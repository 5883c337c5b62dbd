"""``mgwfbp paper``: the paper's evaluation again, its own numbers beside ours."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from mgwfbp.cli.document import print_sections, to_markdown
from mgwfbp.cli.options import Output
from mgwfbp.cli.output import talk
from mgwfbp.cli.paper_text import Case, beyond_section, evaluation_sections
from mgwfbp.cli.progress import show_progress
from mgwfbp.cli.simulate import strategy_of
from mgwfbp.files import write_text
from mgwfbp.network import PRESETS, Network, load_network
from mgwfbp.planners import PLANNERS
from mgwfbp.simulate import (
    Cluster,
    Grid,
    MeasuredCluster,
    SweepRow,
    find_crossing,
    find_limits,
    sweep,
)
from mgwfbp.simulate.evaluation import (
    by_layer,
    compare_with_paper,
    gains_by_forward,
    logged_cost,
    paper_rows,
    ready_at_half,
)
from mgwfbp.trace import ModelTrace, load_trace

__all__ = ["paper"]

STRATEGIES = ("naive", "ps", "ps-sharded", "wfbp", "single", "mgwfbp", "optimal")
BEYOND_STRATEGIES = ("wfbp", "single", "bucket", "mgwfbp", "optimal")
BEYOND_WORKERS = (64, 256, 1024, 4096)
# A modern GPU and modern models, recorded.
BEYOND_TRACES = ("resnet50-h200-b32", "densenet201-h200-b32", "bert-h200-b32", "gpt2-h200-b8")


@dataclass(frozen=True, slots=True)
class _Recorded:
    name: str  # of the case, in JSON
    label: str
    trace: str


# GoogLeNet as its authors measured it, and by counting operations; of ResNet-50 those logs have no times.
AUTHORS = _Recorded("googlenet", "GoogLeNet, batch 64, the authors' logs", "googlenet-k80-bcaffe")
GOOGLENET = _Recorded("googlenet-analytic", "GoogLeNet, batch 64, analytic", "googlenet-k80-b64")
RESNET50 = _Recorded("resnet50", "ResNet-50, batch 32, analytic", "resnet50-k80-b32")


def paper(
    googlenet: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Trace of GoogLeNet, if not the two that come with mgwfbp.")
    ] = None,
    resnet50: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Trace of ResNet-50, likewise.")] = None,
    modern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Traces for what is past the paper, if not those of an H200 that come with mgwfbp; repeatable.",
        ),
    ] = None,
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="Count gradients by tensor; the paper counts by layer.")
    ] = False,
    network: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"The paper's network, or another of {', '.join(PRESETS)}.")
    ] = "10gbe",
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with all rows instead of tables.")] = False,
    output: Output = None,
) -> None:
    """Repeat the paper's evaluation, and go past it.

    To 4096 workers and faster networks.
    """
    link = load_network(network)
    cases = [
        *_cases("googlenet", "GoogLeNet", googlenet, [AUTHORS, GOOGLENET], per_tensor=per_tensor),
        *_cases("resnet50", "ResNet-50", resnet50, [RESNET50], per_tensor=per_tensor),
    ]
    beyond = _beyond([load_trace(name) for name in modern or BEYOND_TRACES], link)
    cases = _exchange([_simulate(case, link) for case in cases])
    if as_json:
        text = json.dumps(_to_json(cases, beyond), indent=1, allow_nan=False) + "\n"
    else:
        sections = [*evaluation_sections(cases, link), beyond_section(beyond)]
        text = to_markdown("The paper's evaluation again (simulated)", sections)
        if output is None:
            print_sections(sections)
            return
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)
        talk(f"wrote {output}")


def _cases(model: str, title: str, given: str | None, recorded: Sequence[_Recorded], *, per_tensor: bool) -> list[Case]:
    """Load the trace that was given for a model, or those that come with the package."""
    if given is None:
        found = [Case(each.name, model, each.label, load_trace(each.trace)) for each in recorded]
    else:
        found = [Case(model, model, f"{title}, as given", load_trace(given))]
    return found if per_tensor else [replace(case, trace=by_layer(case.trace)) for case in found]


def _simulate(case: Case, link: Network) -> Case:
    strategies = [strategy_of(name, dict(PLANNERS)) for name in STRATEGIES]
    done = replace(case, rows=tuple(paper_rows(case.trace, link, strategies)))
    if case.label != AUTHORS.label:
        return done
    cost = logged_cost(case.trace)
    compared = tuple(strategy for strategy in strategies if strategy.servers is None)
    logged = sweep(case.trace, Grid((MeasuredCluster("the authors' logs", cost),), (cost.workers,), compared))
    return replace(done, logged=tuple(logged), by_forward=gains_by_forward(case.trace, link, strategies))


def _exchange(cases: Sequence[Case]) -> list[Case]:
    """Simulate every case with what the authors measured instead: all-reduces, and of their model the trace."""
    authors = next((case for case in cases if case.logged), None)
    if authors is None:
        return list(cases)
    cost = logged_cost(authors.trace)
    source = MeasuredCluster("the authors' logs", cost)
    strategies = tuple(strategy_of(name, dict(PLANNERS)) for name in ("wfbp", "single", "mgwfbp", "optimal"))
    found = []
    for case in cases:
        exchanged = {}
        if case is not authors and case.model == authors.model:
            exchanged["the authors' trace"] = authors.rows
        exchanged["the authors' all-reduces"] = tuple(sweep(case.trace, Grid((source,), (cost.workers,), strategies)))
        found.append(replace(case, exchanged=exchanged))
    return found


def _beyond(traces: Sequence[ModelTrace], link: Network) -> dict[str, list[SweepRow]]:
    """Simulate more workers and faster networks, by model."""
    # A ring's start-up time grows with the number of workers, so that over thousands nobody uses one flat ring.
    sources = (
        Cluster(link),
        Cluster(_halving_doubling(link)),
        Cluster(_halving_doubling(PRESETS["100gbe"])),
        Cluster(PRESETS["ib-hdr"], PRESETS["nvlink3"], 8),
    )
    grid = Grid(sources, BEYOND_WORKERS, tuple(strategy_of(name, dict(PLANNERS)) for name in BEYOND_STRATEGIES))
    found: dict[str, list[SweepRow]] = {}
    for trace in traces:
        # Two traces may be of one model, on different devices or with different batches.
        name = trace.model if trace.model not in found else f"{trace.model} ({len(found) + 1})"
        found[name] = list(show_progress(sweep(trace, grid), grid.num_points, name))
    return found


def _halving_doubling(link: Network) -> Network:
    return replace(link, name=f"{link.name} halving-doubling", algorithm="recursive_halving_doubling")


def _to_json(cases: Sequence[Case], beyond: Mapping[str, list[SweepRow]]) -> dict[str, Any]:
    return {
        "rows": {case.name: [row.to_json() for row in case.rows] for case in cases},
        "logged": {case.name: [row.to_json() for row in case.logged] for case in cases if case.logged},
        "crossing": {case.name: find_crossing(case.rows) for case in cases},
        "ready_at_half": {case.name: ready_at_half(case.trace) for case in cases},
        "gains": [
            {
                "model": case.model,
                "case": case.name,
                "network": rows[0].network,
                "workers": gain.published.workers,
                "against": gain.published.against,
                "paper": gain.published.gain,
                "paper_how": gain.published.how,
                **gain.ours,
            }
            for case in cases
            for rows in (case.rows, case.logged)
            for gain in compare_with_paper(case.model, rows)
        ],
        "beyond": {model: [row.to_json() for row in some] for model, some in beyond.items()},
        "findings": {model: [str(finding) for finding in find_limits(some)] for model, some in beyond.items()},
    }
