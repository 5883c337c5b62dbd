"""Costs as functions, and fits against the curves their samples come from."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import CostError, FormatError, LinearCost, PiecewiseCost, fit
from mgwfbp.cost import Cost, cost_from_json, taken_by
from mgwfbp.costs import (
    ShardedCost,
    WireCost,
    cheapest_s,
    cost_with_halves,
    full_precision_cost,
    halved,
    low_precision_cost,
    sharded_cost,
)
from tests.examples import (
    TableCost,
    linear_costs,
    partitions,
    piecewise_costs,
    table_costs,
    that_take,
    whole_piecewise_costs,
)


@given(piecewise_costs(), st.integers(0, 200), st.integers(0, 200))
def test_a_piecewise_cost_never_falls(cost: PiecewiseCost, one: int, other: int) -> None:
    assert cost(min(one, other)) <= cost(max(one, other)) * (1 + 1e-9)


@given(piecewise_costs())
def test_a_piecewise_cost_goes_through_its_points(cost: PiecewiseCost) -> None:
    assert [cost(size) for size, _ in cost.points] == pytest.approx([time for _, time in cost.points])


def test_a_piecewise_cost_is_flat_before_and_straight_beyond_its_points() -> None:
    cost = PiecewiseCost(2, ((10, 1.0), (20, 2.0), (30, 4.0)))
    assert [cost(size) for size in (0, 9, 15, 25, 40)] == [1.0, 1.0, 1.5, 3.0, 6.0]


@given(st.one_of(linear_costs, piecewise_costs()), st.integers(0, 9))
def test_no_split_is_cheaper_than_the_cheapest(cost: LinearCost | PiecewiseCost, num_bytes: int) -> None:
    splits = list(partitions(num_bytes)) or [(0,)]
    least_s = min(sum(cost(size) for size in split or (0,)) for split in splits)
    assert cheapest_s(cost, num_bytes) <= least_s * (1 + 1e-9)


@given(linear_costs, st.integers(0, 1000))
def test_on_a_line_one_message_is_the_cheapest(cost: LinearCost, num_bytes: int) -> None:
    assert cheapest_s(cost, num_bytes) == cost(num_bytes)


SIZES = [4 * 2**power for power in range(24)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8))
def test_a_line_is_found_from_samples_on_it(startup_s: float, per_byte_s: float) -> None:
    found = fit([(size, startup_s + per_byte_s * size) for size in SIZES], 4, kind="linear")
    assert isinstance(found.cost, LinearCost)
    assert found.cost.startup_s == pytest.approx(startup_s, rel=1e-3)
    assert found.cost.per_byte_s == pytest.approx(per_byte_s, rel=1e-3)
    assert found.mean_error < 1e-4


@given(st.randoms(use_true_random=False))
def test_outliers_do_not_bend_the_line(rng: random.Random) -> None:
    samples = [(size, 1e-4 + 1e-9 * size) for size in SIZES]
    for index in rng.sample(range(len(samples)), 5):  # one in five is up to ten times too slow
        samples[index] = (samples[index][0], samples[index][1] * rng.uniform(2, 10))
    found = fit(samples, 4, kind="linear").cost
    assert [found(size) for size in SIZES] == pytest.approx([1e-4 + 1e-9 * size for size in SIZES], rel=0.05)


def protocol_switch(size: int) -> float:
    """A jump and three slopes, as MPI libraries have them."""
    if size <= 8192:
        return 5e-5 + 2e-9 * size
    if size <= 2**18:
        return 2e-4 + 1.8e-9 * size
    return 5e-4 + 1.2e-9 * size


def test_a_curve_is_found_where_a_line_does_not_fit() -> None:
    rng = random.Random(7)
    sizes = [int(512 * 1.06**power) for power in range(140)]  # up to 1.7 MB
    samples = [(size, protocol_switch(size) * rng.uniform(0.97, 1.03)) for size in sizes for _ in "123"]
    line, curve = fit(samples, 4, kind="linear"), fit(samples, 4)
    assert isinstance(curve.cost, PiecewiseCost)
    assert curve.mean_error < 0.05 < 0.10 < line.mean_error
    assert len(curve.cost.points) <= 13
    # Beyond what was measured it goes on at the slope of large messages, not at that of the last bit of noise.
    assert curve.cost(2**24) == pytest.approx(protocol_switch(2**24), rel=0.1)


def test_auto_takes_the_line_when_it_fits() -> None:
    rng = random.Random(3)
    samples = [(size, (1e-4 + 1e-9 * size) * rng.uniform(0.92, 1.08)) for size in SIZES]
    found = fit(samples, 4)
    assert isinstance(found.cost, LinearCost)
    assert found.mean_error <= 0.10
    assert found.cost.source["fit"]["mean_error"] == found.mean_error


@pytest.mark.parametrize("jump_s", [1e-4, 1.5e-4])
@pytest.mark.parametrize("jumps_at", [2**15, 2**19])
def test_auto_keeps_a_jump_that_few_sizes_see(jump_s: float, jumps_at: int) -> None:
    samples = [(size, 5e-5 + 8e-10 * size + (jump_s if size >= jumps_at else 0.0)) for size in SIZES]
    assert fit(samples, 4, kind="linear").worst_error > 0.10
    for size, seconds in samples:
        assert fit(samples, 4).cost(size) == pytest.approx(seconds, rel=1e-6)


def test_auto_takes_a_curve_where_many_sizes_show_it() -> None:
    rng = random.Random(2)
    sizes = range(2**14, 2**20, 2**12)
    samples = [(size, (1e-4 + 2e-9 * size + 1e-15 * size**2) * rng.lognormvariate(0, 0.01)) for size in sizes]
    assert fit(samples, 4, kind="linear").mean_error < 0.10
    assert fit(samples, 4).mean_error < 0.012
    assert isinstance(fit([samples[place] for place in range(0, len(samples), 30)], 4).cost, LinearCost)


@given(st.integers(0, 10**6), st.sampled_from([0.005, 0.02, 0.05]))
def test_auto_takes_no_noise_for_a_jump(seed: int, noise: float) -> None:
    rng = random.Random(seed)
    samples = [(size, (5e-5 + 8e-10 * size) * rng.lognormvariate(0, noise)) for size in SIZES]
    assert isinstance(fit(samples, 4).cost, LinearCost)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-7, 10)), min_size=2, max_size=40))
def test_any_samples_of_two_sizes_give_a_valid_curve_and_a_valid_line(samples: list[tuple[int, float]]) -> None:
    if len({size for size, _ in samples}) < 2:
        with pytest.raises(CostError, match="2 or more"):
            fit(samples, 2)
        return
    for kind in ("linear", "piecewise"):
        found = fit(samples, 2, kind=kind)
        assert 0 <= found.mean_error <= found.worst_error


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=2, max_size=8))
def test_the_line_has_the_least_relative_error_there_is(samples: list[tuple[int, int]]) -> None:
    by_size = {size: float(time) for size, time in samples}
    if len(by_size) < 2:
        return
    points = sorted(by_size.items())

    def error(startup_s: float, per_byte_s: float) -> float:
        return sum(abs(startup_s + per_byte_s * size - time) / time for size, time in points) / len(points)

    # The optimum of a linear programme is at a corner: through two points, or through one with a or b at 0.
    corners = [(time, 0.0) for _, time in points] + [(0.0, time / size) for size, time in points if size]
    for size, time in points:
        for other_size, other_time in points:
            if other_size > size:
                slope = (other_time - time) / (other_size - size)
                corners.append((time - slope * size, slope))
    least = min(error(a, b) for a, b in [*corners, (0.0, 0.0)] if a >= 0 and b >= 0)
    assert fit(points, 2, kind="linear").mean_error == pytest.approx(least, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "2 or more"),
        ([(4, 1.0)], "2 or more"),
        ([(4, 1.0), (8, 0.0)], r"samples\[1\]: 8 bytes in 0 s"),
        ([(4, 1.0), (8, 1e-13)], r"samples\[1\]: 8 bytes in 1e-13 s"),
        ([(4, 1.0), (8, float("nan"))], r"samples\[1\], seconds, is nan"),
        ([(-4, 1.0), (8, 1.0)], r"samples\[0\], bytes, is -4"),
    ],
)
def test_samples_no_cost_can_be_fitted_to_are_refused(samples: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(CostError, match=message):
        fit(samples, 2)


def test_samples_of_one_size_count_as_their_median() -> None:
    found = fit([(10, 1.0), (10, 1.0), (10, 9.0), (20, 2.0), (20, 2.0), (20, 50.0)], 2)
    assert [found.cost(10), found.cost(20)] == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(("miss", "kind"), [(0.09, LinearCost), (0.12, PiecewiseCost)])
def test_auto_draws_the_line_at_a_mean_error_of_ten_percent(miss: float, kind: type) -> None:
    # Sizes in pairs, one above and one below the line by as much: no line is nearer, a curve is.
    factors = [1 + miss, 1 + miss, 1 - miss, 1 - miss] * 6
    samples = [(size, (1e-4 + 1e-9 * size) * factor) for size, factor in zip(SIZES, factors, strict=True)]
    line = fit(samples, 4, kind="linear")
    assert line.mean_error == pytest.approx(miss, abs=0.015)
    assert isinstance(fit(samples, 4).cost, kind)


@pytest.mark.parametrize("factor", [0.2, 5.0, 10.0])
def test_one_wrong_largest_size_does_not_set_the_slope_of_all_that_is_larger(factor: float) -> None:
    samples = [(size, protocol_switch(size)) for size in SIZES]
    samples[-1] = (SIZES[-1], samples[-1][1] * factor)
    cost = fit(samples, 4, kind="piecewise").cost
    assert cost(2**30) == pytest.approx(protocol_switch(2**30), rel=0.05)


def test_one_wrong_size_within_does_not_bend_the_curve() -> None:
    for index in range(2, len(SIZES) - 1):
        samples = [(size, protocol_switch(size)) for size in SIZES]
        samples[index] = (SIZES[index], samples[index][1] * 5)
        cost = fit(samples, 4, kind="piecewise").cost
        wrong = [abs(cost(size) / protocol_switch(size) - 1) for size in SIZES if size != SIZES[index]]
        assert sorted(wrong)[-3] < 0.25


def test_the_slope_beyond_comes_from_sizes_a_factor_apart() -> None:
    # The last two sizes are next to each other, and noise makes the last one free: it must not stay free.
    samples = [*((size, 1e-4 + 1e-9 * size) for size in range(10**5, 10**6, 10**5)), (910_000, 1e-4 + 1e-9 * 910_000)]
    cost = fit(samples, 4, kind="piecewise").cost
    assert cost(10**8) == pytest.approx(1e-4 + 0.1, rel=0.1)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::2], SIZES[::3], SIZES[-5:], SIZES[-3:]])
def test_a_clean_sweep_that_bends_keeps_its_points_however_sparse_it_is(sizes: list[int]) -> None:
    samples = [(size, 5e-5 + 1.1e-9 * size + 8e-8 * size**0.6) for size in sizes]
    found = fit(samples, 4, kind="piecewise")
    assert found.worst_error < 0.05
    assert found.cost(sizes[-1]) == pytest.approx(samples[-1][1], rel=1e-9)


def test_a_jump_near_the_largest_size_is_kept() -> None:
    # As an MPI library switches its algorithm at 512 kB in a sweep that ends at 1 MB.
    samples = [(2**k, 6e-5 + 1e-9 * 2**k if k < 19 else 9e-4 + 1.3e-9 * 2**k) for k in range(2, 21)]
    found = fit(samples, 8, kind="piecewise")
    assert found.mean_error < 0.016
    assert found.cost(2**19) == pytest.approx(samples[-2][1], rel=0.02)


@pytest.mark.parametrize("jumps_at", [8 * 4096, 2**19, 2**20 - 8 * 4096])
def test_a_jump_between_two_of_hundreds_of_sizes_is_kept_where_it_is(jumps_at: int) -> None:
    # Sweeps in steps of 4 kB have more sizes than knots are looked for among.
    samples = [
        (size, 6e-5 + 1e-9 * size if size < jumps_at else 9e-4 + 1.3e-9 * size) for size in range(4096, 2**20 + 1, 4096)
    ]
    cost = fit(samples, 8, kind="piecewise").cost
    for size, seconds in samples:
        assert cost(size) == pytest.approx(seconds, rel=0.01)


def falling(size: int) -> float:
    """A library that is slow up to 32 kB: as measured on 144 ranks, 3.2 ms where 64 kB take 0.16 ms."""
    return 3.2e-3 if 2**12 < size <= 2**15 else 1e-4 + 1e-9 * size


def test_where_times_fall_a_message_costs_what_it_would_padded_to_a_larger_size() -> None:
    found = fit([(size, falling(size)) for size in SIZES], 144, kind="piecewise")
    for size in SIZES:
        padded = min(falling(other) for other in SIZES if other >= size)
        assert found.cost(size) == pytest.approx(padded, rel=0.01)
    assert [size for size, _ in found.cost.source["padded"]] == [size for size in SIZES if 2**12 < size <= 2**15]
    assert found.mean_error < 0.01


def test_sizes_that_are_slow_do_not_outvote_the_fewer_larger_ones_that_are_faster() -> None:
    samples = [*((size, 1.0) for size in SIZES[4:12]), (SIZES[12], 0.6), (SIZES[13], 0.62), (SIZES[14], 1.3)]
    cost = fit(samples, 4, kind="piecewise").cost
    assert cost(SIZES[4]) == pytest.approx(0.62, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_and_not_taken_for_a_fall(seed: int) -> None:
    rng = random.Random(seed)
    for sizes in (SIZES, list(range(4096, 2**20 + 1, 4096))):
        samples = [(size, (1e-4 + 1e-9 * size) * rng.uniform(0.9, 1.1)) for size in sizes]
        found = fit(samples, 4, kind="piecewise")
        assert "padded" not in found.cost.source
        assert found.cost(sizes[0]) == pytest.approx(1e-4 + 1e-9 * sizes[0], rel=0.11)


def test_one_size_that_was_measured_too_fast_makes_no_smaller_one_cheaper() -> None:
    samples = [(size, 1e-4 + 1e-9 * size) for size in SIZES]
    samples[12] = (SIZES[12], samples[12][1] / 5)
    assert "padded" not in fit(samples, 4, kind="piecewise").cost.source


def test_of_another_cost_only_its_least_is_known() -> None:
    assert cheapest_s(TableCost((2.0, 3.0, 3.0)), 2) == 2.0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CostError, match="kind is 'cubic'"):
        fit([(1, 1.0), (2, 2.0)], 2, kind="cubic")  # type: ignore[arg-type]  # the point of the test


@given(st.one_of(that_take(linear_costs), that_take(whole_piecewise_costs())))
def test_what_messages_take_from_the_computation_is_kept_in_the_file_where_there_is_any(
    cost: LinearCost | PiecewiseCost,
) -> None:
    written = cost.to_json()
    assert cost_from_json(json.loads(json.dumps(written))) == cost
    assert ("taken_s" in written) == ("taken_per_byte_s" in written) == bool(cost.taken_s or cost.taken_per_byte_s)
    assert ("from the computation" in repr(cost)) == ("taken_s" in written)


@pytest.mark.parametrize("name", ["taken_s", "taken_per_byte_s"])
def test_messages_cannot_give_time_to_the_computation(name: str) -> None:
    with pytest.raises(CostError, match=name):
        cost_from_json({**LinearCost(2, 1.0, 1.0).to_json(), name: -1.0})


@given(
    st.one_of(that_take(linear_costs), that_take(whole_piecewise_costs()), that_take(table_costs())),
    st.integers(0, 200),
)
def test_reduce_scatter_and_all_gather_are_an_all_reduce_that_is_started_twice(cost: Cost, size: int) -> None:
    reduce_scatter, all_gather = sharded_cost(cost)
    assert reduce_scatter(size) + all_gather(size) == cost(size)
    assert (reduce_scatter.workers, all_gather.workers) == (cost.workers, cost.workers)
    taken_s = taken_by(reduce_scatter, size) + taken_by(all_gather, size)
    assert taken_s == taken_by(cost, size) + taken_by(cost, 0)
    assert cheapest_s(reduce_scatter, size) == 0.5 * cheapest_s(cost, size)


def test_a_cost_of_three_parts_is_that_of_the_all_reduce_with_its_own_halves() -> None:
    line = LinearCost(4, 2.0, 1.0, {"from": "here"}, 0.5, 0.25)
    cost = ShardedCost(line, LinearCost(4, 1.5, 0.5), PiecewiseCost(4, ((1, 1.0), (2, 2.0))))
    assert (cost(3), cost.workers, cost.source) == (5.0, 4, {"from": "here"})
    assert taken_by(cost, 2) == taken_by(line, 2) == 1.0
    assert sharded_cost(cost) == (cost.reduce_scatter, cost.all_gather)
    assert (full_precision_cost(cost), low_precision_cost(cost)) == (line, halved(line))
    assert sharded_cost(WireCost(line, line)) == sharded_cost(line)


costs = st.one_of(
    st.builds(LinearCost, st.just(4), st.floats(0, 1), st.floats(0, 1)),
    st.builds(lambda one, two: PiecewiseCost(4, ((1, one), (9, one + two))), st.floats(0, 1), st.floats(0, 1)),
)


@given(st.builds(ShardedCost, costs, costs, costs))
def test_a_file_with_halves_is_a_cost_of_all_reduces_to_whoever_needs_no_halves(cost: ShardedCost) -> None:
    data = json.loads(json.dumps(cost.to_json()))
    assert ShardedCost.from_json(data) == cost_with_halves(data) == cost
    assert cost_from_json(data) == cost.all_reduce
    assert cost_with_halves(cost.all_reduce.to_json()) == cost.all_reduce


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"all_gather": None}, "all_gather: expected an object, found None"),
        ({"all_gather": LinearCost(2, 1.0, 1.0).to_json()}, "all_gather is of 2 workers, all_reduce of 4"),
        ({"reduce_scatter": {"format": "mgwfbp.cost/1", "kind": "linear"}}, "reduce_scatter: workers: missing"),
        ({"reduce_scatter": {**LinearCost(4, 1.0, 1.0).to_json(), "startup_s": -1}}, "reduce_scatter: startup_s is -1"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_a_file_with_a_bad_half_is_refused_with_the_place(changes: dict[str, Any], message: str) -> None:
    line = LinearCost(4, 1.0, 1.0)
    with pytest.raises((CostError, FormatError), match=f"^{message}"):
        cost_with_halves({**ShardedCost(line, line, line).to_json(), **changes})


def test_a_file_with_one_half_lacks_the_other() -> None:
    data = LinearCost(4, 1.0, 1.0).to_json()
    with pytest.raises(FormatError, match=r"^reduce_scatter: missing"):
        cost_with_halves({**data, "all_gather": data})
    with pytest.raises(FormatError, match=r"^all_gather: missing"):
        cost_with_halves({**data, "reduce_scatter": data})


def test_parts_that_do_not_fit_are_refused() -> None:
    line = LinearCost(4, 2.0, 1.0)
    with pytest.raises(CostError, match="all_gather is of 2 workers, all_reduce of 4"):
        ShardedCost(line, line, LinearCost(2, 2.0, 1.0))
    with pytest.raises(CostError, match="reduce_scatter is None, expected a linear or a piecewise cost"):
        ShardedCost(line, None, line)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(CostError, match="low is of 2 workers, full of 4"):
        WireCost(line, LinearCost(2, 2.0, 1.0))
