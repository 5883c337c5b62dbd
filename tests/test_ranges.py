"""How sure a prediction is."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_predictions
from benchmarks.bench_predictions import Tuned, least_off, left_out, share
from benchmarks.bench_tables import load, named
from mgwfbp import LinearCost, MergePlan, ModelTrace, PiecewiseCost, find_plan, load_network, predict
from mgwfbp.cli import run
from mgwfbp.costs import ShardedCost
from mgwfbp.fitting import fit
from mgwfbp.planners import plan_optimal
from mgwfbp.ranges import LOW_MODEL_OFF, MODEL_OFF, input_range, off_by, predict_range, spread_of
from mgwfbp.units import format_range
from tests.examples import make_trace, piecewise_costs, traces

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TRACE = make_trace([1.0, 2.0, 3.0], [10, 20, 30])


@given(traces(), piecewise_costs(), st.data())
def test_the_step_is_within_its_range_and_costs_that_are_off_still_never_fall(
    trace: ModelTrace, cost: PiecewiseCost, data: st.DataObject
) -> None:
    parts = st.lists(st.floats(0, 2), min_size=len(cost.points), max_size=len(cost.points))
    unsure = PiecewiseCost(2, cost.points, {"spread": data.draw(parts)})
    plan = plan_optimal(trace, unsure)
    found = predict_range(trace, unsure, plan)
    assert found is not None
    low_s, high_s = found
    assert low_s <= predict(trace, unsure, plan).iteration_s * (1 + 1e-12)
    assert high_s * (1 + 1e-12) >= predict(trace, unsure, plan).iteration_s
    slower = off_by(unsure, 1.0)
    # To plan for slower messages is to have the best step if they are.
    best = plan_optimal(trace, slower)
    assert predict(trace, slower, best).iteration_s <= high_s * (1 + 1e-12)


def test_a_fit_says_how_sure_it_is_and_plans_and_predictions_repeat_it() -> None:
    found = fit([(10, 1.0), (20, 2.5), (40, 4.0), (80, 8.0)], 2, kind="linear")
    assert found.mean_error > 0.01
    assert spread_of(found.cost) == [found.mean_error]
    predicted = find_plan(TRACE, found.cost, "single").predicted
    plan, off = find_plan(TRACE, found.cost, "single"), 1 + found.mean_error
    assert input_range(TRACE, found.cost, plan) == pytest.approx((3 + found.cost(60) / off, 3 + found.cost(60) * off))
    assert (predicted["low_s"], predicted["high_s"]) == predict_range(TRACE, found.cost, plan)


@pytest.mark.parametrize(
    "source", [{}, {"spread": [0.1]}, {"spread": "much"}, {"fit": {}}, {"fit": {"mean_error": "large"}}, {"fit": 3}]
)
def test_where_nothing_is_known_there_is_no_range(source: dict[str, object]) -> None:
    cost = PiecewiseCost(2, ((0, 1.0), (10, 2.0)), source)
    assert spread_of(cost) is None
    assert off_by(cost, 1.0) is cost
    assert "low_s" not in find_plan(TRACE, cost).predicted
    assert predict_range(TRACE, load_network("10gbe").cost(4), find_plan(TRACE, cost)) is None


def test_a_trace_that_knows_its_error_widens_the_range() -> None:
    cost = LinearCost(2, 1.0, 0.0, {"fit": {"mean_error": 0.0}})
    unsure = replace(TRACE, source={"off": 0.25})
    plan = find_plan(TRACE, cost, "single")
    assert input_range(TRACE, cost, plan) == (4.0, 4.0)
    assert input_range(unsure, cost, plan) == pytest.approx((3.0 / 1.25 + 1, 3.0 * 1.25 + 1))


def test_inputs_that_are_sure_leave_what_the_model_itself_is_off_by() -> None:
    cost = LinearCost(2, 1.0, 0.0, {"fit": {"mean_error": 0.0}})
    plan = find_plan(TRACE, cost, "single")
    assert predict_range(TRACE, cost, plan) == pytest.approx((4 * (1 - MODEL_OFF), 4 * (1 + MODEL_OFF)))
    in_low = replace(plan, wire=("bfloat16",))  # which predictions are further off
    assert predict_range(TRACE, cost, in_low) == pytest.approx((4 * (1 - LOW_MODEL_OFF), 4 * (1 + LOW_MODEL_OFF)))
    # Errors of the two add up as independent ones do: 0.3 and 0.4 as 0.5.
    far = replace(cost, source={"fit": {"mean_error": 0.75 * 4 * MODEL_OFF}})
    assert (predict_range(TRACE, far, plan) or (0, 0))[1] == pytest.approx(4 + 1.25 * 4 * MODEL_OFF)


def tuned() -> list[Tuned]:
    """What the tuner predicted of every plan, and what was measured."""
    return [
        plan
        for folder in ("gpu", "wire")
        for cell, result in named(load(BENCHMARKS / folder))
        for plan in bench_predictions.tuned(folder, cell, result)
    ]


@pytest.mark.parametrize(("is_low", "num_plans", "model_off"), [(False, 249, MODEL_OFF), (True, 39, LOW_MODEL_OFF)])
def test_ranges_hold_the_measured_step_of_three_in_four_plans_in_either_precision(
    is_low: bool, num_plans: int, model_off: float
) -> None:
    plans = [one for one in tuned() if one.is_low == is_low]
    assert len(plans) == num_plans
    assert least_off(plans) == model_off
    assert share(plans, "inputs_s") < 0.6  # what inputs may be off by is not all
    assert 0.7 < share(plans, "between_s") < 0.8
    # And in cells, and with models, that what the model is off by was not found from.
    assert 0.7 < left_out(plans) < 0.8
    assert 0.7 < left_out([replace(one, cell=one.cell.partition(",")[0]) for one in plans]) < 0.8


def test_messages_off_by_so_many_errors_take_nothing_else_from_the_computation() -> None:
    cost = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.5}}, taken_s=0.25)
    assert off_by(cost, 1.0) == LinearCost(2, 1.5, 0.75, cost.source, taken_s=0.25)


def test_plan_and_compare_say_ranges_also_where_one_row_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace([4.0, 5.0, 6.0], [10, 20, 30], forward_s=3.0).save(tmp_path / "trace.json")
    sure = LinearCost(2, 0.1, 0.1, {"fit": {"mean_error": 0.1}})
    half = LinearCost(2, 0.01, 0.01)  # of which nothing is known
    ShardedCost(sure, half, half).save(tmp_path / "cost.json")
    files = ["--trace", str(tmp_path / "trace.json"), "--cost", str(tmp_path / "cost.json")]
    assert run(["plan", *files, "-o", str(tmp_path / "plan.json")]) == 0
    predicted = MergePlan.load(tmp_path / "plan.json").predicted
    words = f"({format_range(predicted['low_s'], predicted['high_s'])}: such ranges held the measured step"
    assert words in capsys.readouterr().err
    assert run(["compare", *files, "--engine", "ddp,sharded"]) == 0
    said = capsys.readouterr()
    titles, *rows = [line.split("  ") for line in said.out.splitlines()]
    assert "between" in "".join(titles)
    assert [" to " in "  ".join(row) for row in rows] == [True] * 6 + [False]
    assert "three in four plans" in said.err
