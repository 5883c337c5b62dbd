"""The exact planner where a message takes time from the computation, h + g M for M bytes.

[Note: a clock that stops]
Let the m-th message hold gradients i+1..j. The m - 1 messages before it, of P_i bytes together, have taken
h (m - 1) + g P_i from the computation, so its last gradient is ready that much later than r_j, and it ends at

    F_m = max(F_(m-1), r_j + h (m - 1) + g P_i) + T(P_j - P_i)

On a clock that stops whenever a message takes time, G_m = F_m - h m - g P_j, this is

    G_m = max(G_(m-1), r_j) + T'(P_j - P_i),    T'(M) = T(M) - h - g M

the recurrence without the term, for another cost (which may fall, or be negative). Ready times on this clock depend on
nothing, and the step of a plan of n messages is G_n + h n + g P_L. So with G(m, j) for the earliest end, on this clock,
of the first j gradients in m messages,

    G(m, j) = min over i < j of  max(G(m-1, i), r_j) + T'(P_j - P_i),    step = min over n of  G(n, L) + h n + g P_L

An earlier end with as many messages never makes anything after it later, so this is exact for every T. What reaches a
cut no earlier on this clock than fewer messages do is dropped: whatever may follow, the fewer end earlier. So is what
cannot end by the shortest step so far. For a given m and j the two clocks differ by h m + g P_j, so the programme keeps
F, which is exact where these are large, and looks at the other clock only to compare numbers of messages.

[Note: room for counted messages]
[Note: room] in ``slack.py`` holds with gradients ready as late as they are: with k messages after it, the message of
gradients i+1..j in a plan of n messages has n - 1 - k before it, and leaves room if

    S_m <= min(X - d, (Y - d) / c),    d = r_j + h (n - 1 - k) + g P_i

Going backwards round by round k is known, for a given n; and n is one whose best step is the shortest.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost, taken_by
from mgwfbp.costs import CheaperCost
from mgwfbp.planners.slack import ROUNDING, SLOWER, TIE, Floats, check_end, trace_cuts, vectorized, with_slack

__all__ = ["counted_cuts"]

# Numbers held at once: the times of all messages there can be, if they are no more than this (32 MB).
MOST_HELD = 2**22

_Places = NDArray[np.intp]


def counted_cuts(ready: Floats, prefix: NDArray[np.int64], cost: Cost) -> list[int]:
    """Return where the messages of the best plan begin and end; ``ready`` and ``prefix`` begin with a 0."""
    row = _Row(ready, prefix, cost)
    ends_s = row.shortest_ends()
    shortest_s = min(ends_s)
    check_end(SLOWER * shortest_s)
    counts: list[int | None]
    if row.launch_s * len(ready) <= (TIE - 1) * shortest_s:  # how many they are does not matter
        counts, slow_s = [None], min(row.shortest_ends(SLOWER))
    else:
        best = [number for number, end_s in enumerate(ends_s, 1) if end_s <= shortest_s * TIE]
        slow_ends_s = row.slow_ends(best[-1])
        counts, slow_s = [*best], min(slow_ends_s[number - 1] for number in best)

    def fewest(slow_deadline_s: float) -> list[int] | None:
        found = (row.cuts_within(shortest_s * TIE, slow_deadline_s, number) for number in counts)
        return next((cuts for cuts in found if cuts is not None), None)

    return with_slack(fewest, slow_s, SLOWER * shortest_s)


class _Row:
    """Gradients in a row, what messages of them cost, and what these take from the computation."""

    def __init__(self, ready: Floats, prefix: NDArray[np.int64], cost: Cost) -> None:
        self._ready, self._prefix, self._times = ready, prefix, vectorized(cost)
        self.launch_s = taken_by(cost, 0)  # h
        self._taken_s = np.array([taken_by(cost, size) - self.launch_s for size in prefix.tolist()])  # g P
        self._held = self._message_s(np.arange(len(ready))) if len(ready) ** 2 <= MOST_HELD else None
        total = int(prefix[-1])
        self._last_s = cost(total - int(prefix[-2]))  # the least that a last message takes
        # However bytes are sent, they take at least this, and so much for each of them.
        self._least_s, self._least_per_byte_s = cost(0), _least_per_byte_s(cost, total)
        # The earliest end before every cut, in one message, in two, and so on: of plans that may have the shortest
        # step, and of all with slower messages.
        self._rounds_s: list[Floats] = []
        self._slow_rounds_s: list[Floats] = []

    def shortest_ends(self, slower: float = 1.0) -> list[float]:
        """Return the shortest step of one message, of two, and so on, as far as it may be the shortest of all.

        ``slower``: messages take so many times as long.
        """
        left_s = self._least_s + self._least_per_byte_s * (self._prefix[-1] - self._prefix)
        free_s, fewer_s = self._begin(), np.full(len(self._ready), np.inf)
        rounds_s, active = list[Floats](), np.array([0])
        shortest_s = np.inf
        while active.size:
            free_s = self._one_more(free_s, active, len(rounds_s), slower)
            rounds_s.append(free_s)
            shortest_s = min(shortest_s, free_s[-1])
            lag_s = len(rounds_s) * self.launch_s + self._taken_s
            bound_s = np.maximum(free_s + slower * left_s, self._ready[-1] + lag_s + slower * self._last_s)
            clock_s = free_s - lag_s
            (active,) = np.nonzero((clock_s < fewer_s) & (bound_s <= shortest_s * TIE))
            active = active[active < len(self._ready) - 1]
            fewer_s = np.minimum(fewer_s, clock_s)
        if slower == 1.0:
            self._rounds_s = rounds_s
        return [float(ends_s[-1]) for ends_s in rounds_s]

    def slow_ends(self, most: int) -> list[float]:
        """Return the shortest step of every number of slower messages up to ``most``."""
        free_s = self._begin()
        for number in range(most):
            (active,) = np.nonzero(np.isfinite(free_s[:-1]))
            free_s = self._one_more(free_s, active, number, SLOWER)
            self._slow_rounds_s.append(free_s)
        return [float(ends_s[-1]) for ends_s in self._slow_rounds_s]

    def _begin(self) -> Floats:
        free_s = np.full(len(self._ready), np.inf)
        free_s[0] = 0.0
        return free_s

    def _one_more(self, free_s: Floats, starts: _Places, number: int, slower: float) -> Floats:
        """Return when the link is free after one more message, behind some of the cuts and so many messages."""
        reached_s = np.full(len(self._ready), np.inf)
        for some in self._parts(starts):
            message_s = self._message_s(some) if self._held is None else self._held[some]
            lag_s = number * self.launch_s + self._taken_s[some]
            starts_s = np.maximum(free_s[some][:, np.newaxis], self._ready + lag_s[:, np.newaxis])
            np.minimum(reached_s, (starts_s + slower * message_s).min(axis=0), out=reached_s)
        return reached_s

    def cuts_within(self, deadline_s: float, slow_deadline_s: float, number: int | None) -> list[int] | None:
        """Return the cuts of a plan in which all leave room, if there is one: [Note: room for counted messages].

        Of so many messages; or, where messages take nothing but for their bytes, of the fewest.
        """
        after_s, ends_of = np.full(len(self._ready), np.inf), list[_Places]()
        after_s[-1] = 0.0
        fewer_s, active = after_s, np.array([len(self._ready) - 1])
        while active.size:
            before = 0 if number is None else number - 1 - len(ends_of)  # messages before this one
            after_s, ends = self._one_before(after_s, active, deadline_s, slow_deadline_s, before * self.launch_s)
            ends_of.append(ends)
            if np.isfinite(after_s[0]) and number in (None, len(ends_of)):
                return trace_cuts(ends_of)
            if number == len(ends_of):
                return None
            left_s = self._left(deadline_s, slow_deadline_s, before - 1 if number else None)
            (active,) = np.nonzero((after_s <= left_s) & (after_s < (fewer_s if number is None else np.inf)))
            fewer_s = np.minimum(fewer_s, after_s)
        return None

    def _left(self, deadline_s: float, slow_deadline_s: float, last: int | None) -> Floats:
        """Return what messages before every cut leave to those after it, by the round of the last; None: of any."""
        if last is None:
            earliest_s: Floats = np.minimum.reduce([self._begin(), *self._rounds_s])
            return deadline_s - earliest_s + ROUNDING * deadline_s
        left_s = np.minimum(deadline_s - self._rounds_s[last], (slow_deadline_s - self._slow_rounds_s[last]) / SLOWER)
        return np.asarray(left_s + ROUNDING * deadline_s, dtype=np.float64)

    def _one_before(
        self, after_s: Floats, ends: _Places, deadline_s: float, slow_deadline_s: float, lag_s: float
    ) -> tuple[Floats, _Places]:
        """Return for every cut the least time of all messages after it, with one more before some, and its end."""
        reached_s, ends_of = np.full(len(self._ready), np.inf), np.zeros(len(self._ready), dtype=np.intp)
        rows = np.arange(len(self._ready))
        for some in self._parts(ends):
            message_s = self._message_s(rows, some) if self._held is None else self._held[:, some]
            together_s = message_s + after_s[some]
            ready_s = self._ready[some] + lag_s + self._taken_s[:, np.newaxis]
            room_s = np.minimum(deadline_s - ready_s, (slow_deadline_s - ready_s) / SLOWER)
            together_s[together_s > room_s] = np.inf
            best = together_s.argmin(axis=1)
            best_s = together_s[rows, best]
            ends_of = np.where(best_s < reached_s, some[best], ends_of)
            reached_s = np.minimum(reached_s, best_s)
        return reached_s, ends_of

    def _parts(self, cuts: _Places) -> Iterator[_Places]:
        """Split cuts so that no table over all others is too large."""
        step = max(1, MOST_HELD // len(self._ready))
        for start in range(0, len(cuts), step):
            yield cuts[start : start + step]

    def _message_s(self, starts: _Places, ends: _Places | None = None) -> Floats:
        """Return what messages between cuts take; infinite where they would be empty."""
        ends = np.arange(len(self._ready)) if ends is None else ends
        sizes = self._prefix[ends] - self._prefix[starts][:, np.newaxis]
        message_s = np.asarray(self._times(np.maximum(sizes, 0)), dtype=np.float64)
        message_s[ends <= starts[:, np.newaxis]] = np.inf
        return message_s


def _least_per_byte_s(cost: Cost, total: int) -> float:
    """Return a slope so that a message of so many bytes or fewer never takes less than that of none and the slope."""
    if isinstance(cost, LinearCost):
        return cost.per_byte_s
    if isinstance(cost, CheaperCost):
        return min(_least_per_byte_s(cost.full, total), _least_per_byte_s(cost.low, total))
    if not isinstance(cost, PiecewiseCost) or not total:
        return 0.0
    sizes = [size for size, _ in cost.points if 0 < size < total]
    return min((cost(size) - cost(0)) / size for size in [*sizes, total])
