"""The numbers behind the pictures, without a plotting library."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from mgwfbp import LinearCost, ModelTrace, find_plan, load_network, load_trace, predict
from mgwfbp.report.cases import Case, CaseStrategy, StepRow, step_rows
from mgwfbp.report.chart import NUM_COLORS, STRATEGY_COLORS, colors_of
from mgwfbp.report.curves import allreduce_chart, run_charts
from mgwfbp.report.inputs import Inputs, load_inputs
from mgwfbp.report.matching import find_cases
from mgwfbp.report.paper import FIGURES, example_cases, paper_figure
from mgwfbp.report.tables import (
    bench_rows,
    breakdown_chart,
    model_rows,
    scaling_charts,
    sizes_chart,
    steps_table,
)
from mgwfbp.report.whatif import faster_bandwidth, find_what_if, no_startup
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_seconds
from tests.examples import piecewise_costs, traces
from tests.report.records import TRACE, bench, measured_cost, stretched, sweep_rows, write_run

COST = LinearCost(4, 1e-3, 1e-9)


def planned_case() -> Case:
    (case,) = find_cases(Inputs(traces=(("t", TRACE),), costs=(("c", COST),)))
    return case


def test_computing_imports_no_plotting_library() -> None:
    modules = "tables, curves, words, cases, chart, inputs, matching, measured, paper, page, perfetto, text, whatif"
    code = (
        f"import sys; from mgwfbp.report import {modules}; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False False\n"


def test_a_step_is_computation_and_what_sticks_out() -> None:
    case = planned_case()
    rows = step_rows(case)
    assert [row.strategy for row in rows] == ["wfbp", "single", "bucket", "mgwfbp", "optimal"]
    for row, strategy in zip(rows, case.strategies, strict=True):
        step = predict(TRACE, COST, find_plan(TRACE, COST, strategy.name))
        assert (row.iteration_s, row.exposed_s, row.num_messages) == (
            step.iteration_s,
            step.exposed_s,
            len(step.messages),
        )
        assert row.compute_s + row.exposed_s == pytest.approx(row.iteration_s)
        assert row.speedup == pytest.approx(step.speedup)


def test_rows_and_timelines_agree_where_messages_take_from_the_computation() -> None:
    cost = replace(COST, taken_s=2e-3, taken_per_byte_s=1e-11)
    (case,) = find_cases(Inputs(traces=(("t", TRACE),), costs=(("c", cost),)))
    rows = step_rows(case)
    for row, strategy in zip(rows, case.strategies, strict=True):
        step = predict(TRACE, cost, find_plan(TRACE, cost, strategy.name))
        assert (row.efficiency, row.speedup) == pytest.approx((step.efficiency, step.speedup))
        assert (row.compute_s, row.taken_s) == pytest.approx((TRACE.compute_s, step.taken_s))
        assert row.compute_s + row.taken_s + row.exposed_s == pytest.approx(row.iteration_s)
    chart = breakdown_chart(case)
    heights = [sum(height for _, height in parts) for parts in zip(*(one.points for one in chart.series), strict=True)]
    assert heights == pytest.approx([row.iteration_s for row in rows])
    column = chart.table.titles.index("taken")
    assert [line[column] for line in chart.table.rows] == [format_seconds(row.taken_s) for row in rows]
    assert "taken" not in breakdown_chart(planned_case()).table.titles


def test_the_breakdown_shows_every_strategy_once_and_its_parts_add_up() -> None:
    chart = breakdown_chart(planned_case())
    computation, exposed = chart.series
    steps_s = [row.iteration_s for row in step_rows(planned_case())]
    assert chart.labels == ("wfbp", "single", "bucket", "mgwfbp", "optimal")
    assert [a + b for (_, a), (_, b) in zip(computation.points, exposed.points, strict=True)] == pytest.approx(steps_s)
    assert [row[3] for row in chart.table.rows] == [format_seconds(step_s) for step_s in steps_s]


def test_a_benchmark_is_shown_with_predictions_above_measurements_and_their_error() -> None:
    (case,) = find_cases(Inputs(benches=(("b", bench()),)))
    rows = step_rows(case)
    assert [(row.strategy, row.how) for row in rows[:2]] == [("ddp", "predicted"), ("ddp", "measured")]
    measured = rows[1]
    assert (measured.low_s, measured.high_s) == (bench()["ddp"].low_s, bench()["ddp"].high_s)
    table = steps_table(rows)
    assert table.titles[-2:] == ("between", "prediction error")
    assert table.rows[0][-1] == f"{1 / 1.10 - 1:+.1%}"
    assert table.rows[1][-1] == ""
    assert breakdown_chart(case).labels[:2] == ("ddp, predicted", "ddp, measured, median of 3 turns")


def test_curves_over_workers_are_the_planners_own() -> None:
    network = load_network("10gbe")
    rows = model_rows(TRACE, network, [2, 8])
    speedup, efficiency = scaling_charts(rows)
    step = predict(TRACE, network.cost(8), find_plan(TRACE, network.cost(8)))
    best = next(series for series in speedup.series if series.name == "optimal")
    assert best.points[-1] == (8.0, step.speedup)
    assert next(row for row in efficiency.table.rows if row[0] == "optimal")[-1] == f"{step.efficiency:.1%}"
    assert speedup.series[-1].name == "linear"


def test_measured_and_simulated_curves_stand_apart(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_rows()))
    ((_, rows),) = load_inputs([tmp_path / "sweep.json"]).sweeps
    measured = bench_rows([bench(2), bench(4)])
    charts = scaling_charts([*rows, *measured])
    assert [chart.title.split(": ")[0] for chart in charts] == ["Speedup", "Efficiency"] * 2
    assert "simulated" in charts[0].title
    assert "measured" in charts[2].title
    assert [point[0] for point in charts[2].series[0].points] == [2.0, 4.0]
    assert charts[2].series[0].points[0][1] == bench(2).speedup("ddp")


def test_a_strategy_that_was_not_run_everywhere_leaves_a_gap() -> None:
    rows = [row for row in bench_rows([bench(2), bench(4)]) if (row.strategy, row.workers) != ("wfbp", 2)]
    speedup, _ = scaling_charts(rows)
    assert next(row for row in speedup.table.rows if row[0] == "wfbp")[1] == "-"


@given(traces())
def test_every_gradient_is_counted_once_in_the_sizes(trace: ModelTrace) -> None:
    chart = sizes_chart([("random", trace)])
    assert sum(count for _, count in chart.series[0].points) == len(trace.layers)


def test_sizes_of_two_models_share_their_columns() -> None:
    small = ModelTrace("small", 0.0, TRACE.layers[1:2])
    chart = sizes_chart([("toy", TRACE), ("small", small)])
    assert chart.labels == ("1k to 10k", "10k to 100k", "100k to 1M")
    assert [[count for _, count in series.points] for series in chart.series] == [[8, 0, 4], [1, 0, 0]]


def test_an_all_reduce_is_shown_as_measured_and_as_fitted_with_the_error_of_the_fit() -> None:
    cost = measured_cost()
    chart = allreduce_chart("lab", cost)
    fitted, measured, alone = chart.series
    assert measured.points == tuple((float(size), time) for size, time in cost.source["streamed"])
    assert alone.points == tuple((float(size), time) for size, time in cost.source["isolated"])
    assert all(time == cost(int(size)) for size, time in fitted.points)
    assert f"{cost.source['fit']['mean_error']:.1%}" in chart.note
    size, time = cost.source["streamed"][0]
    assert chart.table.rows[0][2:4] == (format_seconds(time), f"{cost(size) / time - 1:+.1%}")


@pytest.mark.parametrize("points", [[], "none", [[1]], [["a", "b"]], [[1, -1.0]], [[0, 0]]])
def test_a_cost_with_odd_points_is_shown_without_them(points: object) -> None:
    source = {"streamed": points, "fit": {"mean_error": "?", "worst_error": 1, "num_sizes": 2}}
    chart = allreduce_chart("odd", LinearCost(2, 1e-3, 1e-9, source))
    assert [series.name for series in chart.series] == ["fitted"]


def test_curves_of_runs_have_every_epoch_and_step(tmp_path: Path) -> None:
    run = TrainingRun.load(write_run(tmp_path / "run"))
    charts = {chart.title: chart for chart in run_charts([("run", run)])}
    assert list(charts) == [
        "Top-1 accuracy",
        "Top-5 accuracy",
        "Validation loss",
        "Training loss",
        "Samples per second",
    ]
    assert charts["Top-1 accuracy"].series[0].points == ((1.0, 0.5), (2.0, 0.6), (3.0, 0.7))
    assert charts["Top-1 accuracy"].table.rows == (("run", "50.00%", "60.00%", "70.00%"),)
    assert len(charts["Training loss"].series[0].points) == 30
    assert charts["Training loss"].table.titles[1] == "step 1"
    assert charts["Training loss"].table.titles[-1] == "step 30"


def test_strategies_keep_their_colours_and_others_get_free_ones() -> None:
    colors = colors_of(["bucket", "bucket-5", "optimal", "bucket-10"])
    assert colors["optimal"] == STRATEGY_COLORS["optimal"]
    assert len(set(colors.values())) == 4
    assert all(0 <= color < NUM_COLORS for color in colors.values())


@given(piecewise_costs())
def test_without_start_up_or_with_more_bandwidth_no_message_takes_longer(cost: LinearCost) -> None:
    for size in (0, 1, 7, 60, 1000):
        assert no_startup(cost)(size) <= cost(size)
        assert faster_bandwidth(cost)(size) <= cost(size) * (1 + 1e-12)
    assert no_startup(cost)(0) == 0


def test_one_worker_has_no_what_if() -> None:
    case = Case("toy", "", 1, (), TRACE, LinearCost(1, 0.0, 0.0))
    assert find_what_if(case) is None
    # A benchmark of four workers may hold the cost of one, which says nothing of a link.
    assert find_what_if(Case("toy", "", 4, (), TRACE, LinearCost(1, 1.0, 1.0))) is None


def test_a_timeline_joins_the_strategy_whose_messages_it_has(tmp_path: Path) -> None:
    step = predict(TRACE, COST, find_plan(TRACE, COST))
    inputs = Inputs(traces=(("t", TRACE),), costs=(("c", COST),), timelines=(("observed.json", stretched(step, 2.0)),))
    (case,) = find_cases(inputs)
    assert [strategy.name for strategy in case.strategies if strategy.measured] == ["optimal"]
    other = Inputs(inputs.traces, inputs.costs, timelines=(("predicted.json", step),))
    (case,) = find_cases(other)
    assert case.strategies[-1] == CaseStrategy("optimal (predicted.json)", predicted=step)


def test_a_timeline_of_another_model_is_a_case_of_its_own() -> None:
    step = predict(TRACE, COST, find_plan(TRACE, COST))
    other = stretched(step, 1.0)
    object.__setattr__(other, "model", "other")
    cases = find_cases(Inputs(traces=(("t", TRACE),), costs=(("c", COST),), timelines=(("a.json", other),)))
    assert [case.model for case in cases] == ["toy", "other"]


def test_the_example_of_each_case_is_of_that_case() -> None:
    assert [timeline.case for _, timeline in example_cases()] == [1, 2, 3]


@pytest.mark.parametrize("number", [5, 6, 8, 9])
def test_figures_of_googlenet_are_of_its_authors_times_and_say_so(number: int) -> None:
    assert "googlenet: by the paper's authors, K80" in paper_figure(number).note
    analytic = load_trace("googlenet-k80-b64")
    given = paper_figure(number, Inputs(traces=(("mine", analytic),)))
    assert f"googlenet: analytic, k80 ({analytic.source['caution']})" in given.note


@pytest.mark.parametrize("number", FIGURES)
def test_every_figure_of_the_paper_has_numbers(number: int) -> None:
    figure = paper_figure(number)
    assert figure.title.startswith(f"Fig. {number}")
    for panel in figure.panels:
        assert (panel.chart is None) != (not panel.timelines)
        if panel.chart is not None:
            assert panel.chart.table.rows
            assert all(series.points for series in panel.chart.series)


def test_the_merged_figure_shows_that_the_papers_rule_is_not_the_best() -> None:
    steps_s = [timeline.iteration_s for _, timeline in paper_figure(4).panels[0].timelines]
    wfbp, drawn, published, best = steps_s
    assert best < published < drawn < wfbp


def test_runs_of_the_model_are_the_second_half_of_figure_6(tmp_path: Path) -> None:
    run = TrainingRun.load(write_run(tmp_path / "run", model="googlenet"))
    figure = paper_figure(6, Inputs(runs=(("run", run),)))
    assert [panel.title for panel in figure.panels] == ["(a) speedup, simulated", "(b) top-1 accuracy"]
    assert len(paper_figure(7, Inputs(runs=(("run", run),))).panels) == 1


def test_a_measured_cost_is_what_figure_5_shows() -> None:
    figure = paper_figure(5, Inputs(costs=(("lab", measured_cost()),)))
    chart = figure.panels[1].chart
    assert chart is not None
    assert [series.name for series in chart.series][1] == "measured, one after the other"


def test_two_runs_of_one_name_stay_two(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / part / "run") for part in ("a", "b")]
    chart = run_charts(load_inputs(folders).runs)[0]
    assert [series.name for series in chart.series] == [str(folder) for folder in folders]


def test_the_efficiency_of_a_step_of_no_length_is_one() -> None:
    assert StepRow("x", "measured", 1, 0.0, 0.0, 0.0, 4).efficiency == 1.0
