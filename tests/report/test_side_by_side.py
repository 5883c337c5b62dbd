"""The first picture of a page: steps as they were measured, DDP's above ours, on one time axis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import BenchResult, Timeline, predict
from mgwfbp.costs import ShardedCost
from mgwfbp.planners import find_sharded_plan
from mgwfbp.report import Inputs, find_cases, load_inputs
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_seconds
from tests.report.browser import Tab, write_page
from tests.report.records import TRACE, bench, measured_cost, write_demo, write_run

SCALE = """svg => {
  // Pixels per unit, by the grid: where the first and the last line of the axis are, and what they say.
  const ticks = [...svg.querySelectorAll("text.tick")].map((text) => text.textContent);
  const lines = [...svg.querySelectorAll("line.grid")].map((line) => Number(line.getAttribute("x1")));
  return [ticks, lines];
}"""


def observed(inputs: Inputs) -> list[tuple[str, Timeline]]:
    """The measured timelines among the inputs, by strategy."""
    return [
        (strategy.name, strategy.measured)
        for case in find_cases(inputs)
        for strategy in case.strategies
        if strategy.measured is not None
    ]


def with_auto(found: BenchResult) -> BenchResult:
    """The same benchmark with the plan of `optimal` under the name of the tuner's, too, at the end."""
    return replace(found, strategies=(*found.strategies, replace(found["optimal"], strategy="auto")))


def inputs_of(kind: str, folder: Path) -> Inputs:
    match kind:
        case "demo":
            return load_inputs(write_demo(folder))
        case "benchmark":
            return Inputs(benches=(("b", bench(names=("wfbp", "optimal", "bucket"))),))
        case _:
            return Inputs(benches=(("b", with_auto(bench(names=("wfbp", "optimal", "bucket")))),))


@pytest.mark.parametrize(
    ("kind", "ours"), [("demo", "auto"), ("benchmark", "optimal"), ("benchmark with a tuner", "auto")]
)
def test_ddp_stands_above_ours_as_they_were_measured_on_one_axis(
    tab: Tab, tmp_path: Path, kind: str, ours: str
) -> None:
    inputs = inputs_of(kind, tmp_path)
    tab.open(write_page(tmp_path, inputs))
    plots = tab.page.locator(".plot")
    first, second = plots.nth(0), plots.nth(1)
    seen: list[Any] = [plot.evaluate("plot => [plot.dataset.step, plot.dataset.how]") for plot in (first, second)]
    assert seen == [["ddp", "measured"], [ours, "measured"]]
    # No other stands between them or shares their axis.
    section = tab.page.locator("main > section").first
    assert section.locator(".plot").count() == 2
    assert first.locator("svg").evaluate(SCALE) == second.locator("svg").evaluate(SCALE)
    steps = dict(observed(inputs))
    titles = section.locator("h4").all_inner_texts()
    for name, title in zip(("ddp", ours), titles, strict=True):
        assert (
            f"step {format_seconds(steps[name].iteration_s)}, exposed {format_seconds(steps[name].exposed_s)}" in title
        )
    tab.check()


def test_runs_with_networks_of_their_own_are_cases_of_their_own_but_stand_together(tab: Tab, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("monday", "tuesday")]
    inputs = load_inputs([*write_demo(tmp_path), *runs])
    assert [case.num_runs for case in find_cases(inputs)] == [2, 1, 1]
    tab.open(write_page(tmp_path, inputs))
    plots = tab.page.locator("section.measured .plot")
    names = plots.evaluate_all("all => all.map(plot => plot.dataset.step)")
    assert names == ["ddp", "auto", "optimal, gloo (monday)", "optimal, gloo (tuesday)"]


def test_one_measured_step_is_not_compared(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, load_inputs([write_run(tmp_path / "run")])))
    assert tab.page.locator("section.measured").count() == 0


def test_two_runs_of_one_strategy_are_told_apart(tmp_path: Path) -> None:
    ddp, auto = write_demo(tmp_path)
    again = write_demo(tmp_path / "again")[0].rename(tmp_path / "ddp again")
    (case,) = find_cases(load_inputs([ddp, again, auto]))
    assert [strategy.name for strategy in case.strategies[:3]] == ["ddp", "ddp (ddp again)", "auto"]


def test_of_two_runs_both_are_predicted_with_what_one_of_them_measured(tmp_path: Path) -> None:
    inputs = load_inputs(write_demo(tmp_path))
    (case,) = find_cases(inputs)
    assert case.trace == TrainingRun.load(tmp_path / "auto").trace
    ddp = case.strategies[0]
    assert ddp.measured is not None
    assert ddp.predicted is not None
    assert [span.layers for span in ddp.predicted.messages] == [span.layers for span in ddp.measured.messages]
    # Its buckets do not stand there a second time.
    assert [strategy.name for strategy in case.strategies] == ["ddp", "auto", "wfbp", "single", "mgwfbp", "optimal"]


def test_a_runs_own_sharded_plan_is_predicted_with_the_halves_that_it_measured(tmp_path: Path) -> None:
    cost = measured_cost(2)
    slow, fast = (
        replace(cost, points=tuple((size, part * time_s) for size, time_s in cost.points)) for part in (0.4, 0.3)
    )
    halves = ShardedCost(cost, slow, fast)
    plan = find_sharded_plan(TRACE, halves)
    folder = write_run(tmp_path / "run", plan=plan)
    halves.save(folder / "cost.json")
    (folder / "predicted.json").unlink()
    (case,) = find_cases(load_inputs([folder]))
    assert plan.gathers
    assert case.strategies[0].predicted == predict(TRACE, halves, plan)
    assert case.cost == cost  # of the planners beside it, which all-reduce


def test_a_median_of_turns_and_one_observed_step_have_names_of_their_own(tab: Tab, tmp_path: Path) -> None:
    found = bench()
    tab.open(write_page(tmp_path, Inputs(benches=(("b", found),))))
    for name in ("ddp", "wfbp", "optimal"):
        timeline = found[name].timeline
        assert timeline is not None
        rows = tab.page.locator("figure.stacked tbody tr").filter(has=tab.page.get_by_role("rowheader", name=name))
        cells = [row.locator("td").all_inner_texts()[:3] for row in rows.all()]
        assert cells[1][0] == "measured, median of 3 turns"
        assert cells[1][2] == format_seconds(found[name].measured_s)
        titles = [text for text in tab.page.locator("h4").all_inner_texts() if text.startswith(f"{name}, measured")]
        assert titles
        for title in titles:
            assert title.startswith(f"{name}, measured, one observed step: ")
            assert f"step {format_seconds(timeline.iteration_s)}," in title
