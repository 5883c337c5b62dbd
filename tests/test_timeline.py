"""The recurrence against hand-worked steps and the paper's formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import (
    LinearCost,
    MergePlan,
    ModelTrace,
    Network,
    PlanError,
    Timeline,
    find_plan,
    lower_bound_s,
    predict,
    predict_naive,
    predict_parameter_server,
)
from tests.examples import linear_costs, make_trace, partitions, piecewise_costs, traces

COST = LinearCost(4, 2.0, 1.0)


def test_a_step_worked_out_by_hand() -> None:
    trace = make_trace([5, 6, 9], [1, 2, 1], forward_s=3)
    timeline = predict(trace, COST, MergePlan.of_sizes(trace, [1, 1, 1]))
    assert [(span.start_s, span.end_s) for span in timeline.backward] == [(3, 5), (5, 6), (6, 9)]
    assert [(span.ready_s, span.start_s, span.end_s) for span in timeline.messages] == [
        (5, 5, 8),
        (6, 8, 12),
        (9, 12, 15),
    ]
    assert (timeline.forward.start_s, timeline.forward.end_s) == (0, 3)
    assert (timeline.compute_s, timeline.communication_s) == (9, 10)
    assert (timeline.iteration_s, timeline.exposed_s) == (15, 6)
    assert timeline.ratio == 6 / 9
    assert timeline.speedup == pytest.approx(4 / (1 + 6 / 9))
    assert timeline.efficiency == pytest.approx(9 / 15)


def test_messages_of_a_plan_in_another_order_wait_for_their_latest_gradient() -> None:
    trace = make_trace([1, 2, 3], [1, 1, 1])
    plan = MergePlan("example", "by hand", (("g2", "g0"), ("g1",)))
    messages = predict(trace, COST, plan).messages
    assert [(span.ready_s, span.start_s, span.end_s) for span in messages] == [(3, 3, 7), (2, 7, 10)]


@pytest.mark.parametrize(
    ("ready_s", "sizes", "case"),
    [
        ([1, 5, 9], [1, 1, 1], 1),  # each message ends before the next gradient is ready
        ([1, 3, 9], [1, 1, 1], 2),  # the second waits, the last does not
        ([1, 2, 3], [1, 1, 1], 3),  # the last waits
    ],
)
def test_the_papers_three_cases(ready_s: list[float], sizes: list[int], case: int) -> None:
    trace = make_trace(ready_s, sizes)
    timeline = predict(trace, COST, MergePlan.of_sizes(trace, [1] * 3))
    assert timeline.case == case
    if case < 3:  # Eqs. (11) and (12): only the last message is exposed
        assert timeline.iteration_s == trace.compute_s + COST(sizes[-1])


@given(traces(), linear_costs)
def test_naive_adds_up_forward_backward_and_every_message(trace: ModelTrace, cost: LinearCost) -> None:
    timeline = predict_naive(trace, cost)
    total = trace.compute_s + sum(cost(layer.grad_bytes) for layer in trace.layers)
    assert timeline.iteration_s == pytest.approx(total)
    assert timeline.exposed_s == pytest.approx(total - trace.compute_s)


def test_parameter_server_by_hand() -> None:
    # 2 alpha + 2 N beta M / S: with 4 workers and 1 server 2 + 8 M, with 2 servers 2 + 4 M.
    network = Network("link", "ring", latency_s=1.0, per_byte_s=1.0)
    trace = make_trace([1, 2], [1, 1])
    assert predict_parameter_server(trace, network, 4).iteration_s == 1 + 10 + 10
    assert predict_parameter_server(trace, network, 4, servers=2).iteration_s == 1 + 6 + 6
    assert predict_parameter_server(trace, network, 1).exposed_s == 0


@given(traces(max_layers=7), st.one_of(linear_costs, piecewise_costs()))
def test_no_partition_is_below_the_lower_bound(trace: ModelTrace, cost: LinearCost) -> None:
    bound_s = lower_bound_s(trace, cost)
    for sizes in partitions(len(trace.layers)):
        assert predict(trace, cost, MergePlan.of_sizes(trace, sizes)).iteration_s >= bound_s * (1 - 1e-9)


@given(traces(), linear_costs)
def test_a_timeline_survives_its_json_form(trace: ModelTrace, cost: LinearCost) -> None:
    timeline = predict(trace, cost, find_plan(trace, cost))
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_plan_for_another_model_is_refused_and_the_difference_named() -> None:
    plan = MergePlan("other", "by hand", (("g0", "fc.bias"),))
    with pytest.raises(PlanError, match=r"missing: 'g1'; unknown: 'fc.bias'.*mgwfbp plan"):
        predict(make_trace([1, 2], [1, 1]), COST, plan)


def test_a_step_without_computation_is_all_exposed() -> None:
    timeline = predict(make_trace([0], [1]), COST, MergePlan("example", "by hand", (("g0",),)))
    assert (timeline.exposed_s, timeline.ratio, timeline.speedup) == (3.0, float("inf"), 0.0)
