"""The search that `plan_wire` runs: over cuts of a row of gradients, and over the precision of every message.

[Note: the front], [Note: the price of a second] and [Note: the shortest step] are in ``wire.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import full_precision_cost, low_precision_cost
from mgwfbp.planners.slack import ROUNDING, Floats, vectorized
from mgwfbp.trace import ModelTrace

__all__ = ["Found", "Row"]

# How many prices of a second are tried, and at how many moments for every cut; at more of them where a step's length is
# wanted, of which a bound must be nearer than of bytes.
PRICES, GRID, FINE_GRID = 4, 32, 256
# So many states are compared with one another at once, each with those that come earlier.
BLOCK = 256
EARLIER = np.triu(np.ones((BLOCK, BLOCK), dtype=np.bool_), k=1)

_Ints = NDArray[np.int64]
_Places = NDArray[np.intp]
_Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that meets the deadline: where messages begin and end, and which are in low precision."""

    cuts: tuple[int, ...]
    is_low: tuple[bool, ...]
    amount: float  # of what is to be little: bytes in low precision, or seconds of the step
    bound: float = -np.inf  # no plan that meets the deadline has less, unless this one has

    @property
    def sizes(self) -> list[int]:
        """How many gradients each message carries."""
        return [end - start for start, end in pairwise(self.cuts)]


class _States(NamedTuple):
    """Ways to have sent the gradients before a cut, one place in every array for each."""

    free_s: Floats  # when the link is free
    low_bytes: _Ints
    messages: _Ints  # how many so far
    low_messages: _Ints  # and in low precision
    parent: _Ints  # place of the state before the last message, among all states there are
    is_low: _Marks  # whether that message is in low precision

    @classmethod
    def together(cls, parts: "Sequence[_States]") -> "_States":
        columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return cls(*columns)

    def at(self, places: _Places | _Marks | slice) -> "_States":
        columns: list[Any] = [column[places] for column in self]
        return _States(*columns)


class Row:
    """Gradients in a row, what messages of them cost in both precisions, and a deadline.

    ``wants_bytes``: the plan with the fewest bytes in low precision is searched for, else one with the shortest step.
    """

    def __init__(self, trace: ModelTrace, cost: Cost, deadline_s: float, *, wants_bytes: bool) -> None:
        sizes = [layer.grad_bytes for layer in trace.layers]
        self._wants_bytes, self._deadline_s = wants_bytes, deadline_s
        self._grid = GRID if wants_bytes else FINE_GRID
        self._unit = gcd(*sizes) or 1  # all sums of sizes are multiples of it
        self._ready = np.array([0.0, *trace.ready_s])
        self._prefix = np.array(list(accumulate(sizes, initial=0)), dtype=np.int64)
        kinds, total = (full_precision_cost(cost), low_precision_cost(cost)), int(self._prefix[-1])
        self._times = vectorized(kinds[0]), vectorized(kinds[1])
        self._launch_s = np.array([taken_by(kind, 0) for kind in kinds])  # h of both
        self._per_byte_s = np.array([float(getattr(kind, "taken_per_byte_s", 0.0)) for kind in kinds])  # g of both
        self._is_alike = bool(np.ptp(self._launch_s) == 0 and np.ptp(self._per_byte_s) == 0)
        self._least_taken_s = self._per_byte_s.min() * self._prefix  # before every cut, by messages before it
        most_taken_s = self._launch_s.max() * len(sizes) + self._per_byte_s.max() * total
        self._rounding_s = ROUNDING * (deadline_s + most_taken_s)
        self._prices = self._find_prices() if wants_bytes else np.ones(1)
        self._latest_s = self._go_back()
        # A grid of times for every cut, on the clock that stops, and what is to be paid from each of them on.
        self._first_s = np.append(self._ready[1:], self._ready[-1] - max(taken_by(kind, total) for kind in kinds))
        length_s = self._latest_s - self._least_taken_s - self._first_s
        self._step_s = np.maximum(length_s, ROUNDING * deadline_s or 1.0) / (self._grid - 1)
        self._paid = np.array([self._pay(price) for price in self._prices])

    def _find_prices(self) -> Floats:
        """Return bytes in low precision for each second that they save, for messages of many sizes.

        On the link; and of the computation, where messages in low precision take less from it.
        """
        sizes = np.unique(np.geomspace(1, max(1, int(self._prefix[-1])), 200).astype(np.int64))
        taken_s = [launch_s + rate * sizes for launch_s, rate in zip(self._launch_s, self._per_byte_s, strict=True)]
        prices = []
        for saved_s in (self._times[0](sizes) - self._times[1](sizes), taken_s[0] - taken_s[1]):
            rates = np.log(sizes[saved_s > 0] / saved_s[saved_s > 0])
            rates = np.unique(rates.round(6))  # on a straight line all are the same but for rounding
            prices.append(np.exp(rates[:: max(1, -(-len(rates) // PRICES))]))
        return np.concatenate(prices)

    def _go_back(self) -> Floats:
        """Return X: for every cut the latest end of the link before it from which the deadline can be met."""
        latest_s = np.full(len(self._ready), -np.inf)
        latest_s[-1] = self._deadline_s
        for cut in range(len(self._ready) - 2, -1, -1):
            sizes = self._prefix[cut + 1 :] - self._prefix[cut]
            starts_s = latest_s[cut + 1 :] - np.minimum(*(times(sizes) for times in self._times))
            starts_s[self._ready[cut + 1 :] + self._least_taken_s[cut] > starts_s] = -np.inf
            latest_s[cut] = starts_s.max()
        latest_s[:-1] += ROUNDING * self._deadline_s
        return latest_s

    def _pay(self, price: float) -> Floats:
        """Return V of [Note: the price of a second] for every cut and every moment of its grid."""
        last = len(self._ready) - 1
        paid = np.full((last + 1, self._grid), np.inf)
        grid_s = self._first_s[:, np.newaxis] + self._step_s[:, np.newaxis] * np.arange(self._grid)
        paid[last] = price * (grid_s[last] - (self._deadline_s if self._wants_bytes else 0.0))
        for cut in range(last - 1, -1, -1):
            for is_low, times in enumerate(self._times):
                sizes = self._prefix[cut + 1 :] - self._prefix[cut]
                message_s = times(sizes)
                in_time = self._ready[cut + 1 :] + self._least_taken_s[cut] + message_s <= self._latest_s[cut + 1 :]
                (ends,) = np.nonzero(in_time)
                if ends.size:
                    taken_s = self._launch_s[is_low] + self._per_byte_s[is_low] * sizes[ends]
                    ready_s = self._ready[ends + cut + 1]
                    ends_s = np.maximum(grid_s[cut], ready_s[:, np.newaxis]) + (message_s[ends] - taken_s)[:, None]
                    after = self._between(paid, price, (ends + cut + 1)[:, np.newaxis], ends_s)
                    after += (is_low * self._wants_bytes * sizes[ends] + price * taken_s)[:, np.newaxis]
                    np.minimum(paid[cut], after.min(axis=0), out=paid[cut])
        return paid

    def _between(self, paid: Floats, price: float, cuts: _Places | int, clock_s: Floats) -> Floats:
        """Return no more than V between moments of the grid: it never falls, nor rises faster than the price."""
        steps = np.maximum(clock_s - self._first_s[cuts], 0.0) / self._step_s[cuts]
        place = np.minimum(steps, self._grid - 2).astype(np.intp)
        back_s = (place + 1 - steps) * self._step_s[cuts]
        return np.asarray(np.maximum(paid[cuts, place], paid[cuts, place + 1] - price * back_s), dtype=np.float64)

    def search(self, width: int, known: Found) -> Found:
        """Return the plan with the least of what is wanted, if no cut has more states than ``width``.

        Those that need more than ``known`` has are left out.
        """
        nothing = np.zeros(1, dtype=np.int64)
        cuts = [_States(np.zeros(1), nothing, nothing, nothing, nothing, np.zeros(1, dtype=np.bool_))]
        places, bound = [0, 1], np.inf  # where the states of each cut begin among all
        for cut in range(1, len(self._ready)):
            states = self._reached(cuts, places, cut, known.amount)
            needed = self._needed(states, cut)
            states, needed = states.at(needed <= known.amount), needed[needed <= known.amount]
            front = self._front(states, cut)
            states, needed = states.at(front), needed[front]
            if needed.size > width:
                order = np.argsort(needed, kind="stable")
                bound = min(bound, float(needed[order[width]]))
                states = states.at(np.sort(order[:width]))
            cuts.append(states)
            places.append(places[-1] + len(states.free_s))
        last = cuts[-1]
        amounts = last.low_bytes if self._wants_bytes else last.free_s
        if not amounts.size or amounts.min() > known.amount:
            return Found(known.cuts, known.is_low, known.amount, bound)
        best = np.lexsort((last.messages, last.free_s, amounts))[0]
        ends, is_low, place = list[int](), list[bool](), places[-2] + int(best)
        while place:
            cut = int(np.searchsorted(places, place, side="right")) - 1
            states, place = cuts[cut], place - places[cut]
            ends.append(cut)
            is_low.append(bool(states.is_low[place]))
            place = int(states.parent[place])
        return Found((0, *ends[::-1]), tuple(is_low[::-1]), amounts[best].item(), bound)

    def _taken_by_states_s(self, states: _States, start: _Ints | _Places | int) -> Floats:
        """Return what the messages of states before a cut have taken from the computation."""
        full_bytes, full_messages = self._prefix[start] - states.low_bytes, states.messages - states.low_messages
        taken_s = self._launch_s[0] * full_messages + self._launch_s[1] * states.low_messages
        taken_s += self._per_byte_s[0] * full_bytes + self._per_byte_s[1] * states.low_bytes
        return np.asarray(taken_s, dtype=np.float64)

    def _reached(self, cuts: list[_States], places: list[int], end: int, most: float) -> _States:
        """Return what one message that ends at a cut makes of the states before it, if it may meet the deadline."""
        found = [cuts[0].at(slice(0))]
        sizes = self._prefix[end] - self._prefix[:end]
        for is_low, times in enumerate(self._times):
            message_s = times(sizes)
            in_time = self._ready[end] + self._least_taken_s[:end] + message_s <= self._latest_s[end]
            first = int(in_time.argmax())  # or 0 where none is, and then no state is kept below
            before = _States.together(cuts[first:])
            start = np.repeat(np.arange(first, end), np.diff(places[first:]))
            lag_s = self._taken_by_states_s(before, start)
            free_s = np.maximum(before.free_s, self._ready[end] + lag_s) + message_s[start]
            low_bytes = before.low_bytes + is_low * sizes[start]
            may_be = free_s <= (self._latest_s[end] if self._wants_bytes else min(self._latest_s[end], most))
            (kept,) = np.nonzero(may_be & (low_bytes <= most) if self._wants_bytes else may_be)
            counts = before.messages[kept] + 1, before.low_messages[kept] + is_low
            marks = np.full(kept.size, bool(is_low))
            found.append(_States(free_s[kept], low_bytes[kept], *counts, kept + places[first], marks))
        states = _States.together(found)
        if end == len(self._ready) - 1:
            return states
        next_s = self._ready[end + 1] + self._taken_by_states_s(states, end)
        return states._replace(free_s=np.maximum(states.free_s, next_s))

    def _needed(self, states: _States, cut: int) -> Floats:
        """Return how much of what is wanted every state ends with at least, [Note: the price of a second]."""
        taken_s = self._taken_by_states_s(states, cut)
        clock_s = states.free_s - taken_s
        least = np.zeros(len(clock_s))
        for price, paid in zip(self._prices, self._paid, strict=True):
            behind = self._between(paid, price, cut, clock_s) + price * (taken_s - self._rounding_s)
            np.maximum(least, behind, out=least)
        if not self._wants_bytes:
            return least
        units = np.ceil(np.minimum(least, 2.0 * self._prefix[-1]) / self._unit)
        return np.asarray(states.low_bytes + units * self._unit, dtype=np.float64)

    def _front(self, states: _States, cut: int) -> _Places:
        """Return the places of states that no other is ahead of, [Note: the front]."""
        free_s, messages = states.free_s, states.messages
        low_bytes = states.low_bytes if self._wants_bytes else np.zeros_like(states.low_bytes)
        if not self._is_alike:
            return _ahead(free_s, low_bytes, self._taken_by_states_s(states, cut), messages)
        fewer = np.array([], dtype=np.intp)  # the front of states with no more messages
        kept = [fewer]
        for number in np.unique(messages).tolist():
            some = np.concatenate([fewer, np.flatnonzero(messages == number)])
            order = some[np.lexsort((messages[some], low_bytes[some], free_s[some]))]
            fewer = order[_falls(low_bytes[order])]
            kept.append(fewer[messages[fewer] == number])
        return np.concatenate(kept)


def _ahead(free_s: Floats, low_bytes: _Ints, taken_s: Floats, messages: _Ints) -> _Places:
    """Return the places of all for which no other is smaller or equal in all of the first three.

    Of two that are the same in these, one with fewer messages is kept. They come in the order of what was taken: so one
    is left out if another of its block, or one of the blocks before, is free no later and has no more bytes.
    """
    order = np.lexsort((messages, low_bytes, free_s, taken_s))
    stairs = np.array([], dtype=np.intp)  # of the blocks before, by when they are free: those with ever fewer bytes
    kept = [stairs]
    for start in range(0, order.size, BLOCK):
        some = order[start : start + BLOCK]
        if stairs.size:
            step = np.searchsorted(free_s[stairs], free_s[some], side="right") - 1
            some = some[(step < 0) | (low_bytes[stairs[step]] > low_bytes[some])]
        if not some.size:
            continue
        free, low = free_s[some], low_bytes[some]
        is_behind = (free[:, np.newaxis] <= free) & (low[:, np.newaxis] <= low) & EARLIER[: some.size, : some.size]
        some = some[~is_behind.any(axis=0)]
        kept.append(some)
        both = np.concatenate([stairs, some])
        both = both[np.lexsort((low_bytes[both], free_s[both]))]
        stairs = both[_falls(low_bytes[both])]
    return np.concatenate(kept)


def _falls(numbers: _Ints) -> _Marks:
    """Mark the numbers that are below all before them.

    >>> _falls(np.array([3, 3, 1, 2])).tolist()
    [True, False, True, False]
    """
    least = np.minimum.accumulate(numbers)
    return np.append(np.ones(min(1, len(numbers)), dtype=np.bool_), least[1:] < least[:-1])
