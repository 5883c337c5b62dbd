"""`cautious`, where the cost says how far it may be off and where it does not."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import Cost, LinearCost, ModelTrace, PiecewiseCost, find_plan, load_trace, predict
from mgwfbp.planners import plan_cautiously, plan_optimal
from mgwfbp.ranges import off_by
from tests.examples import linear_costs, piecewise_costs, that_take, traces

unsure = st.floats(0.0, 0.5).map(lambda part: {"fit": {"mean_error": part}})


@given(traces(), st.one_of(that_take(linear_costs), that_take(piecewise_costs())))
def test_a_cost_that_says_nothing_of_its_errors_is_planned_for_as_it_is(
    trace: ModelTrace, cost: LinearCost | PiecewiseCost
) -> None:
    assert plan_cautiously(trace, cost).groups == plan_optimal(trace, cost).groups
    sure = replace(cost, source={"fit": {"mean_error": 0.0}})
    assert plan_cautiously(trace, sure).groups == plan_optimal(trace, sure).groups


@given(traces(), st.one_of(linear_costs, piecewise_costs()), unsure)
def test_no_exact_plan_for_a_likely_cost_is_shorter_in_the_mean(
    trace: ModelTrace, cost: LinearCost | PiecewiseCost, source: dict[str, object]
) -> None:
    cost = replace(cost, source=source)
    costs = [off_by(cost, errors) for errors in (0.0, 0.5, 1.0)]
    found = plan_cautiously(trace, cost)

    def together_s(of_whom: Cost | None) -> float:
        plan = found if of_whom is None else plan_optimal(trace, of_whom)
        return sum(predict(trace, one, plan).iteration_s for one in costs)

    assert all(together_s(None) <= together_s(one) * (1 + 1e-12) for one in costs)


def test_a_learnt_cost_is_planned_for_with_its_errors_by_that_name_only() -> None:
    trace = load_trace("densenet201-h200-b32")
    cost = LinearCost(4, 5e-5, 4e-10, {"fit": {"mean_error": 0.3}}, taken_s=5e-5)
    expected, exact = plan_cautiously(trace, cost), plan_optimal(trace, cost)
    assert expected.groups != exact.groups
    assert predict(trace, cost, expected).iteration_s > predict(trace, cost, exact).iteration_s
    assert find_plan(trace, cost, "cautious").groups == expected.groups
    assert find_plan(trace, cost).groups == find_plan(trace, cost, "optimal").groups == exact.groups
