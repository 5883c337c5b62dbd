"""Figures as png, svg or pdf, drawn by matplotlib: the only module that needs it."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path
    from matplotlib.ticker import MaxNLocator, NullLocator
except ImportError as _missing:
    from mgwfbp.errors import ReportError

    raise ReportError(
        "figures need matplotlib, which is not installed: pip install 'mgwfbp[report]' (pages and text do without)"
    ) from _missing

from mgwfbp.report.chart import Chart
from mgwfbp.report.paper import Figure
from mgwfbp.report.words import low_words, message_words
from mgwfbp.timeline import Timeline
from mgwfbp.units import format_bytes, format_seconds, printable

__all__ = ["FigureFormat", "draw_chart", "draw_timelines", "render_figure"]

FigureFormat = Literal["png", "svg", "pdf"]

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; darker where lines are thin.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b2568a", "#dd9200", "#3fa3dd", "#6b7280", "#7a5c1e")
MARKERS = "os^Dv<>P"
FORWARD, GRADIENTS = "#9fb4c8", ("#3f84bf", "#2a6aa3")
MESSAGES, EXPOSED = ("#2fa67f", "#1f8a68"), ("#d55e00", "#b34e00")
HATCH: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "linewidth": 0}  # of messages in low precision

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dfe3e8",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.hashsalt": "mgwfbp",  # the same figure is the same file
    "savefig.dpi": 160,
}


def render_figure(figure: Figure, form: FigureFormat) -> bytes:
    """Draw a figure, panels side by side or, with timelines, as high as these need."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # it draws a box for a letter that the font lacks
        wide = any(panel.timelines for panel in figure.panels)
        rows = sum(len(panel.timelines) for panel in figure.panels)
        charts = [panel.chart for panel in figure.panels if panel.chart is not None]
        bars = max((len(chart.labels) for chart in charts if chart.kind == "stacked"), default=0)
        height = 0.9 + 0.95 * rows if wide else max(3.4, 1.1 + 0.25 * bars)
        canvas = Canvas(figsize=(8.0 if wide or len(figure.panels) > 1 else 5.0, height), layout="constrained")
        grid = canvas.subplots(1, len(figure.panels), squeeze=False)[0]
        for panel, axes in zip(figure.panels, grid, strict=True):
            axes.set_title(_plain(panel.title))
            if panel.chart is not None:
                draw_chart(panel.chart, axes)
            else:
                draw_timelines(panel.timelines, axes)
        canvas.suptitle(_plain(figure.title), fontsize=10, fontweight="bold")
        if figure.note:
            canvas.supxlabel(_plain(figure.note), fontsize=8, color="#59636e")
        stream = io.BytesIO()
        canvas.savefig(stream, format=form, metadata={"Date": None} if form == "svg" else None)
        return stream.getvalue()


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics into a name, and names from holding what no font has."""
    return printable(text).replace("$", r"\$")


def draw_timelines(timelines: Sequence[tuple[str, Timeline]], axes: Axes) -> None:
    """Draw steps under one another to one scale: computation above, messages below, the exposed part in its colour."""
    for place, (label, timeline) in enumerate(timelines):
        top = -3.2 * place
        _draw_lane(axes, top, [(timeline.forward.start_s, timeline.forward.end_s)], (FORWARD, FORWARD))
        _draw_lane(axes, top, [(span.start_s, span.end_s) for span in timeline.backward], GRADIENTS)
        messages = [(span.start_s, span.end_s) for span in timeline.messages]
        gathers = [(span.start_s, span.end_s) for span in timeline.gathers]
        _draw_lane(axes, top - 1.05, gathers, MESSAGES)
        _draw_lane(axes, top - 1.05, messages, MESSAGES)
        end_s = timeline.compute_s
        late = [(max(start_s, end_s), stop_s) for start_s, stop_s in messages if stop_s > end_s]
        _draw_lane(axes, top - 1.05, late, EXPOSED)
        waited_s = timeline.waited_s
        early = [(start_s, min(stop_s, waited_s)) for start_s, stop_s in gathers if start_s < waited_s]
        _draw_lane(axes, top - 1.05, early, EXPOSED)
        _hatch(axes, top - 1.05, [(span.start_s, span.end_s) for span in timeline.messages if span.wire])
        words = (
            f"{label}: {message_words(timeline)}, step {format_seconds(timeline.iteration_s)}, "
            f"exposed {format_seconds(timeline.exposed_s)}{low_words(timeline)}"
        )
        axes.text(0, top + 1.05, _plain(words), fontsize=8, va="bottom")
    axes.set_ylim(-3.2 * len(timelines) + 1.7, 2.0)
    axes.set_xlim(0, max(timeline.iteration_s for _, timeline in timelines) * 1.01 or 1.0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(_format("s"))
    legend = [
        ("forward", FORWARD),
        ("backward, by gradient", GRADIENTS[0]),
        ("message", MESSAGES[0]),
        ("exposed", EXPOSED[0]),
    ]
    handles = [axes.fill_between([], [], color=color, label=name) for name, color in legend]
    if any(timeline.low_bytes for _, timeline in timelines):
        handles.append(axes.fill_between([], [], facecolor=MESSAGES[0], **HATCH, label="in low precision"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles), borderaxespad=-1.6)


def _draw_lane(axes: Axes, bottom: float, spans: Sequence[tuple[float, float]], colors: tuple[str, str]) -> None:
    """Draw spans in two colours in turn, each colour as one path: thousands of messages stay a small file."""
    for parity, color in enumerate(colors):
        if some := spans[parity::2]:
            gap = 0.3 * (len(spans) < 60)
            axes.add_patch(PathPatch(_boxes(bottom, some), facecolor=color, edgecolor="white", linewidth=gap))


def _hatch(axes: Axes, bottom: float, spans: Sequence[tuple[float, float]]) -> None:
    """Draw stripes over the spans of messages in low precision."""
    if spans:
        axes.add_patch(PathPatch(_boxes(bottom, spans), facecolor="none", **HATCH))


def _boxes(bottom: float, spans: Sequence[tuple[float, float]]) -> Path:
    corners, codes = [], []
    for start_s, end_s in spans:
        corners += [(start_s, bottom), (end_s, bottom), (end_s, bottom + 0.95), (start_s, bottom + 0.95)]
        corners.append((start_s, bottom))
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def draw_chart(chart: Chart, axes: Axes) -> None:
    """Draw a chart of any kind."""
    {"lines": _draw_lines, "columns": _draw_columns, "stacked": _draw_stacked}[chart.kind](chart, axes)


def _write_percent(share: float) -> str:
    return f"{share:.0%}"


def _write_number(number: float) -> str:
    return f"{number:g}"


_WRITERS: Mapping[str, Callable[[float], str]] = {
    "s": format_seconds,
    "B": format_bytes,
    "%": _write_percent,
    "": _write_number,
}


def _format(unit: str) -> Callable[[float, float], str]:
    """Return how the ticks of an axis are written."""
    return lambda value, _: _WRITERS[unit](max(0.0, value))


def _draw_lines(chart: Chart, axes: Axes) -> None:
    for place, series in enumerate(chart.series):
        xs, ys = [point[0] for point in series.points], [point[1] for point in series.points]
        marker = "" if series.style == "dashed" or len(xs) > 40 else MARKERS[place % len(MARKERS)]
        line = {"line": "-", "dashed": "--", "points": ""}[series.style]
        axes.plot(
            xs,
            ys,
            color=COLORS[series.color],
            linestyle=line,
            marker=marker or ("o" if series.style == "points" else ""),
            markersize=4,
            linewidth=1.0 if series.style == "dashed" else 1.6,
            label=_plain(series.name),
        )
    points = [point for series in chart.series for point in series.points]
    if chart.x_log and any(x > 0 for x, _ in points):
        axes.set_xscale("log", base=10 if chart.x_unit else 2)
    if chart.y_log and any(y > 0 for _, y in points):
        axes.set_yscale("log", base=10 if chart.y_unit else 2)
    counts = sorted({x for x, _ in points})
    if not chart.x_unit and len(counts) <= 8:
        axes.set_xticks(counts)
    for axis, unit in ((axes.xaxis, chart.x_unit), (axes.yaxis, chart.y_unit)):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(_format(unit))
    if chart.y_unit == "%":
        axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if len(chart.series) > 1:
        axes.legend()


def _draw_columns(chart: Chart, axes: Axes) -> None:
    width = 0.8 / len(chart.series)
    for place, series in enumerate(chart.series):
        xs = [x + (place - (len(chart.series) - 1) / 2) * width for x, _ in series.points]
        axes.bar(xs, [y for _, y in series.points], width * 0.94, color=COLORS[series.color], label=_plain(series.name))
    axes.set_xticks(range(len(chart.labels)), [label.replace(" to ", "\nto ") for label in chart.labels], fontsize=7)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if len(chart.series) > 1:
        axes.legend()


def _draw_stacked(chart: Chart, axes: Axes) -> None:
    places = range(len(chart.labels))
    ends = [0.0 for _ in places]
    for series in chart.series:
        values = [y for _, y in series.points]
        axes.barh(places, values, left=ends, height=0.7, color=COLORS[series.color], label=_plain(series.name))
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(places, [_plain(label) for label in chart.labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(_format(chart.y_unit))
    axes.set_xlabel(chart.y_label)
    # Below the axis: bars fill all of the picture.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(chart.series))
