"""One model on one network: strategies beside one another, predicted and measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mgwfbp.errors import PlanError
from mgwfbp.network import Network
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, Planner
from mgwfbp.report.inputs import Inputs, KnownCost
from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.run import TrainingRun
from mgwfbp.timeline import Timeline, predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Case", "CaseStrategy", "How", "StepRow", "find_cases", "step_rows"]

How = Literal["predicted", "measured"]


@dataclass(frozen=True, slots=True)
class CaseStrategy:
    """One strategy: what was predicted of it and what was measured, as far as there is either."""

    name: str
    predicted: Timeline | None = None
    measured: Timeline | None = None
    result: StrategyResult | None = None  # of a benchmark; its times are medians over many steps


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many workers of a network, and the strategies that were compared."""

    model: str
    where: str  # the network in words
    workers: int
    strategies: tuple[CaseStrategy, ...]
    trace: ModelTrace | None = None
    cost: KnownCost | None = None
    network: Network | None = None  # where the cost comes from one
    compute_s: float | None = None  # measured without communication

    @property
    def title(self) -> str:
        """What to call it in a heading."""
        place = f" over {self.where}" if self.where else ""
        return f"{self.model} on {plural(self.workers, 'worker')}{place}"


@dataclass(frozen=True, slots=True)
class StepRow:
    """The step of one strategy: what it is made of."""

    strategy: str
    how: How
    num_messages: int
    compute_s: float
    exposed_s: float
    iteration_s: float
    workers: int
    communication_s: float | None = None  # how long the link was busy; None: not observed
    low_s: float | None = None  # quartiles, of a benchmark
    high_s: float | None = None

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the step without communication over that with it."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def speedup(self) -> float:
        """Samples per second over those of one worker, weak scaling."""
        return self.workers * self.efficiency


def step_rows(case: Case) -> list[StepRow]:
    """Return the step of every strategy, predicted before measured."""
    rows = []
    for strategy in case.strategies:
        result = strategy.result
        if strategy.predicted is not None:
            rows.append(_timeline_row(strategy.name, "predicted", strategy.predicted))
        elif result is not None and result.predicted_s is not None:
            compute_s = min(case.trace.compute_s if case.trace else case.compute_s or 0.0, result.predicted_s)
            exposed_s = result.predicted_s - compute_s
            row = (result.num_messages, compute_s, exposed_s, result.predicted_s, case.workers)
            rows.append(StepRow(strategy.name, "predicted", *row))
        if result is not None:
            busy_s = strategy.measured.communication_s if strategy.measured else None
            compute_s = result.measured_s - result.exposed_s
            row = (result.num_messages, compute_s, result.exposed_s, result.measured_s, case.workers)
            rows.append(StepRow(strategy.name, "measured", *row, busy_s, result.low_s, result.high_s))
        elif strategy.measured is not None:
            rows.append(_timeline_row(strategy.name, "measured", strategy.measured))
    return rows


def _timeline_row(name: str, how: How, timeline: Timeline) -> StepRow:
    return StepRow(
        name,
        how,
        len(timeline.messages),
        timeline.compute_s,
        timeline.exposed_s,
        timeline.iteration_s,
        timeline.workers,
        timeline.communication_s,
    )


def find_cases(
    inputs: Inputs, *, workers: Sequence[int] = (), planners: Mapping[str, Planner] = PLANNERS
) -> list[Case]:
    """Put together what belongs together.

    Every benchmark and every run with a timeline is a case; so is every trace with every cost and with every network
    of ``workers``, where each planner's step and that of every plan for this model is predicted. A timeline goes to the
    case of its model and number of workers.
    """
    cases = [_bench_case(bench) for _, bench in inputs.benches]
    cases += [case for name, run in inputs.runs if (case := _run_case(name, run, planners)) is not None]
    for _, trace in inputs.traces:
        for name, cost in inputs.costs:
            case = _planned(Case(trace.model, _where(name, cost), cost.workers, (), trace, cost), planners)
            cases.append(_with_plans(case, inputs))
        for _, network in inputs.networks:
            for count in workers:
                case = Case(trace.model, network.name, count, (), trace, network.cost(count), network)
                cases.append(_with_plans(_planned(case, planners), inputs))
    for name, timeline in inputs.timelines:
        _add_timeline(cases, name, timeline)
    return cases


def _where(name: str, cost: KnownCost) -> str:
    return _said_network(cost) or Path(name).name


def _said_network(cost: KnownCost) -> str:
    """Return what a cost says of where it is from, if anything."""
    return str(cost.source.get("network") or cost.source.get("backend") or "")


def _planned(case: Case, planners: Mapping[str, Planner]) -> Case:
    """Add what every planner's plan would give; needs the trace and the cost."""
    if case.trace is None or case.cost is None:
        return case
    there = {strategy.name for strategy in case.strategies}
    added = [
        CaseStrategy(name, predict(case.trace, case.cost, planner(case.trace, case.cost)))
        for name, planner in planners.items()
        if name not in there
    ]
    return replace(case, strategies=(*case.strategies, *added))


def _with_plans(case: Case, inputs: Inputs) -> Case:
    for name, plan in inputs.plans:
        if case.trace is not None and case.cost is not None and _covers(plan, case.trace):
            case = _with_plan(case, Path(name).name, plan, case.trace, case.cost)
    return case


def _covers(plan: MergePlan, trace: ModelTrace) -> bool:
    try:
        plan.check_covers([layer.name for layer in trace.layers])
    except PlanError:
        return False
    return True


def _with_plan(case: Case, name: str, plan: MergePlan, trace: ModelTrace, cost: KnownCost) -> Case:
    strategy = CaseStrategy(f"{name} ({plan.planner})", predict(trace, cost, plan))
    return replace(case, strategies=(*case.strategies, strategy))


def _bench_case(bench: BenchResult) -> Case:
    strategies = []
    for result in bench.strategies:
        predicted = result.predicted_timeline
        if predicted is None and result.plan is not None and bench.trace is not None and bench.cost is not None:
            predicted = predict(bench.trace, bench.cost, result.plan) if _covers(result.plan, bench.trace) else None
        strategies.append(CaseStrategy(result.strategy, predicted, result.timeline, result))
    return Case(
        bench.model,
        bench.network,
        bench.workers,
        tuple(strategies),
        bench.trace,
        bench.cost,
        compute_s=bench.compute_s,
    )


def _run_case(name: str, run: TrainingRun, planners: Mapping[str, Planner]) -> Case | None:
    """Return what a run's folder says of its steps, or None where it says nothing but losses."""
    cost = run.cost if isinstance(run.cost, KnownCost) else None
    predicted = run.predicted
    if predicted is None and run.plan is not None and run.trace is not None and cost is not None:
        predicted = predict(run.trace, cost, run.plan) if _covers(run.plan, run.trace) else None
    timeline = run.timeline or predicted
    if timeline is None:
        return None
    strategy = CaseStrategy(str(run.config.get("strategy", timeline.planner)), predicted, run.timeline)
    network = run.environment.get("network") or (_said_network(cost) if cost is not None else None)
    case = Case(timeline.model, f"{network or 'a network'} ({name})", timeline.workers, (strategy,), run.trace, cost)
    return _planned(case, planners)


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
            strategies[mate] = replace(strategies[mate], measured=timeline)
    cases[place] = replace(cases[place], strategies=tuple(strategies))


def _is_measured_by(strategy: CaseStrategy, timeline: Timeline) -> bool:
    """Whether this may be the measurement of that: nothing says so but the planner's name and the same messages."""
    if strategy.name != timeline.planner or strategy.measured is not None:
        return False
    return strategy.predicted is None or _messages(strategy.predicted) == _messages(timeline)


def _messages(timeline: Timeline) -> list[frozenset[str]]:
    return [frozenset(message.layers) for message in timeline.messages]
