"""Which records belong together: inputs in, cases out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.costs import LowCost, ShardedCost, WireCost, full_precision_cost
from mgwfbp.errors import MgwfbpError, PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, Planner
from mgwfbp.report.cases import Case, CaseStrategy, plan_of
from mgwfbp.report.inputs import Inputs, KnownCost, Named
from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.run import TrainingRun
from mgwfbp.timeline import Timeline, predict
from mgwfbp.trace import ModelTrace

__all__ = ["find_cases"]


def find_cases(
    inputs: Inputs, *, workers: Sequence[int] = (), planners: Mapping[str, Planner] = PLANNERS
) -> list[Case]:
    """Put together what belongs together.

    Every benchmark is a case; so are the runs of one model and number of workers, as far as they need no more than one
    trace and cost; so is every trace with every cost and with every network of ``workers``, where each planner's step
    and that of every plan for this model is predicted. A timeline goes to the case of its model and number of workers.

    Args:
        inputs: what was read.
        workers: numbers of workers for which the networks among the inputs are planned.
        planners: whose steps are predicted, by name.
    """
    cases = [_bench_case(bench) for _, bench in inputs.benches]
    cases += _run_cases(inputs, planners)
    for _, trace in inputs.traces:
        for name, cost in inputs.costs:
            low_cost = _beside(cost, inputs.low_of(name))
            case = Case(trace.model, _where(name, cost), cost.workers, (), trace, cost, low_cost=low_cost)
            cases.append(_with_plans(_planned(case, planners), inputs))
        for _, network in inputs.networks:
            for count in workers:
                cost = network.cost(count)
                low_cost = _beside(cost, inputs.low_cost)
                case = Case(trace.model, network.name, count, (), trace, cost, network, low_cost=low_cost)
                cases.append(_with_plans(_planned(case, planners), inputs))
    for name, timeline in inputs.timelines:
        _add_timeline(cases, name, timeline)
    return cases


def _where(name: str, cost: KnownCost) -> str:
    return _said_network(cost) or Path(name).name


def _said_network(cost: KnownCost) -> str:
    """Return what a cost says of where it is from, if anything."""
    return str(cost.source.get("network") or cost.source.get("backend") or "")


# ---- plans and their predictions


def _planned(case: Case, planners: Mapping[str, Planner]) -> Case:
    """Add what every planner's plan would give; needs the trace and the cost."""
    cost = case.both_costs
    if case.trace is None or cost is None:
        return case
    there = {strategy.name: strategy for strategy in case.strategies}
    ddp = there["ddp"].predicted if "ddp" in there else None
    added = []
    for name, planner in planners.items():
        if name in there:
            continue
        step = predict(case.trace, cost, planner(case.trace, cost))
        # The same buckets need not stand there under both of their names.
        if name != "bucket" or ddp is None or _messages(ddp) != _messages(step):
            added.append(CaseStrategy(name, step))
    return replace(case, strategies=(*case.strategies, *added))


def _with_plans(case: Case, inputs: Inputs) -> Case:
    for name, plan in inputs.plans:
        predicted = _predicted(plan, case.trace, case.both_costs)
        if predicted is not None:
            strategy = CaseStrategy(f"{Path(name).name} ({plan.planner})", predicted)
            case = replace(case, strategies=(*case.strategies, strategy))
    return case


def _predicted(plan: MergePlan | None, trace: ModelTrace | None, cost: Cost | None) -> Timeline | None:
    """Return the step of a plan, where there is all that it takes to predict it."""
    if plan is None or trace is None or cost is None:
        return None
    try:
        plan.check_covers([layer.name for layer in trace.layers])
    except PlanError:
        return None
    return predict(trace, cost, plan)


def _marked(timeline: Timeline | None, plan: MergePlan | None) -> Timeline | None:
    """Write into a timeline's messages in which precision they travel; a step that was observed does not say it."""
    if timeline is None or plan is None or not plan.wire:
        return timeline
    wire_of = {frozenset(group): wire for group, wire in zip(plan.groups, plan.wires, strict=True)}
    spans = [replace(span, wire=span.wire or wire_of.get(frozenset(span.layers), "")) for span in timeline.messages]
    return replace(timeline, messages=tuple(spans))


def _beside(cost: KnownCost | None, low: LowCost | None) -> KnownCost | None:
    """Return what messages in low precision cost beside others, where both are known."""
    return None if cost is None or low is None else low.beside(cost)


def _learnt_low(said: Any, cost: KnownCost | None) -> KnownCost | None:
    """Return the cost of messages in low precision that a free-form field has, if it does.

    Older editions wrote its points alone, and did not learn what such messages take from the computation.
    """
    if cost is None or not said:
        return None
    is_whole = isinstance(said, Mapping)
    fields = said if is_whole else {"points": said}
    taken = {name: fields.get(name, 0.0) for name in ("taken_s", "taken_per_byte_s")}
    try:
        low = PiecewiseCost(cost.workers, fields.get("points", ()), **taken)
    except MgwfbpError:
        return None
    return LowCost(low, knows_taken=is_whole).beside(cost)


# ---- benchmarks


def _bench_case(bench: BenchResult) -> Case:
    low_cost = _learnt_low(bench.source.get("low_cost"), bench.cost)
    case = Case(
        bench.model,
        bench.network,
        bench.workers,
        (),
        bench.trace,
        bench.cost,
        compute_s=bench.compute_s,
        low_cost=low_cost,
    )
    return replace(case, strategies=tuple(_bench_strategy(case, result) for result in bench.strategies))


def _bench_strategy(case: Case, result: StrategyResult) -> CaseStrategy:
    predicted = _marked(result.predicted_timeline, result.plan)
    # Of what the benchmark did not predict, torch's hooks for one, the plan does not say how it travels.
    if predicted is None and result.predicted_s is not None:
        predicted = _predicted(result.plan, case.trace, case.both_costs)
    return CaseStrategy(result.strategy, predicted, _marked(result.timeline, result.plan), result)


# ---- training runs


def _run_cases(inputs: Inputs, planners: Mapping[str, Planner]) -> list[Case]:
    """Put runs of one model and number of workers together.

    A run without a trace and a cost of its own, DDP's for one, belongs to the first that has them, so that strategies
    that were trained one after the other stand in one case.
    """
    groups: list[list[Named[TrainingRun]]] = []
    for named in inputs.runs:
        key = _key(named[1])
        if key is None:  # it says nothing but losses
            continue
        mates = [group for group in groups if _key(group[0][1]) == key]
        free = [group for group in mates if not (_measured_both(named[1]) and any(_measured_both(r) for _, r in group))]
        if free:
            free[0].append(named)
        else:
            groups.append([named])
    return [_planned(_run_case(group, inputs.low_cost), planners) for group in groups]


def _key(run: TrainingRun) -> tuple[str, int] | None:
    timeline = run.timeline or _own_prediction(run)
    return None if timeline is None else (timeline.model, timeline.workers)


def _cost(run: TrainingRun) -> KnownCost | None:
    cost = run.cost if run.cost is None else full_precision_cost(run.cost)
    return cost if isinstance(cost, KnownCost) else None


def _measured_both(run: TrainingRun) -> bool:
    return run.trace is not None and _cost(run) is not None


def _own_prediction(run: TrainingRun) -> Timeline | None:
    if run.predicted is not None:
        return _marked(run.predicted, run.plan)
    return _predicted(run.plan, run.trace, _all_costs(run))


def _all_costs(run: TrainingRun) -> Cost | None:
    """Return a run's cost with those of halves, or that of low precision, where it knows them."""
    if isinstance(run.cost, ShardedCost):
        return run.cost
    cost, low_cost = _cost(run), _learnt_low_cost(run)
    return WireCost(cost, low_cost) if cost and low_cost else cost


def _learnt_low_cost(run: TrainingRun) -> KnownCost | None:
    if isinstance(run.cost, WireCost):  # measured when it began
        return run.cost.low
    return _learnt_low((run.tuning or {}).get("low_cost"), _cost(run))


def _run_case(runs: Sequence[Named[TrainingRun]], given: LowCost | None) -> Case:
    """Make one case of runs, at most one of which has a trace and a cost."""
    known = next((run for _, run in runs if _measured_both(run)), runs[0][1])
    trace, cost = known.trace, _cost(known)
    low_cost = _beside(cost, given) or _learnt_low_cost(known)
    key = _key(runs[0][1])
    assert key is not None  # noqa: S101  # others were left out
    model, workers = key
    strategies: list[CaseStrategy] = []
    for name, run in runs:
        timeline = run.timeline or _own_prediction(run)
        strategy = str(run.config.get("strategy", timeline.planner if timeline else name))
        if any(other.name == strategy for other in strategies):
            strategy = f"{strategy} ({name})"
        measured = _marked(run.timeline, run.plan)
        sent = None if measured is None else plan_of(measured)
        predicted = _own_prediction(run) or _predicted(sent, trace, cost)
        strategies.append(CaseStrategy(strategy, predicted, measured))
    named = runs[0][1].environment.get("network") or (_said_network(cost) if cost is not None else "")
    network = str(named or "a network")
    return Case(
        model,
        f"{network} ({', '.join(name for name, _ in runs)})",
        workers,
        tuple(strategies),
        trace,
        cost,
        num_runs=len(runs),
        raced_s=next((raced_s for _, run in runs if (raced_s := _raced_s(run)) is not None), None),
        low_cost=low_cost,
    )


def _raced_s(run: TrainingRun) -> tuple[float, float] | None:
    """Return what the tuner measured in turns: the step with DDP's buckets and that with the plan it chose."""
    tuning = run.tuning or {}
    before_s, after_s = tuning.get("before_s"), tuning.get("after_s")
    if tuning.get("state") != "settled" or not isinstance(before_s, float) or not isinstance(after_s, float):
        return None
    return before_s, after_s


# ---- timelines


def _add_timeline(cases: list[Case], name: str, timeline: Timeline) -> None:
    """Put a timeline into the case it belongs to, or into one of its own."""
    key = (timeline.model, timeline.workers)
    places = [place for place, case in enumerate(cases) if (case.model, case.workers) == key]
    if not places:
        cases.append(Case(timeline.model, "", timeline.workers, ()))
        places = [len(cases) - 1]
    place = max(places, key=lambda place: any(_is_measured_by(other, timeline) for other in cases[place].strategies))
    strategies = list(cases[place].strategies)
    # A file says not whether it was measured; its name may.
    if "predict" in name.lower():
        strategies.append(CaseStrategy(f"{timeline.planner} ({name})", predicted=timeline))
    else:
        mate = next((index for index, other in enumerate(strategies) if _is_measured_by(other, timeline)), None)
        if mate is None:
            strategies.append(CaseStrategy(f"{timeline.planner} ({name})", measured=timeline))
        else:
            if (predicted := strategies[mate].predicted) is not None:
                pairs = zip(timeline.messages, predicted.messages, strict=True)
                spans = tuple(replace(span, wire=span.wire or mine.wire) for span, mine in pairs)
                timeline = replace(timeline, messages=spans)
            strategies[mate] = replace(strategies[mate], measured=timeline)
    cases[place] = replace(cases[place], strategies=tuple(strategies))


def _is_measured_by(strategy: CaseStrategy, timeline: Timeline) -> bool:
    """Whether this may be the measurement of that: nothing says so but the planner's name and the same messages."""
    if strategy.name != timeline.planner or strategy.measured is not None:
        return False
    return strategy.predicted is None or _messages(strategy.predicted) == _messages(timeline)


def _messages(timeline: Timeline) -> list[frozenset[str]]:
    return [frozenset(message.layers) for message in timeline.messages]
