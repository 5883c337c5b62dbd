"""How fast the simulator is: `pytest benchmarks --benchmark-enable --benchmark-only`; numbers in simulate.md."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mgwfbp import PLANNERS, Cluster, LayerTrace, ModelTrace, Scenario, find_plan, load_network, simulate_steps
from mgwfbp.simulate import Grid, Simulation, Strategy, SweepRow, sweep

Benchmark = Callable[..., Any]


def model(name: str, num_gradients: int, num_parameters: int, compute_s: float) -> ModelTrace:
    """Return a model of this many gradients, sizes spread over four orders of magnitude as those of real ones are."""
    generator = np.random.default_rng(0)
    weights = generator.lognormal(0.0, 2.5, num_gradients)
    sizes = (4 * num_parameters * weights / weights.sum()).astype(int).tolist()
    times_s = generator.lognormal(0.0, 1.0, num_gradients)
    times_s = (2 / 3 * compute_s * times_s / times_s.sum()).tolist()
    layers = (
        LayerTrace(f"layer{index}.weight", time_s, size)
        for index, (time_s, size) in enumerate(zip(times_s, sizes, strict=True))
    )
    return ModelTrace(name, compute_s / 3, tuple(layers))


GOOGLENET = model("like googlenet", 187, 13_000_000, 0.46)
RESNET50 = model("like resnet50", 161, 25_500_000, 0.60)
TEN_GBE = Cluster(load_network("10gbe"))


def test_the_paper_s_sweep_of_five_planners_and_both_models(benchmark: Benchmark) -> None:
    grid = Grid((TEN_GBE,), (4, 8, 16, 32, 64), tuple(Strategy(*item) for item in PLANNERS.items()))

    def work() -> list[SweepRow]:
        return [row for trace in (GOOGLENET, RESNET50) for row in sweep(trace, grid)]

    assert len(benchmark(work)) == 50


@pytest.mark.parametrize("planner", ["wfbp", "optimal"])
@pytest.mark.parametrize(
    ("workers", "steps", "shared"),
    [(4096, 2, 0.5), (4096, 2, 1.0), (64, 1000, 0.5), (64, 1000, 1.0)],
    ids=["4096x2", "4096x2-shared", "64x1000", "64x1000-shared"],
)
def test_jittered_steps(benchmark: Benchmark, workers: int, steps: int, shared: float, planner: str) -> None:
    cost = TEN_GBE.cost(workers)
    plan = find_plan(RESNET50, cost, planner)
    scenario = Scenario(jitter=0.1, jitter_shared=shared, steps=steps)

    def work() -> Simulation:
        return simulate_steps(RESNET50, cost, plan, scenario)

    assert len(benchmark(work).iteration_s) == steps
