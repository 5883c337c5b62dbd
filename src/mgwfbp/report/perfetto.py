"""Timelines for Perfetto and chrome://tracing: ranks are processes, computation and communication their threads.

The format is the Trace Event Format's JSON object: complete events (``ph`` X) with ``ts`` and ``dur`` in microseconds,
and metadata events (``ph`` M) that name processes and threads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mgwfbp.report.cases import Case, How, how_known
from mgwfbp.timeline import Span, Timeline

__all__ = [
    "COMMUNICATION",
    "COMPUTATION",
    "MAX_RANKS",
    "STEP",
    "LabelledTimeline",
    "make_names",
    "timelines_of",
    "to_perfetto",
]

# All ranks of a predicted step are alike; so many are enough to see that.
MAX_RANKS = 8
STEP, COMPUTATION, COMMUNICATION = 0, 1, 2
_THREADS = {STEP: "step", COMPUTATION: "computation", COMMUNICATION: "communication"}


@dataclass(frozen=True, slots=True)
class LabelledTimeline:
    """A timeline, whose it is and how it is known."""

    case: str
    strategy: str
    how: How
    timeline: Timeline

    @property
    def label(self) -> str:
        """What to call it among those of its case."""
        return f"{self.strategy}, {how_known(self.how)}"


def timelines_of(cases: Iterable[Case]) -> list[LabelledTimeline]:
    """Return all timelines of the cases, predicted before measured."""
    found = []
    for case in cases:
        for strategy in case.strategies:
            if strategy.predicted is not None:
                found.append(LabelledTimeline(case.title, strategy.name, "predicted", strategy.predicted))
            if strategy.measured is not None:
                found.append(LabelledTimeline(case.title, strategy.name, "measured", strategy.measured))
    return found


def to_perfetto(timelines: Sequence[LabelledTimeline], *, max_ranks: int = MAX_RANKS) -> dict[str, Any]:
    """Return the timelines as a trace.

    Thread ``step`` has two spans, computation and exposed communication, which add up to the step; where parameters are
    gathered, what the forward pass waited for them comes first. A predicted step is that of every rank; a measured one
    is the one that was observed, and no more is made of it.

    Args:
        timelines: what is shown, one process each.
        max_ranks: of a predicted step so many ranks are shown at most.

    Returns:
        The content of a file for ui.perfetto.dev, ready for ``json.dump``.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for entry in timelines:
        timeline = entry.timeline
        ranks = [f"rank {rank}" for rank in range(min(timeline.workers, max_ranks))]
        for rank in ranks if entry.how == "predicted" else ["the observed rank"]:
            process += 1
            events += make_names(process, f"{rank}, {entry.label}, {entry.case}")
            events += _step(process, timeline)
            events.append(_event(process, COMPUTATION, "forward", "computation", timeline.forward))
            for span in timeline.backward:
                events.append(_event(process, COMPUTATION, _name(span), "computation", span))
            for place, span in enumerate(timeline.gathers):
                name = f"gather {place}: {_name(span)}"
                events.append(_event(process, COMMUNICATION, name, "communication", span))
            for place, span in enumerate(timeline.messages):
                name = f"message {place}{f' in {span.wire}' if span.wire else ''}: {_name(span)}"
                events.append(_event(process, COMMUNICATION, name, "communication", span))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def make_names(process: int, name: str) -> list[dict[str, Any]]:
    """Return the events that name a process and its threads."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for thread, title in _THREADS.items():
        events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": title}})
        events.append(
            {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        )
    return events


def _step(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    waited_s, end_s = timeline.waited_s, timeline.compute_s
    parts = [("computation", waited_s, end_s), ("exposed", end_s, timeline.iteration_s)]
    if waited_s:
        parts.insert(0, ("exposed", 0.0, waited_s))
    return [
        {
            "ph": "X",
            "pid": process,
            "tid": STEP,
            "name": name,
            "cat": "step",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "args": {},
        }
        for name, start_s, end_s in parts
    ]


def _event(process: int, thread: int, name: str, category: str, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": span.start_s * 1e6,
        "dur": span.duration_s * 1e6,
        "args": {
            "layers": list(span.layers),
            "bytes": span.num_bytes,
            "ready_us": span.ready_s * 1e6,
            **({"wire": span.wire} if span.wire else {}),
        },
    }


def _name(span: Span) -> str:
    """Name a span by its first gradient and how many more there are."""
    more = f" and {len(span.layers) - 1} more" if len(span.layers) > 1 else ""
    return f"{span.layers[0] if span.layers else 'nothing'}{more}"
