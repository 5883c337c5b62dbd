"""What is learnt of messages in training, against worlds whose cost is known."""

import math
import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import LinearCost, MergePlan, ModelTrace, PiecewiseCost, predict
from mgwfbp.cost import taken_by
from mgwfbp.fitting import padding_words
from mgwfbp.ranges import spread_of
from mgwfbp.runtime.observe.learn import LEAST, learn_cost, learn_taken, without_lags
from mgwfbp.trace import layers_of
from tests.examples import linear_costs, partitions, that_take, traces

SWEPT = PiecewiseCost(4, ((4, 1.5e-3), (12_000, 1.74e-3), (65_536, 5.4e-3), (2_400_000, 23e-3), (25_000_000, 230e-3)))

curves = st.lists(
    st.tuples(st.integers(1, 10**8), st.floats(1e-6, 1.0)), min_size=2, max_size=8, unique_by=lambda p: p[0]
)
sightings = st.dictionaries(st.integers(0, 10**8), st.lists(st.floats(0.0, 10.0), min_size=1, max_size=5), max_size=8)


def curve_of(points: list[tuple[int, float]], factor: float = 1.0) -> PiecewiseCost:
    times = sorted(factor * time for _, time in points)
    return PiecewiseCost(2, tuple(zip(sorted(size for size, _ in points), times, strict=True)))


def test_small_messages_that_wait_do_not_make_larger_ones_slower_than_they_were_seen() -> None:
    # Seen in training: 12 kB took 14.7 ms against 1.74 swept. The ratio of 8 says nothing of messages beyond it.
    loaded = learn_cost({12_000: [14.7e-3] * 6, 2_330_000: [29.7e-3] * 6}, 4, SWEPT)
    assert loaded(12_000) == pytest.approx(14.7e-3, rel=0.01)
    assert loaded(2_330_000) == pytest.approx(29.7e-3, rel=0.01)
    # The line through both over the sweep: 13.5 ms + 0.71 T.
    assert loaded(65_536) == pytest.approx(17.3e-3, rel=0.02)
    assert loaded(25_000_000) < 230e-3


@pytest.mark.parametrize(("delay_s", "ratio"), [(0.0, 1.0), (0.0, 1.4), (3e-3, 1.0), (13e-3, 1.1), (0.0, 0.8)])
def test_a_delay_and_a_slower_link_are_told_apart(delay_s: float, ratio: float) -> None:
    rng = random.Random(1)

    def real_s(size: int) -> float:
        return delay_s + ratio * SWEPT(size)

    sizes = [1_000, 40_000, 300_000, 1_000_000, 4_000_000, 26_000_000]
    loaded = learn_cost(
        {size: [real_s(size) * rng.lognormvariate(0, 0.1) for _ in "12345"] for size in sizes}, 4, SWEPT
    )
    missed = [abs(loaded(size) / real_s(size) - 1) for size in range(1_000, 30_000_000, 250_000)]
    assert mean(missed) < 0.06


@given(st.floats(0.5, 3.0), st.lists(st.integers(24_000_000, 27_000_000), min_size=1, max_size=4, unique=True))
def test_messages_all_as_large_say_nothing_of_a_delay(ratio: float, sizes: list[int]) -> None:
    loaded = learn_cost(
        {size: [ratio * SWEPT(size) * wobble for wobble in (0.98, 1, 1.02)] for size in sizes}, 4, SWEPT
    )
    assert loaded(1_000) == pytest.approx(ratio * SWEPT(1_000), rel=0.05)


@pytest.mark.parametrize("kinds", [1, 2, 6])
def test_without_a_sweep_a_line_over_the_bytes_is_learnt(kinds: int) -> None:
    sizes = [2**20, 25 * 2**20, 2**15, 2**22, 2**18, 2**24][:kinds]
    learnt = learn_cost({size: [1e-3 + 1e-9 * size] * 5 for size in sizes}, 4)
    for size in sizes:
        assert learnt(size) == pytest.approx(1e-3 + 1e-9 * size, rel=0.01)
    # Of one size alone half of its time is taken for a delay, so that neither merging nor cutting looks free.
    assert learnt(0) == pytest.approx(1e-3 if kinds > 1 else learnt(sizes[0]) / 2, rel=0.05)
    assert learnt(2**28) > learnt(2**27)


def test_where_observed_times_fall_a_message_costs_what_it_would_padded() -> None:
    # As 144 ranks have it: 32 kB in 3.2 ms, 64 kB in 0.16.
    falling = {2**14: [1.6e-3, 1.5e-3, 1.7e-3], 2**15: [3.2e-3, 3.0e-3, 3.3e-3], 2**16: [160e-6, 158e-6, 165e-6]}
    for swept in (None, PiecewiseCost(4, ((4, 1e-4), (2**16, 1.6e-4), (2**20, 8e-4)))):
        learnt = learn_cost(falling, 4, swept)
        assert [learnt(size) for size in falling] == pytest.approx([160e-6] * 3, rel=0.1)
        assert [size for size, _ in learnt.source["padded"]] == [2**14, 2**15]
        assert "2 sizes from 16.4 kB to 32.8 kB" in padding_words(learnt)
    # Few messages, or some that are late, are no fall.
    assert "padded" not in learn_cost({**falling, 2**16: [160e-6]}, 4).source
    late = {2**14: [1e-4, 1e-3, 1e-4, 9e-4, 1e-4], 2**15: [1.2e-4] * 5, 2**16: [1.5e-4] * 5}
    assert "padded" not in learn_cost(late, 4).source
    assert not padding_words(learn_cost(late, 4))


def test_one_late_message_does_not_speak_for_all_of_its_size() -> None:
    seen = {size: [SWEPT(size)] * 6 for size in (10_000, 100_000, 1_000_000, 10_000_000)}
    late = learn_cost({**seen, 300_000: [20 * SWEPT(300_000)]}, 4, SWEPT)
    assert all(late(size) < 1.1 * SWEPT(size) for size in (10_000, 100_000, 1_000_000, 10_000_000))


@given(curves, sightings)
def test_a_cost_under_load_never_falls_and_larger_messages_are_never_free(
    curve: list[tuple[int, float]], seen: dict[int, list[float]]
) -> None:
    swept = curve_of(curve)
    loaded = learn_cost(seen, 2, swept)
    largest = max(swept.points[-1][0], *seen, 0)
    times = [loaded(size) for size in range(0, 2 * largest, max(1, largest // 100))]
    assert times == sorted(times)
    more_swept_s = swept(8 * largest) - swept(4 * largest)
    rounding_s = 1e-12 * loaded(8 * largest)
    assert loaded(8 * largest) - loaded(4 * largest) >= 0.99 * LEAST * more_swept_s - rounding_s


@given(curves, sightings)
def test_the_error_it_states_is_that_against_what_was_observed(
    curve: list[tuple[int, float]], seen: dict[int, list[float]]
) -> None:
    loaded = learn_cost(seen, 2, curve_of(curve))
    if not seen:
        assert "fit" not in loaded.source
        return
    padded = {size for size, _ in loaded.source.get("padded", ())}
    errors = [abs(loaded(size) - time) / time for size, time in loaded.source["under_load"] if size not in padded]
    assert loaded.source["fit"]["mean_error"] == pytest.approx(mean(errors))
    assert loaded.source["fit"]["worst_error"] == pytest.approx(max(errors))
    assert loaded.source["fit"]["num_sizes"] == len(seen) - len(padded)


@given(curves, sightings, st.floats(1.1, 4.0))
def test_a_network_that_is_slower_throughout_gives_a_cost_that_is(
    curve: list[tuple[int, float]], seen: dict[int, list[float]], factor: float
) -> None:
    # No message takes less than a microsecond; what is learnt has a least time that does not grow with the factor.
    seen = {size: [max(1e-6, time) for time in some] for size, some in seen.items()}
    all_slower = {size: [factor * time for time in some] for size, some in seen.items()}
    both = learn_cost(seen, 2, curve_of(curve)), learn_cost(all_slower, 2, curve_of(curve, factor))
    assert all(math.isclose(both[1](size), factor * both[0](size), rel_tol=1e-2) for size, _ in curve)


@given(traces(), that_take(linear_costs), st.data())
def test_what_messages_took_is_taken_out_of_the_trace_that_was_observed_beside_them(
    trace: ModelTrace, cost: LinearCost, data: st.DataObject
) -> None:
    sizes = data.draw(st.sampled_from(sorted(partitions(min(8, len(trace.layers))))))
    trace = replace(trace, layers=trace.layers[: sum(sizes)])
    plan = MergePlan.of_sizes(trace, sizes)
    observed = predict(trace, cost, plan)
    moments = [(span.layers[0], span.end_s, span.num_bytes) for span in observed.backward]
    beside = replace(trace, layers=layers_of(moments, trace.forward_s))
    assert without_lags(beside, plan, cost).ready_s == trace.ready_s


SWEPT_LINE = PiecewiseCost(4, ((0, 1e-4), (10**8, 0.1001)))  # 1 ns a byte


def sent(sizes: list[int], *, is_low: bool = False) -> Any:
    return [(size, is_low) for size in sizes]


def ends_of(
    plans: list[list[int]], launch_s: float, per_byte_s: float, noise: float, *, is_low: bool = False
) -> list[tuple[Any, Any]]:
    """Ends of backward passes of 100 ms, beside messages of these bytes."""
    rng = random.Random(5)
    return [
        (
            sent(sizes, is_low=is_low),
            [
                (0.1 + launch_s * (len(sizes) - 1) + per_byte_s * sum(sizes[:-1])) * rng.lognormvariate(0, noise)
                for _ in range(60)
            ],
        )
        for sizes in plans
    ]


UNEVEN = [[10**8], [5 * 10**7, 5 * 10**7], [10**6, 99 * 10**6], [10**6] * 100, [4 * 10**6] * 25]


@pytest.mark.parametrize("launch_s", [0.0, 2e-5, 2e-4])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.15])
def test_a_launch_and_bytes_are_told_apart_by_plans_that_differ_in_both(launch_s: float, share: float) -> None:
    learnt = learn_taken(SWEPT_LINE, SWEPT_LINE, ends_of(UNEVEN, launch_s, share * 1e-9, 0.01))[0]
    assert learnt.taken_s == pytest.approx(launch_s, abs=1e-5)
    assert learnt.taken_per_byte_s == pytest.approx(share * 1e-9, abs=1e-11)
    assert learnt.points == SWEPT_LINE.points


def test_plans_that_are_alike_do_not_make_noise_a_launch() -> None:
    # Of 5 and of 6 messages, and 2 ms (2 %) apart by chance: that would be 2 ms a message.
    alike = [(sent([10**6] * 5), [0.100, 0.098, 0.102]), (sent([10**6] * 6), [0.102, 0.100, 0.104])]
    learnt = learn_taken(SWEPT_LINE, SWEPT_LINE, alike)
    assert learnt[0].taken_s < 5e-5
    assert learn_taken(*learnt, alike[:1]) == learnt  # one plan says nothing


def test_what_would_speed_the_computation_up_is_nothing() -> None:
    faster = [(sent([10**6] * 2), [0.1] * 30), (sent([10**6] * 60), [0.09] * 30)]
    learnt = learn_taken(SWEPT_LINE, SWEPT_LINE, faster)
    assert learnt == (SWEPT_LINE, SWEPT_LINE)


@pytest.mark.parametrize("more_s", [0.0, 1e-4])
@pytest.mark.parametrize("more_share", [0.0, 0.1])
def test_what_low_precision_takes_is_told_apart_from_what_other_messages_take(more_s: float, more_share: float) -> None:
    full = [*ends_of(UNEVEN, 5e-5, 5e-11, 0.01)]
    both = [*full, *ends_of(UNEVEN, 5e-5 + more_s, 5e-11 + more_share * 1e-9, 0.01, is_low=True)]
    learnt = learn_taken(SWEPT_LINE, SWEPT_LINE, both)
    expected = ((5e-5, 5e-11), (5e-5 + more_s, 5e-11 + more_share * 1e-9))
    for part, (launch_s, share) in zip(learnt, expected, strict=True):
        assert part.taken_s == pytest.approx(launch_s, abs=1.5e-5)
        assert part.taken_per_byte_s == pytest.approx(share, abs=1.5e-11)
    unseen = learn_taken(SWEPT_LINE, SWEPT_LINE, full)
    assert taken_by(unseen[1], 10**6) == pytest.approx(taken_by(unseen[0], 10**6))


def test_sizes_that_were_observed_are_surer_than_others() -> None:
    learnt = learn_cost({10**5: [3e-3] * 9, 10**6: [2e-2] * 9}, 4, SWEPT)
    spread = dict(zip((size for size, _ in learnt.points), spread_of(learnt) or [], strict=True))
    assert spread[10**6] < spread[25_000_000] / 1.5
    assert min(spread.values()) > 0
