"""Results as rows of text: what a table shows, apart from how it is drawn."""

from collections.abc import Sequence
from statistics import fmean

from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.units import plural

__all__ = [
    "beaten_by",
    "bench_rows",
    "bench_titles",
    "disagreements",
    "error_summary",
    "exposed_errors",
    "noise_summary",
]

# An error is relative to the exposed communication where that is more than this part of the step.
ENOUGH_EXPOSED = 0.01


def bench_titles(result: BenchResult) -> tuple[str, ...]:
    """Return the titles of `bench_rows`; times are in the unit that suits the step."""
    unit = "s" if _scale(result) == 1 else "ms"
    return (
        "strategy",
        "messages",
        f"step, {unit}",
        "quartiles",
        f"predicted, {unit}",
        "error",
        f"exposed, {unit}",
        "x ddp",
        "x best bucket",
        "efficiency",
    )


def bench_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Return a row for every strategy, in the order in which they stand."""
    scale = _scale(result)
    return [_row(result, one, scale) for one in result.strategies]


def _scale(result: BenchResult) -> int:
    return 1 if result.compute_s >= 1 else 1000


def _row(result: BenchResult, one: StrategyResult, scale: int) -> tuple[str, ...]:
    digits = 3 if scale == 1 else 1
    error, ddp, bucket = (
        one.prediction_error,
        result.ratio_to(one.strategy),
        result.ratio_to_best_bucket(one.strategy),
    )
    return (
        one.strategy,
        str(one.num_messages),
        f"{one.measured_s * scale:.{digits}f}",
        f"{one.low_s * scale:.{digits}f} to {one.high_s * scale:.{digits}f}",
        "" if one.predicted_s is None else f"{one.predicted_s * scale:.{digits}f}",
        "" if error is None else f"{error:+.1%}",
        f"{one.exposed_s * scale:.{digits}f}",
        "" if ddp is None else f"{ddp:.3f}",
        "" if bucket is None else f"{bucket:.3f}",
        f"{result.efficiency(one.strategy):.1%}",
    )


def error_summary(*results: BenchResult) -> str:
    """Say how far predictions are from what was measured, over all strategies of one or more results.

    First relative to the exposed communication, which is what a prediction has to find out; then to the step, most of
    which may be computation that the prediction is given.
    """
    of_step = [
        (abs(error), _whose(name, result)) for result in results for name, error in result.prediction_errors.items()
    ]
    if not of_step:
        return "nothing was predicted"
    of_exposed = [(error, _whose(name, result)) for result in results for name, error in exposed_errors(result).items()]
    some = "" if len(of_exposed) == len(of_step) else f" ({len(of_exposed)} of them)"
    first = f"of the exposed communication{some}: {_mean_and_worst(of_exposed)}; " if of_exposed else ""
    return f"error of {plural(len(of_step), 'prediction')}, {first}of the step: {_mean_and_worst(of_step)}"


def exposed_errors(result: BenchResult) -> dict[str, float]:
    """Return how far predictions are off, relative to the exposed communication, by strategy.

    Only where more than `ENOUGH_EXPOSED` of the step is exposed: what is nearly nothing is no measure of an error.
    """
    return {
        one.strategy: abs(one.predicted_s - one.measured_s) / one.exposed_s
        for one in result.strategies
        if one.predicted_s is not None and one.exposed_s > ENOUGH_EXPOSED * one.measured_s
    }


def _whose(strategy: str, result: BenchResult) -> str:
    return f"{strategy} of {result.model} on {plural(result.workers, 'worker')}"


def _mean_and_worst(errors: Sequence[tuple[float, str]]) -> str:
    worst, which = max(errors)
    return f"mean {fmean(error for error, _ in errors):.1%}, worst {worst:.1%} ({which})"


def disagreements(first: BenchResult, second: BenchResult) -> list[tuple[str, str]]:
    """Return the pairs of strategies that two runs put in opposite order, each run beyond its own spread.

    A pair is (faster in the first run, faster in the second). Quartiles that touch decide nothing.
    """
    both = [one.strategy for one in first.strategies if any(one.strategy == two.strategy for two in second.strategies)]
    return [
        (fast, slow)
        for fast in both
        for slow in both
        if first[fast].high_s < first[slow].low_s and second[slow].high_s < second[fast].low_s
    ]


def beaten_by(result: BenchResult, strategy: str) -> list[str]:
    """Return the strategies that are faster than this one beyond the spread of both."""
    return [one.strategy for one in result.strategies if one.high_s < result[strategy].low_s]


def noise_summary(result: BenchResult) -> str:
    """Say how far strategies were apart that sent the same messages, and so what differences mean nothing.

    Empty where no two did: what a run's noise is beyond the spread of turns, it then does not tell.
    """
    apart = []
    for names in result.source.get("same_plan", ()):
        fast_s, slow_s = sorted(result[name].measured_s for name in names)
        apart.append(f"{' and '.join(names)} {slow_s / fast_s - 1:.1%}")
    return f"the same plan twice, apart by: {', '.join(apart)}" if apart else ""
