"""Sweeps: planned anew for every point, and what they say in words."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import (
    PLANNERS,
    Cluster,
    LayerTrace,
    ModelTrace,
    Scenario,
    SimulationError,
    find_plan,
    load_network,
    load_trace,
    predict,
)
from mgwfbp.simulate import BASELINES, Grid, Strategy, find_crossing, find_limits, sweep
from mgwfbp.simulate.evaluation import PUBLISHED, by_layer, compare_with_paper, paper_rows, size_distribution

STRATEGIES = tuple(Strategy(name, planner) for name, planner in PLANNERS.items())
ALL = (*STRATEGIES, *BASELINES.values())
TEN_GBE = Cluster(load_network("10gbe"))


def model(num_layers: int, *, layer_s: float, layer_bytes: int, forward_s: float = 0.1) -> ModelTrace:
    layers = (LayerTrace(f"layer{index}.weight", layer_s, layer_bytes) for index in range(num_layers))
    return ModelTrace("uniform", forward_s, tuple(layers))


# Sizes and times of the order of ResNet-50's on a K80: 100 MB in 107 gradients, 0.4 s backward.
DEEP = model(107, layer_s=0.4 / 107, layer_bytes=10**6, forward_s=0.2)


@given(st.integers(1, 40), st.floats(1e-4, 1.0), st.integers(0, 10**7), st.sampled_from([1, 2, 8, 64]))
@settings(max_examples=40)
def test_every_point_is_planned_for_itself_and_predicted_exactly(
    num_layers: int, layer_s: float, layer_bytes: int, workers: int
) -> None:
    trace = model(num_layers, layer_s=layer_s, layer_bytes=layer_bytes)
    rows = list(sweep(trace, Grid((TEN_GBE,), (workers,), STRATEGIES, (1.0, 0.25))))
    assert len(rows) == 2 * len(STRATEGIES)
    for row in rows:
        scaled, cost = trace.scaled(row.scale), TEN_GBE.cost(workers)
        plan = find_plan(scaled, cost, row.planner)
        assert (row.num_groups, row.iteration_s) == (plan.num_groups, plan.predicted["iteration_s"])
        assert row.speedup == predict(scaled, cost, plan).speedup
        assert row.bandwidth_bound_s <= row.iteration_s * (1 + 1e-12)


@given(st.integers(2, 300), st.integers(0, 5))
@settings(max_examples=20)
def test_a_slower_network_never_makes_the_best_plan_faster(workers: int, seed: int) -> None:
    # Not so for every planner: one that is not optimal may be driven by a slower link to a better plan.
    slower = [replace(load_network("10gbe"), name=str(factor), per_byte_s=8e-10 * factor) for factor in (1, 2, 5, 20)]
    scenario = Scenario(seed=seed)
    grid = Grid(tuple(map(Cluster, slower)), (workers,), (Strategy("optimal", PLANNERS["optimal"]),))
    steps = [row.iteration_s for row in sweep(DEEP, grid, scenario)]
    assert steps == sorted(steps)


def test_a_plan_made_for_few_workers_is_slower_on_many_than_one_made_for_them() -> None:
    made_for_two = find_plan(DEEP, TEN_GBE.cost(2), "optimal")
    fixed = Strategy("made for 2", lambda trace, cost: made_for_two)  # noqa: ARG005 - every planner takes both
    anew = Strategy("optimal", PLANNERS["optimal"])
    rows = {
        (row.planner, row.workers): row.iteration_s for row in sweep(DEEP, Grid((TEN_GBE,), (2, 4096), (fixed, anew)))
    }
    assert rows["made for 2", 2] == rows["optimal", 2]
    assert rows["made for 2", 4096] > rows["optimal", 4096]


def test_all_strategies_meet_the_same_jitter() -> None:
    grid = Grid((TEN_GBE, Cluster(load_network("1gbe"))), (16,), ALL)
    rows = list(sweep(DEEP, grid, Scenario(jitter=0.2, jitter_shared=0.5, steps=20)))
    assert len({row.compute_s for row in rows}) == 1
    assert all(row.iteration_std_s > 0 and row.iteration_p95_s >= row.iteration_s for row in rows)


def test_stragglers_are_planned_for() -> None:
    slow = list(sweep(DEEP, Grid((TEN_GBE,), (64,), STRATEGIES), Scenario(stragglers=(3.0,))))
    direct = list(sweep(DEEP.scaled(3.0), Grid((TEN_GBE,), (64,), STRATEGIES)))
    assert [(row.num_groups, row.iteration_s) for row in slow] == [(row.num_groups, row.iteration_s) for row in direct]


def test_naive_is_never_faster_than_wfbp_and_one_server_never_than_many() -> None:
    rows = {(row.planner, row.workers): row for row in sweep(DEEP, Grid((TEN_GBE,), (1, 2, 8, 64), ALL))}
    for workers in (1, 2, 8, 64):
        assert rows["wfbp", workers].iteration_s <= rows["naive", workers].iteration_s
        assert rows["ps-sharded", workers].iteration_s <= rows["ps", workers].iteration_s
        assert rows["naive", 1].exposed_s == rows["ps", 1].exposed_s == rows["single", 1].exposed_s == 0.0


def test_wfbp_is_ahead_of_one_message_on_few_nodes_and_behind_on_many() -> None:
    rows = list(sweep(DEEP, Grid((TEN_GBE,), (4, 8, 16, 32, 64), STRATEGIES)))
    crossing = find_crossing(rows)
    assert crossing is not None
    steps = {(row.planner, row.workers): row.iteration_s for row in rows}
    few, many = crossing
    assert steps["wfbp", few] <= steps["single", few]
    assert steps["wfbp", many] > steps["single", many]
    assert find_crossing([row for row in rows if row.workers < many]) is None


@pytest.mark.parametrize(
    ("layer_s", "layer_bytes", "words"),
    [
        (1.0, 1000, "computation hides communication, merged or not"),
        (1e-5, 10**8, "bandwidth bounds the step, merged or not"),
        (1e-5, 100, "start-up times cost"),
    ],
)
def test_a_sweep_says_in_words_what_limits_it(layer_s: float, layer_bytes: int, words: str) -> None:
    trace = model(30, layer_s=layer_s, layer_bytes=layer_bytes)
    (finding,) = find_limits(sweep(replace(trace, forward_s=layer_s), Grid((TEN_GBE,), (16, 32), STRATEGIES)))
    assert f"10GbE, 16 to 32 workers: {words}" in str(finding)
    assert finding.workers == (16, 32)


def test_one_message_at_the_end_is_called_not_overlapped_and_many_small_ones_start_up() -> None:
    # ResNet-50 on 8 x 10GbE: of one message start-up is 0.63 of 144 ms, of one message per gradient 101 ms.
    trace = load_trace("resnet50-k80-b32")
    strategies = tuple(Strategy(name, PLANNERS[name]) for name in ("single", "wfbp", "optimal"))
    rows = {row.planner: row for row in sweep(trace.scaled(0.02), Grid((TEN_GBE,), (8,), strategies))}
    assert (rows["single"].limit, rows["wfbp"].limit) == ("not overlapped", "start-up")
    (naive,) = sweep(trace, Grid((TEN_GBE,), (8,), (BASELINES["naive"],)))
    assert naive.limit == "not overlapped"


def test_nothing_is_said_of_merging_where_nothing_was_sent_unmerged() -> None:
    grid = Grid((TEN_GBE,), (64,), (Strategy("optimal", PLANNERS["optimal"]),))
    (finding,) = find_limits(sweep(DEEP, grid))
    assert finding.merging_matters is None
    assert "merging" not in str(finding)
    assert find_limits(sweep(DEEP, Grid((TEN_GBE,), (1,), STRATEGIES))) == []


@pytest.mark.parametrize("empty", ["sources", "workers", "strategies", "scales"])
def test_an_empty_grid_is_refused(empty: str) -> None:
    full = partial(Grid, sources=(TEN_GBE,), workers=(2,), strategies=STRATEGIES, scales=(1.0,))
    with pytest.raises(SimulationError, match=f"{empty}: empty"):
        full(**{empty: ()})
    with pytest.raises(SimulationError, match="scale is"):
        full(scales=(-1.0,))
    with pytest.raises(SimulationError, match="workers is 0"):
        full(workers=(0,))


def test_the_paper_s_gains_are_compared_like_with_like() -> None:
    rows = paper_rows(DEEP, load_network("10gbe"), ALL)
    steps = {(row.planner, row.workers): row.iteration_s for row in rows}
    gains = compare_with_paper("resnet50", rows)
    assert [gain.published for gain in gains] == [gain for gain in PUBLISHED if gain.model == "resnet50"]
    for gain in gains:
        against, workers = gain.published.against, gain.published.workers
        assert gain.ours["mgwfbp"] == steps[against, workers] / steps["mgwfbp", workers]
        assert gain.ours["optimal"] >= gain.ours["mgwfbp"] >= 1


names = st.lists(st.sampled_from(["a.weight", "a.bias", "b.weight", "b.c.weight", "d", "e"]), min_size=1, unique=True)


@given(names, st.data())
def test_layers_keep_the_bytes_and_the_end_of_the_backward_pass(tensors: list[str], data: st.DataObject) -> None:
    spans = [(data.draw(st.integers(0, 100)), data.draw(st.integers(0, 100))) for _ in tensors]
    layers = (LayerTrace(name, float(span), size) for name, (span, size) in zip(tensors, spans, strict=True))
    trace = ModelTrace("toy", 1.0, tuple(layers))
    merged = by_layer(trace)
    assert (merged.compute_s, merged.grad_bytes) == (trace.compute_s, trace.grad_bytes)
    ready = dict(zip(tensors, trace.ready_s, strict=True))
    for layer, ready_s in zip(merged.layers, merged.ready_s, strict=True):
        mine = [name for name in tensors if (name.rpartition(".")[0] or name) == layer.name]
        assert ready_s == max(ready[name] for name in mine)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_the_distribution_counts_every_gradient_once_in_its_bin(sizes: list[int]) -> None:
    trace = ModelTrace("toy", 0.0, tuple(LayerTrace(str(index), 0.0, size) for index, size in enumerate(sizes)))
    bins = size_distribution(trace)
    assert sum(each.num_gradients for each in bins) == len(sizes)
    assert sum(each.num_bytes for each in bins) == sum(sizes)
    for each in bins:
        elements = [max(1, -(-size // 4)) for size in sizes]
        assert each.num_gradients == sum(each.low <= count < each.high for count in elements)
