"""Plans with messages in low precision against exhaustive search over all partitions and all precisions."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import (
    Cost,
    LinearCost,
    MergePlan,
    ModelTrace,
    PiecewiseCost,
    PlanError,
    load_cost,
    load_network,
    load_trace,
    predict,
)
from mgwfbp.bounds import lower_bound_s
from mgwfbp.cli.wire import read_low_cost, with_low_cost
from mgwfbp.cost import taken_by, taking_nothing
from mgwfbp.costs import WireCost, cheaper_cost, low_precision_cost
from mgwfbp.planners import PLANNERS, find_plan, find_wire_plan, plan_optimal, plan_sharded, plan_wire, precisions, wire
from mgwfbp.planners.slack import TIE
from mgwfbp.ranges import input_range
from tests.examples import (
    linear_costs,
    make_trace,
    partitions,
    table_costs,
    that_take,
    traces,
    whole_piecewise_costs,
)

BF16 = "bfloat16"
tolerances = st.sampled_from([0.0, 0.01, 0.5])
small_traces = traces(max_layers=7)


@dataclass(frozen=True)
class Candidate:
    """A plan and what it gives."""

    step_s: float
    low_bytes: int
    num_groups: int


def all_plans(trace: ModelTrace, cost: Cost) -> Iterator[Candidate]:
    for sizes in partitions(len(trace.layers)):
        plan = MergePlan.of_sizes(trace, sizes)
        for wires in product(("", "bfloat16"), repeat=len(sizes)):
            timeline = predict(trace, cost, replace(plan, wire=wires))
            pairs = zip(timeline.messages, wires, strict=True)
            low_bytes = sum(message.num_bytes for message, precision in pairs if precision)
            yield Candidate(timeline.iteration_s, low_bytes, len(sizes))


def candidate(trace: ModelTrace, cost: Cost, plan: MergePlan) -> Candidate:
    timeline = predict(trace, cost, plan)
    pairs = zip(timeline.messages, plan.wires, strict=True)
    low_bytes = sum(message.num_bytes for message, precision in pairs if precision)
    return Candidate(timeline.iteration_s, low_bytes, plan.num_groups)


def near_shortest(trace: ModelTrace, cost: Cost, tolerance: float) -> list[Candidate]:
    """All plans within the tolerance of the shortest step, the best first."""
    found = list(all_plans(trace, cost))
    deadline_s = (1 + tolerance) * min(one.step_s for one in found) * TIE
    within = [one for one in found if one.step_s <= deadline_s]
    return sorted(within, key=lambda one: (one.low_bytes, one.step_s, one.num_groups))


def check_against_all_plans(trace: ModelTrace, cost: Cost, tolerance: float) -> None:
    within, plain = near_shortest(trace, cost, tolerance), plan_optimal(trace, cost)
    best, plan = within[0], plan_wire(trace, cost, tolerance=tolerance)
    if candidate(trace, cost, plain) in within:
        assert plan.messages == plain.messages
    elif takes_alike(cost):
        assert candidate(trace, cost, plan) == best
    else:
        found = candidate(trace, cost, plan)
        assert (found.step_s, found.low_bytes) == (best.step_s, best.low_bytes)
    assert plan.predicted == {"low_bytes": best.low_bytes, "low_bytes_bound": best.low_bytes}


def takes_alike(cost: Cost) -> bool:
    """Whether messages of both precisions take as much from the computation."""
    low = low_precision_cost(cost)
    return all(taken_by(cost, size) == taken_by(low, size) for size in (0, 1))


@given(small_traces, st.one_of(linear_costs, whole_piecewise_costs(), table_costs()), tolerances)
@settings(max_examples=40)
def test_half_the_bytes_are_planned_as_exhaustive_search_does(trace: ModelTrace, cost: Cost, tolerance: float) -> None:
    check_against_all_plans(trace, cost, tolerance)


@given(
    small_traces,
    st.one_of(that_take(linear_costs), that_take(whole_piecewise_costs()), that_take(table_costs())),
    tolerances,
)
@settings(max_examples=50)
def test_messages_that_take_from_the_computation_are_planned_as_exhaustive_search_does(
    trace: ModelTrace, cost: Cost, tolerance: float
) -> None:
    check_against_all_plans(trace, cost, tolerance)


measured = st.one_of(that_take(linear_costs), that_take(whole_piecewise_costs()))
# Low precision of any cost: sometimes dearer, for some sizes or for all.
two_precisions = st.builds(WireCost, measured, st.one_of(linear_costs, whole_piecewise_costs(), measured))


@given(small_traces, two_precisions, tolerances)
@settings(max_examples=60)
def test_any_cost_of_low_precision_is_planned_as_exhaustive_search_does(
    trace: ModelTrace, cost: WireCost, tolerance: float
) -> None:
    check_against_all_plans(trace, cost, tolerance)


def test_a_message_that_takes_more_in_low_precision_travels_so_only_where_nothing_is_left_to_be_slowed() -> None:
    # Two gradients of 4 bytes, ready at 2 and 10. As they are: 2 to 6, 10 to 14. The first in low precision takes 3
    # from the computation of the second, which ends at 17; the second takes its 3 from nothing, and ends at 12.
    trace = make_trace([2.0, 10.0], [4, 4])
    cost = WireCost(LinearCost(2, 0.0, 1.0), LinearCost(2, 0.0, 0.5, taken_s=3.0))
    plan = MergePlan.of_sizes(trace, [1, 1])
    steps_s = [
        predict(trace, cost, replace(plan, wire=wire)).iteration_s for wire in (("", ""), (BF16, ""), ("", BF16))
    ]
    assert steps_s == [14.0, 17.0, 12.0]
    assert plan_wire(trace, cost, tolerance=0.0).wires == ("", BF16)


def test_the_shortest_step_is_found_where_no_precision_is_best_for_all_messages() -> None:
    rng, searched = random.Random(20), []
    search = precisions.Row.search

    def counted(row: precisions.Row, width: int, known: precisions.Found) -> precisions.Found:
        searched.append(row._wants_bytes)
        return search(row, width, known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions.Row, "search", counted)
        for _ in range(25):
            steps_s = [rng.randint(0, 40) / 4 for _ in range(5)]
            trace = make_trace(list(accumulate(steps_s)), [rng.randint(1, 40) for _ in steps_s])
            per_byte_s = rng.uniform(1, 2) * (trace.compute_s + 1) / trace.grad_bytes
            taken = [(rng.choice([0.0, 0.5, 2.0]), rng.uniform(0, per_byte_s / 2)) for _ in range(2)]
            full, low = (
                LinearCost(2, 0.5, part * per_byte_s, {}, *some) for part, some in zip((1, 0.6), taken, strict=True)
            )
            cost = WireCost(full, low)
            best = near_shortest(trace, cost, 0.0)[0]
            found = candidate(trace, cost, plan_wire(trace, cost, tolerance=0.0))
            assert found.low_bytes == best.low_bytes
            assert found.step_s == pytest.approx(best.step_s, rel=1e-11)
    assert searched.count(False) > 10  # it had to be searched for


@given(traces(min_layers=8, max_layers=8), st.one_of(two_precisions, that_take(table_costs())), tolerances)
@settings(max_examples=12)
def test_eight_gradients_are_planned_as_exhaustive_search_does(trace: ModelTrace, cost: Cost, tolerance: float) -> None:
    check_against_all_plans(trace, cost, tolerance)


@given(traces(max_layers=5), two_precisions)
@settings(max_examples=30)
def test_the_bound_of_both_precisions_holds_for_every_plan(trace: ModelTrace, cost: WireCost) -> None:
    bound_s = lower_bound_s(trace, cheaper_cost(cost))
    found = list(all_plans(trace, cost))
    assert bound_s <= min(one.step_s for one in found) * TIE
    plan = find_wire_plan(trace, cost)
    assert plan.predicted["lower_bound_s"] == bound_s
    assert plan.predicted["iteration_s"] == predict(trace, cost, plan).iteration_s
    assert plan.predicted["sent_bytes"] == trace.grad_bytes - plan.predicted["low_bytes"] // 2


# With no state kept at all the bound is that of the price of a second alone.
@given(traces(max_layers=5), st.one_of(two_precisions, measured), tolerances, st.sampled_from([0, 0, 1, 2]))
@settings(max_examples=80)
def test_what_is_thinned_out_leaves_a_bound_that_holds(
    trace: ModelTrace, cost: Cost, tolerance: float, width: int
) -> None:
    within = near_shortest(trace, cost, tolerance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "NARROW", 0)
        patch.setattr(wire, "WIDTH", width)
        plan = plan_wire(trace, cost, tolerance=tolerance)
    assert plan.predicted["low_bytes_bound"] <= within[0].low_bytes
    low = low_precision_cost(cost)
    if all(taken_by(cost, size) == taken_by(low, size) for size in (0, 1, 2)):  # else the shortest step is thinned, too
        assert within[0].low_bytes <= plan.predicted["low_bytes"]
        assert predict(trace, cost, plan).iteration_s <= max(one.step_s for one in within)


@pytest.mark.parametrize("width", [0, 2, 1000])
def test_models_that_need_some_low_precision_agree_with_exhaustive_search(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "NARROW", 0)
    monkeypatch.setattr(wire, "WIDTH", width)
    rng, some = random.Random(2020), 0
    for _ in range(40):
        steps_s = [rng.randint(0, 64) / 8 for _ in range(5)]
        trace = make_trace(list(accumulate(steps_s)), [rng.randint(1, 40) for _ in steps_s])
        # As they are, all messages take one to two times as long as the computation.
        per_byte_s = rng.uniform(1, 2) * (trace.compute_s + 1) / trace.grad_bytes
        taken_s, taken_per_byte_s = rng.choice([(0.0, 0.0), (1.0, 0.0), (rng.uniform(0, 4), per_byte_s / 4)])
        full = LinearCost(2, rng.choice([0.0, 0.5, 2.0]), per_byte_s, {}, taken_s, taken_per_byte_s)
        bent = PiecewiseCost(2, ((0, full(0)), (30, full(0) + 9 * per_byte_s), (90, full(0) + 60 * per_byte_s)))
        cost: Cost = full if rng.random() < 0.5 else WireCost(full, bent)
        tolerance = rng.choice([0.01, 0.1, 0.3])
        best, plan = near_shortest(trace, cost, tolerance)[0], plan_wire(trace, cost, tolerance=tolerance)
        some += 0 < best.low_bytes < trace.grad_bytes
        assert plan.predicted["low_bytes_bound"] <= best.low_bytes <= plan.predicted["low_bytes"]
        if width == 1000:
            assert plan.predicted["low_bytes_bound"] == best.low_bytes == candidate(trace, cost, plan).low_bytes
    assert some > 20


@given(traces(max_layers=40), that_take(whole_piecewise_costs()), tolerances)
def test_the_step_is_never_longer_than_the_tolerance_allows(
    trace: ModelTrace, cost: PiecewiseCost, tolerance: float
) -> None:
    plan = plan_wire(trace, cost, tolerance=tolerance)
    either = cheaper_cost(cost)
    step_s = predict(trace, cost, plan).iteration_s
    assert step_s <= (1 + tolerance) * predict(trace, either, plan_optimal(trace, either)).iteration_s * TIE
    assert step_s <= (1 + tolerance) * predict(trace, cost, plan_optimal(trace, cost)).iteration_s * TIE
    assert plan.predicted["low_bytes_bound"] <= plan.predicted["low_bytes"]


@given(traces(max_layers=30), measured, tolerances)
def test_where_low_precision_is_never_cheaper_nothing_is_sent_in_it(
    trace: ModelTrace, cost: LinearCost | PiecewiseCost, tolerance: float
) -> None:
    plan = plan_wire(trace, WireCost(cost, cost), tolerance=tolerance)
    assert plan.messages == plan_optimal(trace, cost).messages
    assert not plan.wire


@pytest.mark.parametrize("network", ["10GbE", "25GbE"])
@pytest.mark.parametrize("taken", [(0.0, 0.0), (3e-5, 5e-11)], ids=["takes nothing", "takes something"])
@pytest.mark.parametrize("model", ["resnet50-h200-b32", "googlenet-h200-b64", "gpt2-h200-b8"])
def test_recorded_models_are_planned_exactly(model: str, network: str, taken: tuple[float, float]) -> None:
    trace, line = load_trace(model), load_network(network).cost(4)
    cost = replace(line, taken_s=taken[0], taken_per_byte_s=taken[1])
    plan = find_wire_plan(trace, cost)
    assert 0 < plan.predicted["low_bytes"] == plan.predicted["low_bytes_bound"] < trace.grad_bytes
    assert plan.predicted["iteration_s"] < 0.9 * find_plan(trace, cost).predicted["iteration_s"]
    either = cheaper_cost(cost)
    assert plan.predicted["iteration_s"] <= 1.01 * TIE * find_plan(trace, either).predicted["iteration_s"]


def test_only_as_much_as_needed_is_sent_in_low_precision() -> None:
    # Two gradients of 4 bytes are ready at 2 and 4. As they are they end at 8, the second in low precision at 6 (half).
    trace = make_trace([2.0, 4.0], [4, 4])
    cost = LinearCost(2, 0.0, 1.0)
    assert predict(trace, cost, plan_optimal(trace, cost)).iteration_s == 10.0
    plan = plan_wire(trace, cost, tolerance=0.0)
    assert plan.wires == ("bfloat16", "bfloat16")
    plan = plan_wire(trace, cost, "float16", tolerance=0.4)
    assert (plan.predicted["low_bytes"], plan.planner) == (4, "optimal+fp16")
    assert predict(trace, cost, plan).iteration_s <= 1.4 * 6.0


def test_launches_that_are_far_longer_than_the_step_are_planned_too() -> None:
    trace = make_trace([0.0, 0.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3], [0, 0, 4, 4, 1000, 0, 4])
    for taken_s in (59.15206444668215, 1e80):
        plan = plan_wire(trace, LinearCost(2, 1e-3, 1e-3, taken_s=taken_s))
        assert (plan.num_groups, plan.wires) == (1, ("bfloat16",))


def test_a_model_without_bytes_and_a_free_network_need_no_low_precision() -> None:
    assert not plan_wire(make_trace([1.0, 2.0], [0, 0]), LinearCost(2, 1.0, 1.0)).wire
    assert not plan_wire(make_trace([0.0], [8]), LinearCost(1, 0.0, 0.0)).wire


def test_low_precision_that_costs_nothing_is_used_where_nothing_else_takes_time() -> None:
    cost = WireCost(LinearCost(2, 1.0, 0.0), LinearCost(2, 0.0, 0.0))
    assert plan_wire(make_trace([0.0], [8]), cost).wire == ("bfloat16",)
    assert plan_wire(make_trace([0.0], [0]), cost).predicted == {"low_bytes": 0, "low_bytes_bound": 0}


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.01), ("bfloat16", -1.0), ("bfloat16", float("nan"))])
def test_wrong_arguments_are_refused(precision: str, tolerance: float) -> None:
    with pytest.raises(PlanError):
        plan_wire(make_trace([1.0], [4]), LinearCost(2, 1.0, 1.0), precision, tolerance=tolerance)


@given(traces(max_layers=12), measured, measured)
def test_planners_that_know_one_precision_plan_with_the_cost_of_messages_as_they_are(
    trace: ModelTrace, full: LinearCost | PiecewiseCost, low: LinearCost | PiecewiseCost
) -> None:
    for name in PLANNERS:
        assert find_plan(trace, WireCost(full, low), name) == find_plan(trace, full, name)


def test_a_cost_that_is_loaded_knows_low_precision_where_its_file_does_and_plans_as_the_other_alone(
    tmp_path: Path,
) -> None:
    path, trace = tmp_path / "cost.json", load_trace("resnet50-h200-b32")
    points = ((4, 1e-4), (10**5, 3e-4), (10**8, 0.2))
    for full in (LinearCost(4, 1e-4, 2e-9), PiecewiseCost(4, points, {"spread": [0.1] * 3}, 1e-5, 1e-12)):
        full.save(path)
        assert load_cost(path) == full
        both = WireCost(full, LinearCost(4, 2e-4, 1.9e-9, taken_s=1e-5, taken_per_byte_s=1e-12), "bfloat16")
        both.save(path)
        loaded = load_cost(path)
        assert loaded == both
        assert (loaded(10**6), loaded.workers, loaded.source) == (full(10**6), 4, full.source)
        for planner in (*PLANNERS, "cautious"):
            assert find_plan(trace, loaded, planner) == find_plan(trace, full, planner)
        assert plan_sharded(trace, loaded) == plan_sharded(trace, full)
        assert lower_bound_s(trace, loaded) == lower_bound_s(trace, full)
        plan = replace(find_plan(trace, full, "single"), wire=(BF16,))
        assert predict(trace, loaded, plan).messages[0].duration_s == pytest.approx(both.low(trace.grad_bytes))


def test_a_range_is_known_where_that_of_the_precisions_in_use_is() -> None:
    trace = make_trace([2.0], [10])
    known, unknown = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.25}}), LinearCost(2, 1.0, 0.25)
    plain = MergePlan.of_sizes(trace, [1])
    low = replace(plain, wire=("bfloat16",))
    assert input_range(trace, WireCost(known, unknown), plain) == input_range(trace, known, plain)
    assert input_range(trace, WireCost(known, unknown), low) is None
    half = replace(known, per_byte_s=0.25)
    assert half == low_precision_cost(known)
    assert input_range(trace, WireCost(known, half), low) == input_range(trace, known, low)
    assert input_range(trace, known, low) == (2.0 + 3.5 / 1.25, 2.0 + 3.5 * 1.25)


def test_what_was_learnt_to_take_nothing_takes_nothing_beside_another_cost_and_what_was_swept_takes_alike(
    tmp_path: Path,
) -> None:
    full, low = LinearCost(2, 1.0, 0.5, taken_s=1.0), LinearCost(2, 1.0, 0.25)
    for learnt_of, expected_s in ((full, 0.0), (taking_nothing(full), 3.0)):
        file = tmp_path / "cost.json"
        WireCost(learnt_of, low, BF16).save(file)
        assert WireCost.load(file) == WireCost(learnt_of, low, BF16)
        both = with_low_cost(replace(full, taken_s=3.0), read_low_cost(BF16, str(file)))
        assert isinstance(both, WireCost)
        assert taken_by(both.low, 8) == expected_s
