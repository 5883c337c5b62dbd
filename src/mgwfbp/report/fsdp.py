"""Steps of FSDP2, predicted and measured: gathers, both passes and reduce-scatters, in text and for Perfetto.

A plan for FSDP2 is laid out with every trace that it covers, on every cost and network, beside wrapping by block; a
step that torch's profiler observed stands with the first plan that has its groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError, ReportError
from mgwfbp.fsdp import at_root_of, fsdp_lower_bound_s, precision_of, predict_fsdp, reported_bound_s
from mgwfbp.fsdp_step import FsdpStep
from mgwfbp.fsdp_units import ROOT
from mgwfbp.planners.fsdp_by_hand import plan_by_block
from mgwfbp.report.cases import How, how_known
from mgwfbp.report.inputs import Inputs
from mgwfbp.report.perfetto import COMMUNICATION, COMPUTATION, STEP, make_names
from mgwfbp.report.text import GUTTER, draw_lane
from mgwfbp.timeline import Span
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_seconds, plural, printable

__all__ = [
    "FsdpCase",
    "FsdpEntry",
    "Part",
    "draw_fsdp_case",
    "find_fsdp_cases",
    "fsdp_events",
    "idle_parts",
    "parts_of",
]

Kind = Literal["gather", "forward", "gather again", "backward", "reduce-scatter"]
BY_BLOCK = "by block"
_LEGEND = (
    "f F forward and b B backward by group in turn, < > gathers, ( ) gathers again, = # reduce-scatters, ! exposed"
)
_MARKS: Mapping[Kind, str] = {
    "gather": "<>",
    "forward": "fF",
    "gather again": "()",
    "backward": "bB",
    "reduce-scatter": "=#",
}
_ON_LINK = ("gather", "gather again", "reduce-scatter")


@dataclass(frozen=True, slots=True)
class FsdpEntry:
    """A step, whose it is and how it is known."""

    name: str
    how: How
    step: FsdpStep

    @property
    def label(self) -> str:
        """What to call it among those of its case."""
        return f"{self.name}, {how_known(self.how)}"

    @property
    def words(self) -> str:
        """What it is in a line: a measured step does not say what memory it took."""
        step = self.step
        again = sum(one is not None for one in step.gathers_again_s)
        memory = f", {format_bytes(step.memory_bytes)} a rank" if step.memory_bytes else ""
        return (
            f"{self.label}: {plural(len(step.groups), 'group')}, {again} of them gathered again, step "
            f"{format_seconds(step.iteration_s)}, exposed {format_seconds(exposed_s(step))}{memory}"
        )


@dataclass(frozen=True, slots=True)
class FsdpCase:
    """A model under FSDP2 on so many workers, and the steps that are compared."""

    title: str
    entries: tuple[FsdpEntry, ...]
    lower_bound_s: float | None = None  # predicted: no plan has a shorter step

    @property
    def summary(self) -> list[str]:
        """What the steps say, of predicted ones."""
        steps = {entry.name: entry.step.iteration_s for entry in self.entries if entry.how == "predicted"}
        found = []
        block_s = steps.get(BY_BLOCK)
        for name, step_s in steps.items():
            if name != BY_BLOCK and block_s and step_s:
                found.append(f"{name} is predicted to be {block_s / step_s:.2f} times as fast as wrapping by block.")
        if self.lower_bound_s is not None:
            found.append(f"No plan can be below {format_seconds(self.lower_bound_s)}.")
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """What the processor or the link does for a group."""

    kind: Kind
    group: tuple[str, ...]
    num_bytes: int
    start_s: float
    end_s: float

    @property
    def is_message(self) -> bool:
        """Whether the link is busy, and not the processor."""
        return self.kind in _ON_LINK

    @property
    def name(self) -> str:
        """The kind, the first module and how many more there are."""
        first = self.group[0] if self.group[0] != ROOT else "the rest"
        more = f" and {len(self.group) - 1} more" if len(self.group) > 1 else ""
        return f"{self.kind}: {first}{more}"


def parts_of(step: FsdpStep) -> list[Part]:
    """Return all that a step does, in order of time."""
    rows: list[tuple[Kind, Sequence[int], Sequence[tuple[float, float] | None]]] = [
        ("gather", step.group_bytes, step.gathers_s),
        ("forward", step.group_bytes, step.forward_s),
        ("gather again", step.group_bytes, step.gathers_again_s),
        ("backward", step.group_bytes, step.backward_s),
        ("reduce-scatter", step.sent_bytes, step.sent_s),
    ]
    found = [
        Part(kind, group, size, *moments)
        for kind, sizes, row in rows
        for group, size, moments in zip(step.groups, sizes, row, strict=True)
        if moments is not None
    ]
    return sorted(found, key=lambda part: (part.start_s, part.end_s))


def idle_parts(step: FsdpStep) -> list[tuple[float, float]]:
    """Return when nothing is computed, which is what of the communication is exposed."""
    found, now_s = list[tuple[float, float]](), 0.0
    for part in [part for part in parts_of(step) if not part.is_message]:
        if part.start_s > now_s:
            found.append((now_s, part.start_s))
        now_s = max(now_s, part.end_s)
    return [*found, (now_s, step.iteration_s)] if step.iteration_s > now_s else found


def exposed_s(step: FsdpStep) -> float:
    """Return how long nothing is computed."""
    return sum(end_s - start_s for start_s, end_s in idle_parts(step))


# ---- which belong together


def find_fsdp_cases(inputs: Inputs, workers: Sequence[int] = ()) -> list[FsdpCase]:
    """Lay out every plan for FSDP2 with what was given, and put measured steps beside those that have their groups.

    Raises:
        ReportError: where a plan is for none of the models that are there.
    """
    cases: list[FsdpCase] = []
    for name, plan in inputs.fsdp_plans:
        precision, at_root = precision_of(plan), at_root_of(plan)
        num_before, refused = len(cases), None
        for trace, where, cost in _points(inputs, workers):
            try:
                step = predict_fsdp(trace, cost, plan, precision=precision)
            except PlanError as problem:
                refused = problem  # of another model
                continue
            by_block = predict_fsdp(trace, cost, plan_by_block(trace, at_root), precision=precision)
            title = f"{trace.model} with FSDP2 on {plural(cost.workers, 'worker')} over {where}"
            entries = (FsdpEntry(Path(name).name, "predicted", step), FsdpEntry(BY_BLOCK, "predicted", by_block))
            bound_s = reported_bound_s(
                fsdp_lower_bound_s(trace, cost, precision=precision), min(step.iteration_s, by_block.iteration_s)
            )
            cases.append(FsdpCase(title, entries, bound_s))
        if refused is not None and len(cases) == num_before:
            raise ReportError(f"{name}: the plan is for no trace here: {refused}")
    for name, step in inputs.fsdp_steps:
        _add_measured(cases, Path(name).name, step)
    return cases


def _points(inputs: Inputs, workers: Sequence[int]) -> Iterator[tuple[ModelTrace, str, Cost]]:
    halves = dict(inputs.halves)
    for _, trace in inputs.traces:
        for name, cost in inputs.costs:
            yield trace, Path(name).name, halves.get(name, cost)
        for _, network in inputs.networks:
            for count in workers:
                yield trace, network.name, network.cost(count)


def _add_measured(cases: list[FsdpCase], name: str, step: FsdpStep) -> None:
    """Put an observed step beside a predicted one with the same groups, or into a case of its own."""
    for place, case in enumerate(cases):
        for entry in case.entries:
            if entry.how == "predicted" and _same_groups(entry.step, step):
                sized = replace(step, group_bytes=entry.step.group_bytes, sent_bytes=entry.step.sent_bytes)
                cases[place] = replace(case, entries=(*case.entries, FsdpEntry(entry.name, "measured", sized)))
                return
    cases.append(FsdpCase(f"{name}: a step of FSDP2", (FsdpEntry(name, "measured", step),)))


def _same_groups(predicted: FsdpStep, measured: FsdpStep) -> bool:
    """Whether the modules of every measured group are, or are inside, those of the predicted group in its place."""
    if len(predicted.groups) != len(measured.groups):
        return False
    return all(
        all(any(name == unit or name.startswith(f"{unit}.") for unit in mine) for name in theirs)
        for mine, theirs in zip(predicted.groups, measured.groups, strict=True)
    )


# ---- text and Perfetto


def draw_fsdp_case(case: FsdpCase, *, width: int = 100) -> str:
    """Return the case's summary and its steps, drawn to the same scale: computation above, messages below."""
    whole_s = max(entry.step.iteration_s for entry in case.entries)
    parts = [printable(" ".join([f"{case.title}.", *case.summary]))]
    parts += [_draw_entry(entry, width, whole_s) for entry in case.entries]
    return "\n\n".join([*parts, _LEGEND]) + "\n"


def _draw_entry(entry: FsdpEntry, width: int, whole_s: float) -> str:
    columns, counts = max(10, width - GUTTER), dict.fromkeys(_MARKS, 0)
    lanes: dict[bool, list[tuple[Span, str]]] = {False: [], True: []}
    for part in parts_of(entry.step):
        span = Span(part.group, part.num_bytes, part.start_s, part.start_s, part.end_s)
        lanes[part.is_message].append((span, _MARKS[part.kind][counts[part.kind] % 2]))
        counts[part.kind] += 1
    idle = [(Span((), 0, start_s, start_s, end_s), "!") for start_s, end_s in idle_parts(entry.step)]
    rows = [("compute", lanes[False]), ("messages", lanes[True]), ("exposed", idle)]
    lines = [f"{name:<{GUTTER}}|{draw_lane(spans, columns - 2, whole_s)}|" for name, spans in rows]
    end = format_seconds(whole_s)
    return "\n".join([printable(entry.words), *lines, f"{'':{GUTTER}}0 s{end:>{columns - 3}}"])


def fsdp_events(cases: Sequence[FsdpCase], first_process: int = 1) -> list[dict[str, Any]]:
    """Return the steps as events for Perfetto, a process each, numbered from ``first_process`` on."""
    events: list[dict[str, Any]] = []
    process = first_process
    for case in cases:
        for entry in case.entries:
            rank = "every rank" if entry.how == "predicted" else "the observed rank"
            events += make_names(process, f"{rank}, {entry.label}, {case.title}")
            for start_s, end_s in idle_parts(entry.step):
                events.append(_event(process, STEP, "exposed", "step", start_s, end_s))
            for part in parts_of(entry.step):
                thread, category = (COMMUNICATION, "communication") if part.is_message else (COMPUTATION, "computation")
                event = _event(process, thread, part.name, category, part.start_s, part.end_s)
                events.append({**event, "args": {"modules": list(part.group), "bytes": part.num_bytes}})
            process += 1
    return events


def _event(process: int, thread: int, name: str, category: str, start_s: float, end_s: float) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, **times, "args": {}}
