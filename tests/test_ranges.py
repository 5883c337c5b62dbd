"""How sure a prediction is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import LinearCost, ModelTrace, PiecewiseCost, find_plan, load_network, predict
from mgwfbp.fitting import fit
from mgwfbp.planners import plan_optimal
from mgwfbp.ranges import off_by, predict_range, spread_of
from tests.examples import make_trace, piecewise_costs, traces

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
    assert predicted["low_s"] == pytest.approx(3.0 + found.cost(60) / (1 + found.mean_error))
    assert predicted["high_s"] == pytest.approx(3.0 + found.cost(60) * (1 + found.mean_error))


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
    assert predict_range(TRACE, cost, plan) == (4.0, 4.0)
    assert predict_range(unsure, cost, plan) == pytest.approx((3.0 / 1.25 + 1, 3.0 * 1.25 + 1))


def test_messages_off_by_so_many_errors_take_nothing_else_from_the_computation() -> None:
    cost = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.5}}, taken_s=0.25)
    assert off_by(cost, 1.0) == LinearCost(2, 1.5, 0.75, cost.source, taken_s=0.25)
