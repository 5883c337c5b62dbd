"""Which plan is the fastest: the tuner's script, a generator that asks for steps and is told what came of them.

[Note: how the tuner decides]
It runs on rank 0 alone; whoever drives it lets all ranks train as it asks and tells it what they observed together. So
nothing here waits, measures or depends on a clock, and tests drive it in simulated worlds.

1. *Observe* the buckets in force, torch's own or an earlier plan's: when gradients are ready and what messages take.
   Then buckets of 1 MiB.
2. *Plan* with that, run the plan, observe its messages, learn the cost anew and plan again, until the plan stays the
   same: the cost that counts is the one beside a busy backward pass.
3. *Compare* these plans, the paper's, and buckets of other sizes, torch's own always among them, in turns: every turn
   goes through all that are left, every second one backwards, so that what drifts, drifts for all alike. A plan is
   compared with another within turns only. One that is slower beyond doubt (`DROPPED`) takes no more turns.
4. *Keep* the buckets in force unless another plan is faster beyond doubt (`CONFIDENCE`, one-sided, of Student's t over
   turns, and as sure for all rivals together: the fastest of many noisy ones is fast by chance too, but not far ahead
   in every turn). The comparison ends as soon as this is decided, or what is left to win is below `WORTH`, or at a
   limit.

Where messages may travel in low precision (``wire``), the last plan of 2 is run with all messages so and observed,
then both, messages and precision, are planned (`plan_wire`), observed, and planned again. These plans take part in 3;
and of those within `PRECISION` of the fastest the one that sends the fewest bytes in low precision is kept.

Where a sharded optimizer gathers parameters (``gathers``), that is tuned when the messages are chosen: it is observed
what gathers take, when the forward pass needs each, and what that takes without them; groups are planned, and take
turns with those in force as in 3 and 4, in at most `GATHERS` of the steps again.

Batches may differ in size from step to step, and machines have slow spells. The forward pass shows both, and a plan
does not change the forward pass: so the part of a step that goes with its forward pass is taken out of the comparison
(a regression of logarithms over all steps), unless a plan did change the forward pass after all.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean, median, stdev

from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.plan import SHORT_WIRES, MergePlan
from mgwfbp.planners import find_plan, plan_bucket, plan_optimal, plan_wire, planner_of
from mgwfbp.planners.sharded import plan_gathers
from mgwfbp.ranges import off_by, predict_range
from mgwfbp.runtime.learn import Known
from mgwfbp.runtime.steps import AgreedSteps, Gradients, Note, Seen
from mgwfbp.runtime.tuning import Candidate, Comparison, Gathering
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace

__all__ = ["BUCKET_MIB", "Limits", "Turn", "Verdict", "compare", "decide", "plan_cautiously"]

# What is noted in the steps of a turn. New buckets are allocated in the first step with them, so it does not count.
_ALL: tuple[Note, ...] = ("plain", "gradients", "messages")
OBSERVE: tuple[Note, ...] = ("settle", *_ALL, *_ALL, *_ALL)
OBSERVE_MESSAGES: tuple[Note, ...] = ("settle", "messages", "messages", "messages")
OBSERVE_GATHERS: tuple[Note, ...] = ("settle", *("gathers", "alone") * 3)
GLANCE: tuple[Note, ...] = ("settle", "plain", "plain")
LOOK: tuple[Note, ...] = ("settle", "plain", "plain", "plain")
GLANCES = 3  # turns in which all candidates take part, whatever came of them
MAX_ROUNDS = 3  # of planning
# Plans that are run next are made for messages as much slower than learnt as these are typically off: one that is best
# only where the cost is underestimated teaches little. A plan that is to be the only one must not give much away to be
# safe either, and is chosen by the mean of these.
CAUTION, CAUTIONS = 1.0, (0.0, 0.5, 1.0)
BUCKET_MIB = (1, 2, 5, 10, 25, 50)
FAR = 4  # bucket sizes are far from each other where one is so many times the other
# A plan that is kept is faster than the buckets in force with so much confidence; one that is dropped slower than
# another; and no more turns are taken where with so much confidence nothing is left to win.
CONFIDENCE, DROPPED, FUTILE = 0.995, 0.99, 0.95
# Far behind, or ahead: by more than this, and by half of it in every turn. After the glances a plan that is far behind
# the best is out, whatever the noise.
FAR_BEHIND = 0.10
# Less than this is not worth more turns.
WORTH = 0.005
# The part of the steps in which groups of gathers may be compared, besides.
GATHERS = 0.25
# Precision is given up only for more than this part of the step.
PRECISION = 0.01
# Forward passes that differ by less than this between plans, or by no more than so many standard errors, are the same.
SAME_FORWARD, ERRORS = 0.005, 3.0
# A regression takes so many steps, and forward passes that spread by more than this.
ENOUGH_STEPS, SPREAD = 10, 0.002


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps to be run: with which messages, and what to note of each."""

    plan: MergePlan
    notes: tuple[Note, ...]
    doing: str  # in words


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be spent on comparing."""

    turns: int = 60
    steps: int = 800


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided, and why."""

    candidates: tuple[Candidate, ...]  # the chosen one first
    comparison: Comparison
    trace: ModelTrace
    cost: PiecewiseCost
    exposed_s: float  # with the chosen plan
    low_cost: PiecewiseCost | None = None  # of a message in low precision, where such were observed
    gathering: Gathering | None = None  # where parameters are gathered


def decide(
    gradients: Gradients,
    workers: int,
    default: MergePlan,
    allowed: Callable[[MergePlan], MergePlan],
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
    torchs: MergePlan | None = None,
    wire: str | None = None,
    gathers: tuple[tuple[str, ...], ...] | None = None,
) -> Generator[Turn, Seen, Verdict]:
    """Find the fastest plan; see [Note: how the tuner decides].

    Args:
        gradients: what a step sends.
        workers: how many ranks there are.
        default: the buckets in force, which are kept unless another plan is faster: torch's own, or an earlier plan.
        allowed: turns a planner's plan into one that the Reducer can hold (one dtype and device a message).
        limits: how much may be spent.
        torchs: torch's own buckets, where those in force are others.
        wire: the precision in which messages may travel besides their own.
        gathers: the groups in which a sharded optimizer gathers parameters; empty where they are the messages', the
            last one first; None where there is none.
    """
    in_force, default = default, replace(default, wire=(), gathers=())
    known = Known(gradients, workers)
    known.learn(default, (yield Turn(default, OBSERVE, "observing the buckets in force")))
    tried = {} if torchs is None else {torchs.groups: ("ddp", torchs)}
    tried = {default.groups: tried.get(default.groups, ("in force" if tried else "ddp", default)), **tried}
    one_mib = allowed(_buckets(known.trace, known.cost, 1))
    if one_mib.groups not in tried:
        tried[one_mib.groups] = ("bucket-1", one_mib)
        known.learn(one_mib, (yield Turn(one_mib, OBSERVE_MESSAGES, "observing buckets of 1 MiB")))
    for number in range(1, MAX_ROUNDS + 1):
        plan = allowed(find_plan(known.trace, off_by(known.cost, CAUTION)))
        if plan.groups in tried:
            break
        tried[plan.groups] = (f"optimal {number}", plan)
        known.learn(plan, (yield Turn(plan, OBSERVE, f"observing plan {number}")))
    candidates = _candidates(tried, known, allowed)
    if wire is not None:
        candidates += yield from _in_low_precision(plan, known, allowed, wire, in_force)
    size_of = gradients.size_of
    candidates, comparison = yield from compare(candidates, limits, known.learn, lambda plan: plan.low_bytes(size_of))
    chosen = candidates[0]
    seen = yield Turn(chosen.plan, OBSERVE, f"observing {chosen.name}")
    known.learn(chosen.plan, seen)
    both = known.both if wire else known.cost
    trace = known.trace
    chosen = _predicted(chosen, trace, both)
    exposed_s = median(seen.plain.exposed_s) if seen.plain else 0.0
    low_cost = known.low_cost if wire else None
    gathering = None
    if gathers is not None:
        chosen, gathering = yield from _gathers(chosen, gathers, known, allowed, limits)
        trace = known.whole_trace
    return Verdict((chosen, *candidates[1:]), comparison, trace, known.cost, exposed_s, low_cost, gathering)


def _gathers(
    chosen: Candidate,
    in_force: tuple[tuple[str, ...], ...],
    known: Known,
    allowed: Callable[[MergePlan], MergePlan],
    limits: Limits,
) -> Generator[Turn, Seen, tuple[Candidate, Gathering]]:
    """Find in which groups parameters are gathered beside the chosen messages: as before unless others are faster."""
    groups = in_force or tuple(group[::-1] for group in reversed(chosen.plan.groups))
    before = replace(chosen.plan, gathers=groups, predicted={})
    known.learn(before, (yield Turn(before, OBSERVE_GATHERS, "observing gathers")))
    trace, cost = known.whole_trace, known.halves
    planned = allowed(replace(chosen.plan, groups=plan_gathers(trace, cost.all_gather), wire=(), predicted={})).groups
    plans = {plan.gathers: plan for plan in (before, replace(before, gathers=planned))}
    names = ("as before", "planned")
    rivals = [Candidate(name, plan, 0.0) for name, plan in zip(names, plans.values(), strict=False)]
    found, comparison = yield from compare(rivals, replace(limits, steps=int(GATHERS * limits.steps)))
    kept = _predicted(replace(chosen, plan=found[0].plan), trace, cost)
    if found[0].steps_s:
        kept = replace(kept, steps_s=found[0].steps_s, step_s=found[0].step_s)
    all_reduced_s = predict(trace, cost.all_reduce, plan_optimal(trace, cost.all_reduce)).iteration_s
    return kept, Gathering(comparison, known.gather_cost, all_reduced_s)


def _in_low_precision(
    merged: MergePlan,
    known: Known,
    allowed: Callable[[MergePlan], MergePlan],
    wire: str,
    in_force: MergePlan,
) -> Generator[Turn, Seen, list[Candidate]]:
    """Learn what messages in low precision take, those of a plan first, and return plans that send some so."""
    short = SHORT_WIRES[wire]
    everything = _all_in(wire, merged, allowed)
    tried = {everything.messages: (f"all {short} 1", everything)}
    known.learn(everything, (yield Turn(everything, OBSERVE_MESSAGES, f"observing messages in {wire}")))
    for number in range(1, MAX_ROUNDS + 1):
        plan = allowed(plan_wire(known.trace, known.both, wire, tolerance=PRECISION))
        if plan.messages in tried or not plan.wire:  # without, it is the plan in full precision, or about as good
            break
        tried[plan.messages] = (f"optimal {number}+{short}", plan)
        known.learn(plan, (yield Turn(plan, OBSERVE_MESSAGES, f"observing plan {number} in {wire}")))
    everything = _all_in(wire, find_plan(known.trace, known.both.low), allowed)
    tried.setdefault(everything.messages, (f"all {short} 2", everything))
    if in_force.wire:
        tried.setdefault(in_force.messages, ("in force", in_force))
    trace, both = known.trace, known.both
    return [_predicted(Candidate(name, plan, 0.0), trace, both) for name, plan in tried.values() if plan.wire]


def _all_in(wire: str, plan: MergePlan, allowed: Callable[[MergePlan], MergePlan]) -> MergePlan:
    """Return the plan with all messages in low precision, as far as that is allowed."""
    return allowed(replace(plan, wire=(wire,) * plan.num_groups, predicted={}))


def plan_cautiously(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Return, of the exact plans for `CAUTIONS`, the one whose step is the shortest in the mean over all of them."""
    costs = [off_by(cost, caution) for caution in CAUTIONS]
    plans = {plan.groups: plan for plan in (plan_optimal(trace, one) for one in costs)}
    return min(plans.values(), key=lambda plan: fmean(predict(trace, one, plan).iteration_s for one in costs))


def _buckets(trace: ModelTrace, cost: PiecewiseCost, mib: float) -> MergePlan:
    size_bytes = int(mib * 2**20)
    planner = partial(plan_bucket, first_bucket_bytes=size_bytes, bucket_bytes=size_bytes)
    return find_plan(trace, cost, planner)


def _candidates(
    tried: Mapping[tuple[tuple[str, ...], ...], tuple[str, MergePlan]],
    known: Known,
    allowed: Callable[[MergePlan], MergePlan],
) -> list[Candidate]:
    """Return what shall be compared: each partition once, the buckets in force first."""
    trace, cost = known.trace, known.cost
    found = dict(tried)
    for name in ("optimal", "mgwfbp"):
        plan = allowed(find_plan(trace, cost, planner_of(name)))
        found.setdefault(plan.groups, (name, plan))
    buckets, predicted_s = {}, {}
    for mib in BUCKET_MIB:
        plan = allowed(_buckets(trace, cost, mib))
        if plan.groups not in found:
            buckets[mib], predicted_s[mib] = plan, predict(trace, cost, plan).iteration_s
    for mib in two_sizes(predicted_s):
        found.setdefault(buckets[mib].groups, (f"bucket-{mib}", buckets[mib]))
    return [_predicted(Candidate(name, plan, 0.0), trace, cost) for name, plan in found.values()]


def _predicted(candidate: Candidate, trace: ModelTrace, cost: Cost) -> Candidate:
    """Return a candidate with what its step is predicted to take."""
    predicted_s = predict(trace, cost, candidate.plan).iteration_s
    return replace(candidate, predicted_s=predicted_s, between_s=predict_range(trace, cost, candidate.plan))


def two_sizes(predicted_s: Mapping[int, float]) -> list[int]:
    """Return the bucket size that is predicted to be the fastest, and the fastest of those far from it.

    Two neighbours would be right or wrong together: where the model errs, a size far away may not.

    >>> two_sizes({1: 4.0, 2: 3.5, 5: 2.0, 10: 2.1, 25: 3.0})
    [5, 25]
    """
    ranked = sorted(predicted_s, key=lambda size: (predicted_s[size], size))
    far = [size for size in ranked[1:] if max(size, ranked[0]) >= FAR * min(size, ranked[0])]
    return [*ranked[:1], *(far or ranked[1:])[:1]]


def compare(
    candidates: Sequence[Candidate],
    limits: Limits,
    learn: Callable[[MergePlan, Seen], object] = lambda *_: None,
    low_bytes: Callable[[MergePlan], int] = lambda _: 0,
) -> Generator[Turn, Seen, tuple[list[Candidate], Comparison]]:
    """Run candidates in turns until the fastest is known; the first of them is kept unless another is beyond doubt.

    Where ``low_bytes`` says that a plan sends fewer bytes in low precision and is slower by no more than `PRECISION`,
    that one is kept. Returns them with their steps, the chosen one first and the others by their speed, and how sure it
    is.
    """
    race = _Race(candidates, [low_bytes(one.plan) for one in candidates])
    spent, left = 0, list(range(len(candidates)))
    while len(left) > 1 and race.turns < limits.turns and spent < limits.steps:
        notes = GLANCE if race.turns < GLANCES else LOOK
        seen: dict[int, AgreedSteps] = {}
        for place in left if race.turns % 2 == 0 else reversed(left):
            result = yield Turn(candidates[place].plan, notes, f"comparing {len(left)} plans, turn {race.turns + 1}")
            assert result.plain is not None  # noqa: S101 - plain steps were asked for
            seen[place] = result.plain
            learn(candidates[place].plan, result)
            spent += len(notes)
        race.add(seen)
        left = race.still_open(left)
    return race.result()


class _Race:
    """Steps of several plans, turn by turn."""

    def __init__(self, candidates: Sequence[Candidate], low_bytes: Sequence[int]) -> None:
        self._candidates, self._low_bytes = candidates, low_bytes
        self._turns: list[dict[int, AgreedSteps]] = []
        self._slope = 0.0  # of a step's logarithm over its forward pass's

    @property
    def turns(self) -> int:
        return len(self._turns)

    def add(self, seen: Mapping[int, AgreedSteps]) -> None:
        self._turns.append(dict(seen))
        self._slope = self._find_slope()

    def still_open(self, left: Sequence[int]) -> list[int]:
        """Return the plans that shall take another turn, torch's own among them; none where all is decided."""
        if self.turns < GLANCES:
            return list(left)
        best = self._best(left)
        others = [place for place in left if place != best and not self._is_slower(place, best)]
        kept = sorted({0, best, *others})
        is_sure = best == 0 or self._gain(best).low > 0 or self._difference(0, best, FUTILE).high < WORTH
        none_is_better = all(self._difference(place, best, FUTILE).low > -WORTH for place in others)
        if is_sure and none_is_better and self.turns > GLANCES:
            return []
        return kept if len(kept) > 1 else []

    def result(self) -> tuple[list[Candidate], Comparison]:
        everyone = range(len(self._candidates))
        measured = [self._measured(place) for place in everyone]
        if not self._turns:
            return measured, Comparison(0, CONFIDENCE, "", 0.0, 0.0, 0.0, is_sure=False)
        last = [place for place in self._turns[-1] if place] or everyone[1:]
        best = self._best(last)
        chosen = self._precise(best) if self._gain(best).low > 0 else 0
        rival = chosen or best
        gain = self._gain(rival)
        others = sorted((measured[place] for place in everyone if place != chosen), key=lambda one: one.step_s)
        bounds = (_part(gain.middle), _part(gain.low), _part(gain.high))
        return [measured[chosen], *others], Comparison(
            self.turns, CONFIDENCE, measured[rival].name, *bounds, is_sure=chosen == rival
        )

    def _precise(self, best: int) -> int:
        """Return the plan with the fewest bytes in low precision among those about as fast as the best one.

        Of the others only such as are faster beyond doubt, too: one that took few turns may not be, and then the
        buckets in force are not kept instead of the best one.
        """
        if not self._low_bytes[best]:
            return best
        slower = {place: self._difference(place, best).middle for place in range(len(self._candidates))}
        near = [place for place in slower if slower[place] <= PRECISION and (not place or self._gain(place).low > 0)]
        return min([best, *near], key=lambda place: (self._low_bytes[place], slower[place]))

    def _measured(self, place: int) -> Candidate:
        steps_s = tuple(step for turn in self._turns if place in turn for step in turn[place].length_s)
        return replace(self._candidates[place], steps_s=steps_s, step_s=median(steps_s) if steps_s else math.inf)

    def _best(self, places: Iterable[int]) -> int:
        """Return the plan that is fastest against torch's own."""
        return min(places, key=lambda place: self._difference(place, 0).middle)

    def _is_slower(self, place: int, best: int) -> bool:
        difference = self._difference(place, best, confidence=DROPPED)
        worse = PRECISION if self._low_bytes[place] < self._low_bytes[best] else 0.0
        return difference.low > worse or self._is_far_behind(place, best)

    def _is_far_behind(self, place: int, other: int) -> bool:
        paired = self._paired(place, other)
        return len(paired) >= GLANCES and min(paired) > FAR_BEHIND / 2 and _interval(paired, 0.5).middle > FAR_BEHIND

    def _gain(self, place: int) -> "_Interval":
        """Return what a plan gains against torch's own, as a part of the step.

        All rivals' bounds hold together, but for those that are far ahead: few of many are so by chance.
        """
        rivals = 1 if self._is_far_behind(0, place) else max(1, len(self._candidates) - 1)
        return self._difference(0, place, 1 - (1 - CONFIDENCE) / rivals)

    def _difference(self, place: int, other: int, confidence: float = CONFIDENCE) -> "_Interval":
        """Return by which part a plan's step is longer than another's."""
        return _interval(self._paired(place, other), confidence)

    def _paired(self, place: int, other: int) -> list[float]:
        return [
            _level(turn[place], self._slope) - _level(turn[other], self._slope)
            for turn in self._turns
            if place in turn and other in turn
        ]

    def _find_slope(self) -> float:
        """Return how a step goes with its forward pass: 1 where it is as many times as long, 0 where it does not."""
        by_plan: dict[int, list[AgreedSteps]] = {}
        for turn in self._turns:
            for place, steps in turn.items():
                by_plan.setdefault(place, []).append(steps)
        if any(length <= 0 for some in by_plan.values() for steps in some for length in steps.forward_s):
            return 0.0
        products, squares, count = 0.0, 0.0, 0
        for some in by_plan.values():
            lengths = [math.log(length) for steps in some for length in steps.length_s]
            forwards = [math.log(length) for steps in some for length in steps.forward_s]
            middle, forward_middle = fmean(lengths), fmean(forwards)
            for length, forward in zip(lengths, forwards, strict=True):
                products += (length - middle) * (forward - forward_middle)
                squares += (forward - forward_middle) ** 2
                count += 1
        if count < ENOUGH_STEPS or squares < count * SPREAD**2 or self._change_forward(by_plan):
            return 0.0
        return min(1.0, max(0.0, products / squares))

    def _change_forward(self, by_plan: Mapping[int, Sequence[AgreedSteps]]) -> bool:
        """Say whether forward passes are longer with some plan than with the buckets in force, beyond noise."""
        for place in by_plan:
            pairs = [turn for turn in self._turns if place in turn and 0 in turn]
            differences = [_forward_level(turn[place]) - _forward_level(turn[0]) for turn in pairs]
            if place and len(differences) >= 3:
                error = stdev(differences) / math.sqrt(len(differences))
                if abs(fmean(differences)) > max(SAME_FORWARD, ERRORS * error):
                    return True
        return False


def _level(steps: AgreedSteps, slope: float) -> float:
    """Return the logarithm of a turn's step, without what goes with its forward pass.

    Of few steps the median, which one that was held up does not move.
    """
    return median(
        math.log(max(length_s, 1e-12)) - (slope * math.log(forward_s) if slope else 0.0)
        for length_s, forward_s in zip(steps.length_s, steps.forward_s, strict=True)
    )


def _forward_level(steps: AgreedSteps) -> float:
    return median(math.log(forward_s) for forward_s in steps.forward_s)


@dataclass(frozen=True, slots=True)
class _Interval:
    middle: float
    low: float
    high: float


def _interval(values: Sequence[float], confidence: float) -> _Interval:
    """Return the trimmed mean, and what it is above, and below, with so much confidence each.

    A fifth of the turns at either end does not count (Yuen's interval): slow spells make long tails.
    """
    if not values:
        return _Interval(0.0, -math.inf, math.inf)
    ranked, cut = sorted(values), len(values) // 5
    inner = ranked[cut : len(ranked) - cut]
    mean = fmean(inner)
    if len(values) < 3:
        return _Interval(mean, -math.inf, math.inf)
    winsorized = [inner[0]] * cut + inner + [inner[-1]] * cut
    error = stdev(winsorized) * math.sqrt(len(values) - 1) / math.sqrt(len(inner) * (len(inner) - 1))
    half = t_quantile(confidence, len(inner) - 1) * error
    return _Interval(mean, mean - half, mean + half)


def _part(logarithm: float) -> float:
    """Return by which part a step is shorter whose logarithm is less by so much."""
    return logarithm if math.isinf(logarithm) else -math.expm1(-max(logarithm, -100.0))


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    r"""Return the quantile of Student's t for confidences from a half on, by bisection of its distribution.

    For whole degrees of freedom :math:`\nu` that is a finite sum of powers of cosines,
    with :math:`\theta = \arctan(t / \sqrt\nu)`.

    >>> [round(t_quantile(0.995, freedom), 3) for freedom in (1, 2, 3, 4, 10, 30)]  # as tables have it
    [63.657, 9.925, 5.841, 4.604, 3.169, 2.75]
    """

    def below(value: float) -> float:
        theta = math.atan(value / math.sqrt(freedom))
        term, total = (math.cos(theta), 0.0) if freedom % 2 else (1.0, 0.0)
        for step in range(1 + freedom % 2, freedom, 2):
            total += term
            term *= math.cos(theta) ** 2 * step / (step + 1)
        within = math.sin(theta) * total
        return 0.5 + (within if freedom % 2 == 0 else 2 / math.pi * (theta + within)) / 2

    low, high = 0.0, 1.0
    while below(high) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < confidence else (low, middle)
    return high
