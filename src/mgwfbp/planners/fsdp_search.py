"""The search for plans for FSDP2 with a given root's group, [Note: how plans for FSDP2 are found]: `Search`."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

from mgwfbp.cost import Cost
from mgwfbp.fsdp import FsdpPlan, shares_of
from mgwfbp.fsdp_step import FsdpStep, Group, lay_out
from mgwfbp.fsdp_units import ROOT, reaches_of, units_of
from mgwfbp.memory import Precision, Schedule, fsdp_memory_bytes
from mgwfbp.planners.fsdp_least import least_reshard
from mgwfbp.planners.fsdp_pareto import Kept, best_kept
from mgwfbp.planners.slack import TIE
from mgwfbp.trace import ModelTrace

__all__ = ["EXHAUSTED", "PREFETCHES", "Choice", "Found", "Problem", "Search"]

PREFETCHES = (1, 2, 3)
EXHAUSTED = 6
# Sizes of groups that the search starts from, each so many times the one before; and how many starts it goes on from.
FACTOR, STARTS = 1.5, 5
# From the best the search is moved away and starts again: so often, and more often where units are few.
KICKS, KICKED_UNITS = 20, 500
# Groups that trade places in memory are at most so far apart.
NEAR = 6
# So many plans are tried at most, and so many groups laid out.
MOST_TRIED, MOST_LAID_OUT = 6000, 200_000


class Choice(NamedTuple):
    """A plan by numbers: where groups end among units, what is resharded, how far ahead."""

    ends: tuple[int, ...]
    reshard: tuple[bool, ...]
    forward_prefetch: int
    backward_prefetch: int


class Problem(NamedTuple):
    """What there is to plan."""

    trace: ModelTrace
    cost: Cost
    limit: int | None
    precision: Precision
    idle: tuple[str, ...]
    at_root: tuple[str, ...]  # that must be there


class Found(NamedTuple):
    """The best plan of a search."""

    root: tuple[str, ...]  # what is in the root's group
    choice: Choice
    step: FsdpStep
    bound_s: float  # no plan that fits, with such roots as were searched, has a shorter step; 0 where none is known


class Search:
    """Plans of one model that fit, and which of them is better."""

    def __init__(self, problem: Problem, root: tuple[str, ...]) -> None:
        self._problem, self._root_names = problem, root
        units = units_of(problem.trace, root, problem.idle)
        first = units[:1] if units and units[0].name == ROOT else ()
        self.root = [Group.of([unit], problem.cost, problem.precision) for unit in first]
        self.units = units[len(self.root) :]
        self._reaches = reaches_of(self.units)
        self._shares = shares_of(problem.trace, problem.cost, problem.precision, problem.idle)
        self._groups: dict[tuple[int, int], Group] = {}
        self._steps: dict[Choice, FsdpStep] = {}
        self._held: dict[Choice, int] = {}

    def best(self, by_hand: FsdpPlan, *, is_short: bool = False) -> Found | None:
        """Return the best that is found, no worse than what is wrapped by hand; None where nothing fits.

        A short search only goes on from that, and from what it is with all groups kept.
        """
        start = self._choice_of(by_hand)
        kept = start._replace(reshard=(False,) * len(start.ends))
        starts = [one for one in (self._least, start, kept) if self.fits(one)]
        if not starts:
            return None
        if self.is_small:
            choice = self.exhaust()
            bound_s = self.step(choice).iteration_s
        else:
            bound_s = self._kept.bound_s if self._problem.limit is None else 0.0
            choice = self._best([self._climb(one) for one in starts]) if is_short else self.climb(starts)
        # What the backward pass does not reach is never gathered again.
        never = (not group.sizes.again for group in self._chosen(choice))
        choice = choice._replace(reshard=tuple(gone or free for gone, free in zip(choice.reshard, never, strict=True)))
        return Found(self._root_names, choice, self.step(choice), bound_s)

    @property
    def least(self) -> FsdpStep:
        """The step that needs the least memory."""
        return self.step(self._least)

    @cached_property
    def _kept(self) -> Kept:
        return best_kept(self.root, self._reaches, self._group)

    def _choice_of(self, plan: FsdpPlan) -> Choice:
        """Return the numbers of a plan with this root."""
        return Choice(
            tuple(accumulate(map(len, plan.groups))), plan.reshard, plan.forward_prefetch, plan.backward_prefetch
        )

    @cached_property
    def _least(self) -> Choice:
        """What needs the least memory; of many units with each of them by itself, see [Note: the least memory]."""
        alone = tuple(range(1, len(self.units) + 1))
        return min(map(self._least_of, self._groupings() if self.is_small else [alone]), key=self._held_bytes)

    def _least_of(self, ends: tuple[int, ...]) -> Choice:
        sizes = [group.sizes for group in (*self.root, *map(self._group, (0, *ends), ends))]
        return Choice(ends, least_reshard(sizes, has_root=bool(self.root)), 1, 1)

    @property
    def is_small(self) -> bool:
        """Whether every plan is tried."""
        return len(self.units) <= EXHAUSTED

    def _groupings(self) -> Iterator[tuple[int, ...]]:
        """Return all ways to group the units, by where groups end."""
        number = len(self.units)
        for cuts in product((False, True), repeat=max(0, number - 1)):
            ends = (*(place for place, is_cut in enumerate(cuts, 1) if is_cut), *([number] if number else []))
            if self._keeps_apart(ends):
                yield ends

    def step(self, choice: Choice) -> FsdpStep:
        """Return what a plan's step is."""
        if choice not in self._steps:
            groups = [*self.root, *self._chosen(choice)]
            self._steps[choice] = lay_out(groups, self._schedule(choice), self._shares)
        return self._steps[choice]

    def _schedule(self, choice: Choice) -> Schedule:
        reshard = (*(False for _ in self.root), *choice.reshard)
        return Schedule(reshard, choice.forward_prefetch, choice.backward_prefetch, bool(self.root))

    def _chosen(self, choice: Choice) -> list[Group]:
        return list(map(self._group, (0, *choice.ends), choice.ends))

    def _group(self, start: int, end: int) -> Group:
        if (start, end) not in self._groups:
            units = self.units[start:end]
            self._groups[start, end] = Group.of(units, self._problem.cost, self._problem.precision)
        return self._groups[start, end]

    def sizes(self, choice: Choice) -> list[int]:
        """Return the bytes of each group."""
        return [group.sizes.gathered for group in self._chosen(choice)]

    def fits(self, choice: Choice) -> bool:
        """Say whether a plan keeps apart what must be, and needs no more memory than there is."""
        limit = self._problem.limit
        return self._keeps_apart(choice.ends) and (limit is None or self._held_bytes(choice) <= limit)

    def _keeps_apart(self, ends: tuple[int, ...]) -> bool:
        return all(end <= self._reaches[start] for start, end in zip((0, *ends), ends, strict=False))

    def _held_bytes(self, choice: Choice) -> int:
        if choice not in self._held:
            sizes = [group.sizes for group in (*self.root, *self._chosen(choice))]
            self._held[choice] = fsdp_memory_bytes(sizes, self._schedule(choice), self._shares)
        return self._held[choice]

    def key(self, choice: Choice) -> tuple[float, float, int, int]:
        """Return what is less for the better plan: the step, then bytes gathered again, groups and prefetching."""
        step = self.step(choice)
        ahead = choice.forward_prefetch + choice.backward_prefetch
        return step.iteration_s, step.again_bytes, len(choice.ends), ahead

    def exhaust(self) -> Choice:
        """Return the best of all plans."""
        found = list[Choice]()
        for ends in self._groupings():
            kept = [(False,) * len(ends)] if self._problem.limit is None else product((False, True), repeat=len(ends))
            choices = product(kept, PREFETCHES, PREFETCHES)
            found += [one for one in (Choice(ends, *rest) for rest in choices) if self.fits(one)]
        return self._best(found)

    def _best(self, choices: Sequence[Choice]) -> Choice:
        """Return the best; of steps that are equal but for rounding the one that is better otherwise."""
        shortest_s = min(self.step(one).iteration_s for one in choices)
        near = [one for one in choices if self.step(one).iteration_s <= shortest_s * TIE]
        return min(near, key=lambda one: self.key(one)[1:])

    def climb(self, more: Sequence[Choice]) -> Choice:
        """Return what the search comes to from its own starts and some more."""
        starts = sorted({*self._starts(), *more}, key=self.key)[:STARTS]
        found = [self._climb(start) for start in starts]
        best = self._best(found)
        # The same numbers each time, so that the same inputs give the same plan.
        numbers, most = Random(0), min(MOST_TRIED, MOST_LAID_OUT // len(self.units))  # noqa: S311 - no secret
        for _ in range(max(KICKS, KICKED_UNITS // len(self.units))):
            if len(self._steps) >= most:
                break
            moved = best
            for _ in range(numbers.randint(2, 4)):
                near = [one for one in self._neighbours(moved) if self.fits(one)]
                moved = numbers.choice(near)
            best = self._best([best, self._climb(moved)])
        return best

    def _starts(self) -> Iterator[Choice]:
        sizes = [unit.num_bytes for unit in self.units]
        for ahead in product(PREFETCHES, PREFETCHES):
            yield from self._made_to_fit(self._kept.ends, *ahead)
        size = float(max(1, min(sizes)))
        while True:
            starts, filled = [0], 0
            for place, one in enumerate(sizes):
                if place == self._reaches[starts[-1]] or (filled and filled + one > size):
                    starts.append(place)
                    filled = 0
                filled += one
            for prefetch in PREFETCHES:
                yield from self._made_to_fit((*starts[1:], len(sizes)), prefetch, prefetch)
            if size >= sum(sizes):
                return
            size *= FACTOR

    def _made_to_fit(self, ends: tuple[int, ...], forward: int, backward: int) -> Iterator[Choice]:
        """Return plans of these groups with as few of them resharded as it takes: the first ones, or the largest."""
        number = len(ends)
        sizes = self.sizes(Choice(ends, (False,) * number, forward, backward))
        by_size = sorted(range(number), key=lambda place: -sizes[place])
        for order in (range(number), by_size) if self._problem.limit is not None else (range(number),):
            for count in range(number + 1):
                gone = set(order[:count])
                choice = Choice(ends, tuple(place in gone for place in range(number)), forward, backward)
                if self.fits(choice):
                    yield choice
                    break

    def _climb(self, choice: Choice) -> Choice:
        while len(self._steps) < min(MOST_TRIED, MOST_LAID_OUT // len(self.units)):
            better = [one for one in self._neighbours(choice) if self.fits(one)]
            best = min([choice, *better], key=self.key)
            if best == choice:
                break
            choice = best
        return choice

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
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
            if self._problem.limit is not None:
                toggled = (*reshard[:place], not reshard[place], *reshard[place + 1 :])
                yield choice._replace(reshard=toggled)
                # Kept in the place of another one near it.
                for other in range(max(0, place - NEAR), place):
                    if reshard[other] != reshard[place]:
                        yield choice._replace(reshard=(*toggled[:other], not reshard[other], *toggled[other + 1 :]))
        for forward, backward in product(PREFETCHES, PREFETCHES):
            yield choice._replace(forward_prefetch=forward, backward_prefetch=backward)
