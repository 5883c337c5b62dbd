"""From measured (bytes, seconds) samples to a cost: `Fit`, `fit`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.errors import CostError
from mgwfbp.record import check_count, check_items, check_real
from mgwfbp.units import quote

__all__ = ["Fit", "FitKind", "Sample", "fit"]

Sample = tuple[int, float]  # (bytes, seconds)
FitKind = Literal["auto", "linear", "piecewise"]
_Floats = NDArray[np.float64]

# "auto" takes the straight line when its mean relative error is at most this.
LINE_IS_GOOD_ENOUGH = 0.10
# A curve gets more segments only while its mean relative error is further than this from that of the most segments.
SEGMENT_IS_WORTH = 0.005
MAX_SEGMENTS = 12
# No clock measures less; relative errors of next to nothing mean nothing.
SHORTEST_S = 1e-12
# Knots are looked for among at most so many sizes; errors are taken over all of them.
MAX_KNOTS = 96
# So many sizes, evenly picked, are enough to see any curve; and so many of the largest to see where it ends.
MAX_SIZES, NEAR_LARGEST = 1000, 100


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost and how well it fits; errors are relative, over the median of each size."""

    cost: LinearCost | PiecewiseCost
    mean_error: float
    worst_error: float
    num_sizes: int


def fit(
    samples: Sequence[Sample], workers: int, *, kind: FitKind = "auto", source: Mapping[str, Any] | None = None
) -> Fit:
    """Fit a cost to samples; several samples of one size count as their median.

    ``linear`` minimises the sum of relative errors of ``a + b M`` with a and b not negative. ``piecewise`` joins up to
    twelve segments that never fall. ``auto`` takes the line if its mean relative error is 10 % or less,
    or if no curve is nearer.

    >>> found = fit([(1000, 0.0012), (2000, 0.0014), (4000, 0.0018)], workers=4)
    >>> found.cost
    LinearCost(4 workers: 1 ms + 200 ns/B)
    """
    if kind not in get_args(FitKind):
        raise CostError(f"kind is {quote(kind)}, expected 'auto', 'linear' or 'piecewise'")
    sizes, times = _medians(samples)
    if kind == "piecewise":
        return _fit_piecewise(sizes, times, workers, source or {})
    line = _fit_linear(sizes, times, workers, source or {})
    if kind == "linear" or line.mean_error <= LINE_IS_GOOD_ENOUGH:
        return line
    curve = _fit_piecewise(sizes, times, workers, source or {})
    return min(curve, line, key=lambda found: found.mean_error)


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
        raise CostError(f"samples of {len(rows)} size(s), a cost needs those of 2 or more")
    sizes, times = np.array(rows).T
    return sizes, times


def _fit_linear(sizes: _Floats, times: _Floats, workers: int, source: Mapping[str, Any]) -> Fit:
    """Minimise sum_i |a + b M_i - t_i| / t_i over a, b >= 0.

    For a given a the best b is a weighted median; what remains is convex in a, so a golden-section search finds it.
    """

    def best_slope(startup_s: float) -> float:
        positive = sizes > 0
        slopes = (times[positive] - startup_s) / sizes[positive]
        return max(0.0, _weighted_median(slopes, sizes[positive] / times[positive]))

    def error(startup_s: float) -> float:
        return float(np.mean(np.abs(startup_s + best_slope(startup_s) * sizes - times) / times))

    low, high = 0.0, float(times.max())
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(100):  # 0.618^100 is below a double's resolution
        left, right = high - golden * (high - low), low + golden * (high - low)
        if error(left) <= error(right):
            high = right
        else:
            low = left
    startup_s = min((0.0, low, high), key=error)
    return _judge(LinearCost(workers, startup_s, best_slope(startup_s), source), sizes, times)


def _weighted_median(values: _Floats, weights: _Floats) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


def _fit_piecewise(sizes: _Floats, times: _Floats, workers: int, source: Mapping[str, Any]) -> Fit:
    """Choose knots among the sizes, on the nearest curve that never falls, that leave the least relative error."""
    kept = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), MAX_SIZES)).round().astype(int))
    all_sizes, all_times, sizes, times = sizes, times, sizes[kept], times[kept]
    level = _never_falling(np.append(times[:-1], _largest_s(sizes, times)))
    knots = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), MAX_KNOTS)).round().astype(int))
    error = np.full((len(knots), len(knots)), np.inf)  # of the segment from one knot to another, first end included
    for row, first in enumerate(knots):
        for column in range(row + 1, len(knots)):
            last = knots[column]
            if column == len(knots) - 1 and not _may_be_last(sizes[[first, last]], level[[first, last]], sizes, level):
                continue
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
    points = tuple((int(sizes[index]), float(level[index])) for index in knots[chosen])
    return _judge(PiecewiseCost(workers, points, source), all_sizes, all_times)


def _largest_s(sizes: _Floats, times: _Floats) -> float:
    """Return the time of the largest size as it and those near it have it.

    It is always a knot and sets the slope of all that is larger, with no neighbour beyond it to outvote it. So it is
    put on the line through the sizes down to a sixteenth: the median of the slopes between all pairs (Theil and Sen),
    which one wrong size in five does not move.
    """
    near = max(len(sizes) - NEAR_LARGEST, min(len(sizes) - 5, int(np.searchsorted(sizes, sizes[-1] / 16))))
    if near < 0:
        return float(times[-1])
    x, y = sizes[near:], times[near:]
    first, second = np.triu_indices(len(x), 1)
    slope = np.median((y[second] - y[first]) / (x[second] - x[first]))
    return max(float(np.median(y - slope * x) + slope * x[-1]), SHORTEST_S)


def _may_be_last(ends: _Floats, end_times: _Floats, sizes: _Floats, level: _Floats) -> bool:
    """Say whether a segment may be the last: larger messages than were measured will go at its slope.

    So noise must not decide it: where the sizes allow it spans a factor of 4, and it is not flat.
    """
    wide_enough = ends[0] <= max(sizes[-1] / 4, sizes[0])
    return bool(wide_enough and (end_times[0] < end_times[1] or level[0] == level[-1]))


def _never_falling(times: _Floats) -> _Floats:
    """Return the never-falling sequence nearest in relative error: pool neighbours that fall into their median.

    A median, not a mean: one slow size must not bend the curve.
    """
    pools: list[list[float]] = []
    for time in times.tolist():
        pools.append([time])
        while len(pools) > 1 and _middle(pools[-2]) > _middle(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return np.array([_middle(pool) for pool in pools for _ in pool])


def _middle(pool: list[float]) -> float:
    values = np.array(pool)
    return _weighted_median(values, 1 / values)


def _judge(cost: LinearCost | PiecewiseCost, sizes: _Floats, times: _Floats) -> Fit:
    errors = [abs(cost(int(size)) - time) / time for size, time in zip(sizes, times, strict=True)]
    found = Fit(cost, float(np.mean(errors)), float(np.max(errors)), len(errors))
    quality = {"mean_error": found.mean_error, "worst_error": found.worst_error, "num_sizes": found.num_sizes}
    return replace(found, cost=replace(cost, source={**cost.source, "fit": quality}))
