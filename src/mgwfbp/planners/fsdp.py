"""The planner for FSDP2: which modules are gathered together, what is resharded, how far ahead; within a memory limit.

[Note: how plans for FSDP2 are found]
Resharding only adds gathers, so what a limit does not ask for is kept. Of models with no more than `EXHAUSTED` units
every plan is tried: all runs of units, every choice of what is resharded, `PREFETCHES` in both directions. Of others a
search starts from groups of many sizes, with as many of the first groups resharded as it takes to fit (the last ones
are needed first in the backward pass), and goes on from the best of them to the best neighbour (two groups merged, one
cut, a border moved, a group kept or resharded) until none is better. What it finds need not be the best; how far it is
from a time that no plan undercuts, `fsdp_lower_bound_s`, is in what it predicts.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.fsdp import ROOT, STATES, FsdpPlan, FsdpStep, Group, fsdp_lower_bound_s, lay_out, units_of
from mgwfbp.planners.slack import TIE
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, quote

__all__ = ["plan_fsdp"]

PREFETCHES = (1, 2, 3)
EXHAUSTED = 6
# Sizes of groups that the search starts from, each so many times the one before; and how many starts it goes on from.
FACTOR, STARTS = 1.5, 3
# So many plans are tried at most.
MOST_TRIED = 6000


class _Choice(NamedTuple):
    """A plan by numbers: where groups end among units, what is resharded, how far ahead."""

    ends: tuple[int, ...]
    reshard: tuple[bool, ...]
    forward_prefetch: int
    backward_prefetch: int


def plan_fsdp(trace: ModelTrace, cost: Cost, *, memory_limit: int | None = None, states: int = STATES) -> FsdpPlan:
    """Find groups, prefetching and resharding with the shortest step that fits, [Note: how plans for FSDP2 are found].

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 4.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "dcba"))
    >>> plan_fsdp(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.1))
    FsdpPlan('toy': 4 modules in 4 groups, 0 of them resharded, prefetching 1 forward and 1 backward)

    Args:
        trace: what each layer takes in both passes.
        cost: what a reduce-scatter and an all-gather take, as `sharded_cost` has it.
        memory_limit: bytes that a rank may have for parameters, gradients and the optimizer's state; what activations
            need must be taken off before.
        states: how many copies of a parameter's bytes the optimizer keeps.

    Raises:
        PlanError: where no plan fits, with the least that one needs; or where the model has no units.
    """
    search = _Search(trace, cost, memory_limit, states)
    if not search.units:
        raise PlanError(
            f"the parameters of {quote(trace.model)} are in no module whose name is known: expected names such as "
            "layer.0.weight"
        )
    search.check_fits()
    best = search.exhaust() if len(search.units) <= EXHAUSTED else search.climb()
    step = search.step(best)
    groups = step.groups[1:] if search.root else step.groups
    again = sum(size for size, is_gone in zip(search.sizes(best), best.reshard, strict=True) if is_gone)
    bound_s = fsdp_lower_bound_s(trace, cost)
    predicted = {
        "iteration_s": step.iteration_s,
        "exposed_s": step.iteration_s - step.compute_s,
        "lower_bound_s": min(bound_s, step.iteration_s),
        "memory_bytes": step.memory_bytes,
        "gathered_again_bytes": again,
    }
    return FsdpPlan(trace.model, groups, best.reshard, best.forward_prefetch, best.backward_prefetch, predicted)


class _Search:
    """Plans of one model that fit, and which of them is better."""

    def __init__(self, trace: ModelTrace, cost: Cost, limit: int | None, states: int) -> None:
        units = units_of(trace)
        self.root = [Group.of(units[:1], cost)] if units[0].name == ROOT else []
        self.units = units[len(self.root) :]
        self._cost, self._limit, self._states = cost, limit, states
        self._groups: dict[tuple[int, int], Group] = {}
        self._steps: dict[_Choice, FsdpStep] = {}

    def step(self, choice: _Choice) -> FsdpStep:
        """Return what a plan's step is."""
        if choice not in self._steps:
            groups = [*self.root, *map(self._group, (0, *choice.ends), choice.ends)]
            reshard = (*(False for _ in self.root), *choice.reshard)
            workers = self._cost.workers
            self._steps[choice] = lay_out(groups, reshard, *choice[2:], workers, self._states)
        return self._steps[choice]

    def _group(self, start: int, end: int) -> Group:
        if (start, end) not in self._groups:
            self._groups[start, end] = Group.of(self.units[start:end], self._cost)
        return self._groups[start, end]

    def sizes(self, choice: _Choice) -> list[int]:
        """Return the bytes of each group."""
        return [self._group(start, end).num_bytes for start, end in zip((0, *choice.ends), choice.ends, strict=False)]

    def fits(self, choice: _Choice) -> bool:
        """Say whether a plan needs no more memory than there is."""
        return self._limit is None or self.step(choice).memory_bytes <= self._limit

    def check_fits(self) -> None:
        """Raise where nothing fits: larger groups, and groups that are kept or prefetched, only need more."""
        number = len(self.units)
        least = _Choice(tuple(range(1, number + 1)), (True,) * number, 1, 1)
        if self._limit is not None and not self.fits(least):
            needed = format_bytes(self.step(least).memory_bytes)
            raise PlanError(
                f"no plan for {quote(self.units[0].name)} to {quote(self.units[-1].name)} fits into "
                f"{format_bytes(self._limit)}: the least is {needed}, with every module by itself and all resharded"
            )

    def key(self, choice: _Choice) -> tuple[float, float, int, int]:
        """Return what is less for the better plan: the step, then bytes gathered again, groups and prefetching."""
        step_s = self.step(choice).iteration_s
        again = sum(size for size, is_gone in zip(self.sizes(choice), choice.reshard, strict=True) if is_gone)
        return step_s, again, len(choice.ends), choice.forward_prefetch + choice.backward_prefetch

    def exhaust(self) -> _Choice:
        """Return the best of all plans."""
        number, found = len(self.units), list[_Choice]()
        for cuts in product((False, True), repeat=number - 1):
            ends = (*(place for place, is_cut in enumerate(cuts, 1) if is_cut), number)
            kept = [(False,) * len(ends)] if self._limit is None else product((False, True), repeat=len(ends))
            choices = product(kept, PREFETCHES, PREFETCHES)
            found += [one for one in (_Choice(ends, *rest) for rest in choices) if self.fits(one)]
        return self._best(found)

    def _best(self, choices: Sequence[_Choice]) -> _Choice:
        """Return the best; of steps that are equal but for rounding the one that is better otherwise."""
        shortest_s = min(self.step(one).iteration_s for one in choices)
        near = [one for one in choices if self.step(one).iteration_s <= shortest_s * TIE]
        return min(near, key=lambda one: self.key(one)[1:])

    def climb(self) -> _Choice:
        """Return what the search comes to."""
        starts = sorted(set(self._starts()), key=self.key)[:STARTS]
        return self._best([self._climb(start) for start in starts])

    def _starts(self) -> Iterator[_Choice]:
        sizes = [unit.num_bytes for unit in self.units]
        size = float(min(sizes))
        while True:
            ends, filled = list[int](), 0
            for place, one in enumerate(sizes):
                if filled and filled + one > size:
                    ends.append(place)
                    filled = 0
                filled += one
            for prefetch in PREFETCHES:
                if (found := self._made_to_fit((*ends, len(sizes)), prefetch)) is not None:
                    yield found
            if not ends:
                return
            size *= FACTOR

    def _made_to_fit(self, ends: tuple[int, ...], prefetch: int) -> _Choice | None:
        """Return a plan of these groups with as few of the first ones resharded as it takes, if that is enough."""
        number = len(ends)
        choices = (_Choice(ends, (True,) * t + (False,) * (number - t), prefetch, prefetch) for t in range(number + 1))
        return next((one for one in choices if self.fits(one)), None)

    def _climb(self, choice: _Choice) -> _Choice:
        while len(self._steps) < MOST_TRIED:
            better = [one for one in self._neighbours(choice) if self.fits(one)]
            best = min([choice, *better], key=self.key)
            if best == choice:
                break
            choice = best
        return choice

    def _neighbours(self, choice: _Choice) -> Iterator[_Choice]:
        ends, reshard = choice.ends, choice.reshard
        last = len(ends) - 1
        for place in range(last):
            # Merged with the next: kept only if both were.
            merged = (*reshard[:place], reshard[place] or reshard[place + 1], *reshard[place + 2 :])
            yield choice._replace(ends=(*ends[:place], *ends[place + 1 :]), reshard=merged)
            for moved in (ends[place] - 1, ends[place] + 1):
                if (ends[place - 1] if place else 0) < moved < ends[place + 1]:
                    yield choice._replace(ends=(*ends[:place], moved, *ends[place + 1 :]))
        for place, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            for cut in range(start + 1, end):
                twice = (*reshard[:place], reshard[place], *reshard[place:])
                yield choice._replace(ends=(*ends[:place], cut, *ends[place:]), reshard=twice)
            if self._limit is not None:
                yield choice._replace(reshard=(*reshard[:place], not reshard[place], *reshard[place + 1 :]))
        for prefetch in PREFETCHES:
            yield choice._replace(forward_prefetch=prefetch)
            yield choice._replace(backward_prefetch=prefetch)
