"""How long the exact planner takes. `make bench`; results in planners.md."""

import random
from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from mgwfbp import LayerTrace, LinearCost, ModelTrace, PiecewiseCost, load_network, load_trace
from mgwfbp.planners import find_sharded_plan, plan_cautiously, plan_optimal, plan_wire

LINE = LinearCost(8, 633.64e-6, 1.4e-9)
# A start-up that grows with the message, two protocol switches, and the slope of large messages.
CURVE = PiecewiseCost(
    8, ((4, 9e-5), (8192, 2e-4), (12288, 6e-4), (2**18, 1.2e-3), (2**20, 2.9e-3), (2**24, 2.6e-2), (2**26, 9.5e-2))
)


def make_trace(num_layers: int) -> ModelTrace:
    """A model of 100 MB whose backward pass takes 80 ms, split evenly over so many gradients on average."""
    rng = random.Random(num_layers)
    layers = [
        LayerTrace(
            f"layer{index}.weight",
            rng.expovariate(num_layers / 0.08),
            4 * int(rng.lognormvariate(0, 2) * 3.4e6 / num_layers),
        )
        for index in range(num_layers)
    ]
    return ModelTrace("random", 0.04, tuple(layers))


@pytest.mark.parametrize("num_layers", [161, 1_000, 10_000, 100_000])
def test_optimal_with_a_linear_cost(benchmark: BenchmarkFixture, num_layers: int) -> None:
    trace = make_trace(num_layers)
    plan = benchmark(plan_optimal, trace, LINE)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("num_layers", [161, 604, 2_000])
def test_optimal_with_a_piecewise_cost(benchmark: BenchmarkFixture, num_layers: int) -> None:
    trace = make_trace(num_layers)
    plan = benchmark(plan_optimal, trace, CURVE)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("num_layers", [161, 604])
@pytest.mark.parametrize("taken_s", [0.0, 5e-5])
@pytest.mark.parametrize("cost", [LINE, CURVE], ids=["line", "curve"])
def test_optimal_with_a_cost_that_may_be_off(
    benchmark: BenchmarkFixture, num_layers: int, taken_s: float, cost: LinearCost | PiecewiseCost
) -> None:
    unsure = replace(cost, taken_s=taken_s, source={"fit": {"mean_error": 0.05}})
    plan = benchmark(plan_cautiously, make_trace(num_layers), unsure)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("backward_s", [0.24, 0.8, 8.0])
def test_optimal_with_a_piecewise_cost_and_a_slower_backward_pass(
    benchmark: BenchmarkFixture, backward_s: float
) -> None:
    trace = make_trace(2_000)
    factor = backward_s / 0.08
    layers = [LayerTrace(layer.name, layer.backward_s * factor, layer.grad_bytes) for layer in trace.layers]
    plan = benchmark(plan_optimal, ModelTrace("slow", 0.04, tuple(layers)), CURVE)
    benchmark.extra_info["messages"] = plan.num_groups


def test_optimal_where_large_messages_are_dear(benchmark: BenchmarkFixture) -> None:
    """The slowest case we know: the cost bends upwards, so the best plan has hundreds of messages."""
    dear = PiecewiseCost(8, ((4, 1e-5), (2**16, 2e-5), (2**20, 1e-3), (2**24, 5e-2), (2**26, 1.0)))
    plan = benchmark(plan_optimal, make_trace(2_000), dear)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("cost", [LINE, CURVE], ids=["linear", "piecewise"])
@pytest.mark.parametrize("num_layers", [161, 604, 2_000])
def test_optimal_where_messages_take_from_the_computation(
    benchmark: BenchmarkFixture, num_layers: int, cost: LinearCost | PiecewiseCost
) -> None:
    taking = replace(cost, taken_s=5e-5, taken_per_byte_s=7e-11)  # 50 us, and a twentieth of what a byte takes
    plan = benchmark(plan_optimal, make_trace(num_layers), taking)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("num_layers", [604, 2_000])
def test_optimal_where_messages_take_from_a_longer_backward_pass(benchmark: BenchmarkFixture, num_layers: int) -> None:
    """The slowest case we know with the term: many messages fit behind the backward pass, and slack is looked for."""
    trace = make_trace(num_layers).scaled(0.3 / 0.08)
    taking = LinearCost(8, 1e-4, 2.5e-9, taken_s=5e-5, taken_per_byte_s=1.25e-10)
    plan = benchmark(plan_optimal, trace, taking)
    benchmark.extra_info["messages"] = plan.num_groups


@pytest.mark.parametrize("share", [0.0, 0.05], ids=["takes nothing", "takes 30 us and 5 %"])
@pytest.mark.parametrize("network", ["10GbE", "25GbE"])
@pytest.mark.parametrize(
    "model",
    ["resnet50-h200-b32", "googlenet-h200-b64", "gpt2-h200-b8", "bert-h200-b32", "densenet201-h200-b32"],
)
def test_low_precision(benchmark: BenchmarkFixture, model: str, network: str, share: float) -> None:
    """Which messages of a recorded model travel in low precision, on 4 workers."""
    line = load_network(network).cost(4)
    cost = replace(line, taken_s=6e-4 * share, taken_per_byte_s=line.per_byte_s * share)
    plan = benchmark.pedantic(plan_wire, (load_trace(model), cost), rounds=3)
    benchmark.extra_info.update(plan.predicted, messages=plan.num_groups)


@pytest.mark.parametrize("num_layers", [161, 604])
def test_low_precision_on_a_curve(benchmark: BenchmarkFixture, num_layers: int) -> None:
    plan = benchmark.pedantic(plan_wire, (make_trace(num_layers), CURVE), rounds=3)
    benchmark.extra_info.update(plan.predicted, messages=plan.num_groups)


@pytest.mark.parametrize("network", ["10GbE", "25GbE"])
@pytest.mark.parametrize(
    "model",
    ["resnet50-h200-b32", "googlenet-h200-b64", "gpt2-h200-b8", "bert-h200-b32", "densenet201-h200-b32"],
)
def test_a_sharded_optimizer(benchmark: BenchmarkFixture, model: str, network: str) -> None:
    """Messages and gathers of a recorded model on 4 workers, and how near they are to the best."""
    trace, cost = load_trace(model), load_network(network).cost(4)
    plan = benchmark.pedantic(find_sharded_plan, (trace, cost), rounds=3)
    benchmark.extra_info.update(plan.predicted, messages=plan.num_groups, gathers=len(plan.gathers))


@pytest.mark.parametrize("num_layers", [161, 604])
def test_a_sharded_optimizer_on_a_curve(benchmark: BenchmarkFixture, num_layers: int) -> None:
    plan = benchmark.pedantic(find_sharded_plan, (make_trace(num_layers), CURVE), rounds=3)
    benchmark.extra_info.update(plan.predicted, messages=plan.num_groups, gathers=len(plan.gathers))
