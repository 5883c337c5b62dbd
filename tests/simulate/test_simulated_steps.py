"""The simulated step: equal to `predict` without jitter, and never faster for anything that makes it worse."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import (
    PLANNERS,
    LayerTrace,
    LinearCost,
    MergePlan,
    ModelTrace,
    PiecewiseCost,
    Scenario,
    SimulationError,
    find_plan,
    load_network,
    predict,
    predict_naive,
    predict_parameter_server,
    simulate_steps,
)
from mgwfbp.cost import taken_by
from mgwfbp.costs import ShardedCost, WireCost, low_precision_cost
from mgwfbp.errors import PlanError
from mgwfbp.planners import find_sharded_plan, find_wire_plan
from mgwfbp.simulate.sweep import BASELINES

KnownCost = LinearCost | PiecewiseCost
times = st.floats(0.0, 10.0, allow_subnormal=False)
# The simulator adds in another order than it compares in: what is equal in numbers may differ in the last bits.
ROUNDING = 1 + 1e-12


@st.composite
def traces(draw: st.DrawFn, max_layers: int = 12) -> ModelTrace:
    spans = draw(st.lists(st.tuples(times, st.integers(0, 10**6)), min_size=1, max_size=max_layers))
    layers = tuple(LayerTrace(f"layer{index}", *span) for index, span in enumerate(spans))
    if draw(st.booleans()):
        return ModelTrace("random", draw(times), layers)
    layers = tuple(replace(layer, forward_s=draw(times)) for layer in layers)
    return ModelTrace("random", sum(layer.forward_s or 0.0 for layer in layers), layers)


@st.composite
def costs(draw: st.DrawFn) -> LinearCost | PiecewiseCost:
    workers = draw(st.integers(1, 9))
    taken: dict[str, Any] = {}
    if draw(st.booleans()):
        taken = {"taken_s": draw(times), "taken_per_byte_s": draw(st.floats(0.0, 1e-5))}
    if draw(st.booleans()):
        return LinearCost(workers, draw(times), draw(st.floats(0.0, 1e-5)), **taken)
    sizes = sorted(draw(st.sets(st.integers(0, 2 * 10**6), min_size=2, max_size=5)))
    seconds = sorted(draw(st.lists(times, min_size=len(sizes), max_size=len(sizes))))
    return PiecewiseCost(workers, tuple(zip(sizes, seconds, strict=True)), **taken)


@st.composite
def gathers_of(draw: st.DrawFn, plan: MergePlan) -> tuple[tuple[str, ...], ...]:
    """Return gathers of some of a plan's messages, in the order of the forward pass, in groups of their own."""
    names = [name for group in plan.groups if draw(st.booleans()) for name in group][::-1]
    cuts = sorted(draw(st.sets(st.integers(1, len(names)))) | {len(names)}) if names else []
    return tuple(tuple(names[start:end]) for start, end in pairwise([0, *cuts]))


@st.composite
def cases(draw: st.DrawFn, *, gathers: bool = True) -> tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan]:
    """Return a trace, a cost and any plan for it, also one that no planner would make."""
    trace, cost = draw(traces()), draw(costs())
    names = draw(st.permutations([layer.name for layer in trace.layers])) if draw(st.booleans()) else None
    cuts = sorted(draw(st.sets(st.integers(1, len(trace.layers)))) | {len(trace.layers)})
    sizes = np.diff([0, *cuts]).tolist()
    plan = MergePlan.of_sizes(trace, sizes)
    if gathers and draw(st.booleans()):
        plan = replace(plan, gathers=draw(gathers_of(plan)))
    elif draw(st.booleans()):
        precision = st.sampled_from(["", "bfloat16"])
        plan = replace(plan, wire=tuple(draw(st.lists(precision, min_size=len(sizes), max_size=len(sizes)))))
    if names is not None:
        renamed = dict(zip(plan.layer_names, names, strict=True))
        groups, gathered = (
            tuple(tuple(renamed[name] for name in group) for group in some) for some in (plan.groups, plan.gathers)
        )
        plan = replace(plan, groups=groups, gathers=gathered)
    return trace, cost, plan


@st.composite
def disturbances(draw: st.DrawFn) -> Scenario:
    """Return any scenario without stragglers for which the claims below are proven."""
    contention, in_flight = draw(st.sampled_from([(1.0, 1), (1.0, 2), (1.0, 3), (1.7, 1), (4.0, 1)]))
    return Scenario(
        jitter=draw(st.sampled_from([0.0, 0.1, 0.5])),
        jitter_shared=draw(st.sampled_from([0.0, 0.3, 1.0])),
        contention=contention,
        in_flight=in_flight,
        steps=4,
        seed=draw(st.integers(0, 10)),
    )


@given(cases())
def test_without_jitter_the_simulated_step_is_the_predicted_one_bit_for_bit(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan],
) -> None:
    trace, cost, plan = case
    simulation, timeline = simulate_steps(trace, cost, plan, Scenario(steps=3)), predict(trace, cost, plan)
    assert [simulation.timeline(step) for step in range(3)] == [timeline] * 3
    assert simulation.mean_iteration_s == timeline.iteration_s
    assert simulation.mean_exposed_s == timeline.exposed_s
    # What messages took and the forward pass waited is a sum of many gaps in one and a difference in the other.
    rounding = 1e-9 if timeline.taken_s or timeline.gathers else 0
    assert simulation.speedup == pytest.approx(timeline.speedup, rel=rounding, abs=0)
    assert simulation.efficiency == pytest.approx(timeline.efficiency, rel=rounding, abs=0)


@given(traces(), costs(), st.sampled_from(sorted(PLANNERS)))
def test_every_planner_keeps_its_promise_in_the_simulator(
    trace: ModelTrace, cost: LinearCost | PiecewiseCost, planner: str
) -> None:
    plan = find_plan(trace, cost, planner)
    assert simulate_steps(trace, cost, plan).mean_iteration_s == plan.predicted["iteration_s"]


@given(traces(), costs(), costs(), costs())
@settings(max_examples=50)
def test_a_plan_for_a_sharded_optimizer_keeps_its_promise_in_the_simulator(
    trace: ModelTrace, both: KnownCost, reduce_scatter: KnownCost, all_gather: KnownCost
) -> None:
    halves = (replace(half, workers=both.workers) for half in (reduce_scatter, all_gather))
    for cost in (both, ShardedCost(both, *halves)):
        plan = find_sharded_plan(trace, cost)
        simulation = simulate_steps(trace, cost, plan)
        assert simulation.timeline() == predict(trace, cost, plan)
        assert simulation.mean_iteration_s == plan.predicted["iteration_s"]
        assert simulation.mean_exposed_s == plan.predicted["exposed_s"]


@given(traces(), costs(), costs(), st.sampled_from(["bfloat16", "float16"]))
def test_a_plan_of_both_precisions_keeps_its_promise_in_the_simulator(
    trace: ModelTrace, full: LinearCost | PiecewiseCost, low: LinearCost | PiecewiseCost, wire: str
) -> None:
    for cost in (full, WireCost(full, replace(low, workers=full.workers))):
        plan = find_wire_plan(trace, cost, wire)
        assert simulate_steps(trace, cost, plan).timeline() == predict(trace, cost, plan)
        assert simulate_steps(trace, cost, plan).mean_iteration_s == plan.predicted["iteration_s"]


@given(traces(), st.integers(1, 20), st.sampled_from(["1gbe", "10gbe", "ib-hdr"]))
def test_baselines_equal_their_predictions_bit_for_bit(trace: ModelTrace, workers: int, preset: str) -> None:
    network = load_network(preset)
    cost = network.cost(workers)
    plan = BASELINES["naive"].planner(trace, cost)
    naive = simulate_steps(trace, cost, plan, overlap=BASELINES["naive"].overlap)
    assert naive.timeline() == predict_naive(trace, cost)
    server_cost = network.parameter_server_cost(workers, servers=1)
    server = simulate_steps(trace, server_cost, BASELINES["ps"].planner(trace, server_cost))
    assert server.timeline() == predict_parameter_server(trace, network, workers)


@given(cases(), disturbances(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=300)
def test_more_jitter_never_makes_the_mean_step_faster(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], scenario: Scenario, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    calm, wild = (simulate_steps(*case, replace(scenario, jitter=jitter)) for jitter in (less, more))
    assert calm.mean_iteration_s <= wild.mean_iteration_s * ROUNDING


@given(cases(), disturbances(), st.integers(0, 8), st.floats(1.0, 5.0))
@settings(max_examples=200)
def test_a_straggler_never_makes_any_step_faster(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], scenario: Scenario, number: int, slowdown: float
) -> None:
    stragglers = (slowdown,) * min(number, case[1].workers)
    usual, hindered = (simulate_steps(*case, each) for each in (scenario, replace(scenario, stragglers=stragglers)))
    assert (usual.iteration_s <= hindered.iteration_s * ROUNDING).all()


@given(cases(), disturbances(), st.floats(1.0, 10.0), st.floats(1.0, 10.0))
@settings(max_examples=200)
def test_a_slower_link_never_makes_any_step_faster(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan],
    scenario: Scenario,
    startup_factor: float,
    rate_factor: float,
) -> None:
    trace, cost, plan = case
    fast = LinearCost(cost.workers, cost(0), (cost(10**6) - cost(0)) / 10**6)
    slow = LinearCost(cost.workers, fast.startup_s * startup_factor, fast.per_byte_s * rate_factor)
    on_fast, on_slow = (simulate_steps(trace, link, plan, scenario) for link in (fast, slow))
    assert (on_fast.iteration_s <= on_slow.iteration_s * ROUNDING).all()


@given(cases(), disturbances(), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_more_contention_never_makes_any_step_faster(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], scenario: Scenario, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    calm, busy = (simulate_steps(*case, replace(scenario, contention=c, in_flight=1)) for c in (less, more))
    assert (calm.iteration_s <= busy.iteration_s * ROUNDING).all()


@given(cases(), disturbances(), st.integers(1, 4))
def test_another_message_in_flight_never_makes_any_step_slower(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], scenario: Scenario, in_flight: int
) -> None:
    fewer, more = (
        simulate_steps(*case, replace(scenario, contention=1.0, in_flight=number))
        for number in (in_flight, in_flight + 1)
    )
    assert (more.iteration_s <= fewer.iteration_s * ROUNDING).all()


@given(cases(), disturbances(), st.integers(1, 3), st.integers(0, 3))
def test_a_disturbed_step_can_be_laid_out_in_time_and_is_as_long_as_it_says(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], scenario: Scenario, in_flight: int, step: int
) -> None:
    simulation = simulate_steps(*case, replace(scenario, in_flight=in_flight))
    timeline = simulation.timeline(step)
    assert timeline.iteration_s == pytest.approx(np.broadcast_to(simulation.iteration_s, 4)[step], rel=1e-12)
    assert timeline.compute_s == pytest.approx(np.broadcast_to(simulation.compute_s, 4)[step], rel=1e-12)
    ready = dict(zip((layer.name for layer in case[0].layers), (span.end_s for span in timeline.backward), strict=True))
    for message in timeline.messages:
        assert message.start_s * ROUNDING >= max(ready[name] for name in message.layers)


def replay(case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], contention: float, num_ticks: int) -> float:
    """Return the end of the last message by walking through time in small ticks: an oracle that knows no formula."""
    trace, cost, plan = case
    sizes = {layer.name: layer.grad_bytes for layer in trace.layers}
    ready = dict(zip((layer.name for layer in trace.layers), trace.ready_s, strict=True))
    unsent = []
    for group, wire in zip(plan.groups, plan.wires, strict=True):
        num_bytes = sum(sizes[name] for name in group)
        kind = low_precision_cost(cost) if wire else cost
        unsent.append((max(ready[name] for name in group), kind(num_bytes), taken_by(kind, num_bytes)))
    tick_s = scale_s(case, contention) / num_ticks
    now_s, done_s, taken_s, message_s, queue = 0.0, 0.0, 0.0, 0.0, list[float]()
    while unsent or queue or message_s > 0:
        while unsent and unsent[0][0] <= done_s and taken_s <= 0:
            _, seconds, taken_s = unsent.pop(0)
            queue.append(seconds)
        if message_s <= 0 and queue:
            message_s = queue.pop(0)
        work_s = tick_s / contention if message_s > 0 else tick_s
        if taken_s > 0:
            taken_s -= work_s
        else:
            done_s += work_s
        message_s -= tick_s
        now_s += tick_s
    return now_s


def scale_s(case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], contention: float) -> float:
    """How long a step may take at most, about."""
    trace, cost, plan = case
    most_bytes = trace.grad_bytes
    messages_s = plan.num_groups * (cost(most_bytes) + taken_by(cost, most_bytes) * contention)
    return trace.compute_s * contention + messages_s + 1e-9


@given(cases(gathers=False), st.sampled_from([1.0, 1.5, 3.0]))
@settings(max_examples=25)
def test_contention_agrees_with_a_walk_through_time_in_small_ticks(
    case: tuple[ModelTrace, LinearCost | PiecewiseCost, MergePlan], contention: float
) -> None:
    num_ticks = 5000
    walked_s = replay(case, contention, num_ticks)
    simulated_s = simulate_steps(*case, Scenario(contention=contention)).ends_s.max()
    assert abs(walked_s - simulated_s) <= 4 * (len(case[2].groups) + 1) * scale_s(case, contention) / num_ticks


TOY = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
TOY_COST = LinearCost(workers=2, startup_s=2.0, per_byte_s=0.1)
ONE_EACH = MergePlan.of_sizes(TOY, [1, 1, 1])


def test_contention_stretches_computation_by_hand() -> None:
    # Gradients after 5, 7, 9 s of computation; messages of 3 s; beside a message computation takes twice as long.
    # c: 5 to 8, in which 1.5 s are computed. b: ready at 8.5, to 11.5, which hides 1.5 s. a: ready at 12, to 15.
    timeline = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(contention=2.0)).timeline()
    assert [(span.ready_s, span.start_s, span.end_s) for span in timeline.messages] == [
        (5.0, 5.0, 8.0),
        (8.5, 8.5, 11.5),
        (12.0, 12.0, 15.0),
    ]
    assert [span.end_s for span in timeline.backward] == [5.0, 8.5, 12.0]
    assert timeline.exposed_s == 3.0


def test_computation_that_ends_beside_a_message_ends_late_by_hand() -> None:
    # The message of c lasts from 5 to 15; the other 4 s of computation take 8 s beside it: b is ready at 9, a at 13.
    slow = LinearCost(workers=2, startup_s=9.0, per_byte_s=0.1)
    timeline = simulate_steps(TOY, slow, MergePlan.of_sizes(TOY, [1, 2]), Scenario(contention=2.0)).timeline()
    assert [span.end_s for span in timeline.backward] == [5.0, 9.0, 13.0]
    assert [(span.ready_s, span.start_s, span.end_s) for span in timeline.messages] == [
        (5.0, 5.0, 15.0),
        (13.0, 15.0, 26.0),
    ]


def test_contention_with_two_messages_in_flight_by_hand() -> None:
    # c: 5 to 8. b is ready after 2 s of computation, 4 s beside messages if there is one all along: c until 8 gives
    # 1.5 s, the last 0.5 s run free: start 8.5, start-up to 10.5, end 11.5. a: 1.5 s beside b, then 0.5 s free: 12.
    simulation = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(contention=2.0, in_flight=2))
    assert simulation.starts_s[:, 0].tolist() == [5.0, 8.5, 12.0]
    # With longer start-ups b starts while c is under way, at 5 + 4; the link stays busy until b ends.
    slow = LinearCost(workers=2, startup_s=9.0, per_byte_s=0.1)
    simulation = simulate_steps(TOY, slow, ONE_EACH, Scenario(contention=2.0, in_flight=2))
    assert simulation.starts_s[:, 0].tolist() == [5.0, 9.0, 15.0]
    assert simulation.ends_s[:, 0].tolist() == [15.0, 19.0, 25.0]
    assert simulation.compute_s.tolist() == [13.0]


def test_two_messages_in_flight_overlap_start_ups_and_not_bytes_by_hand() -> None:
    # Start-up 2 s, bytes 1 s. c: 5 to 8. b: ready 7, start-up to 9, bytes to 10. a: ready 9, start-up to 11, to 12.
    simulation = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(in_flight=2))
    assert simulation.starts_s[:, 0].tolist() == [5.0, 7.0, 9.0]
    assert simulation.ends_s[:, 0].tolist() == [8.0, 10.0, 12.0]
    # With bytes of 3 s and all ready at once: bytes queue, and the third waits for the first to end.
    burst = ModelTrace("burst", 1.0, tuple(LayerTrace(name, 0.0, 30) for name in "cba"))
    simulation = simulate_steps(burst, TOY_COST, MergePlan.of_sizes(burst, [1, 1, 1]), Scenario(in_flight=2))
    assert simulation.starts_s[:, 0].tolist() == [1.0, 1.0, 6.0]
    assert simulation.ends_s[:, 0].tolist() == [6.0, 9.0, 12.0]


# A half of an all-reduce takes 1 s and 1 s for its byte. The forward pass is a, then b.
TWO = ModelTrace("two", 4.0, (LayerTrace("b", 2.0, 1, 2.0), LayerTrace("a", 2.0, 1, 2.0)))
TWO_COST = LinearCost(workers=2, startup_s=2.0, per_byte_s=2.0)
TWO_SHARDED = MergePlan("two", "by hand", (("b",), ("a",)), gathers=(("a",), ("b",)))


@pytest.mark.parametrize(
    ("scenario", "gathers", "forward", "backward", "messages", "exposed_s"),
    [
        # a waits for its gather until 2, b for nothing.
        (Scenario(), [(0, 2), (2, 4)], (2, 6), [8, 10], [(8, 10), (10, 12)], 4),
        # Beside the second gather, from 2 to 4, one second of a is computed; beside b's message one second of a.
        (Scenario(contention=2.0), [(0, 2), (2, 4)], (3, 7), [9, 12], [(9, 11), (12, 14)], 5),
        # The start-up of the second gather runs beside the first one; nothing had waited for it.
        (Scenario(in_flight=2), [(0, 2), (0, 3)], (2, 6), [8, 10], [(8, 10), (10, 12)], 4),
        # The slow worker's a is computed from 2 to 6, and its b was there at 4.
        (Scenario(stragglers=(2.0,)), [(0, 2), (2, 4)], (2, 10), [14, 18], [(14, 16), (18, 20)], 4),
    ],
)
def test_a_step_with_gathers_by_hand(
    scenario: Scenario,
    gathers: list[tuple[float, float]],
    forward: tuple[float, float],
    backward: list[float],
    messages: list[tuple[float, float]],
    exposed_s: float,
) -> None:
    simulation = simulate_steps(TWO, TWO_COST, TWO_SHARDED, scenario)
    timeline = simulation.timeline()
    assert [(span.start_s, span.end_s) for span in timeline.gathers] == gathers
    assert (timeline.forward.start_s, timeline.forward.end_s) == forward
    assert [span.end_s for span in timeline.backward] == backward
    assert [(span.start_s, span.end_s) for span in timeline.messages] == messages
    assert simulation.mean_exposed_s == timeline.exposed_s == exposed_s
    assert "in 2 messages and 2 gathers" in repr(simulation)


@given(cases(), st.integers(1, 5), st.floats(0.0, 1.0), st.integers(0, 10))
def test_a_step_with_jitter_is_the_predicted_one_of_what_its_worker_computed(
    case: tuple[ModelTrace, KnownCost, MergePlan], workers: int, shared: float, seed: int
) -> None:
    # Of one worker, or where a worker's step has one factor, the trace of a step can be read off the computation.
    trace, cost, plan = case
    shared = 1.0 if workers > 1 else shared
    simulation = simulate_steps(
        trace, replace(cost, workers=workers), plan, Scenario(jitter=0.5, jitter_shared=shared, steps=4, seed=seed)
    )
    for step, ready_s in enumerate(simulation.computation.ready_s.T):
        slower = ready_s[0] / trace.forward_s if trace.forward_s else 1.0
        layers = tuple(
            replace(layer, backward_s=span_s, forward_s=forward_s * slower)
            for layer, span_s, forward_s in zip(
                trace.layers, np.diff(ready_s).tolist(), trace.layer_forward_s, strict=True
            )
        )
        computed = ModelTrace(trace.model, sum(layer.forward_s or 0.0 for layer in layers), layers)
        assert simulation.iteration_s[step] == pytest.approx(predict(computed, cost, plan).iteration_s, rel=1e-9)


def test_one_straggler_holds_all_workers_back() -> None:
    slow = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(stragglers=(2.0,)))
    # Gradients at 10, 14, 18 s, every message done before the next is ready.
    assert slow.mean_iteration_s == 21.0
    assert slow.speedup == pytest.approx(2 * 9.0 / 21.0)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_stragglers_are_slower_with_jitter_too(shared: float) -> None:
    free = LinearCost(4, 0.0, 0.0)
    noisy = Scenario(jitter=0.1, jitter_shared=shared, steps=20)
    usual = simulate_steps(TOY, free, ONE_EACH, noisy).iteration_s
    all_slow = simulate_steps(TOY, free, ONE_EACH, replace(noisy, stragglers=(3.0,) * 4)).iteration_s
    one_slow = simulate_steps(TOY, free, ONE_EACH, replace(noisy, stragglers=(3.0,))).iteration_s
    assert all_slow == pytest.approx(3 * usual)
    assert (one_slow > 1.5 * usual).all()
    assert (one_slow <= all_slow).all()


def test_the_same_seed_gives_the_same_steps_and_another_seed_others() -> None:
    noisy = Scenario(jitter=0.2, jitter_shared=0.5, steps=10)
    first, again = (simulate_steps(TOY, TOY_COST, ONE_EACH, noisy) for _ in range(2))
    other = simulate_steps(TOY, TOY_COST, ONE_EACH, replace(noisy, seed=1))
    assert first.iteration_s.tolist() == again.iteration_s.tolist()
    assert first.iteration_s.tolist() != other.iteration_s.tolist()


def test_more_steps_continue_the_same_run() -> None:
    few = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(jitter=0.2, jitter_shared=0.5, steps=10))
    many = simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(jitter=0.2, jitter_shared=0.5, steps=20_000))
    assert many.iteration_s[:10].tolist() == few.iteration_s.tolist()


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_jitter_is_log_normal_with_median_one(shared: float) -> None:
    # One worker and no communication: the step is its forward pass alone, so the factor can be read off.
    trace = ModelTrace("toy", 1.0, (LayerTrace("a", 0.0, 0),))
    scenario = Scenario(jitter=0.3, jitter_shared=shared, steps=40_000)
    steps = simulate_steps(trace, LinearCost(1, 0.0, 0.0), MergePlan.of_sizes(trace, [1]), scenario).iteration_s
    logs = np.log(steps)
    assert abs(logs.mean()) < 1e-12  # mirrored pairs
    assert logs.std() == pytest.approx(0.3, rel=0.02)
    assert np.mean(np.abs(logs) < 0.3) == pytest.approx(0.6827, abs=0.01)


def test_the_slowest_of_many_workers_is_slower_than_the_slowest_of_few() -> None:
    scenario = Scenario(jitter=0.1, steps=200)
    means = [
        simulate_steps(TOY, LinearCost(workers, 0.0, 0.0), ONE_EACH, scenario).mean_compute_s
        for workers in (1, 8, 64, 512)
    ]
    assert means == sorted(means)
    # Jitter that gradients do not share cancels out in part.
    own = simulate_steps(TOY, LinearCost(512, 0.0, 0.0), ONE_EACH, replace(scenario, jitter_shared=0.0))
    assert own.mean_compute_s < means[-1]


def test_the_slowest_of_n_workers_agrees_with_drawing_them_one_by_one() -> None:
    generator = np.random.default_rng(3)
    drawn = np.exp(0.2 * generator.standard_normal((20_000, 16))).max(axis=1) * TOY.compute_s
    scenario = Scenario(jitter=0.2, steps=20_000, seed=4)
    simulated = simulate_steps(TOY, LinearCost(16, 0.0, 0.0), ONE_EACH, scenario)
    assert simulated.mean_compute_s == pytest.approx(drawn.mean(), rel=0.005)
    assert simulated.quantile_s(0.95) == pytest.approx(np.quantile(drawn, 0.95), rel=0.01)


@given(traces())
def test_one_worker_has_no_communication(trace: ModelTrace) -> None:
    simulation = simulate_steps(trace, load_network("1gbe").cost(1), MergePlan.of_sizes(trace, [1] * len(trace.layers)))
    assert simulation.mean_exposed_s == 0.0
    assert simulation.speedup == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"jitter": -0.1},
        {"jitter": 50.0, "steps": 2},
        {"jitter": float("nan")},
        {"jitter": 0.1, "steps": 3},
        {"jitter_shared": 1.5},
        {"stragglers": (0.5,)},
        {"stragglers": 2.0},
        {"contention": 0.0},
        {"in_flight": 0},
        {"steps": 0},
        {"seed": -1},
    ],
)
def test_impossible_scenarios_are_refused_in_one_line(wrong: dict[str, object]) -> None:
    with pytest.raises(SimulationError) as caught:
        Scenario(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert next(iter(wrong)) in str(caught.value) or "steps" in str(caught.value)


def test_more_stragglers_than_workers_are_refused() -> None:
    with pytest.raises(SimulationError, match="3 stragglers among 2 workers"):
        simulate_steps(TOY, TOY_COST, ONE_EACH, Scenario(stragglers=(2.0, 2.0, 2.0)))


def test_what_does_not_fit_into_memory_is_refused_before_it_is_tried() -> None:
    with pytest.raises(SimulationError, match="do not fit"):
        simulate_steps(TOY, LinearCost(10**9, 0.0, 0.0), ONE_EACH, Scenario(jitter=0.1, jitter_shared=0.0, steps=2))


def test_a_plan_for_another_model_and_a_step_that_was_not_simulated_are_refused() -> None:
    with pytest.raises(PlanError, match="another model"):
        simulate_steps(TOY, TOY_COST, MergePlan("other", "by hand", (("x",),)))
    with pytest.raises(SimulationError, match="step 1 was not simulated"):
        simulate_steps(TOY, TOY_COST, ONE_EACH).timeline(1)


def test_times_beyond_all_numbers_are_refused() -> None:
    trace = ModelTrace("huge", 0.7e100, (LayerTrace("a", 0.1e100, 1),))
    plan = MergePlan.of_sizes(trace, [1])
    with pytest.raises(SimulationError, match=r"computation of a step of 'huge' is 1\.6e\+100, expected"):
        simulate_steps(trace, TOY_COST, plan, Scenario(stragglers=(2.0,)))
    with pytest.raises(SimulationError, match=r"last message's end in a step of 'huge' is 1\.7e\+100, expected"):
        simulate_steps(trace, LinearCost(2, 0.9e100, 0.0), plan)
