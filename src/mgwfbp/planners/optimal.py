"""The exact planner: the shortest step that messages of neighbours can give, with room for error, the fewest of them.

[Note: the programme]
Let gradient j = 1..L be ready at r_j, let P_j be the bytes of the first j gradients, T the cost of a message, and F(j)
the earliest moment at which the first j gradients can all have been sent. The last message of a best plan for j holds
gradients i+1..j for some i < j and starts when the link is free and gradient j is ready:

    F(0) = 0,    F(j) = min over i < j of  max(F(i), r_j) + T(P_j - P_i)

An earlier F(i) never makes anything after it later, so this is exact for every T. F never falls: leaving the last
gradient out of a plan makes no message later, as long as T never falls.

Which of the plans that reach F(L) is taken is in ``slack.py``. Where messages take time from the computation, when a
gradient is ready depends on the messages before it: ``counted.py``.

docs/optimality.md has the proofs.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, LinearCost, taken_by
from mgwfbp.costs import full_precision_cost
from mgwfbp.plan import MergePlan
from mgwfbp.planners.counted import counted_cuts
from mgwfbp.planners.slack import ROUNDING, SLOWER, TIE, Floats, Times, check_end, trace_cuts, vectorized, with_slack
from mgwfbp.trace import ModelTrace

__all__ = ["plan_optimal"]


def plan_optimal(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Find a plan with the shortest step; among those one that is best on a slower network, in the fewest messages.

    Exact among partitions into neighbours, in ready order, of whole gradients, for every cost that never falls as the
    message grows. For a `LinearCost` that takes nothing from the computation nothing else is faster either: no groups
    of other gradients, no other order, no gradient cut in two. For other costs something may be (docs/optimality.md has
    examples).

    O(L) for such a `LinearCost`; O(L^2) for any other to find the shortest step, and no more than O(L^2) for each
    message of the plan to find the fewest. Where messages take time from the computation O(L^2) for each number of
    messages that may be the best.

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 1) for name in "dcba"))
    >>> plan_optimal(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=1.0)).group_sizes
    (1, 3)
    """
    cost = full_precision_cost(cost)
    ready_s = trace.ready_s
    prefix_bytes = list(accumulate((layer.grad_bytes for layer in trace.layers), initial=0))
    takes = taken_by(cost, trace.grad_bytes) > 0
    if isinstance(cost, LinearCost) and not takes:
        cuts = _linear_cuts(ready_s, prefix_bytes, cost)
    else:
        ready, prefix = np.array([0.0, *ready_s]), np.array(prefix_bytes, dtype=np.int64)
        cuts = (counted_cuts if takes else _general_cuts)(ready, prefix, cost)
    return MergePlan.of_sizes(trace, (end - start for start, end in pairwise(cuts)), planner="optimal")


def _linear_cuts(ready_s: Sequence[float], prefix_bytes: Sequence[int], cost: LinearCost) -> list[int]:
    """Return where the messages of the best plan begin and end, in O(L), for T(M) = a + b M."""
    startup_s, per_byte_s = cost.startup_s, cost.per_byte_s
    shortest_s = _linear_end(ready_s, prefix_bytes, startup_s, per_byte_s)
    slow_s = _linear_end(ready_s, prefix_bytes, SLOWER * startup_s, SLOWER * per_byte_s)
    check_end(slow_s)

    def fewest(slow_deadline_s: float) -> list[int] | None:
        # Backwards: the message that ends at `last` takes in all it can. On a straight line it is never better to
        # leave a gradient to the messages before it, since every byte costs b wherever it travels.
        cuts, later_s = [len(ready_s)], 0.0
        while (last := cuts[-1]) > 0:
            ready, end_bytes, start = ready_s[last - 1], prefix_bytes[last], last - 1
            room_s = min(shortest_s * TIE - ready, (slow_deadline_s - ready) / SLOWER) - later_s
            while start > 0 and startup_s + per_byte_s * (end_bytes - prefix_bytes[start - 1]) <= room_s:
                start -= 1
            message_s = startup_s + per_byte_s * (end_bytes - prefix_bytes[start])
            if message_s > room_s + ROUNDING * shortest_s:
                return None
            later_s += message_s
            cuts.append(start)
        return cuts[::-1]

    return with_slack(fewest, slow_s, SLOWER * shortest_s)


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


def _general_cuts(ready: Floats, prefix: NDArray[np.int64], cost: Cost) -> list[int]:
    """Return where the messages of the best plan begin and end, for any cost that never falls; O(L^2) a round."""
    times = vectorized(cost)
    earliest_s = _earliest_ends(ready, prefix, times)
    slow_s = _earliest_ends(ready, prefix, lambda sizes: SLOWER * times(sizes))
    check_end(slow_s[-1])
    shortest_s = float(earliest_s[-1]) * TIE

    def fewest(slow_deadline_s: float) -> list[int] | None:
        room_s = np.minimum(shortest_s - ready, (slow_deadline_s - ready) / SLOWER)
        # Whatever comes before a cut takes at least its F: so much is left for what comes after it.
        left_s = np.minimum(shortest_s - earliest_s, (slow_deadline_s - slow_s) / SLOWER)
        return _fewest_cuts(prefix, times, room_s, left_s + ROUNDING * shortest_s)

    return with_slack(fewest, float(slow_s[-1]), SLOWER * shortest_s)


def _earliest_ends(ready: Floats, prefix: NDArray[np.int64], times: Times) -> Floats:
    """Return F of the first note: for every j the earliest end of the first j gradients."""
    earliest_s = np.zeros(len(ready))
    free = 0  # the largest i with F(i) <= r_j; of those up to it, it is the best: its message is the smallest
    for last in range(1, len(ready)):
        while free + 1 < last and earliest_s[free + 1] <= ready[last]:
            free += 1
        ends_s = np.maximum(earliest_s[free:last], ready[last]) + times(prefix[last] - prefix[free:last])
        earliest_s[last] = ends_s.min()
    return earliest_s


def _fewest_cuts(prefix: NDArray[np.int64], times: Times, room_s: Floats, left_s: Floats) -> list[int] | None:
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
            return trace_cuts(ends_of)
        after_s[better] = reached_s[better]
    return None
