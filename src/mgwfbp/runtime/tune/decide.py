"""Which plan is the fastest: the tuner's script, a generator that asks for steps and is told what came of them.

[Note: how the tuner decides]
It runs on rank 0 alone; whoever drives it lets all ranks train as it asks and tells it what they observed together. So
nothing here waits, measures or depends on a clock, and tests drive it in simulated worlds.

1. *Observe* the buckets in force, torch's own or an earlier plan's: when gradients are ready and what messages take.
   Then buckets of 1 MiB.
2. *Plan* with that, run the plan, observe its messages, learn the cost anew and plan again, until the plan stays the
   same: the cost that counts is the one beside a busy backward pass.
3. *Compare* these plans, the paper's, and buckets of other sizes in turns. The plan in force, torch's buckets and those
   of 1 MiB always take part, and of those in low precision one. Where the limit of steps is too low for all, of the
   others those do that are predicted to be the fastest (`ENOUGH_TURNS`).
4. *Keep* the plan in force unless another one is faster beyond doubt, see [Note: how sure a comparison is] in
   ``race.py``. The comparison ends as soon as this is decided and nothing is left to win, or at a limit.

Where messages may travel in low precision (``wire``), the last plan of 2 is run with all messages so and observed,
then both, messages and precision, are planned (`plan_wire`), observed, and planned again. These plans take part in 3;
and of those within the tolerance of the fastest the one that sends the fewest bytes in low precision is kept.

Where a sharded optimizer gathers parameters (``gathers``), that is tuned when the messages are chosen: it is observed
what gathers take, when the forward pass needs each, and what that takes without them; groups are planned, and take
turns with those in force as in 3 and 4, in at most `GATHERS` of the steps again. What is sharded is not changed, since
state would have to move. But it is measured, in as many steps again, what those take that wait for gathers first and
all-reduce their messages, as those of a plain optimizer do; and a plan that all-reduces some messages, and is
predicted to be worth a new optimizer, is said.
"""

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from statistics import median

from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.plan import SHORT_WIRES, MergePlan
from mgwfbp.planners import find_plan, plan_bucket, plan_wire, planner_of
from mgwfbp.planners.sharded import plan_gathers, plan_sharded
from mgwfbp.ranges import off_by, predict_range
from mgwfbp.runtime.observe.learn import Learner
from mgwfbp.runtime.observe.steps import Gradients, Note, Seen
from mgwfbp.runtime.tune.race import PRECISION, Limits, Turn, compare, turns_steps
from mgwfbp.runtime.tune.tuning import Candidate, Comparison, Gathering
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace

__all__ = ["BUCKET_MIB", "Situation", "Verdict", "decide"]

# What is noted in the steps of a turn. New buckets are allocated in the first step with them, so it does not count.
_ALL: tuple[Note, ...] = ("plain", "gradients", "messages")
OBSERVE: tuple[Note, ...] = ("settle", *_ALL, *_ALL, *_ALL)
OBSERVE_MESSAGES: tuple[Note, ...] = ("settle", "messages", "messages", "messages")
OBSERVE_GATHERS: tuple[Note, ...] = ("settle", *("gathers", "alone") * 3)
# Fewer turns decide nothing, so no more candidates take part than can have so many within the limit of steps.
ENOUGH_TURNS = 5
MAX_ROUNDS = 3  # of planning
# Plans that are run next are made for messages that take longer than learnt by so many times what these are typically
# off (the learnt cost's spread): one that is best only where the cost is underestimated teaches little.
CAUTION = 1.0
BUCKET_MIB = (1, 2, 5, 10, 25, 50)
FAR = 4  # bucket sizes are far from each other where one is so many times the other
# The part of the steps in which groups of gathers may be compared, besides; and again these with plain all-reduces.
GATHERS = 0.25
# A plan that needs a new optimizer is predicted to shorten the step by more than this part, or is not mentioned.
NEW_OPTIMIZER = 0.01

Messages = tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[tuple[str, ...], ...]]
Named = dict[Messages, tuple[str, MergePlan]]  # plans and their names, by what each sends
Allowed = Callable[[MergePlan], MergePlan]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is tuned, and what is there when it begins."""

    gradients: Gradients  # what a step sends
    workers: int
    in_force: MergePlan  # kept unless another plan is faster: torch's own buckets, or an earlier plan
    torchs: MergePlan | None = None  # torch's own buckets, where those in force may be others
    wire: str | None = None  # the precision in which messages may travel besides their own
    tolerance: float = PRECISION  # precision is given up only for more than this part of the step
    # The groups in which a sharded optimizer gathers parameters; empty where they are the messages', the last one
    # first; None where there is no such optimizer.
    gathers: tuple[tuple[str, ...], ...] | None = None
    most_bytes: float = inf  # of a message, for which there is room
    most_low_bytes: float = inf  # and of one in low precision


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided, and why."""

    candidates: tuple[Candidate, ...]  # the chosen one first
    comparison: Comparison
    trace: ModelTrace
    cost: PiecewiseCost
    exposed_s: float  # with the chosen plan
    before_s: float | None = None  # a step of the plan that was in force, as compared; None where nothing was
    low_cost: PiecewiseCost | None = None  # of a message in low precision, where such were observed
    gathering: Gathering | None = None  # where parameters are gathered


def decide(
    situation: Situation,
    allowed: Allowed,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> Generator[Turn, Seen, Verdict]:
    """Find the fastest plan; see [Note: how the tuner decides].

    Args:
        situation: what is tuned, and the plan in force.
        allowed: turns a planner's plan into one that the Reducer can hold (one dtype and device a message).
        limits: how much may be spent.
    """
    known = Learner(situation.gradients, situation.workers)
    size_of = situation.gradients.size_of

    def fitting(plan: MergePlan) -> MergePlan:
        return split_by_size(allowed(plan), size_of, situation.most_bytes, situation.most_low_bytes)

    candidates = yield from _find_candidates(situation, known, fitting, limits.steps)
    in_force = candidates[0].name
    candidates, comparison = yield from compare(
        candidates,
        limits,
        known.learn,
        lambda plan: plan.low_bytes(size_of),
        situation.tolerance,
        regresses=situation.gathers is None,  # gathers may have the groups of messages
    )
    before_s = {one.name: one.step_s for one in candidates}[in_force]
    chosen = candidates[0]
    seen = yield Turn(chosen.plan, OBSERVE, f"observing {chosen.name}")
    known.learn(chosen.plan, seen)
    trace, cost = known.trace, known.cost if situation.wire is None else known.both
    chosen = _predicted(chosen, trace, cost)
    gathering = None
    if situation.gathers is not None:
        chosen, among_gathers = yield from _gathers(chosen, situation.gathers, known, allowed, limits)
        gathering = yield from _all_reduced(chosen, among_gathers, known, allowed, fitting, limits)
        trace = known.whole_trace
    return Verdict(
        (chosen, *candidates[1:]),
        comparison,
        trace,
        known.cost,
        exposed_s=median(seen.plain.exposed_s) if seen.plain else 0.0,
        before_s=before_s if isfinite(before_s) else None,
        low_cost=known.low_cost,
        gathering=gathering,
    )


def _find_candidates(
    situation: Situation, known: Learner, allowed: Allowed, steps: int
) -> Generator[Turn, Seen, list[Candidate]]:
    """Observe, plan and observe, and return the plans to be compared in so many steps, the one in force first."""
    in_force = replace(situation.in_force, gathers=())
    plain = replace(in_force, wire=())  # the same messages as they are: gradients are observed beside such
    torchs = situation.torchs or plain
    found: Named = {in_force.messages: ("ddp" if in_force.messages == torchs.messages else "in force", in_force)}
    found.setdefault(torchs.messages, ("ddp", torchs))
    found.setdefault(plain.messages, ("in force, full precision", plain))
    known.learn(plain, (yield Turn(plain, OBSERVE, "observing the buckets in force")))
    one_mib = allowed(_buckets(known.trace, known.cost, 1))
    if one_mib.messages not in found:
        found[one_mib.messages] = ("bucket-1", one_mib)
        known.learn(one_mib, (yield Turn(one_mib, OBSERVE_MESSAGES, "observing buckets of 1 MiB")))
    for number in range(1, MAX_ROUNDS + 1):
        plan = allowed(find_plan(known.trace, off_by(known.cost, CAUTION)))
        if plan.messages in found:
            break
        found[plan.messages] = (f"optimal {number}", plan)
        known.learn(plan, (yield Turn(plan, OBSERVE, f"observing plan {number}")))
    _add_other_planners(found, known, allowed)
    if situation.wire is not None:
        low = yield from _in_low_precision(plan, known, allowed, situation.wire, situation.tolerance)
        for messages, named in low.items():
            found.setdefault(messages, named)
    trace, cost = known.trace, known.cost if situation.wire is None else known.both
    candidates = [_predicted(Candidate(name, one, 0.0), trace, cost) for name, one in found.values()]
    always = {one.messages for one in (in_force, torchs, one_mib)}
    low_ones = sorted((one for one in candidates if any(one.plan.wire)), key=lambda one: one.predicted_s)
    always.update(one.plan.messages for one in low_ones[:1])
    return _most_likely(candidates, always, steps)


def _gathers(
    chosen: Candidate,
    in_force: tuple[tuple[str, ...], ...],
    known: Learner,
    allowed: Allowed,
    limits: Limits,
) -> Generator[Turn, Seen, tuple[Candidate, Comparison]]:
    """Find in which groups parameters are gathered beside the chosen messages: as before unless others are faster."""
    groups = in_force or tuple(group[::-1] for group in reversed(chosen.plan.groups))
    before = replace(chosen.plan, gathers=groups, predicted={})
    known.learn(before, (yield Turn(before, OBSERVE_GATHERS, "observing gathers")))
    trace, cost = known.whole_trace, known.halves
    planned = allowed(replace(chosen.plan, groups=plan_gathers(trace, cost.all_gather), wire=(), predicted={})).groups
    plans = {plan.gathers: plan for plan in (before, replace(before, gathers=planned))}
    names = ("as before", "planned")
    rivals = [Candidate(name, plan, 0.0) for name, plan in zip(names, plans.values(), strict=False)]
    found, comparison = yield from compare(rivals, _some(limits), regresses=False)
    kept = _predicted(replace(chosen, plan=found[0].plan), trace, cost)
    if found[0].steps_s:
        kept = replace(kept, steps_s=found[0].steps_s, step_s=found[0].step_s)
    return kept, comparison


def _all_reduced(
    kept: Candidate, among_gathers: Comparison, known: Learner, allowed: Allowed, fitting: Allowed, limits: Limits
) -> Generator[Turn, Seen, Gathering]:
    """Find what steps take with all messages all-reduced, those of the plan and those planned so, and say what is."""
    seen = yield Turn(kept.plan, OBSERVE_MESSAGES, "observing messages that are all-reduced", all_reduces=True)
    known.learn_all_reduces(kept.plan, seen)
    trace, cost = known.whole_trace, known.halves
    planned = fitting(find_plan(trace, cost.all_reduce)).groups
    plans = {groups: replace(kept.plan, groups=groups, predicted={}) for groups in (kept.plan.groups, planned)}
    names = ("all-reduced", "all-reduced, planned so")
    rivals = [Candidate(name, plan, 0.0) for name, plan in zip(names, plans.values(), strict=False)]
    found, comparison = yield from compare([kept, *rivals], _some(limits), regresses=False, all_reduced=(1, 2))
    all_reduced_s = min(one.step_s for one in found if one.name in names)
    per_group = allowed(plan_sharded(trace, cost))
    per_group_s = predict(trace, cost, per_group).iteration_s
    is_mixed = 0 < sum(per_group.sharded) < per_group.num_groups  # else it is a plain optimizer's, or as this one
    is_worth = is_mixed and per_group_s < (1 - NEW_OPTIMIZER) * kept.predicted_s
    said = replace(per_group, predicted={"iteration_s": per_group_s}) if is_worth else None
    return Gathering(among_gathers, known.gather_cost, comparison, all_reduced_s, known.all_reduce_cost, said)


def _some(limits: Limits) -> Limits:
    return replace(limits, steps=max(1, int(GATHERS * limits.steps)))


def _in_low_precision(
    merged: MergePlan, known: Learner, allowed: Allowed, wire: str, tolerance: float
) -> Generator[Turn, Seen, Named]:
    """Learn what messages in low precision take, those of a plan first, and return plans that send some so."""
    short = SHORT_WIRES[wire]
    everything = _all_in(wire, merged, allowed)
    if not everything.wire:  # no gradient of this model can
        return {}
    found: Named = {everything.messages: (f"all {short} 1", everything)}
    known.learn(everything, (yield Turn(everything, OBSERVE_MESSAGES, f"observing messages in {wire}")))
    for number in range(1, MAX_ROUNDS + 1):
        plan = allowed(plan_wire(known.trace, known.both, wire, tolerance=tolerance))
        if plan.messages in found or not plan.wire:  # without, it is the plan in full precision, or about as good
            break
        found[plan.messages] = (f"optimal {number}+{short}", plan)
        known.learn(plan, (yield Turn(plan, OBSERVE_MESSAGES, f"observing plan {number} in {wire}")))
    everything = _all_in(wire, find_plan(known.trace, known.both.low), allowed)
    found.setdefault(everything.messages, (f"all {short} 2", everything))
    return {messages: (name, plan) for messages, (name, plan) in found.items() if plan.wire}


def _all_in(wire: str, plan: MergePlan, allowed: Callable[[MergePlan], MergePlan]) -> MergePlan:
    """Return the plan with all messages in low precision, as far as that is allowed."""
    return allowed(replace(plan, wire=(wire,) * plan.num_groups, predicted={}))


def _buckets(trace: ModelTrace, cost: PiecewiseCost, mib: float) -> MergePlan:
    size_bytes = int(mib * 2**20)
    planner = partial(plan_bucket, first_bucket_bytes=size_bytes, bucket_bytes=size_bytes)
    return find_plan(trace, cost, planner)


def _add_other_planners(found: Named, known: Learner, allowed: Allowed) -> None:
    """Add the exact plan, the paper's and two bucket sizes to the plans that were found, each partition once."""
    trace, cost = known.trace, known.cost
    for name in ("optimal", "mgwfbp"):
        plan = allowed(find_plan(trace, cost, planner_of(name)))
        found.setdefault(plan.messages, (name, plan))
    buckets, predicted_s = {}, {}
    for mib in BUCKET_MIB:
        plan = allowed(_buckets(trace, cost, mib))
        if plan.messages not in found:
            buckets[mib], predicted_s[mib] = plan, predict(trace, cost, plan).iteration_s
    for mib in two_sizes(predicted_s):
        found.setdefault(buckets[mib].messages, (f"bucket-{mib}", buckets[mib]))


def _most_likely(candidates: Sequence[Candidate], always: Container[Messages], steps: int) -> list[Candidate]:
    """Return those that always take part, and of the others the fastest as predicted: as many as have enough turns."""
    others = [one for one in candidates if one.plan.messages not in always]
    room = steps // turns_steps(ENOUGH_TURNS) - (len(candidates) - len(others))
    slowest = sorted(others, key=lambda one: one.predicted_s)[max(1, room) :]
    return [one for one in candidates if one not in slowest]


def _predicted(candidate: Candidate, trace: ModelTrace, cost: Cost) -> Candidate:
    """Return a candidate with what its step is predicted to take."""
    predicted_s = predict(trace, cost, candidate.plan).iteration_s
    return replace(candidate, predicted_s=predicted_s, between_s=predict_range(trace, cost, candidate.plan))


def split_by_size(
    plan: MergePlan, size_of: Mapping[str, int], most_bytes: float, most_low_bytes: float = inf
) -> MergePlan:
    """Split messages into ones of at most so many bytes, each as full as can be; larger gradients travel alone.

    Those in low precision may have another limit; a gradient that is larger than that travels as it is.

    >>> plan = MergePlan("toy", "by hand", (("d", "c", "b"), ("a",)))
    >>> split_by_size(plan, {"d": 2, "c": 3, "b": 1, "a": 9}, 4).groups
    (('d',), ('c', 'b'), ('a',))
    """
    groups: list[list[str]] = []
    wire: list[str] = []
    for group, precision in zip(plan.groups, plan.wires, strict=True):
        filled = 0
        for place, name in enumerate(group):
            sent_in = precision if size_of[name] <= most_low_bytes else ""
            filled += size_of[name]
            if place == 0 or sent_in != wire[-1] or filled > (most_low_bytes if sent_in else most_bytes):
                groups.append([])
                wire.append(sent_in)
                filled = size_of[name]
            groups[-1].append(name)
    if len(groups) == plan.num_groups and tuple(wire) == plan.wires:
        return plan
    return replace(plan, groups=tuple(map(tuple, groups)), wire=tuple(wire), predicted={})


def two_sizes(predicted_s: Mapping[int, float]) -> list[int]:
    """Return the bucket size that is predicted to be the fastest, and the fastest of those far from it.

    Two neighbours would be right or wrong together: where the model errs, a size far away may not.

    >>> two_sizes({1: 4.0, 2: 3.5, 5: 2.0, 10: 2.1, 25: 3.0})
    [5, 25]
    """
    ranked = sorted(predicted_s, key=lambda size: (predicted_s[size], size))
    far = [size for size in ranked[1:] if max(size, ranked[0]) >= FAR * min(size, ranked[0])]
    return [*ranked[:1], *(far or ranked[1:])[:1]]
