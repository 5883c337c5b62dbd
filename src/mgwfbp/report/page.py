"""One self-contained HTML page: records go in as JSON, a script that comes with the package draws them.

[Note: hostile names] Names of layers and models come from files of others. In the page they stand only inside one JSON
block, whose ``<``, ``>`` and ``&`` are escaped so that no name can end it, and in the title, which is escaped as HTML.
The script writes them with textContent alone. The page's own policy allows no script but this one, by its hash, and no
request to anywhere.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from mgwfbp.errors import ReportError
from mgwfbp.planners import PLANNERS, Planner
from mgwfbp.report.cases import OURS_LOW, Case, CaseStrategy, How, how_known
from mgwfbp.report.chart import Chart, Table
from mgwfbp.report.curves import allreduce_chart, run_charts
from mgwfbp.report.fsdp import FsdpCase, FsdpEntry, find_fsdp_cases, idle_parts, parts_of
from mgwfbp.report.inputs import Inputs, ScalingRow
from mgwfbp.report.matching import find_cases
from mgwfbp.report.measured import SideBySide, side_by_side
from mgwfbp.report.tables import (
    bench_rows,
    breakdown_chart,
    model_rows,
    scaling_charts,
    sizes_chart,
)
from mgwfbp.report.whatif import WhatIf, find_what_if
from mgwfbp.report.words import summarize, summarize_runs, summarize_scaling
from mgwfbp.timeline import Span, Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Names", "build_page", "render", "step_json"]

_SCRIPTS = ("planner.js", "draw.js", "timeline.js", "chart.js", "whatif.js", "main.js")
_SCALING_WORKERS = (2, 4, 8, 16, 32, 64)
_GLOSSARY = (
    ("Step:", "one training iteration: the forward pass, the backward pass, and what of the communication sticks out."),
    (
        "Exposed:",
        "communication that no computation hides: from the end of the backward pass to the last message's, "
        "and what a forward pass waits for gathers.",
    ),
    ("Efficiency:", "the step without communication over the step with it; times the workers it is the speedup."),
    (
        "Predicted:",
        "laid out by the model: one message at a time, as long as the cost says; what messages take from the "
        "computation only where the cost says it.",
    ),
    (
        "Between:",
        "of a benchmark the quartiles of its turns; of a prediction the step with all messages as much faster, and as "
        "much slower, as their cost is typically off what was measured of them.",
    ),
    (
        "Measured:",
        "a benchmark's number is the median of its turns, on the slowest worker; a timeline is one observed step, on "
        "one worker. The two differ as steps differ from one another.",
    ),
    (
        "Planners:",
        "wfbp sends every gradient alone, single all at once, bucket fills PyTorch's 1 MiB and 25 MiB, mgwfbp is the "
        "paper's rule, optimal the shortest step there is.",
    ),
)

_LOW_GLOSSARY = (
    "Low precision:",
    "a message that is striped travels in bfloat16 or float16 and sends half the bytes of its gradients; sent are the "
    "bytes of a step as they travel, low precision is the share of the gradients' bytes that travel so.",
)


def build_page(
    inputs: Inputs,
    *,
    workers: Sequence[int] = (),
    planners: Mapping[str, Planner] = PLANNERS,
    title: str | None = None,
) -> str:
    """Return the text of a page that shows all that was given; it opens without a server and without a network.

    Args:
        inputs: what is shown.
        workers: numbers of workers for which the networks among the inputs are planned.
        planners: whose steps are predicted, by name.
        title: of the page; made of the inputs if not given.

    Raises:
        ReportError: where there is nothing to show.
    """
    cases = find_cases(inputs, workers=workers, planners=planners)
    scaling = _scaling_rows(inputs, cases, planners)
    groups = _groups(inputs, cases, scaling)
    fsdp = find_fsdp_cases(inputs, workers)
    if not cases and not groups and not fsdp:
        raise ReportError(
            "there is nothing to show: give a trace and a cost (or a network and --workers), a timeline, a benchmark, "
            "a training run or a simulation"
        )
    names = Names()
    said = [summarize(case) for case in cases]
    lead: Sequence[str] = next((words for words in [*said, *(group["summary"] for group in groups)] if words), ())
    models = list(dict.fromkeys(case.model for case in cases)) or [name for name, *_ in inputs.descriptions]
    backwards: list[dict[str, Any]] = []
    content = {
        "title": title or f"Where the time goes: {', '.join(models)}",
        "lead": lead,
        "cases": [
            {"summary": words if words != lead else [], **_case_json(case, names, backwards)}
            for case, words in zip(cases, said, strict=True)
        ],
        "fsdp": [_fsdp_json(case, names) for case in fsdp],
        "measured": [_measured_json(found, names, backwards) for found in side_by_side(cases)],
        "what_if": [
            _what_if_json(found, names) for case in cases if (found := find_what_if(case, planners)) is not None
        ],
        "groups": [{**group, "summary": group["summary"] if group["summary"] != lead else []} for group in groups],
        "inputs": Table(("name", "kind", "what it is"), inputs.descriptions).to_json(),
        "glossary": (*_GLOSSARY, _LOW_GLOSSARY) if _uses_low_precision(cases) else _GLOSSARY,
        "backwards": backwards,
        "names": names.listed,
    }
    return render(str(content["title"]), content)


def _uses_low_precision(cases: Sequence[Case]) -> bool:
    timelines = [timeline for case in cases for strategy in case.strategies for _, timeline in _both(strategy)]
    return any(timeline is not None and timeline.low_bytes for timeline in timelines)


def _scaling_rows(inputs: Inputs, cases: Sequence[Case], planners: Mapping[str, Planner]) -> list[ScalingRow]:
    rows = [row for _, some in inputs.sweeps for row in some]
    measured = bench_rows(bench for _, bench in inputs.benches)
    counts: dict[tuple[str, str], set[int]] = {}
    for row in measured:
        counts.setdefault((row.model, row.network), set()).add(row.workers)
    # One number of workers is no curve; the case itself shows it.
    rows += [row for row in measured if len(counts[row.model, row.network]) > 1]
    done: set[tuple[str, str]] = set()
    for case in cases:
        if case.trace is None or case.network is None or (case.model, case.network.name) in done:
            continue
        done.add((case.model, case.network.name))
        # What messages in low precision cost was measured on one number of workers, and is no curve.
        known = {name: one for name, one in planners.items() if case.low_cost is None or name not in OURS_LOW}
        rows += model_rows(case.trace, case.network, sorted({*_SCALING_WORKERS, case.workers}), known)
    return rows


def _groups(inputs: Inputs, cases: Sequence[Case], scaling: Sequence[ScalingRow]) -> list[dict[str, Any]]:
    traces = _distinct([*inputs.traces, *((case.model, case.trace) for case in cases if case.trace is not None)])
    costs = [*inputs.costs, *((case.where, case.cost) for case in cases if case.cost is not None)]
    curves = {(cost.workers, repr(cost), len(cost.source)): (name, cost) for name, cost in reversed(costs)}
    groups: list[tuple[str, str, Sequence[Chart], Sequence[str]]] = [
        ("scaling", "More workers", scaling_charts(scaling), [*summarize_scaling(scaling), *_left_out(cases)]),
        ("runs", "Training", run_charts(inputs.runs), summarize_runs(inputs.runs)),
        ("all-reduce", "What a message costs", [allreduce_chart(*named) for named in reversed(curves.values())], ()),
        ("sizes", "Gradients", [sizes_chart(traces)] if traces else [], ()),
    ]
    return [
        {"id": key, "title": title, "summary": words, "charts": [chart.to_json() for chart in charts]}
        for key, title, charts, words in groups
        if charts or words
    ]


def _left_out(cases: Sequence[Case]) -> list[str]:
    """Say which plans are not among the curves over workers, though their steps are shown."""
    measured = [case for case in cases if case.network is not None and case.low_cost is not None]
    names = dict.fromkeys((one.name, case.workers) for case in measured for one in case.strategies)
    return [
        f"{name} is left out of the curves: its messages were measured on {plural(workers, 'worker')} only."
        for name, workers in names
        if name in OURS_LOW
    ]


def _distinct(traces: Sequence[tuple[str, ModelTrace]]) -> list[tuple[str, ModelTrace]]:
    """Return every trace once, under a name of its own."""
    found: dict[str, ModelTrace] = {}
    for name, trace in traces:
        if trace in found.values():
            continue
        label = trace.model if trace.model not in found else f"{trace.model} ({name})"
        found[label if label not in found else f"{label} {len(found) + 1}"] = trace
    return list(found.items())


class Names:
    """The names of gradients, each once; places in a row make ranges short."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """Return the place of a name."""
        if name not in self._places:
            self._places[name] = len(self.listed)
            self.listed.append(name)
        return self._places[name]

    def ranges(self, names: Sequence[str]) -> list[int]:
        """Return the names as pairs of a first place and a count, one after the other."""
        found: list[int] = []
        for name in names:
            place = self.place(name)
            if found and found[-2] + found[-1] == place:
                found[-1] += 1
            else:
                found += [place, 1]
        return found


def _case_json(case: Case, names: Names, backwards: list[dict[str, Any]]) -> dict[str, Any]:
    if case.trace is not None:
        names.ranges([layer.name for layer in case.trace.layers])
    steps = [
        step_json(strategy.name, how, timeline, names, backwards)
        for strategy in case.strategies
        for how, timeline in _both(strategy)
        if timeline is not None
    ]
    return {"title": case.title, "steps": steps, "breakdown": breakdown_chart(case).to_json()}


def _fsdp_json(case: FsdpCase, names: Names) -> dict[str, Any]:
    return {"title": case.title, "summary": case.summary, "steps": [_fsdp_step(one, names) for one in case.entries]}


def _fsdp_step(entry: FsdpEntry, names: Names) -> dict[str, Any]:
    """Return a step of FSDP2 as the page's script reads it: pieces of both passes, messages, and when it is idle."""
    step, parts = entry.step, parts_of(entry.step)

    def columns(*kinds: str) -> dict[str, Any]:
        chosen = [part for part in parts if part.kind in kinds]
        spans = [
            Span(
                tuple(name or "the rest" for name in part.group), part.num_bytes, part.start_s, part.start_s, part.end_s
            )
            for part in chosen
        ]
        return {**_spans_json(spans, names), "kind": [part.kind for part in chosen]}

    messages = columns("reduce-scatter")
    return {
        "name": entry.name,
        "how": entry.how,
        "known": how_known(entry.how),
        "words": entry.words,
        "forward": [0.0, _short(step.forward_s[-1][1])],
        "forwards": columns("forward"),
        "backward": columns("backward"),
        "messages": {**messages, "ready": messages["start"]},
        "gathers": columns("gather", "gather again"),
        "idle": [[_short(start_s), _short(end_s)] for start_s, end_s in idle_parts(step)],
        "compute_s": _short(max(end_s for _, end_s in step.backward_s)),
        "iteration_s": _short(step.iteration_s),
    }


def _both(strategy: CaseStrategy) -> tuple[tuple[How, Timeline | None], ...]:
    return ("predicted", strategy.predicted), ("measured", strategy.measured)


def _measured_json(found: SideBySide, names: Names, backwards: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [step_json(name, "measured", timeline, names, backwards) for name, timeline in found.steps]
    return {"title": found.title, "steps": steps, "note": found.note}


def step_json(name: str, how: How, timeline: Timeline, names: Names, backwards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a step as the page's script reads it; its backward pass is added to ``backwards`` if it is a new one."""
    backward = _spans_json(timeline.backward, names)
    if backward not in backwards:  # the steps that planners give have it in common
        backwards.append(backward)
    messages = _spans_json(timeline.messages, names)
    messages["ready"] = [_short(span.ready_s) for span in timeline.messages]
    if timeline.low_bytes:
        messages["wire"] = [span.wire for span in timeline.messages]
    return {
        "name": name,
        "how": how,
        "known": how_known(how),
        "forward": [_short(timeline.forward.start_s), _short(timeline.forward.end_s)],
        "backward": backwards.index(backward),
        "messages": messages,
        "compute_s": _short(timeline.compute_s),
        "iteration_s": _short(timeline.iteration_s),
        **_gathers_json(timeline, names),
    }


def _gathers_json(timeline: Timeline, names: Names) -> dict[str, Any]:
    if not timeline.gathers:
        return {}
    return {"gathers": _spans_json(timeline.gathers, names), "waited_s": _short(timeline.waited_s)}


def _spans_json(spans: Sequence[Span], names: Names) -> dict[str, Any]:
    return {
        "start": [_short(span.start_s) for span in spans],
        "end": [_short(span.end_s) for span in spans],
        "bytes": [span.num_bytes for span in spans],
        "ranges": [names.ranges(span.layers) for span in spans],
    }


def _short(seconds: float) -> float:
    """Drop digits that no picture shows."""
    return float(f"{seconds:.9g}")


def _what_if_json(found: WhatIf, names: Names) -> dict[str, Any]:
    return {**found.to_json(), "names": [names.place(layer.name) for layer in found.trace.layers]}


def render(title: str, content: Mapping[str, Any]) -> str:
    """Return the text of the page; ``content`` is what its script reads."""
    folder = resources.files("mgwfbp.report") / "page"
    parts = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    style = (folder / "report.css").read_text(encoding="utf-8")
    records = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        records = records.replace(character, f"\\u{ord(character):04x}")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<main><noscript>This page draws its pictures with a script of its own; please allow it.</noscript></main>\n"
        f'<script id="records" type="application/json">{records}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
