"""The numbers behind the pictures: records in, charts with their tables out. Nothing here draws."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgwfbp.network import Network
from mgwfbp.planners import PLANNERS, Planner
from mgwfbp.ranges import RANGE_WORDS
from mgwfbp.report.cases import Case, StepRow, step_rows
from mgwfbp.report.chart import Chart, Series, Table, colors_of
from mgwfbp.report.inputs import ScalingRow
from mgwfbp.results import BenchResult
from mgwfbp.simulate.evaluation import size_distribution
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_range, format_seconds, plural

__all__ = [
    "COMPUTATION_COLOR",
    "EXPOSED_COLOR",
    "bench_rows",
    "breakdown_chart",
    "model_rows",
    "scaling_charts",
    "sizes_chart",
    "steps_table",
]

COMPUTATION_COLOR, EXPOSED_COLOR, TAKEN_COLOR = 0, 1, 2
TAKEN = "messages' own time: what starting and copying them takes from the computation"


def steps_table(rows: Sequence[StepRow]) -> Table:
    """Return one line per strategy and how it is known; errors of predictions where both are."""
    measured = {row.strategy: row for row in rows if row.how == "measured"}
    errors = any(row.how == "predicted" and row.strategy in measured for row in rows)
    spread = any(row.low_s is not None for row in rows)
    takes = any(row.taken_s for row in rows)
    titles = ["strategy", "known by", "messages", "step", "computation", *["taken"] * takes]
    titles += ["exposed", "share", "efficiency"]
    titles += ["between"] * spread + ["prediction error"] * errors
    wire = any(row.low_bytes for row in rows)
    titles += ["sent", "low precision"] * wire
    lines = []
    for row in rows:
        cells = [
            row.strategy,
            row.how_known,
            str(row.num_messages),
            format_seconds(row.iteration_s),
            format_seconds(row.compute_s),
            *([format_seconds(row.taken_s)] if takes else []),
            format_seconds(row.exposed_s),
            f"{row.exposed_s / row.iteration_s:.1%}" if row.iteration_s else "-",
            f"{row.efficiency:.1%}",
        ]
        if spread:
            known = row.low_s is not None and row.high_s is not None
            cells.append(format_range(row.low_s or 0, row.high_s or 0) if known else "")
        if errors:
            real = measured.get(row.strategy)
            compared = row.how == "predicted" and real is not None and real.iteration_s
            cells.append(f"{row.iteration_s / real.iteration_s - 1:+.1%}" if compared and real else "")
        if wire:
            cells += _wire_cells(row)
        lines.append(tuple(cells))
    return Table(tuple(titles), tuple(lines))


def _wire_cells(row: StepRow) -> list[str]:
    """Return the bytes on the wire and which part of the gradients' bytes travels in low precision."""
    if row.grad_bytes is None or row.sent_bytes is None:
        return ["", ""]
    return [format_bytes(row.sent_bytes), f"{row.low_bytes / row.grad_bytes if row.grad_bytes else 0:.0%}"]


def breakdown_chart(case: Case) -> Chart:
    """Show what every strategy's step is made of: computation, and communication that nothing hides."""
    rows = step_rows(case)
    several = len({row.how for row in rows}) > 1
    labels = tuple(f"{row.strategy}, {row.how_known}" if several else row.strategy for row in rows)
    computation = tuple((float(place), row.compute_s) for place, row in enumerate(rows))
    taken = tuple((float(place), row.taken_s) for place, row in enumerate(rows))
    exposed = tuple((float(place), row.exposed_s) for place, row in enumerate(rows))
    known = [
        (row.low_s, row.high_s) if row.low_s is not None and row.high_s is not None else (row.iteration_s,) * 2
        for row in rows
    ]
    spread = tuple(known) if any(row.low_s is not None for row in rows) else ()
    return Chart(
        title=f"What a step is made of: {case.title}",
        kind="stacked",
        series=(
            Series("computation", computation, COMPUTATION_COLOR),
            *([Series(TAKEN, taken, TAKEN_COLOR)] if any(row.taken_s for row in rows) else []),
            Series("communication that nothing hides", exposed, EXPOSED_COLOR, spread=spread),
        ),
        table=steps_table(rows),
        y_label="time of a step",
        y_unit="s",
        labels=labels,
        note=_spread_note(rows) if spread else "",
    )


def _spread_note(rows: Sequence[StepRow]) -> str:
    """Say what the lines at the ends of bars, and the column `between`, are."""
    hows = {row.how for row in rows if row.low_s is not None}
    words = {
        "measured": "of measured steps the middle half of the turns",
        "predicted": f"of predicted ones what they may be off by: {RANGE_WORDS}",
    }
    return f"The line at the end of a bar spans, {', '.join(text for how, text in words.items() if how in hows)}."


def model_rows(
    trace: ModelTrace, network: Network, workers: Iterable[int], planners: Mapping[str, Planner] = PLANNERS
) -> list[ScalingRow]:
    """Predict every planner's step on these numbers of workers, each planned anew."""
    rows = []
    for count in workers:
        cost = network.cost(count)
        for name, planner in planners.items():
            step = predict(trace, cost, planner(trace, cost))
            rows.append(
                ScalingRow(
                    trace.model,
                    network.name,
                    name,
                    count,
                    len(step.messages),
                    step.iteration_s,
                    step.compute_s - step.waited_s,
                    step.exposed_s,
                    step.speedup,
                    step.efficiency,
                    "predicted",
                )
            )
    return rows


def bench_rows(benches: Iterable[BenchResult]) -> list[ScalingRow]:
    """Return what was measured on each benchmark's number of workers."""
    return [
        ScalingRow(
            bench.model,
            bench.network,
            result.strategy,
            bench.workers,
            result.num_messages,
            result.measured_s,
            bench.compute_s,
            result.exposed_s,
            bench.speedup(result.strategy),
            bench.efficiency(result.strategy),
            "measured",
        )
        for bench in benches
        for result in bench.strategies
        if result.measured_s  # a step of no time has no speedup
    ]


def scaling_charts(rows: Sequence[ScalingRow]) -> list[Chart]:
    """Show speedup and efficiency over workers, one pair of pictures for each model and network."""
    charts = []
    for model, network, how in dict.fromkeys((row.model, row.network, row.how) for row in rows):
        some = [row for row in rows if (row.model, row.network, row.how) == (model, network, how)]
        charts += _scaling_pair(f"{model} over {network}, {how}", some)
    return charts


def _scaling_pair(title: str, rows: Sequence[ScalingRow]) -> list[Chart]:
    found = {(row.strategy, row.workers): row for row in rows}
    counts = sorted({row.workers for row in rows})
    colors = colors_of(row.strategy for row in rows)
    line = Series("linear", tuple((float(count), float(count)) for count in counts), 6, "dashed")

    def chart(what: str, attribute: str, unit: Any, show: str, extra: tuple[Series, ...]) -> Chart:
        series = [
            Series(name, tuple((float(n), getattr(found[name, n], attribute)) for n in counts if (name, n) in found), c)
            for name, c in colors.items()
        ]
        cells = [
            (name, *(format(getattr(found[name, n], attribute), show) if (name, n) in found else "-" for n in counts))
            for name in colors
        ]
        return Chart(
            title=f"{what}: {title}",
            kind="lines",
            series=(*series, *extra),
            table=Table(("strategy", *(plural(count, "worker") for count in counts)), tuple(cells)),
            x_label="workers",
            y_label=what.lower(),
            y_unit=unit,
            x_log=len(counts) > 2,
            y_log=attribute == "speedup" and len(counts) > 2,
        )

    return [chart("Speedup", "speedup", "", ".4g", (line,)), chart("Efficiency", "efficiency", "%", ".1%", ())]


def sizes_chart(traces: Sequence[tuple[str, ModelTrace]]) -> Chart:
    """Show how many gradients have how many elements, Fig. 5(a)."""
    by_name = {name: {size.low: size for size in size_distribution(trace)} for name, trace in traces}
    lows = sorted({low for sizes in by_name.values() for low in sizes})
    series, lines = [], []
    for place, (name, sizes) in enumerate(by_name.items()):
        counts = tuple(sizes[low].num_gradients if low in sizes else 0 for low in lows)
        points = tuple((float(x), float(count)) for x, count in enumerate(counts))
        series.append(Series(name, points, (0, 4, 2, 3)[place % 4]))
    for low in lows:
        cells = [f"{low:,} to {low * 10 - 1:,}"]
        for sizes in by_name.values():
            size = sizes.get(low)
            cells += [str(size.num_gradients), format_bytes(size.num_bytes)] if size else ["0", "0 B"]
        lines.append(tuple(cells))
    titles = ["elements"]
    for name in by_name:
        titles += [f"{name}: gradients", "bytes together"] if len(by_name) > 1 else ["gradients", "bytes together"]
    return Chart(
        title="Sizes of gradients",
        kind="columns",
        series=tuple(series),
        table=Table(tuple(titles), tuple(lines)),
        x_label="elements of 4 bytes",
        y_label="gradients",
        labels=tuple(f"{_power(low)} to {_power(low * 10)}" for low in lows),
    )


def _power(number: int) -> str:
    """Write a power of ten short.

    >>> _power(1), _power(1000), _power(10**7)
    ('1', '1k', '10M')
    """
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number // scale}{unit}"
    return str(number)
