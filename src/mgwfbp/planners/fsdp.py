"""The planner for FSDP2: which modules are gathered together, what is resharded, how far ahead; within a memory limit.

[Note: how plans for FSDP2 are found]
Resharding only adds gathers, so what a limit does not ask for is kept. Of models with no more than `EXHAUSTED` units
every plan is tried: all runs of units, every choice of what is resharded, `PREFETCHES` in both directions; such a plan
is the best (``predicted["exact"]``). Of others a search starts from the groups that are best where nothing is resharded
([Note: a pass over cuts]), from groups of many sizes, with as few of the first ones, or of the largest, resharded as it
takes to fit, and from what people wrap by hand. It goes on from the best of them to the best neighbour (two groups
merged, one cut, a border moved, a group kept or resharded or traded for another) until none is better; then it is moved
away from the best a few times, and goes on from there. What it finds need not be the best, but is never behind what is
wrapped by hand in the same memory. How far it is from a time that no plan undercuts, `fsdp_lower_bound_s`, is in what
it predicts; how far from the best of all plans of small models was measured: docs/optimality.md.

The same is done with all that is no block in the root's group, as in the second way to wrap by hand: one message less
in each pass, which may be worth its memory.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, product
from random import Random
from typing import Any, NamedTuple

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, idle_bytes_of, reported_bound_s
from mgwfbp.fsdp_step import FsdpStep, Group, lay_out
from mgwfbp.fsdp_units import ROOT, idle_of, root_of, units_of
from mgwfbp.memory import AS_STORED, Precision, Schedule, Shares, fsdp_memory_bytes
from mgwfbp.planners.fsdp_by_hand import BY_HAND, plan_blocks_alone, plan_by_block
from mgwfbp.planners.fsdp_pareto import best_kept
from mgwfbp.planners.slack import TIE
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, quote

__all__ = ["BY_HAND", "plan_blocks_alone", "plan_by_block", "plan_fsdp"]

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


class _Choice(NamedTuple):
    """A plan by numbers: where groups end among units, what is resharded, how far ahead."""

    ends: tuple[int, ...]
    reshard: tuple[bool, ...]
    forward_prefetch: int
    backward_prefetch: int


class _Problem(NamedTuple):
    """What there is to plan."""

    trace: ModelTrace
    cost: Cost
    limit: int | None
    precision: Precision
    idle: tuple[str, ...]


def plan_fsdp(
    trace: ModelTrace,
    cost: Cost,
    *,
    memory_limit: int | None = None,
    precision: Precision = AS_STORED,
    root: Collection[str] = (),
) -> FsdpPlan:
    """Find groups, prefetching and resharding with the shortest step that fits, [Note: how plans for FSDP2 are found].

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 4.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "dcba"))
    >>> plan_fsdp(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.1))
    FsdpPlan('toy': 4 modules in 4 groups, 0 of them resharded, prefetching 1 forward and 1 backward)

    Args:
        trace: what each layer takes in both passes.
        cost: what a reduce-scatter and an all-gather take by the bytes that travel, as `sharded_cost` has it.
        memory_limit: bytes that a rank may have for parameters, gradients and the optimizer's state; what activations
            need must be taken off before.
        precision: how many bytes are gathered, sent and kept for each byte of a parameter.
        root: units that FSDP2 cannot gather by themselves, which stay with the rest of the model.

    Raises:
        PlanError: where no plan fits, with the least that one needs; or where the model has no units.
    """
    idle = tuple(idle_of(trace))
    problem = _Problem(trace, cost, memory_limit, precision, idle)
    at_root = root_of(trace, root)
    search = _Search(problem, at_root)
    if not search.units and not at_root:
        raise PlanError(
            f"the parameters of {quote(trace.model)} are in no module whose name is known: expected names such as "
            "layer.0.weight"
        )
    best, step = search.best(plan_by_block(trace, root))
    search.check_fits(step)
    alone = plan_blocks_alone(trace, root)
    if set(alone.root) != set(at_root):
        other = _Search(problem, alone.root)
        found, laid_out = other.best(alone, is_short=True)
        if laid_out is not None and (step is None or laid_out.iteration_s * TIE < step.iteration_s):
            search, best, step = other, found, laid_out
    assert step is not None  # noqa: S101 - one of both fits
    return search.plan(best, step)


class _Search:
    """Plans of one model that fit, and which of them is better."""

    def __init__(self, problem: _Problem, at_root: Collection[str]) -> None:
        self._problem, self._at_root = problem, at_root
        units = units_of(problem.trace, at_root, problem.idle)
        first = units[:1] if units and units[0].name == ROOT else ()
        self.root = [Group.of([unit], problem.cost, problem.precision) for unit in first]
        self.units = units[len(self.root) :]
        idle_bytes = idle_bytes_of(problem.trace, problem.idle)
        self._shares = Shares(problem.cost.workers, problem.precision.states, idle_bytes)
        self._groups: dict[tuple[int, int], Group] = {}
        self._steps: dict[_Choice, FsdpStep] = {}
        self._held: dict[_Choice, int] = {}

    def best(self, by_hand: FsdpPlan, *, is_short: bool = False) -> tuple[_Choice, FsdpStep | None]:
        """Return the best that is found, no worse than what is wrapped by hand; None for its step where nothing fits.

        A short search only goes on from that, and from what it is with all groups kept.
        """
        least = self._least()
        if not self.fits(least):
            return least, None
        if self.is_exhausted:
            choice = self.exhaust()
        else:
            start = self._choice_of(by_hand)
            kept = start._replace(reshard=(False,) * len(start.ends))
            starts = [one for one in (least, start, kept) if self.fits(one)]
            choice = self._best([self._climb(one) for one in starts]) if is_short else self.climb(starts)
        # What the backward pass does not reach is never gathered again.
        never = (not group.sizes.again for group in self._chosen(choice))
        choice = choice._replace(reshard=tuple(gone or free for gone, free in zip(choice.reshard, never, strict=True)))
        return choice, self.step(choice)

    @property
    def is_exhausted(self) -> bool:
        """Whether all plans are tried."""
        return len(self.units) <= EXHAUSTED

    def plan(self, choice: _Choice, step: FsdpStep) -> FsdpPlan:
        """Return a choice as a plan, with what is expected of it."""
        trace, cost, limit, precision, idle = self._problem
        bound_s = fsdp_lower_bound_s(trace, cost, precision=precision, memory_limit=limit)
        predicted: Mapping[str, Any] = {
            "iteration_s": step.iteration_s,
            "exposed_s": step.iteration_s - step.compute_s,
            "lower_bound_s": reported_bound_s(bound_s, step.iteration_s),
            "memory_bytes": step.memory_bytes,
            "gathered_again_bytes": step.again_bytes,
            "exact": self.is_exhausted or step.iteration_s <= bound_s * TIE,
            "precision": precision._asdict(),
        }
        groups = step.groups[1:] if self.root else step.groups
        ahead = choice.forward_prefetch, choice.backward_prefetch
        return FsdpPlan(trace.model, groups, choice.reshard, *ahead, predicted, tuple(self._at_root), idle)

    def _choice_of(self, plan: FsdpPlan) -> _Choice:
        """Return the numbers of a plan with this root."""
        return _Choice(
            tuple(accumulate(map(len, plan.groups))), plan.reshard, plan.forward_prefetch, plan.backward_prefetch
        )

    def _least(self) -> _Choice:
        """Return what needs the least memory: larger groups, and groups that are kept or prefetched, only need more."""
        number = len(self.units)
        return _Choice(tuple(range(1, number + 1)), (True,) * number, 1, 1)

    def step(self, choice: _Choice) -> FsdpStep:
        """Return what a plan's step is."""
        if choice not in self._steps:
            groups = [*self.root, *self._chosen(choice)]
            self._steps[choice] = lay_out(groups, self._schedule(choice), self._shares)
        return self._steps[choice]

    def _schedule(self, choice: _Choice) -> Schedule:
        reshard = (*(False for _ in self.root), *choice.reshard)
        return Schedule(reshard, choice.forward_prefetch, choice.backward_prefetch, bool(self.root))

    def _chosen(self, choice: _Choice) -> list[Group]:
        return list(map(self._group, (0, *choice.ends), choice.ends))

    def _group(self, start: int, end: int) -> Group:
        if (start, end) not in self._groups:
            units = self.units[start:end]
            self._groups[start, end] = Group.of(units, self._problem.cost, self._problem.precision)
        return self._groups[start, end]

    def sizes(self, choice: _Choice) -> list[int]:
        """Return the bytes of each group."""
        return [group.sizes.gathered for group in self._chosen(choice)]

    def fits(self, choice: _Choice) -> bool:
        """Say whether a plan needs no more memory than there is."""
        limit = self._problem.limit
        if limit is None:
            return True
        if choice not in self._held:
            sizes = [group.sizes for group in (*self.root, *self._chosen(choice))]
            self._held[choice] = fsdp_memory_bytes(sizes, self._schedule(choice), self._shares)
        return self._held[choice] <= limit

    def check_fits(self, step: FsdpStep | None) -> None:
        """Raise where nothing fits."""
        if step is None and self._problem.limit is not None:
            needed = format_bytes(self.step(self._least()).memory_bytes)
            raise PlanError(
                f"no plan for {quote(self._problem.trace.model)} fits into {format_bytes(self._problem.limit)}: the "
                f"least is {needed} a rank, with every module by itself and all resharded"
            )

    def key(self, choice: _Choice) -> tuple[float, float, int, int]:
        """Return what is less for the better plan: the step, then bytes gathered again, groups and prefetching."""
        step = self.step(choice)
        ahead = choice.forward_prefetch + choice.backward_prefetch
        return step.iteration_s, step.again_bytes, len(choice.ends), ahead

    def exhaust(self) -> _Choice:
        """Return the best of all plans."""
        number, found = len(self.units), list[_Choice]()
        if not number:
            return _Choice((), (), 1, 1)
        for cuts in product((False, True), repeat=number - 1):
            ends = (*(place for place, is_cut in enumerate(cuts, 1) if is_cut), number)
            kept = [(False,) * len(ends)] if self._problem.limit is None else product((False, True), repeat=len(ends))
            choices = product(kept, PREFETCHES, PREFETCHES)
            found += [one for one in (_Choice(ends, *rest) for rest in choices) if self.fits(one)]
        return self._best(found)

    def _best(self, choices: Sequence[_Choice]) -> _Choice:
        """Return the best; of steps that are equal but for rounding the one that is better otherwise."""
        shortest_s = min(self.step(one).iteration_s for one in choices)
        near = [one for one in choices if self.step(one).iteration_s <= shortest_s * TIE]
        return min(near, key=lambda one: self.key(one)[1:])

    def climb(self, more: Sequence[_Choice]) -> _Choice:
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

    def _starts(self) -> Iterator[_Choice]:
        sizes = [unit.num_bytes for unit in self.units]
        kept = best_kept(self.root, len(sizes), self._group)
        for ahead in product(PREFETCHES, PREFETCHES):
            yield from self._made_to_fit(kept, *ahead)
        size = float(max(1, min(sizes)))
        while True:
            ends, filled = list[int](), 0
            for place, one in enumerate(sizes):
                if filled and filled + one > size:
                    ends.append(place)
                    filled = 0
                filled += one
            for prefetch in PREFETCHES:
                yield from self._made_to_fit((*ends, len(sizes)), prefetch, prefetch)
            if not ends:
                return
            size *= FACTOR

    def _made_to_fit(self, ends: tuple[int, ...], forward: int, backward: int) -> Iterator[_Choice]:
        """Return plans of these groups with as few of them resharded as it takes: the first ones, or the largest."""
        number = len(ends)
        sizes = self.sizes(_Choice(ends, (False,) * number, forward, backward))
        by_size = sorted(range(number), key=lambda place: -sizes[place])
        for order in (range(number), by_size) if self._problem.limit is not None else (range(number),):
            for count in range(number + 1):
                gone = set(order[:count])
                choice = _Choice(ends, tuple(place in gone for place in range(number)), forward, backward)
                if self.fits(choice):
                    yield choice
                    break

    def _climb(self, choice: _Choice) -> _Choice:
        while len(self._steps) < min(MOST_TRIED, MOST_LAID_OUT // len(self.units)):
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
            if self._problem.limit is not None:
                toggled = (*reshard[:place], not reshard[place], *reshard[place + 1 :])
                yield choice._replace(reshard=toggled)
                # Kept in the place of another one near it.
                for other in range(max(0, place - NEAR), place):
                    if reshard[other] != reshard[place]:
                        yield choice._replace(reshard=(*toggled[:other], not reshard[other], *toggled[other + 1 :]))
        for forward, backward in product(PREFETCHES, PREFETCHES):
            yield choice._replace(forward_prefetch=forward, backward_prefetch=backward)
