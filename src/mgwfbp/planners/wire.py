"""Which messages travel in low precision: as few bytes of gradients as a step that is nearly the shortest needs.

[Note: the front]
A message of gradients i+1..j, behind n others, ends at

    F' = max(F, r_j + h n + g P_i) + T(P_j - P_i)        or with T_low in the place of T

Of what came before it, it is enough to know the end F of the link, the bytes W in low precision, and n. Of two states
at a cut one is dropped that is smaller than the other in none of the three: whatever follows both, the other stays
ahead. F is lifted to the moment at which the next gradient is ready, since nothing starts before it.

What remains is a front, and it can be exponentially long: this is a knapsack. So states are dropped

1. that no messages can complete by the deadline D: F > X(i), the latest end at cut i from which the cheaper of both
   precisions for every message still meets D;
2. that need more bytes in low precision than a plan already found: W + B above it, [Note: the price of a second];
3. if more are left than `WIDTH`, those with the largest W + B. The least of these is a bound: no plan has fewer bytes
   in low precision than it, or than the plan that was found.

[Note: the price of a second]
Let a second cost so many bytes, lambda, and let V(i, G) be the least that the messages after cut i cost together, the
end of the step being paid for from D on. On the clock that stops ([Note: a clock that stops] in ``counted.py``), where
G = F - h n - g P_i and T' = T - h - g m,

    V(i, G) = min over j > i and both T of  [m if low] + lambda h + V(j, max(G, r_j) + T'(m)),    m = P_j - P_i
    V(L, G) = lambda (G + g P_L - D)

A plan that ends by D pays nothing or less for its end, so a state with n messages has V(i, G) + lambda h n bytes in low
precision or more before it. V is kept for a grid of G. Between two places of it V is at least that of the earlier, and
at least that of the later less lambda for every second between: a link that is free later ends no earlier, and later by
no more. The bytes that are needed, B, are the largest of these for several lambda. That a gap appears in which the link
waits for gradients does not weaken it, nor do launches.

docs/optimality.md has the proofs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import cheaper_cost, full_precision_cost, low_precision_cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import SHORT_WIRES, WIRES, MergePlan
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.slack import ROUNDING, TIE, Floats, vectorized
from mgwfbp.record import check_real
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = ["DEFAULT_TOLERANCE", "plan_wire", "wire_planner_name"]

# Which part longer than the shortest the step may be.
DEFAULT_TOLERANCE = 0.01

# States kept for every cut: to find some plan, and then the best; of models with many gradients fewer, so that no more
# than `MOST_REACHED` messages are tried from them. More of them are seldom needed, and then gain some hundred bytes.
NARROW, WIDTH, MOST_REACHED = 16, 1024, 2**27
# How many prices of a second are tried, and at how many moments for every cut.
PRICES, GRID = 4, 32

_Ints = NDArray[np.int64]
_Places = NDArray[np.intp]


def wire_planner_name(wire: str) -> str:
    """Return what tables call the planner whose messages may travel in this precision.

    >>> wire_planner_name("bfloat16")
    'optimal+bf16'
    """
    if wire not in WIRES:
        raise PlanError(f"wire is {quote(wire)}, expected one of {', '.join(WIRES)}")
    return f"optimal+{SHORT_WIRES[wire]}"


def plan_wire(
    trace: ModelTrace, cost: Cost, wire: str = "bfloat16", *, tolerance: float = DEFAULT_TOLERANCE
) -> MergePlan:
    """Find the plan with the fewest bytes in low precision whose step is nearly as short as any.

    C is the shortest step over all partitions into neighbours with any of the messages in low precision. Of all plans
    whose step is at most (1 + tolerance) C (and one part in 10^12) the one with the fewest bytes of gradients in low
    precision; of those one with the shortest step, and then the fewest messages. If it needs none, it is
    `plan_optimal`'s.

    ``plan.predicted`` holds ``low_bytes``, its bytes of gradients in low precision, and ``low_bytes_bound``: no plan
    within the tolerance has fewer. Where the two are equal, the plan is exact.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 4) for name in "dcba"))
    >>> plan_wire(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.5), tolerance=0.1)
    MergePlan('toy' by 'optimal+bf16': 4 gradients in 2 messages, 1+3, 1 of them in bfloat16)

    Args:
        trace: when each gradient is ready.
        cost: what a message takes; in low precision as `low_precision_cost` has it.
        wire: the low precision, one of `WIRES`.
        tolerance: which part longer than the shortest the step may be.

    Raises:
        PlanError: where there is no such precision, or the tolerance is no number of 0 or more.
        CostError: where the cost gives no numbers that can be planned with.
    """
    planner = wire_planner_name(wire)
    tolerance = check_real(tolerance, "tolerance", PlanError)
    either = cheaper_cost(cost)
    fastest = plan_optimal(trace, either)
    deadline_s = (1 + tolerance) * predict(trace, either, fastest).iteration_s * TIE
    plain = plan_optimal(trace, cost)
    if predict(trace, cost, plain).iteration_s <= deadline_s:
        return replace(plain, planner=planner, predicted={"low_bytes": 0, "low_bytes_bound": 0})
    row = _Row(trace, cost, deadline_s)
    found = row.search(NARROW, row.fastest(fastest.group_sizes))
    found = row.search(max(NARROW, min(WIDTH, MOST_REACHED // len(trace.layers) ** 2)), found)
    sizes = [end - start for start, end in pairwise(found.cuts)]
    return replace(
        MergePlan.of_sizes(trace, sizes, planner=planner),
        wire=tuple(wire if low else "" for low in found.is_low),
        predicted={"low_bytes": found.low_bytes, "low_bytes_bound": int(min(found.low_bytes, found.bound))},
    )


class _Found(NamedTuple):
    """A plan that meets the deadline: where messages begin and end, and which are in low precision."""

    cuts: list[int]
    is_low: list[bool]
    low_bytes: int
    bound: float  # no plan that meets it has fewer bytes in low precision, unless this one has


class _States(NamedTuple):
    """Ways to have sent the gradients before a cut, one place in every array for each."""

    free_s: Floats  # when the link is free
    low_bytes: _Ints
    messages: _Ints  # how many so far
    parent: _Ints  # place of the state before the last message, among all states there are
    is_low: NDArray[np.bool_]  # whether that message is in low precision

    @classmethod
    def together(cls, parts: "Sequence[_States]") -> "_States":
        columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return cls(*columns)

    def at(self, places: _Places | NDArray[np.bool_] | slice) -> "_States":
        columns: list[Any] = [column[places] for column in self]
        return _States(*columns)


class _Row:
    """Gradients in a row, what messages of them cost in both precisions, and a deadline."""

    def __init__(self, trace: ModelTrace, cost: Cost, deadline_s: float) -> None:
        sizes = [layer.grad_bytes for layer in trace.layers]
        self._unit = gcd(*sizes) or 1  # all sums of sizes are multiples of it
        self._ready = np.array([0.0, *trace.ready_s])
        self._prefix = np.array(list(accumulate(sizes, initial=0)), dtype=np.int64)
        self._times = vectorized(full_precision_cost(cost)), vectorized(low_precision_cost(cost))
        self._launch_s = taken_by(cost, 0)  # h
        self._taken_s = np.array([taken_by(cost, size) - self._launch_s for size in self._prefix.tolist()])  # g P
        self._deadline_s = deadline_s
        self._prices = self._find_prices()
        self._latest_s = self._go_back()
        # A grid of times for every cut, on the clock that stops, and what is to be paid from each of them on.
        self._first_s = np.append(self._ready[1:], self._ready[-1] - taken_by(cost, int(self._prefix[-1])))
        length_s = self._latest_s - self._taken_s - self._first_s
        self._step_s = np.maximum(length_s, ROUNDING * deadline_s or 1.0) / (GRID - 1)
        self._paid = np.array([self._pay(price) for price in self._prices])

    def _find_prices(self) -> Floats:
        """Return bytes in low precision for each second that they save, for messages of many sizes."""
        sizes = np.unique(np.geomspace(1, max(1, int(self._prefix[-1])), 200).astype(np.int64))
        saved_s = self._times[0](sizes) - self._times[1](sizes)
        rates = np.log(sizes[saved_s > 0] / saved_s[saved_s > 0])
        rates = np.unique(rates.round(6))  # on a straight line all are the same but for rounding
        return np.asarray(np.exp(rates[:: max(1, -(-len(rates) // PRICES))]), dtype=np.float64)

    def _go_back(self) -> Floats:
        """Return X: for every cut the latest end of the link before it from which the deadline can be met."""
        latest_s = np.full(len(self._ready), -np.inf)
        latest_s[-1] = self._deadline_s
        for cut in range(len(self._ready) - 2, -1, -1):
            sizes = self._prefix[cut + 1 :] - self._prefix[cut]
            starts_s = latest_s[cut + 1 :] - np.minimum(*(times(sizes) for times in self._times))
            starts_s[self._ready[cut + 1 :] + self._taken_s[cut] > starts_s] = -np.inf
            latest_s[cut] = starts_s.max()
        latest_s[:-1] += ROUNDING * self._deadline_s
        return latest_s

    def _pay(self, price: float) -> Floats:
        """Return V of [Note: the price of a second] for every cut and every moment of its grid."""
        last = len(self._ready) - 1
        paid = np.full((last + 1, GRID), np.inf)
        grid_s = self._first_s[:, np.newaxis] + self._step_s[:, np.newaxis] * np.arange(GRID)
        paid[last] = price * (grid_s[last] + self._taken_s[last] - self._deadline_s)
        for cut in range(last - 1, -1, -1):
            for is_low, times in enumerate(self._times):
                sizes = self._prefix[cut + 1 :] - self._prefix[cut]
                message_s = times(sizes)
                in_time = self._ready[cut + 1 :] + self._taken_s[cut] + message_s <= self._latest_s[cut + 1 :]
                (ends,) = np.nonzero(in_time)
                if ends.size:
                    clock_s = message_s[ends] - self._launch_s - (self._taken_s[ends + cut + 1] - self._taken_s[cut])
                    ready_s = self._ready[ends + cut + 1]
                    ends_s = np.maximum(grid_s[cut], ready_s[:, np.newaxis]) + clock_s[:, np.newaxis]
                    after = self._between(paid, price, (ends + cut + 1)[:, np.newaxis], ends_s)
                    after += (is_low * sizes[ends])[:, np.newaxis] + price * self._launch_s
                    np.minimum(paid[cut], after.min(axis=0), out=paid[cut])
        return paid

    def _between(self, paid: Floats, price: float, cuts: _Places | int, clock_s: Floats) -> Floats:
        """Return no more than V between moments of the grid: it never falls, nor rises faster than the price."""
        steps = np.maximum(clock_s - self._first_s[cuts], 0.0) / self._step_s[cuts]
        place = np.minimum(steps, GRID - 2).astype(np.intp)
        back_s = (place + 1 - steps) * self._step_s[cuts]
        return np.asarray(np.maximum(paid[cuts, place], paid[cuts, place + 1] - price * back_s), dtype=np.float64)

    def fastest(self, sizes: tuple[int, ...]) -> _Found:
        """Return messages of so many gradients, each in the cheaper precision."""
        cuts = list(accumulate(sizes, initial=0))
        message_bytes = np.diff(self._prefix[cuts])
        full_s, low_s = (times(message_bytes) for times in self._times)
        is_low = low_s < full_s
        return _Found(cuts, is_low.tolist(), int(message_bytes[is_low].sum()), -np.inf)

    def search(self, width: int, known: _Found) -> _Found:
        """Return the plan with the fewest bytes in low precision, if no cut has more states than ``width``.

        Those that need more than ``known`` has are left out.
        """
        nothing = np.zeros(1, dtype=np.int64)
        cuts = [_States(np.zeros(1), nothing, nothing, nothing, np.zeros(1, dtype=np.bool_))]
        places, bound = [0, 1], np.inf  # where the states of each cut begin among all
        for cut in range(1, len(self._ready)):
            states = self._reached(cuts, places, cut, known.low_bytes)
            needed = self._needed(states, cut)
            states, needed = states.at(needed <= known.low_bytes), needed[needed <= known.low_bytes]
            front = self._front(states)
            states, needed = states.at(front), needed[front]
            if needed.size > width:
                order = np.argsort(needed, kind="stable")
                bound = min(bound, float(needed[order[width]]))
                states = states.at(np.sort(order[:width]))
            cuts.append(states)
            places.append(places[-1] + len(states.free_s))
        last = cuts[-1]
        if not last.free_s.size:
            return known._replace(bound=bound)
        best = np.lexsort((last.messages, last.free_s, last.low_bytes))[0]
        ends, is_low, place = list[int](), list[bool](), places[-2] + int(best)
        while place:
            cut = int(np.searchsorted(places, place, side="right")) - 1
            states, place = cuts[cut], place - places[cut]
            ends.append(cut)
            is_low.append(bool(states.is_low[place]))
            place = int(states.parent[place])
        return _Found([0, *ends[::-1]], is_low[::-1], int(last.low_bytes[best]), bound)

    def _reached(self, cuts: list[_States], places: list[int], end: int, most: int) -> _States:
        """Return what one message that ends at a cut makes of the states before it, if it may meet the deadline."""
        found = [cuts[0].at(slice(0))]
        sizes = self._prefix[end] - self._prefix[:end]
        for is_low, times in enumerate(self._times):
            message_s = times(sizes)
            in_time = self._ready[end] + self._taken_s[:end] + message_s <= self._latest_s[end]
            first = int(in_time.argmax())  # or 0 where none is, and then no state is kept below
            before = _States.together(cuts[first:])
            start = np.repeat(np.arange(first, end), np.diff(places[first:]))
            lag_s = self._launch_s * before.messages + self._taken_s[start]
            free_s = np.maximum(before.free_s, self._ready[end] + lag_s) + message_s[start]
            low_bytes = before.low_bytes + is_low * sizes[start]
            (kept,) = np.nonzero((free_s <= self._latest_s[end]) & (low_bytes <= most))
            marks, messages = np.full(kept.size, bool(is_low)), before.messages[kept] + 1
            found.append(_States(free_s[kept], low_bytes[kept], messages, kept + places[first], marks))
        states = _States.together(found)
        if end == len(self._ready) - 1:
            return states
        next_s = self._ready[end + 1] + self._launch_s * states.messages + self._taken_s[end]
        return states._replace(free_s=np.maximum(states.free_s, next_s))

    def _needed(self, states: _States, cut: int) -> _Ints:
        """Return how many bytes in low precision every state ends with at least, [Note: the price of a second]."""
        launches_s = self._launch_s * states.messages
        clock_s = states.free_s - launches_s - self._taken_s[cut]
        least = np.zeros(len(clock_s))
        for price, paid in zip(self._prices, self._paid, strict=True):
            rounding = ROUNDING * price * (self._deadline_s + self._launch_s * len(self._ready) + self._taken_s[-1])
            np.maximum(least, self._between(paid, price, cut, clock_s) + price * launches_s - rounding, out=least)
        units = np.ceil(np.minimum(least, 2 * self._prefix[-1]) / self._unit).astype(np.int64)
        return np.asarray(states.low_bytes + units * self._unit, dtype=np.int64)

    def _front(self, states: _States) -> _Places:
        """Return the places of states that no other is ahead of, [Note: the front]."""
        free_s, low_bytes, messages = states.free_s, states.low_bytes, states.messages
        fewer = np.array([], dtype=np.intp)  # the front of states with no more messages
        kept = [fewer]
        for number in np.unique(messages).tolist():
            some = np.concatenate([fewer, np.flatnonzero(messages == number)])
            order = some[np.lexsort((messages[some], low_bytes[some], free_s[some]))]
            least = np.minimum.accumulate(low_bytes[order])
            fewer = order[np.append(True, least[1:] < least[:-1])]
            kept.append(fewer[messages[fewer] == number])
        return np.concatenate(kept)
