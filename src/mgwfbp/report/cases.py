"""One model on one network: strategies beside one another, predicted and measured."""

from dataclasses import dataclass, replace
from typing import Literal

from mgwfbp.costs import WireCost
from mgwfbp.network import Network
from mgwfbp.plan import SHORT_WIRES, MergePlan
from mgwfbp.ranges import predict_range
from mgwfbp.report.inputs import KnownCost
from mgwfbp.results import StrategyResult
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = [
    "DEFAULTS",
    "OURS",
    "OURS_LOW",
    "Case",
    "CaseStrategy",
    "How",
    "StepRow",
    "how_known",
    "plan_of",
    "step_rows",
]

How = Literal["predicted", "measured"]

# What training runs with if nobody does anything: PyTorch's buckets, by any of their names.
DEFAULTS = ("ddp", "bucket")
# What this package offers in their place, the first that there is.
OURS = ("auto", "optimal")
OURS_LOW = tuple(f"{name}+{wire}" for name in OURS for wire in SHORT_WIRES.values())


def how_known(how: How, num_turns: int | None = None) -> str:
    """Say which number it is: a prediction, the median of a benchmark's turns, or the one step of a timeline.

    >>> how_known("predicted"), how_known("measured", 5), how_known("measured")
    ('predicted', 'measured, median of 5 turns', 'measured, one observed step')
    """
    if how == "predicted":
        return how
    which = "one observed step" if num_turns is None else f"median of {plural(num_turns, 'turn')}"
    return f"{how}, {which}"


@dataclass(frozen=True, slots=True)
class CaseStrategy:
    """One strategy: what was predicted of it and what was measured, as far as there is either."""

    name: str  # where several have one, followed by what tells them apart: "auto (second run)"
    predicted: Timeline | None = None
    measured: Timeline | None = None  # one observed step
    result: StrategyResult | None = None  # of a benchmark; its times are medians over many steps

    @property
    def kind(self) -> str:
        """The strategy's own name."""
        return self.name.partition(" (")[0]


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
    num_runs: int = 0  # so many strategies, the first ones, are those of training runs
    raced_s: tuple[float, float] | None = None  # measured by a run's tuner, in turns: DDP's buckets, the chosen plan
    low_cost: KnownCost | None = None  # of messages in low precision; None: they cost what half the bytes cost

    @property
    def both_costs(self) -> KnownCost | WireCost | None:
        """The cost, with that of messages in low precision where it is known for as many workers."""
        if self.cost is None or self.low_cost is None or self.cost.workers != self.low_cost.workers:
            return self.cost
        return WireCost(self.cost, self.low_cost)

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
    compute_s: float  # of the computation alone
    exposed_s: float
    iteration_s: float
    workers: int
    communication_s: float | None = None  # how long the link was busy; None: not observed
    num_turns: int | None = None  # of a benchmark, whose median it is; None: it is one step
    low_s: float | None = None  # quartiles, of a benchmark; or what a prediction may be off by
    high_s: float | None = None
    grad_bytes: int | None = None  # of all messages; None: not known
    sent_bytes: int | None = None  # these as they travel
    low_bytes: int = 0  # how many of them travel in low precision
    taken_s: float = 0.0  # what messages take from the computation, where that is told apart

    @property
    def lost_s(self) -> float:
        """What the step is longer than its computation."""
        return self.exposed_s + self.taken_s

    @property
    def how_known(self) -> str:
        """Which number the step is."""
        return how_known(self.how, self.num_turns)

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the step without communication over that with it."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def speedup(self) -> float:
        """Samples per second over those of one worker, weak scaling."""
        return self.workers * self.efficiency

    def is_like(self, other: "StepRow") -> bool:
        """Whether the two may be compared: both predicted, both medians of turns, or both one observed step."""
        return self.how == other.how and (self.num_turns is None) == (other.num_turns is None)


def step_rows(case: Case) -> list[StepRow]:
    """Return the step of every strategy, predicted before measured."""
    rows = []
    for strategy in case.strategies:
        result = strategy.result
        if strategy.predicted is not None:
            row = _timeline_row(strategy.name, "predicted", strategy.predicted)
            rows.append(_with_range(row, case, strategy.predicted))
        elif result is not None and result.predicted_s is not None:
            compute_s = min(case.trace.compute_s if case.trace else case.compute_s or 0.0, result.predicted_s)
            exposed_s = result.predicted_s - compute_s
            numbers = (result.num_messages, compute_s, exposed_s, result.predicted_s, case.workers)
            rows.append(StepRow(strategy.name, "predicted", *numbers))
        if result is not None:
            rows.append(_result_row(strategy, result, case.workers))
        elif strategy.measured is not None:
            rows.append(_timeline_row(strategy.name, "measured", strategy.measured))
    return rows


def _with_range(row: StepRow, case: Case, predicted: Timeline) -> StepRow:
    """Add what the prediction may be off by, if it was made of the case's trace and a cost that knows it."""
    cost = case.both_costs
    if case.trace is None or cost is None or predicted.planner in ("naive", "ps"):
        return row
    plan = plan_of(predicted)
    if set(plan.layer_names) != {layer.name for layer in case.trace.layers}:
        return row
    between_s = predict_range(case.trace, cost, plan)
    if between_s is None or not between_s[0] <= predicted.iteration_s <= between_s[1]:
        return row
    return replace(row, low_s=between_s[0], high_s=between_s[1])


def plan_of(timeline: Timeline) -> MergePlan:
    """Return the plan whose messages these are."""
    groups = tuple(message.layers for message in timeline.messages)
    wire = tuple(message.wire for message in timeline.messages)
    gathers = tuple(gather.layers for gather in timeline.gathers)
    return MergePlan(timeline.model, timeline.planner, groups, wire=wire, gathers=gathers)


def _result_row(strategy: CaseStrategy, result: StrategyResult, workers: int) -> StepRow:
    row = StepRow(
        strategy.name,
        "measured",
        result.num_messages,
        result.measured_s - result.exposed_s,
        result.exposed_s,
        result.measured_s,
        workers,
        strategy.measured.communication_s if strategy.measured else None,
        len(result.turns_s),
        result.low_s,
        result.high_s,
    )
    return _with_bytes(row, strategy.measured or strategy.predicted)


def _with_bytes(row: StepRow, timeline: Timeline | None) -> StepRow:
    if timeline is None:
        return row
    sent_bytes, low_bytes = timeline.sent_bytes, timeline.low_bytes
    return replace(row, grad_bytes=timeline.grad_bytes, sent_bytes=sent_bytes, low_bytes=low_bytes)


def _timeline_row(name: str, how: How, timeline: Timeline) -> StepRow:
    taken_s = timeline.taken_s if timeline.takes else 0.0
    row = StepRow(
        name,
        how,
        len(timeline.messages),
        timeline.compute_s - timeline.waited_s - taken_s,
        timeline.exposed_s,
        timeline.iteration_s,
        timeline.workers,
        timeline.communication_s,
        taken_s=taken_s,
    )
    return _with_bytes(row, timeline)
