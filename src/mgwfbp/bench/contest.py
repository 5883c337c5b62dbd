"""Strategies side by side on one model and network: `contest`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import Any

import torch.distributed as dist

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import HOOKED, Contender, Known, Measured, hook_mib, make_contender, predict_contender
from mgwfbp.bench.learning import NOTES, Learnt, after_backward, learn, observe
from mgwfbp.bench.servers import ServerCosts
from mgwfbp.bench.turns import Schedule, take_turns
from mgwfbp.cost import PiecewiseCost
from mgwfbp.measure.workload import Workload
from mgwfbp.plan import SHORT_WIRES
from mgwfbp.ranges import LOW_MODEL_OFF, MODEL_OFF
from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.runtime.strategies import split_wire
from mgwfbp.runtime.tune.tuning import Tuning
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace

__all__ = ["Case", "Progress", "contest", "num_steps"]

# The turn without communication, among the strategies'.
ALONE = "no communication"
# Plans whose messages are of all sizes there are; the last is the one that the model takes for the best.
LEARN_FROM = ("single", "wfbp", "ddp", "optimal")
# Buckets whose messages are observed in low precision, where strategies may send so; one precision speaks for all.
LOW_MIB = (1, 25)
# Steps of every strategy that are watched at the end.
WATCHED_STEPS = 3
# What a tuner takes in the middle; benchmarks/decisions.md.
TUNING_STEPS = 250


@dataclass(frozen=True, slots=True)
class Case:
    """What strategies are compared on: a model, its trace, and what messages cost between these workers."""

    workload: Workload
    trace: ModelTrace  # recorded without communication
    cost: PiecewiseCost  # swept without computation
    network: str  # what the workers talk over, in words
    servers: ServerCosts | None = None  # of gradients through the ranks that own them
    ddp_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """What to call as a contest goes on."""

    on_steps: Callable[[int], object] = lambda _: None  # so many more steps are done
    on_turn: Callable[[int, Mapping[str, float]], object] = lambda _turn, _times: None
    on_phase: Callable[[str], object] = lambda _: None  # what has been found


def num_steps(strategies: Sequence[str], schedule: Schedule, *, learns: bool, timelines: bool) -> int:
    """Return about how many steps a contest takes; a tuner's are some hundred more."""
    turns = schedule.turns * (1 + len(strategies)) * (schedule.settle + schedule.steps)
    low = len(LOW_MIB) if any(split_wire(name)[1] for name in strategies) else 0
    learning = (len(LEARN_FROM) + low) * (1 + len(NOTES)) if learns else 0
    watched = len(strategies) * (1 + WATCHED_STEPS) if timelines else 0
    return turns + learning + watched + TUNING_STEPS * sum(split_wire(name)[0] == "auto" for name in strategies)


def contest(
    case: Case,
    strategies: Sequence[str],
    schedule: Schedule,
    *,
    learns: bool = True,
    timelines: bool = True,
    progress: Progress | None = None,
    source: Mapping[str, Any] | None = None,
) -> BenchResult:
    """Measure strategies in interleaved turns and predict each. All ranks must call it.

    They get the same result, but for measured timelines, which are each rank's own.

    ``auto`` comes first: the tuner works until it has settled, and its plan then takes part like any other. With
    ``learns`` some plans are watched next, and predictions and plans are made with the cost and the trace that training
    itself shows; without, with those of ``case``. With ``timelines`` every strategy is watched at the end.
    """
    progress = progress or Progress()
    arena = Arena(case.workload, case.trace, tune="auto" in strategies, **case.ddp_arguments)
    tunings = {}
    for name in strategies:
        base, wire = split_wire(name)
        if base == "auto":
            tunings[name] = arena.tune(progress.on_steps, wire)
            progress.on_phase(repr(tunings[name]))
    wires = dict.fromkeys(wire for _, wire in map(split_wire, strategies) if wire is not None)
    learnt = _learn(case, arena, progress, list(wires)) if learns else Learnt(case.trace, case.cost)
    contenders = [_contender(name, case, learnt, tunings) for name in strategies]
    ways = {ALONE: arena.enter_alone, **{one.strategy: arena.way(one) for one in contenders}}
    turns_s = take_turns(ways, schedule, arena.device, on_turn=progress.on_turn, on_steps=progress.on_steps)
    seen = _watch(arena, contenders, progress) if timelines else {}
    recorded = Measured(case.trace, case.cost)
    before = Known(recorded, recorded, case.servers)
    after = Known(Measured(learnt.trace, case.cost), Measured(learnt.trace, learnt.both), case.servers)
    compute_s = median(turns_s[ALONE])
    results = []
    for one in contenders:
        predicted = predict_contender(one, after)
        result = StrategyResult.of_turns(
            one.strategy,
            turns_s[one.strategy],
            compute_s,
            num_messages=one.plan.num_groups,
            predicted_s=None if predicted is None else predicted.iteration_s,
            plan=one.plan,
            timeline=seen.get(one.strategy),
            predicted_timeline=predicted if timelines else None,
        )
        results.append(result)
    without_learning = {one.strategy: predict_contender(one, before) for one in contenders}
    return BenchResult(
        model=case.trace.model,
        workers=dist.get_world_size(),
        network=case.network,
        compute_s=compute_s,
        strategies=tuple(results),
        trace=learnt.trace,
        cost=learnt.cost,
        source={
            **(source or {}),
            "turns": schedule.turns,
            "steps": schedule.steps,
            "settle": schedule.settle,
            "same_plan": [list(pair) for pair in _same_plan(contenders)],
            "compute_turns_s": turns_s[ALONE],
            "recorded_compute_s": case.trace.compute_s,
            "learnt": learns,
            "model_off": [MODEL_OFF, LOW_MODEL_OFF],  # in the ranges of predictions
            "predicted_before_learning_s": {
                name: None if timeline is None else timeline.iteration_s for name, timeline in without_learning.items()
            },
            "terms": [asdict(terms) for terms in learnt.terms],
            "swept_cost": case.cost.points,
            "tuning": _summary(tunings["auto"]) if "auto" in tunings else None,
            **{f"tuning of {name}": _summary(tuning) for name, tuning in tunings.items() if name != "auto"},
            **({"low_cost": learnt.low_cost.to_json()} if learnt.low_cost else {}),
        },
    )


def _learn(case: Case, arena: Arena, progress: Progress, wires: Sequence[str]) -> Learnt:
    names = [f"bucket-{mib}+{SHORT_WIRES[wire]}" for wire in wires[:1] for mib in LOW_MIB]
    plans = [make_contender(name, case.workload.model, case.trace, case.cost) for name in (*names, *LEARN_FROM)]
    learnt = learn(arena, plans, case.trace, case.cost, on_steps=progress.on_steps)
    for terms in learnt.terms:
        progress.on_phase(f"in training, {terms}")
    return learnt


def _contender(name: str, case: Case, learnt: Learnt, tunings: Mapping[str, Tuning]) -> Contender:
    if name not in tunings:
        cost = learnt.both if split_wire(name)[1] else learnt.cost
        return make_contender(name, case.workload.model, learnt.trace, cost)
    plan = tunings[name].plan
    if plan is None:  # the tuner gave up and left torch's own buckets
        return replace(make_contender("ddp", case.workload.model, learnt.trace, learnt.cost), strategy=name)
    return Contender(name, replace(plan, model=case.trace.model, planner=name), wire=split_wire(name)[1])


def _watch(arena: Arena, contenders: Sequence[Contender], progress: Progress) -> dict[str, Timeline]:
    """Return a measured timeline of every strategy, this rank's."""
    seen = {}
    for contender in contenders:
        if hook_mib(contender.strategy) is not None:  # torch's own, which is not ours to observe
            continue
        timeline = observe(arena, contender, WATCHED_STEPS).timeline
        seen[contender.strategy] = after_backward(timeline) if contender.strategy == "naive" else timeline
        progress.on_steps(1 + WATCHED_STEPS)
    return seen


def _same_plan(contenders: Sequence[Contender]) -> list[tuple[str, str]]:
    """Return the pairs of strategies that send the same messages in the same way."""
    plans = {
        one.strategy: one.plan.messages
        for one in contenders
        if one.strategy not in HOOKED and hook_mib(one.strategy) is None
    }
    return [pair for pair in combinations(plans, 2) if plans[pair[0]] == plans[pair[1]]]


def _summary(tuning: Tuning) -> dict[str, Any]:
    """Return the tuner's findings, without what the result has already."""
    found = tuning.to_json()
    return {name: found[name] for name in ("state", "reason", "steps", "candidates", "before_s", "after_s", "spent_s")}
