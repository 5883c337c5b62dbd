"""Of plans that are equally fast the one with room for error, and then the fewest messages.

[Note: ties]
Many plans reach the same end, because a message that is hidden behind computation may as well be another. Two ends are
the same when they differ by less than one part in 10^12, far more than rounding and far less than any clock sees. Of
all plans with the shortest step we want

1. one that stays short where costs were thought too low: whose end is the earliest, up to one part in a thousand
   (`NEAR`), if every message takes `SLOWER` times as long;
2. of those one with the fewest messages: each costs host time, also where the cost does not say so (``taken_s``).

[Note: room]
A plan ends by X if every message leaves room for itself and those after it: with S_m for the time of message m and all
later ones together, and j for its last gradient, r_j + S_m <= X. With messages that take c times as long it ends by Y
if r_j + c S_m <= Y. So both deadlines together are one limit of S_m for every last gradient,

    S_m <= B(j) = min(X - r_j, (Y - r_j) / c)

and going backwards from the last gradient only S_m has to be known: the smaller, the better. For X the shortest end
and a given Y this finds the fewest messages, or that there are none. Y is first the earliest end that slower messages
allow at all, which can nearly always be had; else it is found by bisection.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.costs import CheaperCost, full_precision_cost
from mgwfbp.errors import CostError
from mgwfbp.record import check_real

__all__ = [
    "NEAR",
    "ROUNDING",
    "SLOWER",
    "TIE",
    "Floats",
    "Times",
    "check_end",
    "trace_cuts",
    "vectorized",
    "with_slack",
]

# Of plans that are equally good the one is taken that is best when every message takes so many times as long.
SLOWER = 1.25
# Two ends with slower messages are as good as the same when they are this near.
NEAR = 1e-3
TIE = 1 + 1e-12
# Sums of thousands of messages are off by less than this part.
ROUNDING = 1e-11

Floats = NDArray[np.float64]
Times = Callable[[NDArray[np.int64]], Floats]


def with_slack(fewest: Callable[[float], list[int] | None], least_s: float, most_s: float) -> list[int]:
    """Return the cuts of [Note: ties].

    ``fewest`` finds those that meet a deadline of slower messages, if there are any: none before ``least_s``, and some
    by ``most_s``.
    """
    cuts = fewest(least_s * (1 + NEAR))
    if cuts is None:
        low_s, high_s = least_s, most_s  # met by nothing, and by something
        while high_s - low_s > NEAR * low_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if fewest(middle_s) is None else (low_s, middle_s)
        cuts = fewest(low_s * (1 + NEAR))
    if cuts is None:
        raise CostError("the shortest step that was found cannot be had: does the cost fall as messages grow?")
    return cuts


def check_end(end_s: float) -> None:
    """Raise where an end is no number that a record may hold."""
    check_real(float(end_s), "the end of the last message of the best plan", CostError)


def vectorized(cost: Cost) -> Times:
    """Return the cost as a function of many sizes at once."""
    cost = full_precision_cost(cost)
    if isinstance(cost, CheaperCost):
        full, low = vectorized(cost.full), vectorized(cost.low)
        return lambda sizes: np.minimum(full(sizes), low(sizes))
    if isinstance(cost, LinearCost):
        return lambda sizes: cost.startup_s + np.float64(cost.per_byte_s) * sizes
    if not isinstance(cost, PiecewiseCost):
        return lambda sizes: np.array([cost(size) for size in sizes.ravel().tolist()]).reshape(sizes.shape)
    knots, knot_times = np.array(cost.points).T
    slope = (knot_times[-1] - knot_times[-2]) / (knots[-1] - knots[-2])
    return lambda sizes: np.interp(sizes, knots, knot_times) + slope * np.maximum(sizes - knots[-1], 0.0)


def trace_cuts(ends_of: Sequence[NDArray[np.intp]]) -> list[int]:
    """Return where messages begin and end, of rounds that each say where the first message after every cut ends."""
    cuts = [0]
    for ends in reversed(ends_of):
        cuts.append(int(ends[cuts[-1]]))
    return cuts
