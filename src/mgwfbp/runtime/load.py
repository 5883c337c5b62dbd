"""What a message costs beside a busy backward pass: `cost_under_load`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from mgwfbp.cost import PiecewiseCost
from mgwfbp.fitting import SHORTEST_S, fit_quality, nearest_line, never_falling

__all__ = ["agreed_time_s", "cost_under_load"]

# No message is taken to cost less than this part of what the sweep says: then the observation is wrong.
LEAST = 0.2
# What a delay is worth in relative errors of messages: where these cannot tell a delay from a slower link (all about as
# large), it is a slower link.
DELAY_PENALTY = 0.5
# How far an observation reaches, to sizes smaller or larger by about this factor, and how many observations it takes to
# be believed rather than the line through all of them.
REACH, BELIEVED = 2.0, 3.0
# Larger messages than were swept or observed go on at the sweep's slope, to a point at so many times the largest.
BEYOND = 4


def agreed_time_s(times_s: Sequence[float], *, queued: bool) -> float:
    """Return what a message took, from what every rank saw of it.

    A rank that is ready early also waits for the others, so of a message that some rank sent as soon as it was ready
    the shortest time counts. Of one that was ``queued`` behind another on every rank the times differ only by when each
    learnt of an arrival, they add up to the same on every rank, and the mean counts.
    """
    return fmean(times_s) if queued else min(times_s)


def cost_under_load(swept: PiecewiseCost, seen: Mapping[int, Sequence[float]]) -> PiecewiseCost:
    r"""Correct a cost that was swept on an idle machine by what messages of a running training took.

    ``seen`` holds, by bytes, the seconds of all messages of that size. Beside a backward pass a message waits for room
    on the processor, whatever its size, and its bytes go more slowly. So to the medians :math:`t_i` of the sizes
    :math:`m_i`, each seen :math:`n_i` times, a line over the sweep T is fitted, `nearest_line`:

    .. math:: B(M) = d + \rho\, T(M)

    with a delay d and a ratio :math:`\rho`. What the sizes differ from it is kept near them, as a mean of logarithms:

    .. math:: \ln\frac{C(M)}{B(M)} = \frac{\sum_i w_i \ln(t_i / B(m_i))}{n_0 + \sum_i w_i}, \qquad
              w_i = n_i \exp\!\Big(-\frac{\ln^2(M/m_i)}{2 \ln^2 2}\Big)

    with :math:`n_0` `BELIEVED`: one late message must not speak for all of its size. The result is the nearest to that
    which never falls. ``source["under_load"]`` holds the observed medians, ``source["fit"]`` how far the result is from
    them.

    >>> swept = PiecewiseCost(2, ((0, 1.0), (1000, 2.0), (10**6, 1001.0)))
    >>> loaded = cost_under_load(swept, {0: [11.0] * 9, 1000: [12.0] * 8 + [60.0], 10**6: [1011.0] * 9})
    >>> [round(loaded(size), 6) for size in (0, 1000, 10**5, 10**6)]  # 10 s more, whatever the size
    [11.0, 12.0, 111.0, 1011.0]
    """
    sizes = sorted(size for size, times in seen.items() if times and swept(size) > 0)
    if not sizes:
        return swept
    swept_s = np.array([swept(size) for size in sizes])
    observed_s = np.maximum([median(seen[size]) for size in sizes], np.maximum(LEAST * swept_s, SHORTEST_S))
    counts = np.array([float(len(seen[size])) for size in sizes])
    delay_s, ratio = nearest_line(swept_s, observed_s, counts, height_penalty=DELAY_PENALTY)
    ratio = max(LEAST, ratio)
    grid = _grid(swept, sizes)
    grid_s = np.array([swept(size) for size in grid])
    # From each size of the grid (rows) to each that was observed.
    distances = np.log(np.maximum(1, grid)[:, np.newaxis] / np.maximum(1, sizes)) / math.log(REACH)
    weights = counts * np.exp(-(distances**2) / 2)
    missed = np.log(observed_s / (delay_s + ratio * swept_s))
    corrections = (weights @ missed) / (BELIEVED + weights.sum(axis=1))
    times_s = never_falling((delay_s + ratio * grid_s) * np.exp(corrections), BELIEVED + weights.sum(axis=1))
    largest, largest_s = grid[-1], float(times_s[-1])
    beyond = (BEYOND * largest, largest_s + ratio * (swept(BEYOND * largest) - swept(largest)))
    points = (*zip(grid, times_s.tolist(), strict=True), beyond)
    cost = PiecewiseCost(swept.workers, points)
    observed = observed_s.tolist()
    source = {"under_load": list(zip(sizes, observed, strict=True)), "fit": fit_quality(cost, sizes, observed)}
    return replace(cost, source={**swept.source, **source})


def _grid(swept: PiecewiseCost, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the result's points: those of the sweep, those observed, and enough between them."""
    first, last = max(4, swept.points[0][0]), max(swept.points[-1][0], *sizes)
    doublings = {first << shift for shift in range((last // first).bit_length())}
    return sorted({*(size for size, _ in swept.points), *doublings, *sizes})
