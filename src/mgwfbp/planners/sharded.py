"""The planner for a sharded optimizer: reduce-scatters in the backward pass, all-gathers in the next forward pass.

[Note: the mirror]
Let gradient j = 1..L be ready at r_j after the start of the backward pass, and let q_j be what is left of the forward
pass when layer j starts in it: the time of layers j, j-1, .., 1. All messages of the backward pass come before all
gathers. If the last of them ends at F, gathers that are sent in the order of the forward pass let it end at F + G,
where by reading time backwards from that end, with P_j for the bytes of the first j parameters,

    F(j) = min over i < j of  max(F(i), r_j) + T_rs(P_j - P_i)
    G(j) = min over i < j of  max(G(i), q_j) + T_ag(P_j - P_i)

F = F(L), G = G(L): the same programme twice, once of another trace, and each is `plan_optimal`'s. So where groups of
reduce-scatters and of gathers need not be the same, the shortest period of training is F(L) + G(L).

[Note: one grouping]
Where a group may also be all-reduced at once (and is not gathered then), messages and gathers have one grouping:

    sharded:      (F, G) -> (max(F, r_j) + T_rs,  max(G, q_j) + T_ag)
    all-reduced:  (F, G) -> (max(F, r_j) + T_ar,  G)                     period = F(L) + max(G(L), q_L)

A smaller F or G never makes anything longer, so keeping for every cut the pairs that no other is ahead of is exact. It
is NP-hard, and fronts may grow without limit. A pair is dropped if it cannot come below the best plan known so far.
Where a cut has still more pairs than `WIDTH`, they are put into cells of equal length in F, and of every cell the pair
with the least F + G is kept: that gives a plan. A second pass keeps of every cell the least F and the least G, a pair
that is ahead of all in it: that gives a time below which no such plan is.

docs/optimality.md has the proofs.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgwfbp.bounds import sharded_lower_bound_s
from mgwfbp.cost import Cost
from mgwfbp.costs import cheapest_s, full_precision_cost, sharded_cost
from mgwfbp.plan import MergePlan
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.slack import TIE, Floats, vectorized
from mgwfbp.timeline import predict
from mgwfbp.trace import LayerTrace, ModelTrace

__all__ = ["SHARDED", "plan_gathers", "plan_sharded"]

# What tables call the planner.
SHARDED = "sharded"
# Pairs kept for every cut; of models with many gradients fewer, so that no more than `MOST_REACHED` are tried in all.
WIDTH, NARROW, MOST_REACHED = 512, 16, 2**26

_Places = NDArray[np.intp]


def plan_sharded(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Find messages and gathers with the shortest period of training under a sharded optimizer.

    The best of three plans, of equally good ones the first:

    1. all gradients reduce-scattered and all parameters gathered, in groups that need not be the same: exact among all
       groups of neighbours, also where messages take time from the computation;
    2. all gradients all-reduced, `plan_optimal`;
    3. each group sharded or all-reduced, with one grouping for messages and gathers: exact where no cut of the model
       has more than `WIDTH` pairs to keep (it is NP-hard) and messages take nothing from the computation. Where they
       take something, it is found without that and judged with it. Then gathers are grouped anew, if that is better.

    ``plan.predicted`` holds ``all_reduced_bytes``, and ``iteration_bound_s``: none of all these plans has a shorter
    period. Where that is the plan's own, the plan is the best of them.

    >>> from mgwfbp.cost import LinearCost
    >>> trace = ModelTrace("toy", 2.0, tuple(LayerTrace(name, 1.0, 4) for name in "dcba"))
    >>> plan_sharded(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.5))
    MergePlan('toy' by 'sharded': 4 gradients in 3 messages, 1+1+2, all of them reduce-scattered, 2 gathers, 3+1)

    Args:
        trace: when each gradient is ready, and what its layer takes in the forward pass.
        cost: what an all-reduce takes, and its halves as `sharded_cost` has them.

    Raises:
        CostError: where the cost gives no numbers that can be planned with.
    """
    plans = [_plan_apart(trace, cost), replace(plan_optimal(trace, cost), planner=SHARDED)]
    row = _Row(trace, cost)
    known_s = min(row.period_s(plan) for plan in plans)
    found = row.search(known_s, sharded_lower_bound_s(trace, cost))
    if found.plan is not None:
        # Which layers are all-reduced is settled: then gathers need not be grouped as messages are.
        sharded = {name for group in found.plan.gathers for name in group}
        apart = replace(found.plan, gathers=plan_gathers(trace, sharded_cost(cost)[1], sharded))
        plans += [found.plan, apart]
    steps_s = [predict(trace, cost, plan).iteration_s for plan in plans]
    best = next(place for place, step_s in enumerate(steps_s) if step_s <= min(steps_s) * TIE)
    plan, bound_s = plans[best], steps_s[best]
    if found.bound_s * TIE < bound_s:
        bound_s = found.bound_s
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    kept = [group for group, is_sharded in zip(plan.groups, plan.sharded, strict=True) if not is_sharded]
    all_reduced_bytes = sum(size_of[name] for group in kept for name in group)
    return replace(plan, predicted={"all_reduced_bytes": all_reduced_bytes, "iteration_bound_s": bound_s})


def _plan_apart(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Return the best plan that shards all, [Note: the mirror]."""
    reduce_scatter, all_gather = sharded_cost(cost)
    return replace(plan_optimal(trace, reduce_scatter), planner=SHARDED, gathers=plan_gathers(trace, all_gather))


def plan_gathers(
    trace: ModelTrace, all_gather: Cost, sharded: Collection[str] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Find the groups of parameters with which the forward pass ends the earliest, [Note: the mirror].

    Args:
        trace: what each layer takes in the forward pass, and the ready order, whose opposite it has.
        all_gather: what an all-gather of so many bytes of parameters takes.
        sharded: the layers whose parameters are gathered, if not all are.

    Returns:
        Names, in the order in which they are gathered.
    """
    mirrored, left_s = list[LayerTrace](), 0.0
    for layer, forward_s in zip(trace.layers, trace.layer_forward_s, strict=True):
        left_s += forward_s  # of layers that are not gathered, too: they run after the gather of those before them
        if sharded is None or layer.name in sharded:
            mirrored.append(LayerTrace(layer.name, left_s, layer.grad_bytes))
            left_s = 0.0
    if not mirrored:
        return ()
    return _in_forward_order(plan_optimal(ModelTrace(trace.model, 0.0, tuple(mirrored)), all_gather).groups)


def _in_forward_order(groups: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(group[::-1] for group in reversed(groups))


class _Found(NamedTuple):
    """What a search came to."""

    plan: MergePlan | None  # shorter than the one known, if there is any
    bound_s: float  # no plan of one grouping is shorter


class _Front(NamedTuple):
    """Ways to have sent the gradients before a cut, one place in every array for each."""

    reduced_s: Floats  # F
    gathered_s: Floats  # G
    parent: _Places  # the place before the last message, among all places there are
    is_sharded: NDArray[np.bool_]  # that message

    def at(self, places: _Places | NDArray[np.bool_]) -> "_Front":
        columns: list[Any] = [column[places] for column in self]
        return _Front(*columns)


class _Row:
    """Gradients in a row, and what messages of them cost; what these take from the computation is left out."""

    def __init__(self, trace: ModelTrace, cost: Cost) -> None:
        self._trace = trace
        costs = (*sharded_cost(cost), full_precision_cost(cost))
        self._times = [vectorized(one) for one in costs]
        self._ready = np.array([0.0, *accumulate(layer.backward_s for layer in trace.layers)])  # r
        self._left = np.array([0.0, *accumulate(trace.layer_forward_s)])  # q
        self._prefix = np.array([0, *accumulate(layer.grad_bytes for layer in trace.layers)], dtype=np.int64)
        self._bounds = self._find_bounds(costs)

    def _find_bounds(self, costs: Sequence[Cost]) -> tuple[Floats, Floats, Floats]:
        """Return what a period is above F + G, above F and above G at least, for every cut.

        docs/optimality.md: w, B and A.
        """
        rest = self._prefix[-1] - self._prefix
        least = np.array([[cheapest_s(cost, size) for size in rest.tolist()] for cost in costs])
        together_s = np.minimum(least[0] + least[1], least[2])  # the least that the link is busy with the rest
        before_s = np.minimum(least[0], least[2])  # and in the backward pass
        last = len(rest) - 1
        together_s[last] = before_s[last] = 0.0
        above_gathered = np.zeros(last + 1)
        above_gathered[:last] = np.maximum.accumulate((self._ready[1:] + together_s[:-1])[::-1])[::-1]
        above_reduced = before_s + self._left[-1]
        for cut in range(last):
            if rest[cut]:
                share = rest[cut:-1] / rest[cut]  # of the rest: each later gradient and all behind it
                mixed_s = (1 - share) * before_s[cut] + share * together_s[cut] + self._left[cut + 1 :]
                above_reduced[cut] = max(above_reduced[cut], mixed_s.max())
        return together_s, above_reduced, above_gathered

    def period_s(self, plan: MergePlan) -> float:
        """Return the period of a plan of neighbours, messages in ready order and gathers in the opposite one."""
        reduce_scatter, all_gather, all_reduce = self._times
        place_of = {layer.name: place for place, layer in enumerate(self._trace.layers)}

        def ends(groups: Sequence[tuple[str, ...]]) -> list[int]:
            return [0, *(1 + max(place_of[name] for name in group) for group in groups)]

        period_s = gathered_s = 0.0
        for (start, end), is_sharded in zip(pairwise(ends(plan.groups)), plan.sharded, strict=True):
            size = self._prefix[end : end + 1] - self._prefix[start]
            times = reduce_scatter if is_sharded else all_reduce
            period_s = max(period_s, float(self._ready[end])) + float(times(size)[0])
        for start, end in pairwise(ends(plan.gathers[::-1])):
            size = self._prefix[end : end + 1] - self._prefix[start]
            gathered_s = max(gathered_s, float(self._left[end])) + float(all_gather(size)[0])
        return period_s + max(gathered_s, float(self._left[-1]))

    def search(self, known_s: float, least_s: float) -> _Found:
        """Find a plan of one grouping that is shorter than what is known, [Note: one grouping].

        No plan at all is shorter than ``least_s``: whatever is as short is the best.
        """
        width = max(NARROW, min(WIDTH, MOST_REACHED // len(self._ready) ** 2))
        plan, shortest_s, is_exact = None, known_s, False
        # The first pass is quick, and what it finds drops most of what the second would keep.
        for is_bound, kept in ((False, NARROW), (False, width), (True, width)):
            if is_exact or shortest_s <= least_s * TIE:
                break
            better, shortest_s, is_exact = self._pass(kept, shortest_s, is_bound=is_bound)
            plan = better or plan
        return _Found(plan, shortest_s)

    def _pass(self, width: int, known_s: float, *, is_bound: bool) -> tuple[MergePlan | None, float, bool]:
        """Return the best plan below ``known_s``, the shortest period, and whether no cut had more than ``width``."""
        fronts = [_Front(np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.bool_))]
        places, is_exact, last = [0, 1], True, len(self._ready) - 1  # where the pairs of each cut begin among all
        reached = _Reached(fronts[0])
        for cut in range(1, last + 1):
            front = self._front(self._reach(reached, places, cut, known_s), cut)
            if front.parent.size > width:
                is_exact = False
                front = _thinned(front, width, is_bound=is_bound)
            fronts.append(front)
            reached.add(front)
            places.append(places[-1] + front.parent.size)
        periods_s = fronts[last].reduced_s + np.maximum(fronts[last].gathered_s, self._left[last])
        if not periods_s.size:
            return None, known_s, is_exact
        best = int(periods_s.argmin())
        plan = None if is_bound else self._plan(fronts, places, places[last] + best)
        return plan, float(periods_s[best]), is_exact

    def _reach(self, reached: "_Reached", places: list[int], end: int, known_s: float) -> _Front:
        """Return what a message that ends at a cut makes of pairs before it, if that may be below what is known."""
        sizes = self._prefix[end] - self._prefix[:end]
        above_both, above_reduced, above_gathered = (bound[end] for bound in self._bounds)
        ready_s, left_s = self._ready[end], self._left[end]
        lift_s = self._left[min(end + 1, len(self._left) - 1)]
        found = []
        for is_sharded in (True, False):
            message_s = self._times[0 if is_sharded else 2](sizes)
            # The longer a message the later it ends: pairs at cuts before the first of these are of no use.
            in_time = ready_s + message_s + above_reduced < known_s
            first = int(in_time.argmax()) if in_time.any() else end
            begin = places[first]
            start = np.repeat(np.arange(first, end), np.diff(places[first : end + 1]))
            reduced_s = np.maximum(reached.reduced_s[begin : places[end]], ready_s) + message_s[start]
            gathered_s = reached.gathered_s[begin : places[end]]
            if is_sharded:
                gathered_s = np.maximum(gathered_s, left_s) + self._times[1](sizes)[start]
            gathered_s = np.maximum(gathered_s, lift_s)  # no later gather starts before that
            least_s = np.maximum(
                reduced_s + np.maximum(gathered_s + above_both, above_reduced), gathered_s + above_gathered
            )
            (kept,) = np.nonzero(least_s * TIE < known_s)
            marks = np.full(kept.size, is_sharded)
            found.append(_Front(reduced_s[kept], gathered_s[kept], kept + begin, marks))
        return _Front(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _front(self, some: _Front, cut: int) -> _Front:
        """Return the pairs that no other is ahead of, by rising F."""
        if cut + 1 < len(self._ready):  # no later message starts before that
            some = some._replace(reduced_s=np.maximum(some.reduced_s, self._ready[cut + 1]))
        some = some.at(np.lexsort((some.gathered_s, some.reduced_s)))
        least_s = np.minimum.accumulate(some.gathered_s)
        return some.at(np.append(True, least_s[1:] < least_s[:-1])[: least_s.size])

    def _plan(self, fronts: Sequence[_Front], places: Sequence[int], place: int) -> MergePlan:
        ends, kinds = list[int](), list[bool]()
        while place:
            cut = int(np.searchsorted(places, place, side="right")) - 1
            here = place - places[cut]
            ends.append(cut)
            kinds.append(bool(fronts[cut].is_sharded[here]))
            place = int(fronts[cut].parent[here])
        sizes = [end - start for start, end in pairwise([0, *ends[::-1]])]
        plan = MergePlan.of_sizes(self._trace, sizes, planner=SHARDED)
        gathered = [group for group, is_sharded in zip(plan.groups, kinds[::-1], strict=True) if is_sharded]
        return replace(plan, gathers=_in_forward_order(gathered))


class _Reached:
    """F and G of all cuts so far, in two arrays that grow."""

    def __init__(self, front: _Front) -> None:
        self.reduced_s, self.gathered_s, self._size = np.zeros(1024), np.zeros(1024), 0
        self.add(front)

    def add(self, front: _Front) -> None:
        end = self._size + front.reduced_s.size
        if end > self.reduced_s.size:
            self.reduced_s = np.append(self.reduced_s, np.zeros(end))
            self.gathered_s = np.append(self.gathered_s, np.zeros(end))
        self.reduced_s[self._size : end] = front.reduced_s
        self.gathered_s[self._size : end] = front.gathered_s
        self._size = end


def _thinned(front: _Front, width: int, *, is_bound: bool) -> _Front:
    """Return one pair for each of ``width`` cells of equal length in F: the best in it, or one ahead of all in it."""
    reduced_s = front.reduced_s
    step_s = (reduced_s[-1] - reduced_s[0]) / width
    cells = np.minimum(((reduced_s - reduced_s[0]) / step_s).astype(np.intp), width - 1)
    first = np.flatnonzero(np.append(True, cells[1:] > cells[:-1]))
    if is_bound:
        last = np.append(first[1:], cells.size) - 1
        return front.at(first)._replace(gathered_s=front.gathered_s[last])
    order = np.lexsort((reduced_s + front.gathered_s, cells))
    return front.at(order[first])
