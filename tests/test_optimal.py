"""The exact planner against exhaustive search and against itself."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import partitions as partitions_benchmark
from mgwfbp import (
    PLANNERS,
    Cost,
    LayerTrace,
    LinearCost,
    MergePlan,
    ModelTrace,
    PiecewiseCost,
    find_plan,
    load_network,
    load_trace,
    lower_bound_s,
    predict,
)
from mgwfbp.cost import taken_by
from mgwfbp.planners import plan_bucket, plan_optimal
from mgwfbp.planners.slack import NEAR, SLOWER
from tests.examples import (
    end_by_hand,
    linear_costs,
    make_trace,
    partitions,
    piecewise_costs,
    table_costs,
    that_take,
    traces,
    whole_piecewise_costs,
)

any_cost: st.SearchStrategy[Cost] = st.one_of(linear_costs, table_costs())


@dataclass(frozen=True)
class Slower:
    """A cost as it is when every message takes so many times as long as was thought."""

    cost: Cost
    workers: int = 2

    def __call__(self, num_bytes: int, /) -> float:
        return SLOWER * self.cost(num_bytes)

    @property
    def taken_s(self) -> float:
        return taken_by(self.cost, 0)

    @property
    def taken_per_byte_s(self) -> float:
        return taken_by(self.cost, 1) - taken_by(self.cost, 0)


def check_against_all_partitions(trace: ModelTrace, cost: Cost) -> None:
    """Compare with exhaustive search: the end, then the end of slower messages, then the number of messages."""
    ends = {sizes: end_by_hand(trace, cost, sizes) for sizes in partitions(len(trace.layers))}
    shortest = min(ends.values())
    slow_ends = {sizes: end_by_hand(trace, Slower(cost), sizes) for sizes, end in ends.items() if end == shortest}
    least = min(slow_ends.values())
    plan = plan_optimal(trace, cost)
    assert plan.group_sizes in slow_ends
    assert slow_ends[plan.group_sizes] <= least * (1 + 1.001 * NEAR)
    # As few as the very best needs, or fewer; no fewer than any that is nearly as good.
    assert plan.num_groups <= min(len(sizes) for sizes, end in slow_ends.items() if end == least)
    near = least * (1 + 1.001 * NEAR)
    assert plan.num_groups >= min(len(sizes) for sizes, end in slow_ends.items() if end <= near)


@given(traces(), any_cost)
@settings(max_examples=300)
def test_optimal_equals_exhaustive_search_in_time_in_slack_and_in_number_of_messages(
    trace: ModelTrace, cost: Cost
) -> None:
    check_against_all_partitions(trace, cost)


@given(traces(), whole_piecewise_costs())
@settings(max_examples=200)
def test_optimal_equals_exhaustive_search_on_measured_curves(trace: ModelTrace, cost: PiecewiseCost) -> None:
    check_against_all_partitions(trace, cost)


any_cost_that_takes: st.SearchStrategy[Cost] = st.one_of(
    that_take(linear_costs), that_take(whole_piecewise_costs()), that_take(table_costs())
)


@given(traces(), any_cost_that_takes)
@settings(max_examples=400)
def test_messages_that_take_time_from_the_computation_are_planned_as_exhaustive_search_does(
    trace: ModelTrace, cost: Cost
) -> None:
    check_against_all_partitions(trace, cost)


@given(traces(), any_cost_that_takes)
def test_prediction_and_bound_know_what_messages_take(trace: ModelTrace, cost: Cost) -> None:
    bound_s = lower_bound_s(trace, cost)
    for sizes in partitions(len(trace.layers)) if len(trace.layers) < 7 else [plan_optimal(trace, cost).group_sizes]:
        timeline = predict(trace, cost, MergePlan.of_sizes(trace, sizes))
        end_s = max(end_by_hand(trace, cost, sizes), timeline.compute_s)
        assert timeline.iteration_s == end_s >= bound_s * (1 - 1e-12)
        taken = [taken_by(cost, message.num_bytes) for message in timeline.messages[:-1]]
        assert timeline.taken_s == sum(taken)
        assert timeline.compute_s == trace.compute_s + sum(taken)


@given(traces(), any_cost_that_takes, st.sampled_from([1, 4, 9, 30]))
def test_no_buckets_of_one_size_are_faster_than_the_plan(trace: ModelTrace, cost: Cost, size: int) -> None:
    bucket = plan_bucket(trace, cost, first_bucket_bytes=size, bucket_bytes=size)
    assert predict(trace, cost, plan_optimal(trace, cost)).iteration_s <= predict(trace, cost, bucket).iteration_s


def test_launches_that_are_far_longer_than_the_step_are_planned_too() -> None:
    trace = make_trace([0.0, 0.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3], [0, 0, 4, 4, 1000, 0, 4])
    for taken_s in (59.15206444668215, 1e80):
        assert plan_optimal(trace, LinearCost(2, 1e-3, 0.0, taken_s=taken_s)).num_groups == 1


def set_partitions(things: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put things into groups, neighbours or not."""
    if not things:
        yield []
        return
    first, *others = things
    for groups in set_partitions(others):
        yield [[first], *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], [first, *group], *groups[index + 1 :]]


def shortest_of_any_groups(trace: ModelTrace, cost: Cost) -> float:
    """Try all groups of whole gradients, sent in all orders."""

    def end(messages: tuple[list[int], ...]) -> float:
        now = 0.0
        for message in messages:
            ready_s = trace.ready_s[max(message)]
            now = max(now, ready_s) + cost(sum(trace.layers[index].grad_bytes for index in message))
        return now

    groups = set_partitions(list(range(len(trace.layers))))
    return min(end(order) for some in groups for order in permutations(some))


def optimal_end(trace: ModelTrace, cost: Cost) -> float:
    return end_by_hand(trace, cost, plan_optimal(trace, cost).group_sizes)


@given(traces(max_layers=6), linear_costs)
@settings(max_examples=60)
def test_on_a_straight_line_no_groups_of_whole_gradients_in_any_order_end_earlier(
    trace: ModelTrace, cost: LinearCost
) -> None:
    assert optimal_end(trace, cost) == shortest_of_any_groups(trace, cost)


@given(traces(), linear_costs, st.data())
def test_on_a_straight_line_cutting_a_gradient_gains_nothing(
    trace: ModelTrace, cost: LinearCost, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(trace.layers) - 1))
    layer = trace.layers[index]
    first_bytes = data.draw(st.integers(0, layer.grad_bytes))
    pieces = (
        replace(layer, grad_bytes=first_bytes),
        LayerTrace("rest", 0.0, layer.grad_bytes - first_bytes),
    )
    cut = replace(trace, layers=(*trace.layers[:index], *pieces, *trace.layers[index + 1 :]))
    assert optimal_end(cut, cost) == optimal_end(trace, cost)


# 1 s up to 5 bytes, 3 s from 6: a switch of protocol.
JUMP = PiecewiseCost(2, ((5, 1.0), (6, 3.0), (100, 3.0)))


def test_on_a_curve_gradients_that_are_no_neighbours_may_do_better_together() -> None:
    trace = make_trace([1.0, 1.0, 2.0], [3, 5, 2])
    assert optimal_end(trace, JUMP) == 4.0
    assert shortest_of_any_groups(trace, JUMP) == 3.0  # the second alone, then the first and the third


def test_on_a_curve_a_gradient_cut_in_two_may_do_better() -> None:
    assert optimal_end(make_trace([0.0], [10]), JUMP) == 3.0
    assert optimal_end(make_trace([0.0, 0.0], [5, 5]), JUMP) == 2.0


def test_the_benchmark_of_other_partitions_finds_what_they_gain_in_both_examples() -> None:
    trace, one = make_trace([1.0, 1.0, 2.0], [3, 5, 2]), make_trace([0.0], [10])
    groups = partitions_benchmark.in_groups([1, 1, 1])
    found_s = partitions_benchmark.search(partitions_benchmark.Row(trace, JUMP), groups, random.Random(1))
    assert partitions_benchmark.bound_s(trace, JUMP) <= found_s == shortest_of_any_groups(trace, JUMP)
    cut = partitions_benchmark.in_pieces(one, 5)
    assert partitions_benchmark.bound_s(one, JUMP) <= optimal_end(cut, JUMP) == 2.0


def test_a_network_that_is_slower_than_thought_does_not_make_it_worse_than_fixed_buckets() -> None:
    # Without slack this took 668 ms where DDP's buckets take 663 and the paper's rule 647.
    trace, thought = load_trace("resnet50-k80-b32"), load_network("10gbe").cost(8)
    real = LinearCost(8, 1.15 * thought.startup_s, 1.15 * thought.per_byte_s)
    steps = {name: predict(trace, real, find_plan(trace, thought, name)).iteration_s for name in PLANNERS}
    assert steps["optimal"] < 1.001 * min(steps.values())
    assert find_plan(trace, thought).num_groups <= 5


@given(traces(max_layers=8), piecewise_costs())
def test_optimal_equals_exhaustive_search_on_curves_of_any_slope(trace: ModelTrace, cost: PiecewiseCost) -> None:
    shortest = min(end_by_hand(trace, cost, sizes) for sizes in partitions(len(trace.layers)))
    plan = plan_optimal(trace, cost)
    assert end_by_hand(trace, cost, plan.group_sizes) == pytest.approx(shortest, rel=1e-9, abs=1e-12)


@given(traces(max_layers=40), st.one_of(any_cost, piecewise_costs()))
def test_optimal_is_never_above_another_planner_nor_below_the_bound(trace: ModelTrace, cost: Cost) -> None:
    best = find_plan(trace, cost, "optimal").predicted
    for name in PLANNERS:
        assert best["iteration_s"] <= find_plan(trace, cost, name).predicted["iteration_s"] * (1 + 1e-9)
    assert best["lower_bound_s"] <= best["iteration_s"] * (1 + 1e-9)


def random_trace(rng: random.Random, count: int) -> ModelTrace:
    layers = [
        LayerTrace(f"g{index}", rng.expovariate(1 / 3e-4), int(4 * 10 ** rng.uniform(1.5, 6.5)))
        for index in range(count)
    ]
    return ModelTrace("random", 0.05, tuple(layers))


@pytest.mark.parametrize("startup_s", [0.0, 1e-5, 6e-4, 5e-3])
@pytest.mark.parametrize("per_byte_s", [0.0, 1e-11, 2e-9])
def test_the_linear_and_the_quadratic_programme_agree_on_large_models(startup_s: float, per_byte_s: float) -> None:
    trace = random_trace(random.Random(f"{startup_s} {per_byte_s}"), 700)
    line = LinearCost(8, startup_s, per_byte_s)
    same_as_curve = PiecewiseCost(8, ((0, startup_s), (10**9, startup_s + per_byte_s * 10**9)))
    linear, quadratic = plan_optimal(trace, line), plan_optimal(trace, same_as_curve)
    assert predict(trace, line, linear).iteration_s == pytest.approx(
        predict(trace, line, quadratic).iteration_s, rel=1e-9
    )
    assert linear.num_groups == quadratic.num_groups


@given(traces(max_layers=30), linear_costs, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_all_times_scales_the_step_and_keeps_the_plan(
    trace: ModelTrace, cost: LinearCost, factor: float
) -> None:
    slow_layers = [LayerTrace(layer.name, layer.backward_s * factor, layer.grad_bytes) for layer in trace.layers]
    slow_trace = ModelTrace(trace.model, trace.forward_s * factor, tuple(slow_layers))
    slow_cost = LinearCost(cost.workers, cost.startup_s * factor, cost.per_byte_s * factor)
    plan, slow_plan = find_plan(trace, cost), find_plan(slow_trace, slow_cost)
    assert slow_plan.groups == plan.groups
    assert slow_plan.predicted["iteration_s"] == plan.predicted["iteration_s"] * factor


@given(traces(max_layers=30), linear_costs, st.sampled_from([2, 64]))
def test_scaling_all_sizes_on_a_link_as_much_faster_changes_nothing(
    trace: ModelTrace, cost: LinearCost, factor: int
) -> None:
    big_layers = [LayerTrace(layer.name, layer.backward_s, layer.grad_bytes * factor) for layer in trace.layers]
    big_trace = ModelTrace(trace.model, trace.forward_s, tuple(big_layers))
    fast_cost = LinearCost(cost.workers, cost.startup_s, cost.per_byte_s / factor)
    plan, big_plan = find_plan(trace, cost), find_plan(big_trace, fast_cost)
    assert big_plan.groups == plan.groups
    assert big_plan.predicted["iteration_s"] == plan.predicted["iteration_s"]


def test_a_free_network_needs_one_message() -> None:
    trace = make_trace([1.0, 2.0, 3.0], [5, 5, 5])
    assert plan_optimal(trace, LinearCost(1, 0.0, 0.0)).group_sizes == (3,)


def test_a_cost_that_jumps_is_met_by_messages_just_below_the_jump() -> None:
    # Above 2 bytes a message is ten times dearer, so three messages of 2 bytes beat one of 6.
    trace = make_trace([1.0] * 6, [1] * 6)
    cost = PiecewiseCost(2, ((0, 1.0), (2, 1.0), (3, 10.0), (6, 10.5)))
    assert plan_optimal(trace, cost).group_sizes == (2, 2, 2)
    assert find_plan(trace, cost).predicted["lower_bound_s"] == pytest.approx(4.0)


def test_random_floats_agree_with_exhaustive_search() -> None:
    rng = np.random.default_rng(2019)
    for _ in range(200):
        count = int(rng.integers(1, 10))
        layers = [
            LayerTrace(f"g{index}", float(rng.exponential(2e-3)), int(rng.integers(0, 10**6))) for index in range(count)
        ]
        trace = ModelTrace("random", float(rng.exponential(1e-2)), tuple(layers))
        cost = LinearCost(4, float(rng.exponential(2e-3)), float(rng.exponential(4e-9)))
        shortest = min(end_by_hand(trace, cost, sizes) for sizes in partitions(count))
        assert end_by_hand(trace, cost, plan_optimal(trace, cost).group_sizes) == pytest.approx(shortest, rel=1e-9)
