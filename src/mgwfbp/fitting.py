"""From measured (bytes, seconds) samples to a cost: `Fit`, `fit`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.errors import CostError
from mgwfbp.record import LARGEST_COUNT, check_count, check_items, check_real
from mgwfbp.units import format_bytes, plural, quote

__all__ = ["Fit", "FitKind", "Sample", "fit", "fit_quality", "nearest_line", "never_falling", "padding_words"]

Sample = tuple[int, float]  # (bytes, seconds)
FitKind = Literal["auto", "linear", "piecewise"]
_Floats = NDArray[np.float64]

# "auto" takes the straight line when its mean relative error is at most this, and its worst no more than so many times
# the mean: noise of dozens of sizes has a worst error of three times the mean, a jump one of ten.
LINE_IS_GOOD_ENOUGH, WORST_IS_NOISE = 0.10, 6.0
# A curve gets more segments only while its mean relative error is further than this from that of the most segments.
SEGMENT_IS_WORTH = 0.005
MAX_SEGMENTS = 12
# No clock measures less; relative errors of next to nothing mean nothing.
SHORTEST_S = 1e-12
# Knots are looked for among at most so many sizes, evenly picked, and on both sides of so many of the largest jumps,
# where a library changes its protocol; errors are taken over all sizes.
MAX_KNOTS, MAX_JUMPS = 80, 8
# So many sizes, evenly picked, are enough to see any curve; and so many of the largest to see where it ends.
MAX_SIZES, NEAR_LARGEST = 1000, 100
# The largest size is taken for a mistake where it is off the line through its neighbours by more than this part, and by
# more than so many times what any of them is off: a curve that bends is off its own chords too.
MISTAKE, TIMES_OTHERS = 0.25, 4.0
# Where larger messages take less by more than this part, that is no noise.
FALL = 0.25
# The curve goes on, at the slope of its large sizes, to a point at so many times the largest.
BEYOND = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost and how well it fits; errors are relative, over the median of each size, padded where that is faster."""

    cost: LinearCost | PiecewiseCost  # what was fitted
    mean_error: float  # over all sizes, relative: 0.1 is 10 %
    worst_error: float  # the largest of them
    num_sizes: int  # so many sizes were fitted to


def fit(
    samples: Sequence[Sample], workers: int, *, kind: FitKind = "auto", source: Mapping[str, Any] | None = None
) -> Fit:
    """Fit a cost to samples; several samples of one size count as their median.

    ``linear`` minimises the sum of relative errors of ``a + b M`` with a and b not negative. ``piecewise`` joins up to
    twelve segments that never fall. ``auto`` takes the line if its mean relative error is 10 % or less, unless a
    curve is nearer by more than half a per cent and that is no noise: it has few segments for the number of sizes, or
    some sizes are off the line by more than six times the mean, as at a jump, where a library changes its protocol.

    Where times fall as messages grow, that is noise, and averaged, unless they fall by more than a quarter. Then a
    message had better be padded to a larger size, so (but for ``linear``) it has the least time of larger sizes, and
    ``source["padded"]`` lists what was measured of such sizes.

    Args:
        samples: pairs of bytes and seconds, of two sizes or more.
        workers: among how many they were measured.
        kind: ``auto``, ``linear`` or ``piecewise``.
        source: where they come from; kept in the cost.

    Returns:
        The cost and how well it fits.

    Raises:
        CostError: where no cost can be fitted: too few sizes, or times that no clock shows.

    >>> found = fit([(1000, 0.0012), (2000, 0.0014), (4000, 0.0018)], workers=4)
    >>> found.cost
    LinearCost(4 workers: 1 ms + 200 ns/B)
    """
    if kind not in get_args(FitKind):
        raise CostError(f"kind is {quote(kind)}, expected 'auto', 'linear' or 'piecewise'")
    sizes, times = _medians(samples)
    source = dict(source or {})
    if kind == "linear":
        return _fit_linear(sizes, times, workers, source)
    padded = _padded(sizes, times)
    if np.any(padded < times):
        rows = zip(sizes.tolist(), times.tolist(), padded.tolist(), strict=True)
        source["padded"] = [(int(size), time) for size, time, least in rows if least < time]
    if kind == "piecewise":
        return _fit_piecewise(sizes, padded, workers, source)
    line = _fit_linear(sizes, padded, workers, source)
    return _simpler(line, _fit_piecewise(sizes, padded, workers, source))


def _simpler(line: Fit, curve: Fit) -> Fit:
    """Return the line, unless it is poor and the curve is nearer, or the curve shows more than it takes from noise."""
    gain = line.mean_error - curve.mean_error
    if line.mean_error > LINE_IS_GOOD_ENOUGH:
        return curve if gain > 0 else line
    assert isinstance(curve.cost, PiecewiseCost)  # noqa: S101 - as it was fitted
    # Of n sizes that are off by chance, k knots take about k/n of the error of a line away.
    has_shape = curve.mean_error < (1 - 2 * len(curve.cost.points) / curve.num_sizes) * line.mean_error
    has_jump = line.worst_error > WORST_IS_NOISE * line.mean_error
    return curve if gain > SEGMENT_IS_WORTH and (has_shape or has_jump) else line


def _medians(samples: Sequence[Sample]) -> tuple[_Floats, _Floats]:
    checked = []
    for index, (size, time) in enumerate(check_items(samples, tuple, "samples", CostError)):
        num_bytes = check_count(size, f"samples[{index}], bytes,", CostError)
        seconds = check_real(time, f"samples[{index}], seconds,", CostError)
        if seconds < SHORTEST_S:
            raise CostError(f"samples[{index}]: {num_bytes} bytes in {seconds:g} s, expected {SHORTEST_S:g} s or more")
        checked.append((num_bytes, seconds))
    by_size = groupby(sorted(checked), key=lambda sample: sample[0])
    rows = [(size, median(time for _, time in group)) for size, group in by_size]
    if len(rows) < 2:
        raise CostError(f"samples of {plural(len(rows), 'size')}, a cost needs those of 2 or more")
    sizes, times = np.array(rows).T
    return sizes, times


def _padded(sizes: _Floats, times: _Floats) -> _Floats:
    """Give sizes that larger ones undercut by more than `FALL` the least time of the larger ones.

    Single sizes may be off, so neighbours have to agree. That larger messages are so fast, the upper median of sizes
    from one to its double says; that this one is slow, also the upper median of sizes from its half on. The least is
    that of lower medians: of two sizes the faster one, of many the middle.

    >>> _padded(2.0 ** np.arange(6), np.array([1.0, 9.0, 8.0, 2.0, 1.9, 2.1])).tolist()
    [1.0, 1.9, 1.9, 2.0, 1.9, 2.1]
    """
    index = np.arange(len(sizes))
    half = np.maximum(0, np.minimum(np.searchsorted(sizes, sizes / 2), index - 1))
    double = np.minimum(len(sizes) - 1, np.maximum(np.searchsorted(sizes, 2 * sizes, side="right") - 1, index + 1))
    lower, upper = _medians_between(times, index, double)
    lower[-1] = upper[-1] = np.inf  # the largest has no neighbour that agrees
    _, own = _medians_between(times, half, index)
    falls = _least_after(upper) < (1 - FALL) * np.minimum(times, own)
    return np.where(falls, _least_after(lower), times)


def _least_after(times: _Floats) -> _Floats:
    return np.append(np.minimum.accumulate(times[::-1])[::-1][1:], np.inf)


def _medians_between(times: _Floats, first: NDArray[np.intp], last: NDArray[np.intp]) -> tuple[_Floats, _Floats]:
    """Return lower and upper medians from the first to the last of each row, of 16 that are evenly picked."""
    picked = np.rint(first[:, np.newaxis] + (last - first)[:, np.newaxis] * np.linspace(0, 1, 16)).astype(np.intp)
    ordered = np.sort(times[picked], axis=1)
    return ordered[:, 7], ordered[:, 8]


def _fit_linear(sizes: _Floats, times: _Floats, workers: int, source: Mapping[str, Any]) -> Fit:
    startup_s, per_byte_s = nearest_line(sizes, times)
    return _judge(LinearCost(workers, startup_s, per_byte_s, source), sizes, times)


def nearest_line(
    x: _Floats, y: _Floats, weights: _Floats | None = None, *, height_penalty: float = 0.0
) -> tuple[float, float]:
    r"""Return the height a and the slope b of the line with the least sum of relative errors, neither negative.

    .. math:: \sum_i w_i \frac{|a + b x_i - y_i|}{y_i} + \lambda \frac{a}{\min_i y_i}

    with :math:`w` ``weights`` (1 if not given) and :math:`\lambda` ``height_penalty``: where points so near one another
    cannot tell a height from a slope, a penalty lets the slope have it. All y must be above 0.

    For a given a the best b is a weighted median; what remains is convex in a, so a golden-section search finds it.
    """
    weights = np.ones_like(y) if weights is None else weights
    positive = x > 0
    slope_weights = (weights * x / y)[positive]

    def best_slope(height: float) -> float:
        return max(0.0, _weighted_median((y[positive] - height) / x[positive], slope_weights))

    def error(height: float) -> float:
        missed = np.abs(height + best_slope(height) * x - y) / y
        return float(np.sum(weights * missed) + height_penalty * height / y.min())

    low, high = 0.0, float(y.max())
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(100):  # 0.618^100 is below a double's resolution
        left, right = high - golden * (high - low), low + golden * (high - low)
        if error(left) <= error(right):
            high = right
        else:
            low = left
    height = min((0.0, low, high), key=error)
    return height, best_slope(height)


def _weighted_median(values: _Floats, weights: _Floats) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


def _fit_piecewise(sizes: _Floats, times: _Floats, workers: int, source: Mapping[str, Any]) -> Fit:
    """Choose knots among the sizes, on the nearest curve that never falls, that leave the least relative error."""
    kept = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), MAX_SIZES)).round().astype(int))
    all_sizes, all_times, sizes, times = sizes, times, sizes[kept], times[kept]
    largest_s, slope = _end_of(sizes, times)
    level = never_falling(np.append(times[:-1], largest_s))
    knots = _knots(level)
    error = np.full((len(knots), len(knots)), np.inf)  # of the segment from one knot to another, first end included
    for row, first in enumerate(knots):
        for column, last in enumerate(knots[row + 1 :], row + 1):
            line = np.interp(sizes[first:last], sizes[[first, last]], level[[first, last]])
            error[row, column] = np.sum(np.abs(line - times[first:last]) / times[first:last])
    best = error[0]  # of a curve of so many segments from the first knot to each
    curves = [(best[-1], [0, len(knots) - 1])]
    choices: list[NDArray[np.intp]] = []
    for _ in range(min(MAX_SEGMENTS, len(knots) - 1) - 1):
        totals = best[:, None] + error
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
        path = [len(knots) - 1]
        for choice in reversed(choices):
            path.append(int(choice[path[-1]]))
        curves.append((best[-1], [0, *reversed(path)]))
    goal = min(total for total, _ in curves) + SEGMENT_IS_WORTH * len(sizes)
    _, chosen = next(curve for curve in curves if curve[0] <= goal)
    points = [(int(sizes[index]), float(level[index])) for index in knots[chosen]]
    largest, level_s = points[-1]
    points.append((BEYOND * largest, level_s + slope * (BEYOND - 1) * largest))
    return _judge(PiecewiseCost(workers, tuple(points), source), all_sizes, all_times)


def _knots(level: _Floats) -> NDArray[np.intp]:
    """Return which sizes a segment may begin or end at, first and last included."""
    even = np.linspace(0, len(level) - 1, min(len(level), MAX_KNOTS)).round().astype(np.intp)
    jumps = np.argsort(-np.diff(np.log(level)), kind="stable")[:MAX_JUMPS]
    return np.unique(np.concatenate([even, jumps, jumps + 1]))


def _end_of(sizes: _Floats, times: _Floats) -> tuple[float, float]:
    """Return the time of the largest size, and the slope at which larger ones go on.

    Both set what all larger messages take, with no neighbour beyond to outvote them. So the slope is the median of
    those between all pairs of sizes down to a quarter, five at least (Theil and Sen: one wrong in five does not move
    it). The time is the measured one, unless it is clearly a mistake (`MISTAKE`); then it is put on that line.
    """
    near = max(0, len(sizes) - NEAR_LARGEST, min(len(sizes) - 5, int(np.searchsorted(sizes, sizes[-1] / 4))))
    x, y = sizes[near:], times[near:]
    height, slope = _line_through(x, y)
    if len(x) < 5:
        return float(y[-1]), slope
    others, others_slope = _line_through(x[:-1], y[:-1])
    off = np.abs(others + others_slope * x - y) / y
    if off[-1] <= max(MISTAKE, TIMES_OTHERS * off[:-1].max()):
        return float(y[-1]), slope
    return max(height + slope * float(x[-1]), SHORTEST_S), slope


def _line_through(x: _Floats, y: _Floats) -> tuple[float, float]:
    """Return height and slope of the line of median slope; one that would not rise goes through the ends instead."""
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    if slope <= 0:
        slope = max(0.0, float((y[-1] - y[0]) / (x[-1] - x[0])))
    return float(np.median(y - slope * x)), slope


def never_falling(times: _Floats, weights: _Floats | None = None) -> _Floats:
    """Return the never-falling sequence nearest in relative error: pool neighbours that fall into their median.

    A median, not a mean: one slow size must not bend the curve.

    >>> never_falling(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.0, 2.0, 4.0]
    """
    weights = np.ones_like(times) if weights is None else weights
    pools: list[tuple[_Floats, _Floats]] = []
    for time, weight in zip(times, weights, strict=True):
        pools.append((np.array([time]), np.array([weight])))
        while len(pools) > 1 and _middle(*pools[-2]) > _middle(*pools[-1]):
            values, their_weights = pools.pop()
            pools[-1] = (np.append(pools[-1][0], values), np.append(pools[-1][1], their_weights))
    return np.concatenate([np.full(len(values), _middle(values, their)) for values, their in pools])


def _middle(values: _Floats, weights: _Floats) -> float:
    return _weighted_median(values, weights / values)


def padding_words(cost: Cost | None) -> str:
    """Say which sizes a cost has with the time of larger, faster ones; empty where there are none.

    >>> padding_words(LinearCost(2, 1.0, 0.5, {"padded": [(16384, 2.8e-3), (32768, 3.2e-3)]}))[:75]
    'larger messages are faster than those of 2 sizes from 16.4 kB to 32.8 kB, w'
    """
    padded = getattr(cost, "source", {}).get("padded")
    rows = padded if isinstance(padded, list | tuple) else ()  # a file may say anything there
    heads = [row[0] for row in rows if isinstance(row, list | tuple) and row]
    sizes = [head for head in heads if isinstance(head, int) and 0 <= head <= LARGEST_COUNT]
    if not sizes:
        return ""
    where = f"{plural(len(sizes), 'size')} from {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
    return f"larger messages are faster than those of {where}, which are planned as if padded (DDP does not pad)"


def fit_quality(cost: LinearCost | PiecewiseCost, sizes: Sequence[float], times: Sequence[float]) -> dict[str, Any]:
    """Return how far a cost is from measured times: relative errors, as they stand in ``source["fit"]``."""
    errors = [abs(cost(int(size)) - time) / time for size, time in zip(sizes, times, strict=True)]
    return {"mean_error": float(np.mean(errors)), "worst_error": float(np.max(errors)), "num_sizes": len(errors)}


def _judge(cost: LinearCost | PiecewiseCost, sizes: _Floats, times: _Floats) -> Fit:
    quality = fit_quality(cost, sizes.tolist(), times.tolist())
    return Fit(cost=replace(cost, source={**cost.source, "fit": quality}), **quality)
