"""The figures of the paper, 1 to 9, from our own data: what each shows. `figures` draws them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mgwfbp.cost import LinearCost
from mgwfbp.errors import ReportError
from mgwfbp.network import PRESETS, Network
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, plan_mgwfbp, plan_optimal, plan_wfbp
from mgwfbp.report.chart import Chart, Series, Table
from mgwfbp.report.curves import allreduce_chart, run_charts
from mgwfbp.report.inputs import Inputs, ScalingRow
from mgwfbp.report.tables import (
    COMPUTATION_COLOR,
    EXPOSED_COLOR,
    scaling_charts,
    sizes_chart,
)
from mgwfbp.simulate import BASELINES, Strategy, SweepRow
from mgwfbp.simulate.evaluation import (
    MEASURED_WORKERS,
    SIMULATED_WORKERS,
    by_layer,
    paper_rows,
    predict_allreduce,
)
from mgwfbp.timeline import Timeline, predict, predict_naive
from mgwfbp.trace import LayerTrace, ModelTrace, load_trace
from mgwfbp.units import format_bytes, format_seconds, quote

__all__ = ["FIGURES", "Figure", "Panel", "paper_figure"]

_TRACES = {"googlenet": "googlenet-k80-bcaffe", "resnet50": "resnet50-k80-b32"}
_STRATEGIES = ("naive", "ps", "wfbp", "single", "mgwfbp", "optimal")
_SHORT = {"wfbp": "WF.", "single": "S.E.", "mgwfbp": "M.W.", "optimal": "ours"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a figure: a chart, or timelines under one another."""

    title: str
    chart: Chart | None = None
    timelines: tuple[tuple[str, Timeline], ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: panels side by side, and what to say under them."""

    title: str
    panels: tuple[Panel, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Data:
    """What figures are made from: what was given, and for what was not, what comes with the package."""

    inputs: Inputs
    network: Network

    def recorded(self, model: str) -> ModelTrace:
        given = [trace for _, trace in self.inputs.traces if trace.model == model]
        return given[0] if given else load_trace(_TRACES[model])

    def trace(self, model: str) -> ModelTrace:
        return by_layer(self.recorded(model))

    def origin(self, *models: str) -> str:
        """Say where the layers' times are from, and what to beware of."""
        words = []
        for model in models:
            source = self.recorded(model).source
            caution = f" ({source['caution']})" if source.get("caution") else ""
            words.append(f"{model}: {source.get('measured', 'unknown')}, {source.get('device', 'unknown')}{caution}")
        return f"Times of layers: {'; '.join(words)}."

    def rows(self, model: str, workers: Sequence[int]) -> list[ScalingRow]:
        strategies = [BASELINES[name] if name in BASELINES else Strategy(name, PLANNERS[name]) for name in _STRATEGIES]
        found = paper_rows(self.trace(model), self.network, strategies)
        return [_scaling_row(model, row) for row in found if row.workers in workers]


def _scaling_row(model: str, row: SweepRow) -> ScalingRow:
    return ScalingRow(
        model,
        row.network,
        row.planner,
        row.workers,
        row.num_groups,
        row.iteration_s,
        row.compute_s,
        row.exposed_s,
        row.speedup,
        row.efficiency,
        "simulated",
    )


def paper_figure(number: int, inputs: Inputs | None = None) -> Figure:
    """Return the paper's figure of this number, made from what was given and, for the rest, from recorded traces.

    Given traces of googlenet and resnet50 take the place of the recorded ones; so does the first network for 10GbE.
    A measured cost adds its points to Fig. 5, training runs of the two models are the second half of Figs. 6 and 7.
    """
    if number not in FIGURES:
        raise ReportError(f"figure {quote(number)} is not one of the paper's, which are 1 to {max(FIGURES)}")
    given = inputs or Inputs()
    network = given.networks[0][1] if given.networks else PRESETS["10gbe"]
    return FIGURES[number](_Data(given, network))


def example_trace() -> ModelTrace:
    """Return the 4-layer network of the paper's drawings."""
    layers = [LayerTrace(f"layer {layer}", 2e-3, 1_000_000) for layer in (4, 3, 2, 1)]
    return ModelTrace("4 layers", 5e-3, tuple(layers))


# Under WFBP these give the paper's three cases: messages shorter than a backward step; longer than some of them
# (`example_cases` has those); longer than all.
_CASES = {1: LinearCost(4, 0.5e-3, 1e-9), 2: LinearCost(4, 0.7e-3, 1.6e-9), 3: LinearCost(4, 1.5e-3, 2e-9)}


def _figure_1(data: _Data) -> Figure:  # noqa: ARG001 - every figure takes the data
    step = predict_naive(example_trace(), _CASES[3])
    title = "Fig. 1: naive S-SGD, a 4-layer network"
    return Figure(title, (Panel("", timelines=(("naive S-SGD", step),)),), "All messages wait for the backward pass.")


def _figure_2(data: _Data) -> Figure:  # noqa: ARG001
    trace, cost = example_trace(), _CASES[1]
    step = predict(trace, cost, plan_wfbp(trace, cost))
    return Figure("Fig. 2: WFBP, a 4-layer network", (Panel("", timelines=(("WFBP", step),)),))


def _figure_3(data: _Data) -> Figure:  # noqa: ARG001
    return Figure("Fig. 3: three cases of WFBP", (Panel("", timelines=tuple(example_cases())),))


def example_cases() -> list[tuple[str, Timeline]]:
    """Return a WFBP step of each of the paper's three cases."""
    found = []
    for case, cost in _CASES.items():
        trace = example_trace()
        if case == 2:  # the first two gradients come faster than they can be sent, the last leaves time
            steps_s = (1e-3, 1e-3, 4e-3, 4e-3)
            layers = [LayerTrace(f"layer {4 - place}", step_s, 1_000_000) for place, step_s in enumerate(steps_s)]
            trace = ModelTrace("4 layers", 5e-3, tuple(layers))
        found.append((f"case {case}", predict(trace, cost, plan_wfbp(trace, cost))))
    return found


def _figure_4(data: _Data) -> Figure:  # noqa: ARG001
    trace = example_trace()
    cost = LinearCost(4, 2.2e-3, 0.5e-9)
    steps = [
        ("WFBP", predict(trace, cost, plan_wfbp(trace, cost))),
        ("4 and 3 merged, as the paper draws it", predict(trace, cost, MergePlan.of_sizes(trace, [2, 1, 1]))),
        ("the paper's Algorithm 1", predict(trace, cost, plan_mgwfbp(trace, cost))),
        ("the best plan", predict(trace, cost, plan_optimal(trace, cost))),
    ]
    return Figure("Fig. 4: merged gradients", (Panel("", timelines=tuple(steps)),))


def _figure_5(data: _Data) -> Figure:
    sizes = sizes_chart([(model, data.trace(model)) for model in _TRACES])
    panels = [Panel("(a) sizes of gradients, by layer", sizes)]
    for name, cost in data.inputs.costs:
        panels.append(Panel(f"(b) all-reduce, {name}", allreduce_chart(name, cost)))
    if not data.inputs.costs:
        panels.append(Panel(f"(b) all-reduce over {data.network.name}, predicted", _allreduce_lines(data.network)))
    return Figure("Fig. 5: gradients and all-reduces", tuple(panels), data.origin(*_TRACES))


def _allreduce_lines(network: Network) -> Chart:
    found = predict_allreduce(network)
    series = [
        Series(f"{count} nodes", tuple((4.0 * size, times[count]) for size, times in found), place)
        for place, count in zip((0, 4, 2), MEASURED_WORKERS, strict=True)
    ]
    rows = [(format_bytes(4 * size), *(format_seconds(time) for time in times.values())) for size, times in found]
    table = Table(("bytes", *(f"{count} nodes" for count in MEASURED_WORKERS)), tuple(rows))
    return Chart(
        f"All-reduce over {network.name}",
        "lines",
        tuple(series),
        table,
        x_label="bytes",
        y_label="time",
        x_unit="B",
        y_unit="s",
        x_log=True,
        y_log=True,
    )


def _speedup_and_accuracy(number: int, model: str, data: _Data) -> Figure:
    speedup, _ = scaling_charts(data.rows(model, MEASURED_WORKERS))
    panels = [Panel("(a) speedup, simulated", speedup)]
    runs = [(name, run) for name, run in data.inputs.runs if run.config.get("model") == model and run.epochs]
    panels += [Panel("(b) top-1 accuracy", run_charts(runs)[0])] if runs else []
    without = "" if runs else f" No training run of {model} was given, so there is no (b) top-1 accuracy."
    note = data.origin(model) + without
    return Figure(f"Fig. {number}: {model} over {data.network.name}", tuple(panels), note)


def _figure_6(data: _Data) -> Figure:
    return _speedup_and_accuracy(6, "googlenet", data)


def _figure_7(data: _Data) -> Figure:
    return _speedup_and_accuracy(7, "resnet50", data)


def _figure_8(data: _Data) -> Figure:
    panels = [
        Panel(f"({letter}) {model}", _breakdown(model, data.rows(model, MEASURED_WORKERS)))
        for letter, model in zip("ab", _TRACES, strict=True)
    ]
    title = f"Fig. 8: computation and communication that is not overlapped, {data.network.name}"
    return Figure(title, tuple(panels), data.origin(*_TRACES))


def _breakdown(model: str, rows: Sequence[ScalingRow]) -> Chart:
    shown = [row for count in MEASURED_WORKERS for row in rows if row.workers == count and row.strategy in _SHORT]
    computation = tuple((float(place), row.compute_s) for place, row in enumerate(shown))
    exposed = tuple((float(place), row.exposed_s) for place, row in enumerate(shown))
    lines = [
        (_SHORT[row.strategy], str(row.workers), format_seconds(row.compute_s), format_seconds(row.exposed_s))
        for row in shown
    ]
    return Chart(
        model,
        "stacked",
        (Series("Comp.", computation, COMPUTATION_COLOR), Series("Comm.", exposed, EXPOSED_COLOR)),
        Table(("strategy", "nodes", "computation", "exposed"), tuple(lines)),
        y_label="time of a step",
        y_unit="s",
        labels=tuple(f"{_SHORT[row.strategy]}, {row.workers} nodes" for row in shown),
    )


def _figure_9(data: _Data) -> Figure:
    panels = [
        Panel(f"({letter}) {model}", scaling_charts(data.rows(model, SIMULATED_WORKERS))[0])
        for letter, model in zip("ab", _TRACES, strict=True)
    ]
    return Figure(f"Fig. 9: simulated speedup over {data.network.name}", tuple(panels), data.origin(*_TRACES))


FIGURES: Mapping[int, Callable[[_Data], Figure]] = MappingProxyType(
    {
        1: _figure_1,
        2: _figure_2,
        3: _figure_3,
        4: _figure_4,
        5: _figure_5,
        6: _figure_6,
        7: _figure_7,
        8: _figure_8,
        9: _figure_9,
    }
)
