"""Which of several plans has the shortest step: plans take turns, until one is known to be faster, or none is.

[Note: how sure a comparison is]
Every turn goes through all plans that are left, every second one backwards, so that what drifts, drifts for all alike.
A plan is compared with another within turns only; the difference of two is the trimmed mean over turns, and its bounds
are Student's t's (`interval_of`).

The plan in force, the first one, is kept unless another is faster with `CONFIDENCE`, which holds for the whole
comparison: the chance of its ending on a plan that is not faster is at most what is missing to 1. Who looks at a bound
after every turn, and stops when it likes it, is wrong ten times as often as the bound says; and the fastest of many
noisy plans is fast by chance. So the missing part is shared out: `AT_END` of it to the bounds when the limit is
reached, the rest evenly to the `LOOKS`, and each share evenly to the rivals. Whichever bound fails, their chances add
up to no more. (The bounds are exact where noise is normal; benchmarks/decisions.md has what was kept in worlds where no
plan is faster.)

What is not kept needs no such care, since a mistake costs a little speed, never the plan in force: after every turn a
plan is out that is slower than the fastest one with `DROPPED`, or ahead of it by no more than `WORTH` with `FUTILE`.

Batches may differ in size from step to step, and machines have slow spells. The forward pass shows both, and a plan
does not change the forward pass: so the part of a step that goes with its forward pass is taken out (a regression of
logarithms over all steps), unless a plan did change the forward pass after all. With a sharded optimizer it does, since
gathers run beside the forward pass, and nothing is taken out.
"""

import math
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from mgwfbp.plan import MergePlan
from mgwfbp.runtime.observe.steps import AgreedSteps, Note, Seen
from mgwfbp.runtime.tune.intervals import Interval, interval_of
from mgwfbp.runtime.tune.tuning import Candidate, Comparison

__all__ = ["GLANCES", "PRECISION", "Limits", "Turn", "compare", "turns_steps"]

# What is noted in the steps of a turn. New buckets are allocated in the first step with them, so it does not count.
GLANCE: tuple[Note, ...] = ("settle", "plain", "plain")  # in the first turns
LONGER: tuple[Note, ...] = ("settle", "plain", "plain", "plain")  # and in those after
GLANCES = 3  # how many first turns there are; all plans take part in them, whatever came of them
# After so many turns it is decided whether a plan is faster than the one in force. Each is about half as many again as
# the one before: a turn more says much after four, and little after forty.
LOOKS = (4, 6, 9, 14, 19, 29, 44, 69)
# What is sure is so with a probability of `CONFIDENCE`, whichever plans and however many turns there were; of what is
# missing to 1 this part is for the bounds at the end, where turns or steps have run out.
CONFIDENCE, AT_END = 0.995, 0.5
# Probabilities, of one bound: that a plan which takes no more turns is slower than the fastest, or cannot gain on it.
DROPPED, FUTILE = 0.99, 0.95
# A gain of less than this part of the step is not worth more turns.
WORTH = 0.005
# A plan is far behind another when its step is longer by more than this part, and by half of it in every turn. Three
# turns leave Student's t with so few degrees of freedom that noise hides any difference; such a plan takes no more.
FAR_BEHIND = 0.10
# Precision is given up only for more than this part of the step, unless told.
PRECISION = 0.01
# Forward passes that differ by less than this part between plans, or by no more than so many standard errors, are the
# same.
SAME_FORWARD, ERRORS = 0.005, 3.0
# A regression takes so many steps, and forward passes whose logarithms spread by more than this.
ENOUGH_STEPS, SPREAD = 10, 0.002


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps to be run: with which messages, and what to note of each."""

    plan: MergePlan
    notes: tuple[Note, ...]
    doing: str  # in words
    all_reduces: bool = False  # with a sharded optimizer: as a plain one would


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be spent on comparing."""

    turns: int = 100
    steps: int = 1200


def turns_steps(turns: int) -> int:
    """Return how many steps a plan takes in so many turns."""
    return min(turns, GLANCES) * len(GLANCE) + max(0, turns - GLANCES) * len(LONGER)


def compare(
    candidates: Sequence[Candidate],
    limits: Limits,
    learn: Callable[[MergePlan, Seen], object] = lambda *_: None,
    low_bytes: Callable[[MergePlan], int] = lambda _: 0,
    tolerance: float = PRECISION,
    *,
    regresses: bool = True,
    all_reduced: Container[int] = (),
) -> Generator[Turn, Seen, tuple[list[Candidate], Comparison]]:
    """Run plans in turns until the fastest is known; the first is kept unless another is faster beyond doubt.

    ``all_reduced`` are the places of plans whose turns are so, see `Turn`.

    Of plans that are slower than the fastest by no more than ``tolerance`` the one is kept that has the fewest
    ``low_bytes``, bytes in low precision; and one with fewer than the plan in force replaces it where it is not slower
    by more than that, beyond doubt. It ``regresses``, takes out what goes with the forward pass, where plans do not
    change that. Returns plans with their steps, the chosen one first and the others by their speed, and how sure it is.
    """
    race = _Race(candidates, [low_bytes(one.plan) for one in candidates], tolerance, regresses=regresses)
    spent, left, is_decided = 0, list(range(len(candidates))), False
    while len(left) > 1 and race.turns < limits.turns and spent < limits.steps and not is_decided:
        notes = GLANCE if race.turns < GLANCES else LONGER
        seen: dict[int, AgreedSteps] = {}
        for place in left if race.turns % 2 == 0 else reversed(left):
            doing, is_reduced = f"comparing {len(left)} plans, turn {race.turns + 1}", place in all_reduced
            result = yield Turn(candidates[place].plan, notes, doing, all_reduces=is_reduced)
            assert result.plain is not None  # noqa: S101 - plain steps were asked for
            seen[place] = result.plain
            learn(candidates[place].plan, result)
            spent += len(notes)
        race.add(seen)
        left = race.still_open(left)
        is_decided = race.turns in LOOKS and race.look(left)
    if race.turns and not is_decided:
        race.look(left, at_end=True)
    return race.result()


class _Race:
    """Steps of several plans, turn by turn; a plan is known by its place, that in force by 0."""

    def __init__(
        self, candidates: Sequence[Candidate], low_bytes: Sequence[int], tolerance: float, *, regresses: bool
    ) -> None:
        self._candidates, self._low_bytes, self._tolerance = candidates, low_bytes, tolerance
        self._regresses = regresses
        self._turns: list[dict[int, AgreedSteps]] = []
        self._logarithms: list[dict[int, _Logarithms]] = []
        self._levels: list[dict[int, float]] = []  # of their steps, without what goes with the forward pass
        self._gains: dict[int, Interval] = {}  # over the plan in force, at the last look

    @property
    def turns(self) -> int:
        return len(self._turns)

    def add(self, seen: Mapping[int, AgreedSteps]) -> None:
        self._turns.append(dict(seen))
        self._logarithms.append({place: _Logarithms.of(steps) for place, steps in seen.items()})
        slope = self._find_slope() if self._regresses else 0.0
        self._levels = [{place: one.level(slope) for place, one in turn.items()} for turn in self._logarithms]

    def still_open(self, left: Sequence[int]) -> list[int]:
        """Return the plans that shall take another turn, the one in force among them."""
        if self.turns < GLANCES:
            return list(left)
        best = self._fastest(left)
        return [place for place in left if place in (0, best) or not self._is_out(place, best)]

    def look(self, left: Sequence[int], *, at_end: bool = False) -> bool:
        """Find what each plan gains on the one in force, and say whether all is decided: nothing is left to win."""
        rivals = max(1, len(self._candidates) - 1)
        share = AT_END if at_end else (1 - AT_END) / len(LOOKS)
        confidence = 1 - (1 - CONFIDENCE) * share / rivals
        self._gains = {place: self._difference(0, place, confidence) for place in range(1, len(self._candidates))}
        chosen = self._choose()
        return all(
            self._difference(place, chosen, FUTILE).low > self._handicap(place, chosen) - WORTH
            for place in left
            if place != chosen
        )

    def result(self) -> tuple[list[Candidate], Comparison]:
        measured = [self._measured(place) for place in range(len(self._candidates))]
        if not self._turns:
            return measured, Comparison(0, CONFIDENCE, "", 0.0, 0.0, 0.0, is_sure=False)
        chosen = self._choose()
        rival = chosen or self._fastest([place for place in self._turns[-1] if place] or self._gains)
        gain = self._gains[rival]
        others = sorted((one for place, one in enumerate(measured) if place != chosen), key=lambda one: one.step_s)
        bounds = (_part(gain.middle), _part(gain.low), _part(gain.high))
        return [measured[chosen], *others], Comparison(
            self.turns, CONFIDENCE, measured[rival].name, *bounds, is_sure=chosen != 0
        )

    def _choose(self) -> int:
        """Return the plan to be kept by what is known of gains.

        That is the fastest of those that are faster than the one in force beyond doubt; or of those about as fast the
        one with the fewest bytes in low precision. One that is out counts only where no other does: it has fewer turns.
        """
        sure = [place for place, gain in self._gains.items() if gain.low > -max(0.0, self._handicap(place, 0))]
        fastest = self._fastest([0, *([place for place in sure if place in self._turns[-1]] or sure)])
        if not self._low_bytes[fastest]:
            return fastest
        slower = {place: self._difference(place, fastest).middle for place in (0, *sure)}
        near = [place for place in slower if slower[place] <= self._tolerance]
        return min([fastest, *near], key=lambda place: (self._low_bytes[place], slower[place]))

    def _handicap(self, place: int, other: int) -> float:
        """Return by which part a plan may be slower than another to be as good, for its bytes in low precision."""
        more = self._low_bytes[other] - self._low_bytes[place]
        return math.copysign(self._tolerance, more) if more else 0.0

    def _measured(self, place: int) -> Candidate:
        steps_s = tuple(step for turn in self._turns if place in turn for step in turn[place].length_s)
        return replace(self._candidates[place], steps_s=steps_s, step_s=median(steps_s) if steps_s else math.inf)

    def _fastest(self, places: Iterable[int]) -> int:
        """Return the plan that is fastest against the one in force."""
        return min(places, key=lambda place: self._difference(place, 0).middle)

    def _is_out(self, place: int, best: int) -> bool:
        """Say whether a plan takes no more turns: it is slower than the fastest one, or could gain nothing on it."""
        has_fewer = self._low_bytes[place] < self._low_bytes[best]
        if self._difference(place, best, DROPPED).low > (self._tolerance if has_fewer else 0.0):
            return True
        is_futile = self.turns > GLANCES and self._difference(place, best, FUTILE).low > -WORTH
        return (is_futile and not has_fewer) or self._is_far_behind(place, best)

    def _is_far_behind(self, place: int, other: int) -> bool:
        paired = self._paired(place, other)
        return len(paired) >= GLANCES and min(paired) > FAR_BEHIND / 2 and interval_of(paired, 0.5).middle > FAR_BEHIND

    def _difference(self, place: int, other: int, confidence: float = CONFIDENCE) -> Interval:
        """Return by which part a plan's step is longer than another's."""
        return interval_of(self._paired(place, other), confidence)

    def _paired(self, place: int, other: int) -> list[float]:
        return [levels[place] - levels[other] for levels in self._levels if place in levels and other in levels]

    def _find_slope(self) -> float:
        """Return how a step goes with its forward pass: 1 where it is as many times as long, 0 where it does not."""
        by_plan: dict[int, list[_Logarithms]] = {}
        for turn in self._logarithms:
            for place, steps in turn.items():
                by_plan.setdefault(place, []).append(steps)
        products, squares, count = 0.0, 0.0, 0
        for some in by_plan.values():
            lengths = [length for steps in some for length in steps.lengths]
            forwards = [forward for steps in some for forward in steps.forwards]
            if not all(map(math.isfinite, forwards)):
                return 0.0
            middle, forward_middle = fmean(lengths), fmean(forwards)
            for length, forward in zip(lengths, forwards, strict=True):
                products += (length - middle) * (forward - forward_middle)
                squares += (forward - forward_middle) ** 2
            count += len(lengths)
        if count < ENOUGH_STEPS or squares < count * SPREAD**2 or self._change_forward(by_plan):
            return 0.0
        return min(1.0, max(0.0, products / squares))

    def _change_forward(self, places: Iterable[int]) -> bool:
        """Say whether forward passes are longer with some plan than with the one in force, beyond noise."""
        for place in places:
            pairs = [turn for turn in self._logarithms if place in turn and 0 in turn]
            differences = [median(turn[place].forwards) - median(turn[0].forwards) for turn in pairs]
            if place and len(differences) >= 3:
                error = stdev(differences) / math.sqrt(len(differences))
                if abs(fmean(differences)) > max(SAME_FORWARD, ERRORS * error):
                    return True
        return False


@dataclass(frozen=True, slots=True)
class _Logarithms:
    """Of what the steps of a turn took, and their forward passes: infinite where there was none."""

    lengths: tuple[float, ...]
    forwards: tuple[float, ...]

    @classmethod
    def of(cls, steps: AgreedSteps) -> "_Logarithms":
        lengths = tuple(math.log(max(length_s, 1e-12)) for length_s in steps.length_s)
        return cls(lengths, tuple(math.log(one) if one > 0 else -math.inf for one in steps.forward_s))

    def level(self, slope: float) -> float:
        """Return a step's logarithm, without what goes with its forward pass.

        Of few steps the median, which one that was held up does not move.
        """
        if not slope:
            return median(self.lengths)
        return median(length - slope * forward for length, forward in zip(self.lengths, self.forwards, strict=True))


def _part(logarithm: float) -> float:
    """Return by which part a step is shorter whose logarithm is less by so much."""
    return logarithm if math.isinf(logarithm) else -math.expm1(-max(logarithm, -100.0))
