"""Timelines in plain text, for a terminal without a browser."""

from collections.abc import Iterable, Sequence

from mgwfbp.report.cases import Case
from mgwfbp.report.perfetto import timelines_of
from mgwfbp.report.words import low_words, message_words, summarize, taken_words
from mgwfbp.timeline import Span, Timeline
from mgwfbp.units import format_seconds, printable

__all__ = ["GUTTER", "draw_case", "draw_lane", "draw_timeline"]

GUTTER = 10
_LEGEND = "f forward, b B gradients in turn, = # messages in turn, ! exposed"
_LOW_LEGEND = "- ~ messages in low precision in turn"
_GATHER_LEGEND = "< > gathers in turn"


def draw_case(case: Case, *, width: int = 100) -> str:
    """Return the case's summary and all its timelines, drawn to the same scale."""
    pairs = [(entry.label, entry.timeline) for entry in timelines_of([case])]
    whole_s = max((timeline.iteration_s for _, timeline in pairs), default=0.0)
    parts = [printable(" ".join(summarize(case)))]
    parts += [draw_timeline(timeline, label=label, width=width, whole_s=whole_s) for label, timeline in pairs]
    legend = _LEGEND
    legend += f", {_LOW_LEGEND}" * any(timeline.low_bytes for _, timeline in pairs)
    legend += f", {_GATHER_LEGEND}" * any(timeline.gathers for _, timeline in pairs)
    return "\n\n".join([*parts, legend] if pairs else parts) + "\n"


def draw_timeline(timeline: Timeline, *, label: str = "", width: int = 100, whole_s: float | None = None) -> str:
    """Draw a step: computation above, messages below, the exposed part marked, a scale at the foot.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.plan import MergePlan
    >>> from mgwfbp.timeline import predict
    >>> from mgwfbp.trace import LayerTrace, ModelTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> step = predict(trace, LinearCost(2, 2.0, 0.1), MergePlan.of_sizes(trace, [1, 2], planner="by hand"))
    >>> print(draw_timeline(step, width=38))
    by hand: 2 messages, step 13 s, exposed 4 s
    compute   |ffffffbbbbBBBBbbbb        |
    messages  |          ======  ########|
    exposed   |                  !!!!!!!!|
              0 s                     13 s
    """
    whole_s = whole_s or timeline.iteration_s
    columns = max(10, width - GUTTER)
    title = (
        f"{printable(label or timeline.planner)}: {message_words(timeline)}, step "
        f"{format_seconds(timeline.iteration_s)}, exposed {format_seconds(timeline.exposed_s)}{taken_words(timeline)}"
        f"{low_words(timeline)}"
    )
    forward = [(timeline.forward, "f")]
    backward = [(span, "bB"[place % 2]) for place, span in enumerate(timeline.backward)]
    messages = [(span, ("-~" if span.wire else "=#")[place % 2]) for place, span in enumerate(timeline.messages)]
    gathers = [(span, "<>"[place % 2]) for place, span in enumerate(timeline.gathers)]
    lost_s = [(0.0, timeline.waited_s), (timeline.compute_s, timeline.iteration_s)]
    exposed = [(Span((), 0, start_s, start_s, end_s), "!") for start_s, end_s in lost_s]
    lanes = [("compute", [*forward, *backward]), ("messages", [*gathers, *messages])]
    if timeline.exposed_s:
        lanes.append(("exposed", exposed))
    lines = [f"{name:<{GUTTER}}|{draw_lane(spans, columns - 2, whole_s)}|" for name, spans in lanes]
    end = format_seconds(whole_s)
    return "\n".join([title, *lines, f"{'':{GUTTER}}0 s{end:>{columns - 3}}"])


def draw_lane(spans: Iterable[tuple[Span, str]], columns: int, whole_s: float) -> str:
    """Give every column the mark of the span that fills most of it, if one fills any of it worth showing."""
    filled = [0.0] * columns
    marks = [" "] * columns
    for span, mark in spans:
        for column, part in _parts(span, columns, whole_s):
            if part > filled[column]:
                filled[column], marks[column] = part, mark
    return "".join(marks)


def _parts(span: Span, columns: int, whole_s: float) -> Sequence[tuple[int, float]]:
    """Return which columns a span touches and how much of each it fills."""
    if not whole_s or not span.duration_s:
        return []
    first, last = span.start_s / whole_s * columns, span.end_s / whole_s * columns
    # Rounding is not worth a column.
    return [
        (column, part)
        for column in range(int(first), min(columns, int(last) + 1))
        if (part := min(last, column + 1) - max(first, column)) > 1e-6
    ]
