"""``mgwfbp paper``: the paper's evaluation again, its own numbers beside ours."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from mgwfbp.cli.document import print_sections, to_markdown
from mgwfbp.cli.options import Output
from mgwfbp.cli.output import talk
from mgwfbp.cli.paper_text import beyond_section, evaluation_sections
from mgwfbp.cli.progress import show_progress
from mgwfbp.cli.simulate import strategy_of
from mgwfbp.files import write_text
from mgwfbp.network import PRESETS, Network, load_network
from mgwfbp.planners import PLANNERS
from mgwfbp.simulate import Cluster, Grid, SweepRow, find_crossing, find_limits, sweep
from mgwfbp.simulate.evaluation import by_layer, compare_with_paper, paper_rows
from mgwfbp.trace import ModelTrace, load_trace

__all__ = ["paper", "paper_traces"]

STRATEGIES = ("naive", "ps", "ps-sharded", "wfbp", "single", "mgwfbp", "optimal")
BEYOND_STRATEGIES = ("wfbp", "single", "bucket", "mgwfbp", "optimal")
BEYOND_WORKERS = (64, 256, 1024, 4096)
# A modern GPU and modern models, recorded.
BEYOND_TRACES = ("resnet50-h200-b32", "densenet201-h200-b32", "bert-h200-b32", "gpt2-h200-b8")


def paper_traces() -> dict[str, str]:
    """Return the names of the traces to take for the paper's two models, of those that come with the package."""
    return {"googlenet": "googlenet-k80-b64", "resnet50": "resnet50-k80-b32"}


def paper(
    googlenet: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Trace of GoogLeNet, if not the one that comes with mgwfbp.")
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
    given = {"googlenet": googlenet, "resnet50": resnet50}
    traces = {model: load_trace(given[model] or name) for model, name in paper_traces().items()}
    link = load_network(network)
    beyond = _beyond([load_trace(name) for name in modern or BEYOND_TRACES], link)
    if not per_tensor:
        traces = {model: by_layer(trace) for model, trace in traces.items()}
    strategies = [strategy_of(name, dict(PLANNERS)) for name in STRATEGIES]
    rows = {model: paper_rows(traces[model], link, strategies) for model in traces}
    if as_json:
        text = json.dumps(_to_json(rows, beyond), indent=1, allow_nan=False) + "\n"
    else:
        sections = [*evaluation_sections(traces, rows, link), beyond_section(beyond)]
        text = to_markdown("The paper's evaluation again (simulated)", sections)
        if output is None:
            print_sections(sections)
            return
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)
        talk(f"wrote {output}")


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


def _to_json(rows: Mapping[str, list[SweepRow]], beyond: Mapping[str, list[SweepRow]]) -> dict[str, Any]:
    return {
        "rows": {model: [row.to_json() for row in some] for model, some in rows.items()},
        "crossing": {model: find_crossing(some) for model, some in rows.items()},
        "gains": [
            {
                "model": model,
                "workers": gain.published.workers,
                "against": gain.published.against,
                "paper": gain.published.gain,
                "paper_how": gain.published.how,
                **gain.ours,
            }
            for model, some in rows.items()
            for gain in compare_with_paper(model, some)
        ],
        "beyond": {model: [row.to_json() for row in some] for model, some in beyond.items()},
        "findings": {model: [str(finding) for finding in find_limits(some)] for model, some in beyond.items()},
    }
