"""The range of numbers: what is within it gives numbers, what is beyond it is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import (
    LayerTrace,
    LinearCost,
    MgwfbpError,
    ModelTrace,
    PiecewiseCost,
    ResultError,
    Scenario,
    StrategyResult,
    find_plan,
    predict,
    simulate_steps,
)


def test_less_than_anything_that_can_be_measured_is_nothing() -> None:
    assert LayerTrace("a", 5e-324, 8).backward_s == 0.0
    assert LayerTrace("a", 1e-99, 8).backward_s == 1e-99


def test_a_step_measured_in_no_time_is_refused() -> None:
    with pytest.raises(ResultError, match="strategy 'ddp': measured_s is 0, expected a step that takes time"):
        StrategyResult("ddp", 1, 0.0, 0.0, 0.0, (0.0,), 0.0)


# Every order of magnitude that a number has, within the range of a record's and beyond it.
wild = st.one_of(st.just(0.0), st.floats(-320.0, 308.0).map(lambda exponent: 10.0**exponent), st.floats(1e99, 1e101))


@given(
    st.lists(st.tuples(wild, st.integers(0, 2**53)), min_size=1, max_size=4),
    st.tuples(wild, wild, wild),
    st.booleans(),
)
def test_what_is_predicted_of_any_numbers_is_a_number_or_refused(
    layers: list[tuple[float, int]], link: tuple[float, float, float], is_curve: bool
) -> None:
    forward_s, startup_s, per_byte_s = link
    try:
        trace = ModelTrace("m", forward_s, tuple(LayerTrace(f"g{at}", *layer) for at, layer in enumerate(layers)))
        cost: LinearCost | PiecewiseCost = LinearCost(3, startup_s, per_byte_s)
        if is_curve:
            later_s = startup_s + per_byte_s
            cost = PiecewiseCost(3, ((0, startup_s), (2**20, later_s), (2**30, later_s + per_byte_s)))
        plan = find_plan(trace, cost)
        step, simulated = predict(trace, cost, plan), simulate_steps(trace, cost, plan, Scenario(jitter=0.1, steps=2))
    except MgwfbpError:
        return
    assert json.loads(json.dumps(dict(plan.predicted), allow_nan=False)) == plan.predicted
    known = [step.communication_s, step.speedup, step.efficiency, simulated.speedup, simulated.mean_iteration_s]
    assert np.isfinite([*known, float(simulated.iteration_s.std()), simulated.quantile_s(0.95)]).all()
    assert np.isfinite(step.ratio) or not step.compute_s  # which is the one honest infinity
