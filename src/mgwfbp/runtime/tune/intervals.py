"""What a few turns say of a difference, and how sure they are: `Interval`, `interval_of`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

__all__ = ["Interval", "interval_of", "t_quantile"]

TRIMMED = 9


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and what it is above and below with some confidence each."""

    middle: float
    low: float
    high: float


def interval_of(values: Sequence[float], confidence: float) -> Interval:
    """Return the trimmed mean, and what it is above, and below, with so much confidence each.

    From `TRIMMED` values on a fifth at either end does not count (Yuen's interval): slow spells make long tails. Of
    fewer all count, since what is left would have next to no degrees of freedom.
    """
    if not values:
        return Interval(0.0, -math.inf, math.inf)
    ranked, cut = sorted(values), len(values) // 5 if len(values) >= TRIMMED else 0
    inner = ranked[cut : len(ranked) - cut]
    mean = fmean(inner)
    if len(values) < 3:
        return Interval(mean, -math.inf, math.inf)
    winsorized = [inner[0]] * cut + inner + [inner[-1]] * cut
    error = stdev(winsorized) * math.sqrt(len(values) - 1) / math.sqrt(len(inner) * (len(inner) - 1))
    half = t_quantile(confidence, len(inner) - 1) * error
    return Interval(mean, mean - half, mean + half)


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    r"""Return the quantile of Student's t for confidences from a half on, by bisection of its distribution.

    For whole degrees of freedom :math:`\nu` that is a finite sum of powers of cosines,
    with :math:`\theta = \arctan(t / \sqrt\nu)`.

    >>> [round(t_quantile(0.995, freedom), 3) for freedom in (1, 2, 3, 4, 10, 30)]  # as tables have it
    [63.657, 9.925, 5.841, 4.604, 3.169, 2.75]
    """

    def below(value: float) -> float:
        theta = math.atan(value / math.sqrt(freedom))
        term, total = (math.cos(theta), 0.0) if freedom % 2 else (1.0, 0.0)
        for step in range(1 + freedom % 2, freedom, 2):
            total += term
            term *= math.cos(theta) ** 2 * step / (step + 1)
        within = math.sin(theta) * total
        return 0.5 + (within if freedom % 2 == 0 else 2 / math.pi * (theta + within)) / 2

    low, high = 0.0, 1.0
    while below(high) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < confidence else (low, middle)
    return high
