"""Results as rows of text: what a table shows, apart from how it is drawn."""

from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.units import plural

__all__ = ["beaten_by", "bench_rows", "bench_titles", "disagreements", "error_summary", "noise_summary"]


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
    """Say how far predictions are from what was measured, over all strategies of one or more results."""
    errors = [
        (abs(error), f"{name} of {result.model} on {plural(result.workers, 'worker')}")
        for result in results
        for name, error in result.prediction_errors.items()
    ]
    if not errors:
        return "nothing was predicted"
    mean, (worst, which) = sum(error for error, _ in errors) / len(errors), max(errors)
    return f"error of {len(errors)} predictions: mean {mean:.1%}, worst {worst:.1%} ({which})"


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
