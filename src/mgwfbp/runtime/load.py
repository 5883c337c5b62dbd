"""What a message costs beside a busy backward pass: `cost_under_load`."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median

from mgwfbp.cost import PiecewiseCost

__all__ = ["agreed_time_s", "cost_under_load"]

# No message is taken to cost less than this part, or more than so many times, of what the sweep says: beyond it the
# sweep or the observation is wrong, and one of them must not decide alone.
LEAST, MOST = 0.2, 20.0
# How far an observation reaches: to sizes that are smaller or larger by about this factor.
REACH = 2.0


def agreed_time_s(times_s: Sequence[float], *, queued: bool) -> float:
    """Return what a message took, from what every rank saw of it.

    A rank that is ready early also waits for the others, so of a message that some rank sent as soon as it was ready
    the shortest time counts. Of one that was ``queued`` behind another on every rank the times differ only by when each
    learnt of an arrival, they add up to the same on every rank, and the mean counts.
    """
    return fmean(times_s) if queued else min(times_s)


def cost_under_load(swept: PiecewiseCost, seen: Mapping[int, Sequence[float]]) -> PiecewiseCost:
    r"""Correct a cost that was swept on an idle machine by what messages of a running training took.

    ``seen`` holds, by bytes, the seconds of all messages of that size. The sweep T is multiplied by a ratio that varies
    slowly with the size, the mean (of logarithms) over the sizes :math:`m_i` that were seen :math:`n_i` times, with the
    median :math:`t_i`:

    .. math:: \ln\rho(M) = \frac{\sum_i w_i \ln(t_i / T(m_i))}{\sum_i w_i}, \qquad
              w_i = n_i \exp\!\Big(-\frac{\ln^2(M/m_i)}{2 \ln^2 2}\Big)

    since one late message must not speak for all of its size. The result never falls.

    >>> swept = PiecewiseCost(2, ((0, 1.0), (1000, 2.0), (10**6, 1001.0)))
    >>> loaded = cost_under_load(swept, {1000: [6.0, 5.0, 60.0]})
    >>> [round(loaded(size), 6) for size in (0, 1000, 10**6)]
    [3.0, 6.0, 3003.0]
    """
    samples = [
        (size, len(times), math.log(min(MOST, max(LEAST, median(times) / swept(size)))))
        for size, times in seen.items()
        if size > 0 and times and swept(size) > 0
    ]
    if not samples:
        return swept
    first, last = max(4, swept.points[0][0]), max(swept.points[-1][0], *seen)
    doublings = {first << shift for shift in range((last // first).bit_length())}
    grid = sorted({*(size for size, _ in swept.points), *doublings, *(size for size, _, _ in samples)})
    times = accumulate((swept(size) * _ratio(max(1, size), samples) for size in grid), max)
    source = {**swept.source, "under_load": [[size, median(seen[size])] for size, _, _ in sorted(samples)]}
    return PiecewiseCost(swept.workers, tuple(zip(grid, times, strict=True)), source)


def _ratio(size: int, samples: Sequence[tuple[int, int, float]]) -> float:
    # From the nearest on: far from all of them every weight would vanish.
    distances = [(math.log(size / other) / math.log(REACH)) ** 2 / 2 for other, _, _ in samples]
    nearest = min(distances)
    weights = [count * math.exp(nearest - distance) for (_, count, _), distance in zip(samples, distances, strict=True)]
    mean = sum(weight * ratio for weight, (_, _, ratio) in zip(weights, samples, strict=True)) / sum(weights)
    return math.exp(mean)
