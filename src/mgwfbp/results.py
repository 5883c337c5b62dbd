"""What a benchmark found: `StrategyResult`, `BenchResult`; strategies measured side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, ClassVar, Self, TypeVar

from mgwfbp.cost import LinearCost, PiecewiseCost, cost_from_json
from mgwfbp.errors import FormatError, MgwfbpError, ResultError
from mgwfbp.plan import MergePlan
from mgwfbp.record import (
    Fields,
    Record,
    check_count,
    check_free_form,
    check_items,
    check_real,
    check_text,
    first_repeated,
)
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural, quote

__all__ = ["BenchResult", "StrategyResult"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """One strategy's step: measured in several turns, and predicted."""

    strategy: str  # "ddp", "wfbp", "bucket-5" (fixed buckets of 5 MB), "auto", ...
    num_messages: int  # sent in a step
    measured_s: float  # the step of the slowest rank: median of the turns
    low_s: float  # lower quartile of the turns
    high_s: float  # upper quartile
    turns_s: tuple[float, ...]  # the median step of every turn, in the order in which they were taken
    exposed_s: float  # what the step exceeds that without communication by
    predicted_s: float | None = None
    plan: MergePlan | None = None
    timeline: Timeline | None = None  # measured
    predicted_timeline: Timeline | None = None

    def __post_init__(self) -> None:
        check_text(self.strategy, "strategy", ResultError)
        what = f"strategy {quote(self.strategy)}"
        messages = check_count(self.num_messages, f"{what}: num_messages", ResultError, minimum=1)
        object.__setattr__(self, "num_messages", messages)
        for name in ("measured_s", "low_s", "high_s", "exposed_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), f"{what}: {name}", ResultError))
        if self.predicted_s is not None:
            predicted_s = check_real(self.predicted_s, f"{what}: predicted_s", ResultError)
            object.__setattr__(self, "predicted_s", predicted_s)
        turns = check_items(self.turns_s, object, f"{what}: turns_s", ResultError)
        turns_s = tuple(check_real(turn, f"{what}: turns_s[{index}]", ResultError) for index, turn in enumerate(turns))
        object.__setattr__(self, "turns_s", turns_s)
        if not self.measured_s:
            raise ResultError(f"{what}: measured_s is 0, expected a step that takes time")
        if not self.low_s <= self.measured_s <= self.high_s:
            raise ResultError(
                f"{what}: low_s {self.low_s}, measured_s {self.measured_s}, high_s {self.high_s}, "
                "expected them in this order"
            )

    @classmethod
    def of_turns(
        cls, strategy: str, turns_s: Sequence[float], compute_s: float, *, num_messages: int, **others: Any
    ) -> Self:
        """Sum turns up: their median and quartiles, and what they exceed the step without communication by.

        Args:
            strategy: its name.
            turns_s: the step of each turn, of the slowest rank.
            compute_s: the step without communication.
            num_messages: of a step.
            **others: the other fields of this record.

        Raises:
            ResultError: where there are no turns, or a value cannot be.

        >>> result = StrategyResult.of_turns("ddp", [3.0, 2.0, 4.0, 3.5], 2.0, num_messages=1)
        >>> result.low_s, result.measured_s, result.high_s, result.exposed_s
        (2.75, 3.25, 3.625, 1.25)
        """
        if not turns_s:
            raise ResultError(f"strategy {quote(strategy)}: no turns, expected at least one")
        middle_s = median(turns_s)
        low_s, _, high_s = quantiles(turns_s, n=4, method="inclusive") if len(turns_s) > 1 else [middle_s] * 3
        return cls(
            strategy=strategy,
            num_messages=num_messages,
            measured_s=middle_s,
            low_s=low_s,
            high_s=high_s,
            turns_s=tuple(turns_s),
            exposed_s=max(0.0, middle_s - compute_s),  # below it only by noise
            **others,
        )

    @property
    def prediction_error(self) -> float | None:
        """How far the prediction is above (or, negative, below) the measured step, relative to that."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1

    @property
    def is_fixed_bucket(self) -> bool:
        """Whether it is DDP with one bucket size for every model: its default, or another."""
        is_bucket = self.strategy in ("ddp", "bucket") or self.strategy.startswith("bucket-")
        return is_bucket and "+" not in self.strategy  # which stands before a precision


@dataclass(frozen=True, slots=True, repr=False)
class BenchResult(Record):
    """Strategies measured side by side on one model and network, in interleaved turns of one run."""

    FORMAT: ClassVar[str] = "mgwfbp.bench/1"

    model: str
    workers: int  # N
    network: str  # what the workers talk over, in words
    compute_s: float  # the step without communication: median of turns among the others'
    strategies: tuple[StrategyResult, ...]
    trace: ModelTrace | None = None  # what predictions were made from
    cost: LinearCost | PiecewiseCost | None = None
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)  # command, versions, hardware; free-form

    def __post_init__(self) -> None:
        check_text(self.model, "model", ResultError)
        check_text(self.network, "network", ResultError)
        object.__setattr__(self, "workers", check_count(self.workers, "workers", ResultError, minimum=1))
        object.__setattr__(self, "compute_s", check_real(self.compute_s, "compute_s", ResultError))
        object.__setattr__(self, "strategies", check_items(self.strategies, StrategyResult, "strategies", ResultError))
        object.__setattr__(self, "source", check_free_form(self.source, "source", ResultError))
        if not self.strategies:
            raise ResultError("strategies: empty, expected at least one")
        repeated = first_repeated(result.strategy for result in self.strategies)
        if repeated is not None:
            raise ResultError(f"strategy {quote(repeated)} stands twice, expected every name once")

    def __repr__(self) -> str:
        fastest = min(self.strategies, key=lambda result: result.measured_s)
        return (
            f"BenchResult({quote(self.model)}, {plural(self.workers, 'worker')} on {quote(self.network)}: "
            f"{plural(len(self.strategies), 'strategy', 'strategies')}, fastest {quote(fastest.strategy)} in "
            f"{format_seconds(fastest.measured_s)}, computation {format_seconds(self.compute_s)})"
        )

    def __getitem__(self, strategy: str) -> StrategyResult:
        """Return the result of a strategy by its name."""
        for result in self.strategies:
            if result.strategy == strategy:
                return result
        known = ", ".join(result.strategy for result in self.strategies)
        raise ResultError(f"strategy {quote(strategy)} was not measured; there are {known}")

    @property
    def best_bucket(self) -> StrategyResult | None:
        """The fastest of those with fixed bucket sizes, DDP's default among them."""
        buckets = [result for result in self.strategies if result.is_fixed_bucket]
        return min(buckets, key=lambda result: result.measured_s, default=None)

    def ratio_to(self, strategy: str, other: str = "ddp") -> float | None:
        """Return how many times faster than another a strategy is; None where that other was not measured.

        Args:
            strategy: the name of a strategy of this benchmark.
            other: the one it is compared with.

        Raises:
            ResultError: where ``strategy`` was not measured.
        """
        if all(result.strategy != other for result in self.strategies):
            return None
        return self[other].measured_s / self[strategy].measured_s

    def ratio_to_best_bucket(self, strategy: str) -> float | None:
        """Return how many times faster than the best fixed bucket size a strategy is; None where there is none.

        Raises:
            ResultError: where ``strategy`` was not measured.
        """
        best = self.best_bucket
        return None if best is None else best.measured_s / self[strategy].measured_s

    def efficiency(self, strategy: str) -> float:
        """Return a strategy's scaling efficiency: the step without communication over that with it.

        Raises:
            ResultError: where ``strategy`` was not measured.
        """
        return self.compute_s / self[strategy].measured_s

    def speedup(self, strategy: str) -> float:
        """Return samples per second of N workers over those of one, weak scaling."""
        return self.workers * self.efficiency(strategy)

    @property
    def prediction_errors(self) -> dict[str, float]:
        """The error of every prediction there is, by strategy."""
        errors = {result.strategy: result.prediction_error for result in self.strategies}
        return {name: error for name, error in errors.items() if error is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``result.json``."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "workers": self.workers,
            "network": self.network,
            "compute_s": self.compute_s,
            "strategies": [_strategy_json(result) for result in self.strategies],
            "trace": _json_or_none(self.trace),
            "cost": _json_or_none(self.cost),
            "source": dict(self.source),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a result from the content of ``result.json``."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        return cls(
            fields["model"],
            fields["workers"],
            fields["network"],
            fields["compute_s"],
            tuple(_strategy(entry) for entry in fields.objects("strategies")),
            _nested(fields, "trace", ModelTrace.from_json),
            _nested(fields, "cost", cost_from_json),
            fields.get("source", {}),
        )


def _strategy_json(result: StrategyResult) -> dict[str, Any]:
    return {
        "strategy": result.strategy,
        "num_messages": result.num_messages,
        "measured_s": result.measured_s,
        "low_s": result.low_s,
        "high_s": result.high_s,
        "turns_s": list(result.turns_s),
        "predicted_s": result.predicted_s,
        "exposed_s": result.exposed_s,
        "plan": _json_or_none(result.plan),
        "timeline": _json_or_none(result.timeline),
        "predicted_timeline": _json_or_none(result.predicted_timeline),
    }


def _strategy(fields: Fields) -> StrategyResult:
    names = ("strategy", "num_messages", "measured_s", "low_s", "high_s", "exposed_s")
    values = {name: fields[name] for name in names}
    nested: dict[str, Any] = {
        "plan": _nested(fields, "plan", MergePlan.from_json),
        "timeline": _nested(fields, "timeline", Timeline.from_json),
        "predicted_timeline": _nested(fields, "predicted_timeline", Timeline.from_json),
    }
    try:
        return StrategyResult(
            **values, turns_s=tuple(fields.items("turns_s")), predicted_s=fields.get("predicted_s", None), **nested
        )
    except ResultError as error:
        raise FormatError(f"{fields.where}: {error}") from None


def _json_or_none(record: Record | None) -> dict[str, Any] | None:
    return None if record is None else record.to_json()


def _nested(fields: Fields, name: str, make: Callable[[object], T]) -> T | None:
    """Make the record that stands in a field, if one does; its errors name the field."""
    data = fields.get(name, None)
    if data is None:
        return None
    try:
        return make(data)
    except MgwfbpError as error:
        raise FormatError(f"{fields.path(name)}: {error}") from None
