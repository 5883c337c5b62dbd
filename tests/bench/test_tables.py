"""Tables of results: computed, not drawn."""

from dataclasses import replace

from mgwfbp import BenchResult, StrategyResult
from mgwfbp.bench.tables import beaten_by, bench_rows, bench_titles, disagreements, error_summary, noise_summary


def result(compute_s: float, **turns_s: float) -> BenchResult:
    strategies = tuple(
        StrategyResult.of_turns(name, [turn_s], compute_s, num_messages=3, predicted_s=turn_s * 1.25)
        for name, turn_s in turns_s.items()
    )
    return BenchResult("toy", 4, "a wire", compute_s, strategies)


def test_a_row_says_all_that_is_asked_of_a_strategy() -> None:
    found = result(0.1, ddp=0.2, optimal=0.16)
    assert dict(zip(bench_titles(found), bench_rows(found)[1], strict=True)) == {
        "strategy": "optimal",
        "messages": "3",
        "step, ms": "160.0",
        "quartiles": "160.0 to 160.0",
        "predicted, ms": "200.0",
        "error": "+25.0%",
        "exposed, ms": "60.0",
        "x ddp": "1.250",
        "x best bucket": "1.250",
        "efficiency": "62.5%",
    }


def test_long_steps_are_in_seconds() -> None:
    found = result(2.0, wfbp=4.0)
    assert bench_titles(found)[2] == "step, s"
    assert bench_rows(found)[0][2] == "4.000"
    assert bench_rows(found)[0][7] == ""  # no ddp to compare with


def test_errors_are_summed_up_over_several_results() -> None:
    near = BenchResult(
        "toy", 2, "lo", 1.0, (StrategyResult.of_turns("ddp", [2.0], 1.0, num_messages=1, predicted_s=2.1),)
    )
    far = BenchResult(
        "toy", 8, "lo", 1.0, (StrategyResult.of_turns("ps", [2.0], 1.0, num_messages=1, predicted_s=1.4),)
    )
    assert error_summary(near, far) == (
        "error of 2 predictions, of the exposed communication: mean 35.0%, worst 60.0% (ps of toy on 8 workers); "
        "of the step: mean 17.5%, worst 30.0% (ps of toy on 8 workers)"
    )
    hidden = BenchResult(
        "toy", 2, "lo", 1.0, (StrategyResult.of_turns("wfbp", [1.0], 1.0, num_messages=1, predicted_s=1.1),)
    )
    assert "exposed" not in error_summary(hidden)
    assert ", of the exposed communication (1 of them): mean 10.0%" in error_summary(near, hidden)
    unknown = BenchResult("toy", 2, "lo", 1.0, (StrategyResult.of_turns("ddp", [2.0], 1.0, num_messages=1),))
    assert error_summary(unknown) == "nothing was predicted"


def spread(**quartiles: tuple[float, float]) -> BenchResult:
    strategies = tuple(
        StrategyResult(name, 1, (low + high) / 2, low, high, (low, high), 0.0)
        for name, (low, high) in quartiles.items()
    )
    return BenchResult("toy", 2, "lo", 1.0, strategies)


def test_two_runs_disagree_only_where_both_are_sure_of_opposite_orders() -> None:
    first = spread(a=(1.0, 2.0), b=(3.0, 4.0), c=(3.5, 5.0))
    assert disagreements(first, first) == []
    assert disagreements(first, spread(a=(5.0, 6.0), b=(3.0, 4.0), d=(0.0, 1.0))) == [("a", "b")]
    assert disagreements(first, spread(a=(5.0, 6.0), b=(3.0, 5.0))) == []  # they touch
    assert disagreements(first, spread(c=(1.0, 2.0), b=(3.0, 4.0))) == []  # b and c overlap in the first


def test_a_strategy_is_beaten_only_beyond_the_spread() -> None:
    result = spread(auto=(2.0, 3.0), near=(1.5, 2.5), fast=(1.0, 1.5), slow=(4.0, 5.0))
    assert beaten_by(result, "auto") == ["fast"]


def test_strategies_with_the_same_plan_show_the_noise() -> None:
    found = replace(result(0.1, ddp=0.2, optimal=0.16, auto=0.21), source={"same_plan": [["ddp", "auto"]]})
    assert noise_summary(found) == "the same plan twice, apart by: ddp and auto 5.0%"
    assert noise_summary(result(0.1, ddp=0.2)) == ""
