"""The exact planner: the shortest step any partition can give, in the fewest messages that give it.

[Note: the programme]
Let gradient j = 1..L be ready at r_j, let P_j be the bytes of the first j gradients, T the cost of a message, and F(j)
the earliest moment at which the first j gradients can all have been sent. The last message of a best plan for j holds
gradients i+1..j for some i < j and starts when the link is free and gradient j is ready:

    F(0) = 0,    F(j) = min over i < j of  max(F(i), r_j) + T(P_j - P_i)

An earlier F(i) never makes anything after it later, so this is exact for every T. F never falls: leaving the last
gradient out of a plan makes no message later, as long as T never falls.

[Note: ties]
Many plans reach the same end, because a message that is hidden behind computation may as well be another. Of all of
them we want the one with the fewest messages: each costs host time the model does not know. Two ends are the same when
they differ by less than one part in 10^12, far more than rounding and far less than any clock sees.

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

__all__ = ["plan_optimal"]

_TIE = 1 + 1e-12

_Times = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def plan_optimal(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Find a plan with the shortest step, and among those one with the fewest messages.

    Exact for every cost that never falls as the message grows. O(L) for a `LinearCost`; O(L^2) for any other to find
    the shortest step, and no more than O(L^2) for each message of the plan to find the fewest.

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
        cuts = _general_cuts(ready_s, prefix_bytes, cost)
    return MergePlan.of_sizes(trace, (end - start for start, end in pairwise(cuts)), planner="optimal")


def _linear_cuts(ready_s: Sequence[float], prefix_bytes: Sequence[int], cost: LinearCost) -> list[int]:
    """Return where the messages of the best plan begin and end, in O(L), for T(M) = a + b M.

    Let k be the largest i with F(i) <= r_j. Among i <= k the best is k: all start at r_j and k's message is smallest.
    Among i > k the link is the bottleneck and the end is F(i) - b P_i plus what does not depend on i. k only moves
    forward with j, so the best of the latter is a sliding-window minimum, kept in a deque of rising keys.
    """
    startup_s, per_byte_s = cost.startup_s, cost.per_byte_s
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
    _check_end(earliest_s[-1])
    # [Note: ties] Backwards, with the deadline by which the first `last` gradients must have been sent: the message
    # that ends there takes in all it can. On a straight line it is never better to leave a gradient to the messages
    # before it, since every byte costs b wherever it travels.
    cuts = [len(ready_s)]
    deadline_s = earliest_s[-1] * _TIE
    while (last := cuts[-1]) > 0:
        ready, end_bytes = ready_s[last - 1], prefix_bytes[last]
        start = last - 1
        while start > 0 and ready + (startup_s + per_byte_s * (end_bytes - prefix_bytes[start - 1])) <= deadline_s:
            start -= 1
        # Rounding must not put the deadline before what can be reached.
        deadline_s -= startup_s + per_byte_s * (end_bytes - prefix_bytes[start])
        deadline_s = max(deadline_s, earliest_s[start])
        cuts.append(start)
    return cuts[::-1]


def _check_end(end_s: float) -> None:
    check_real(float(end_s), "the end of the last message of the best plan", CostError)


def _general_cuts(ready_s: Sequence[float], prefix_bytes: Sequence[int], cost: Cost) -> list[int]:
    """Return where the messages of the best plan begin and end, for any cost that never falls."""
    ready = np.array([0.0, *ready_s])
    prefix = np.array(prefix_bytes, dtype=np.int64)
    times = _vectorized(cost)
    earliest_s = _earliest_ends(ready, prefix, cost, times)
    _check_end(earliest_s[-1])
    latest_s = np.maximum(_latest_ends(ready, prefix, times, earliest_s[-1] * _TIE), earliest_s)
    return _fewest_cuts(ready, prefix, times, latest_s)


def _vectorized(cost: Cost) -> _Times:
    if not isinstance(cost, PiecewiseCost):
        return lambda sizes: np.array([cost(size) for size in sizes.tolist()])
    knots, knot_times = np.array(cost.points).T
    slope = (knot_times[-1] - knot_times[-2]) / (knots[-1] - knots[-2])
    return lambda sizes: np.interp(sizes, knots, knot_times) + slope * np.maximum(sizes - knots[-1], 0.0)


def _earliest_ends(
    ready: NDArray[np.float64], prefix: NDArray[np.int64], cost: Cost, times: _Times
) -> NDArray[np.float64]:
    """Return F of the note above: for every j the earliest end of the first j gradients."""
    earliest_s = np.zeros(len(ready))
    free = 0  # the largest i with F(i) <= r_j; of those up to it, it is the best: its message is the smallest
    for last in range(1, len(ready)):
        while free + 1 < last and earliest_s[free + 1] <= ready[last]:
            free += 1
        ends_s = np.maximum(earliest_s[free:last], ready[last]) + times(prefix[last] - prefix[free:last])
        start = free + int(ends_s.argmin())
        earliest_s[last] = max(earliest_s[start], ready[last]) + cost(int(prefix[last] - prefix[start]))
    return earliest_s


def _latest_ends(
    ready: NDArray[np.float64], prefix: NDArray[np.int64], times: _Times, deadline_s: float
) -> NDArray[np.float64]:
    """Return for every j by when the first j gradients must have been sent, so that the rest can meet the deadline."""
    latest_s = np.full(len(ready), -np.inf)
    latest_s[-1] = deadline_s
    for start in range(len(ready) - 2, -1, -1):
        durations_s = times(prefix[start + 1 :] - prefix[start])
        ends_s = latest_s[start + 1 :]
        fits = ready[start + 1 :] + durations_s <= ends_s
        if fits.any():
            latest_s[start] = (ends_s - durations_s)[fits].max()
    return latest_s


def _fewest_cuts(
    ready: NDArray[np.float64],
    prefix: NDArray[np.int64],
    times: _Times,
    latest_s: NDArray[np.float64],
) -> list[int]:
    """Return the cuts of a plan that ends by ``latest_s[-1]`` with the fewest messages.

    Round c finds for every cut the earliest end in c messages, from the cuts that round c - 1 reached earlier than any
    round before it, and drops ends that come too late for the rest. The first round that reaches the last gradient in
    time has the fewest messages.
    """
    # Ends before the next gradient is ready are worth the same.
    next_ready = np.append(ready[1:], latest_s[-1])
    worth_s = np.full(len(ready), np.inf)  # of the best end so far
    ends_s = np.full(len(ready), np.inf)
    worth_s[0] = ends_s[0] = 0.0
    rounds: list[NDArray[np.intp]] = []  # for every cut where its last message starts
    starts = np.array([0])
    while True:
        reached_s = np.full(len(ready), np.inf)
        origin = np.zeros(len(ready), dtype=np.intp)
        for start in starts.tolist():
            arrival_s = np.maximum(ends_s[start], ready[start + 1 :]) + times(prefix[start + 1 :] - prefix[start])
            (earlier,) = np.nonzero(arrival_s < reached_s[start + 1 :])
            reached_s[start + 1 + earlier] = arrival_s[earlier]
            origin[start + 1 + earlier] = start
        rounds.append(origin)
        reached_worth_s = np.maximum(reached_s, next_ready)
        (starts,) = np.nonzero((reached_s <= latest_s * _TIE) & (reached_worth_s < worth_s))
        ends_s, worth_s = reached_s, np.minimum(worth_s, reached_worth_s)
        if starts.size and starts[-1] == len(ready) - 1:
            break
    cuts = [len(ready) - 1]
    for origin in reversed(rounds):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[::-1]
