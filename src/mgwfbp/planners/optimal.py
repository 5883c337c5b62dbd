"""The exact planner: the shortest step that messages of neighbours can give, with room for error, the fewest of them.

[Note: the programme]
Let gradient j = 1..L be ready at r_j, let P_j be the bytes of the first j gradients, T the cost of a message, and F(j)
the earliest moment at which the first j gradients can all have been sent. The last message of a best plan for j holds
gradients i+1..j for some i < j and starts when the link is free and gradient j is ready:

    F(0) = 0,    F(j) = min over i < j of  max(F(i), r_j) + T(P_j - P_i)

An earlier F(i) never makes anything after it later, so this is exact for every T. F never falls: leaving the last
gradient out of a plan makes no message later, as long as T never falls.

[Note: ties]
Many plans reach the same end, because a message that is hidden behind computation may as well be another. Two ends are
the same when they differ by less than one part in 10^12, far more than rounding and far less than any clock sees. Of
all plans with the shortest step we want

1. one that stays short where costs were thought too low: whose end is the earliest, up to one part in a thousand
   (`NEAR`), if every message takes `SLOWER` times as long;
2. of those one with the fewest messages: each costs host time the model does not know.

[Note: room]
A plan ends by X if every message leaves room for itself and those after it: with S_m for the time of message m and all
later ones together, and j for its last gradient, r_j + S_m <= X. With messages that take c times as long it ends by Y
if r_j + c S_m <= Y. So both deadlines together are one limit of S_m for every last gradient,

    S_m <= B(j) = min(X - r_j, (Y - r_j) / c)

and going backwards from the last gradient only S_m has to be known: the smaller, the better. For X the shortest end
and a given Y this finds the fewest messages, or that there are none. Y is first the earliest end that slower messages
allow at all, which can nearly always be had; else it is found by bisection.

docs/optimality.md has the proofs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.errors import CostError
from mgwfbp.plan import MergePlan
from mgwfbp.record import check_real
from mgwfbp.trace import ModelTrace

__all__ = ["SLOWER", "plan_optimal"]

# Of plans that are equally good the one is taken that is best when every message takes so many times as long.
SLOWER = 1.25
# Two ends with slower messages are as good as the same when they are this near.
NEAR = 1e-3
_TIE = 1 + 1e-12
# Sums of thousands of messages are off by less than this part.
_ROUNDING = 1e-11

_Floats = NDArray[np.float64]
_Times = Callable[[NDArray[np.int64]], _Floats]


def plan_optimal(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Find a plan with the shortest step; among those one that is best on a slower network, in the fewest messages.

    Exact among partitions into neighbours, in ready order, of whole gradients, for every cost that never falls as the
    message grows. For a `LinearCost` nothing else is faster either: no groups of other gradients, no other order, no
    gradient cut in two. For other costs something may be (docs/optimality.md has examples).

    O(L) for a `LinearCost`; O(L^2) for any other to find the shortest step, and no more than O(L^2) for each message of
    the plan to find the fewest.

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 1) for name in "dcba"))
    >>> plan_optimal(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=1.0)).group_sizes
    (1, 3)
    """
    ready_s = trace.ready_s
    prefix_bytes = list(accumulate((layer.grad_bytes for layer in trace.layers), initial=0))
    if isinstance(cost, LinearCost):
        cuts = _linear_cuts(ready_s, prefix_bytes, cost)
    else:
        cuts = _general_cuts(np.array([0.0, *ready_s]), np.array(prefix_bytes, dtype=np.int64), cost)
    return MergePlan.of_sizes(trace, (end - start for start, end in pairwise(cuts)), planner="optimal")


def _with_slack(fewest: Callable[[float], list[int] | None], least_s: float, most_s: float) -> list[int]:
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


def _check_end(end_s: float) -> None:
    check_real(float(end_s), "the end of the last message of the best plan", CostError)


def _linear_cuts(ready_s: Sequence[float], prefix_bytes: Sequence[int], cost: LinearCost) -> list[int]:
    """Return where the messages of the best plan begin and end, in O(L), for T(M) = a + b M."""
    startup_s, per_byte_s = cost.startup_s, cost.per_byte_s
    shortest_s = _linear_end(ready_s, prefix_bytes, startup_s, per_byte_s)
    slow_s = _linear_end(ready_s, prefix_bytes, SLOWER * startup_s, SLOWER * per_byte_s)
    _check_end(slow_s)

    def fewest(slow_deadline_s: float) -> list[int] | None:
        # Backwards: the message that ends at `last` takes in all it can. On a straight line it is never better to
        # leave a gradient to the messages before it, since every byte costs b wherever it travels.
        cuts, later_s = [len(ready_s)], 0.0
        while (last := cuts[-1]) > 0:
            ready, end_bytes, start = ready_s[last - 1], prefix_bytes[last], last - 1
            room_s = min(shortest_s * _TIE - ready, (slow_deadline_s - ready) / SLOWER) - later_s
            while start > 0 and startup_s + per_byte_s * (end_bytes - prefix_bytes[start - 1]) <= room_s:
                start -= 1
            message_s = startup_s + per_byte_s * (end_bytes - prefix_bytes[start])
            if message_s > room_s + _ROUNDING * shortest_s:
                return None
            later_s += message_s
            cuts.append(start)
        return cuts[::-1]

    return _with_slack(fewest, slow_s, SLOWER * shortest_s)


def _linear_end(ready_s: Sequence[float], prefix_bytes: Sequence[int], startup_s: float, per_byte_s: float) -> float:
    """Return F(L) of the first note in O(L), for T(M) = a + b M.

    Let k be the largest i with F(i) <= r_j. Among i <= k the best is k: all start at r_j and k's message is smallest.
    Among i > k the link is the bottleneck and the end is F(i) - b P_i plus what does not depend on i. k only moves
    forward with j, so the best of the latter is a sliding-window minimum, kept in a deque of rising keys.
    """
    earliest_s = [0.0]  # F
    free = 0  # k
    window: deque[tuple[float, int]] = deque()  # (F(i) - b P_i, i) for i in k+1..j-1, keys rising
    for last, ready in enumerate(ready_s, 1):
        end_bytes = prefix_bytes[last]
        while free + 1 < last and earliest_s[free + 1] <= ready:
            free += 1
        while window and window[0][1] <= free:
            window.popleft()
        end_s = ready + (startup_s + per_byte_s * (end_bytes - prefix_bytes[free]))
        if window:
            start = window[0][1]
            end_s = min(end_s, earliest_s[start] + (startup_s + per_byte_s * (end_bytes - prefix_bytes[start])))
        earliest_s.append(end_s)
        key = end_s - per_byte_s * end_bytes
        while window and window[-1][0] >= key:
            window.pop()
        window.append((key, last))
    return earliest_s[-1]


def _general_cuts(ready: _Floats, prefix: NDArray[np.int64], cost: Cost) -> list[int]:
    """Return where the messages of the best plan begin and end, for any cost that never falls; O(L^2) a round."""
    times = _vectorized(cost)
    earliest_s = _earliest_ends(ready, prefix, times)
    slow_s = _earliest_ends(ready, prefix, lambda sizes: SLOWER * times(sizes))
    _check_end(slow_s[-1])
    shortest_s = float(earliest_s[-1]) * _TIE

    def fewest(slow_deadline_s: float) -> list[int] | None:
        room_s = np.minimum(shortest_s - ready, (slow_deadline_s - ready) / SLOWER)
        # Whatever comes before a cut takes at least its F: so much is left for what comes after it.
        left_s = np.minimum(shortest_s - earliest_s, (slow_deadline_s - slow_s) / SLOWER)
        return _fewest_cuts(prefix, times, room_s, left_s + _ROUNDING * shortest_s)

    return _with_slack(fewest, float(slow_s[-1]), SLOWER * shortest_s)


def _vectorized(cost: Cost) -> _Times:
    if not isinstance(cost, PiecewiseCost):
        return lambda sizes: np.array([cost(size) for size in sizes.tolist()])
    knots, knot_times = np.array(cost.points).T
    slope = (knot_times[-1] - knot_times[-2]) / (knots[-1] - knots[-2])
    return lambda sizes: np.interp(sizes, knots, knot_times) + slope * np.maximum(sizes - knots[-1], 0.0)


def _earliest_ends(ready: _Floats, prefix: NDArray[np.int64], times: _Times) -> _Floats:
    """Return F of the first note: for every j the earliest end of the first j gradients."""
    earliest_s = np.zeros(len(ready))
    free = 0  # the largest i with F(i) <= r_j; of those up to it, it is the best: its message is the smallest
    for last in range(1, len(ready)):
        while free + 1 < last and earliest_s[free + 1] <= ready[last]:
            free += 1
        ends_s = np.maximum(earliest_s[free:last], ready[last]) + times(prefix[last] - prefix[free:last])
        earliest_s[last] = ends_s.min()
    return earliest_s


def _fewest_cuts(prefix: NDArray[np.int64], times: _Times, room_s: _Floats, left_s: _Floats) -> list[int] | None:
    """Return the cuts of a plan with the fewest messages in which all leave room, if there is one: [Note: room].

    Round c finds for every cut the least time that c messages after it take together, from the cuts where round c - 1
    was better than any before it, and drops what leaves too little to those before the cut. The first round that
    reaches the first gradient has the fewest messages.
    """
    after_s = np.full(len(prefix), np.inf)  # the least time of all messages after a cut, so far
    after_s[-1] = 0.0
    ends_of: list[NDArray[np.intp]] = []  # for every round and cut: where the first message after it ends
    better = np.array([len(prefix) - 1])
    while better.size:
        reached_s, ends = np.full(len(prefix), np.inf), np.zeros(len(prefix), dtype=np.intp)
        for end in better.tolist():
            together_s = times(prefix[end] - prefix[:end]) + after_s[end]
            (good,) = np.nonzero((together_s <= room_s[end]) & (together_s < reached_s[:end]))
            reached_s[good], ends[good] = together_s[good], end
        ends_of.append(ends)
        (better,) = np.nonzero((reached_s < after_s) & (reached_s <= left_s))
        if better.size and better[0] == 0:
            return _trace_cuts(ends_of)
        after_s[better] = reached_s[better]
    return None


def _trace_cuts(ends_of: Sequence[NDArray[np.intp]]) -> list[int]:
    cuts = [0]
    for ends in reversed(ends_of):
        cuts.append(int(ends[cuts[-1]]))
    return cuts
