"""Curves that were measured: all-reduces over sizes, training runs over time. Nothing here draws."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgwfbp.cost import LinearCost
from mgwfbp.fitting import SHORTEST_S
from mgwfbp.record import is_real
from mgwfbp.report.chart import Chart, Series, Table
from mgwfbp.report.inputs import KnownCost
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_bytes, format_seconds, plural

__all__ = ["allreduce_chart", "run_charts"]

_MEASURED_COLOR = 4


def allreduce_chart(name: str, cost: KnownCost) -> Chart:
    """Show what an all-reduce takes: the curve, and the points that it was made from, if the cost says them.

    Of a cost that was learnt in training these are messages of training; what was swept before stands beside them.
    """
    swept, alone, observed = (_points(cost, kind) for kind in ("streamed", "isolated", "under_load"))
    measured = observed or swept
    knots = [] if isinstance(cost, LinearCost) else [size for size, _ in cost.points if size]
    sizes = sorted({*(size for size, _ in measured), *knots, *_DECADES})
    shown = [size for size, _ in (*swept, *observed)]
    sizes = [size for size in sizes if not shown or min(shown) <= size <= max(shown)]
    curve = tuple((float(size), cost(size)) for size in _between(sizes))
    series = [Series("learnt in training" if observed else "fitted", curve, 0)]
    if observed:
        series.append(Series("observed in training", _floats(observed), _MEASURED_COLOR, "points"))
    if swept:
        words = "swept before, one after the other" if observed else "measured, one after the other"
        series.append(Series(words, _floats(swept), 2 if observed else _MEASURED_COLOR, "points"))
    if alone:
        series.append(
            Series("swept before, each alone" if observed else "measured, each alone", _floats(alone), 6, "points")
        )
    times, alone_times = dict(measured), dict(alone)
    lines = [
        (
            format_bytes(size),
            format_seconds(cost(size)),
            *([format_seconds(times[size]), f"{cost(size) / times[size] - 1:+.1%}"] if times.get(size) else ["-", "-"])
            * bool(measured),
            *[format_seconds(alone_times[size]) if size in alone_times else "-"] * bool(alone),
        )
        for size in sizes
    ]
    titles = ("bytes", series[0].name, *(["measured", "error"] * bool(measured)), *(["alone"] * bool(alone)))
    return Chart(
        title=f"All-reduce over {plural(cost.workers, 'worker')}: {name}",
        kind="lines",
        series=tuple(series),
        table=Table(titles, tuple(lines)),
        x_label="bytes",
        y_label="time",
        x_unit="B",
        y_unit="s",
        x_log=True,
        y_log=True,
        note=_fit_words(cost),
    )


_DECADES = tuple(10**power for power in range(2, 9))


def _between(sizes: Sequence[int]) -> list[int]:
    """Return so many sizes more that a straight line looks like the curve it is on logarithmic axes."""
    if not sizes:
        return []
    steps = 60
    low, high = sizes[0], sizes[-1]
    return sorted({*sizes, *(round(low * (high / low) ** (step / steps)) for step in range(steps + 1))})


def _points(cost: KnownCost, name: str) -> list[tuple[int, float]]:
    """Return measured points from the free-form part of a cost, by size; whatever else stands there is none."""
    listed = cost.source.get(name, ())
    found = [_point(point) for point in listed] if isinstance(listed, (list, tuple)) else []
    return sorted(point for point in found if point is not None)


def _point(point: object) -> tuple[int, float] | None:
    if not isinstance(point, (list, tuple)) or len(point) != 2 or not all(is_real(value) for value in point):
        return None
    size, time = int(point[0]), float(point[1])
    return (size, time) if 1 <= size <= 2**53 and time >= SHORTEST_S else None


def _floats(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), float(time)) for size, time in points)


def _fit_words(cost: KnownCost) -> str:
    found = cost.source.get("fit")
    quality = ""
    if isinstance(found, Mapping) and {"mean_error", "worst_error", "num_sizes"} <= set(found):
        mean, worst, count = (found[key] for key in ("mean_error", "worst_error", "num_sizes"))
        if all(is_real(value) for value in (mean, worst, count)):
            of = "observed in training" if "under_load" in cost.source else "measured"
            quality = f" It is off by {mean:.1%} on average and {worst:.1%} at worst from the {count:g} sizes {of}."
    return f"{cost!r}.{quality}"


def run_charts(runs: Sequence[tuple[str, TrainingRun]]) -> list[Chart]:
    """Show accuracy and loss by epoch, and loss and throughput by step, all runs in one picture."""
    charts = []
    by_epoch = [(name, run) for name, run in runs if run.epochs]
    by_step = [(name, run) for name, run in runs if run.steps]
    for what, attribute, unit in (
        ("Top-1 accuracy", "top1", "%"),
        ("Top-5 accuracy", "top5", "%"),
        ("Validation loss", "valid_loss", ""),
    ):
        if by_epoch:
            lines = {
                name: [(epoch.epoch + 1, getattr(epoch, attribute)) for epoch in run.epochs] for name, run in by_epoch
            }
            charts.append(_run_chart(what, "epoch", unit, lines))
    for what, attribute in (("Training loss", "loss"), ("Samples per second", "samples_per_s")):
        if by_step:
            lines = {name: [(step.step, getattr(step, attribute)) for step in run.steps] for name, run in by_step}
            charts.append(_run_chart(what, "step", "", lines))
    return charts


def _run_chart(what: str, x_label: str, unit: Any, lines: Mapping[str, Sequence[tuple[int, float]]]) -> Chart:
    series = tuple(Series(name, _floats(points), place % 8) for place, (name, points) in enumerate(lines.items()))
    show = "{:.2%}" if unit == "%" else "{:.4g}"
    ends = {name: _picked(points) for name, points in lines.items()}
    titles = sorted({x for points in ends.values() for x, _ in points})
    rows = []
    for name, points in ends.items():
        values = dict(points)
        rows.append((name, *(show.format(values[x]) if x in values else "-" for x in titles)))
    table = Table(("run", *(f"{x_label} {x}" for x in titles)), tuple(rows))
    return Chart(what, "lines", series, table, x_label, what.lower(), y_unit=unit)


def _picked(points: Sequence[tuple[int, float]], most: int = 6) -> list[tuple[int, float]]:
    """Return at most so many of the points, evenly picked, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
