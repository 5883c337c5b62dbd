"""The first paragraph: its claims checked against what they are computed from."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from mgwfbp import LinearCost, ModelTrace, StrategyResult, find_plan, predict
from mgwfbp.report import Inputs, find_cases, step_rows, summarize
from mgwfbp.report.cases import Case
from mgwfbp.report.inputs import KnownCost
from mgwfbp.report.words import find_bottleneck, find_current, find_remedies, summarize_runs, summarize_scaling
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_seconds
from tests.examples import linear_costs, piecewise_costs, traces
from tests.report.records import TRACE, bench, measured_cost, stretched, write_demo, write_run


def case_of(cost: KnownCost) -> Case:
    (case,) = find_cases(Inputs(traces=(("t", TRACE),), costs=(("c", cost),)))
    return case


def bottleneck(cost: KnownCost) -> str:
    case = case_of(cost)
    current = find_current(case, step_rows(case))
    return find_bottleneck(current, current, find_remedies(TRACE, cost))


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (LinearCost(4, 1e-9, 1e-12), "computation"),
        (LinearCost(4, 1e-6, 1e-7), "bandwidth"),
        (LinearCost(4, 0.5, 1e-12), "start-up times"),
        (LinearCost(4, 1e-4, 1.6e-9), "the way gradients are merged"),
        (
            LinearCost(4, 1e-6, 2e-9, taken_per_byte_s=2e-9),
            "what starting and copying messages takes from the computation",
        ),
    ],
)
def test_the_bottleneck_is_what_would_save_most(cost: LinearCost, expected: str) -> None:
    assert bottleneck(cost) == expected
    assert f"The bottleneck is {expected}." in summarize(case_of(cost))


def test_what_messages_take_is_named_with_what_it_would_save() -> None:
    cost = LinearCost(4, 1e-6, 2e-9, taken_per_byte_s=2e-9)
    row = find_current(case_of(cost), step_rows(case_of(cost)))
    assert row.taken_s > 0
    words = " ".join(summarize(case_of(cost)))
    share = f"{format_seconds(row.taken_s)} of it ({row.taken_s / row.iteration_s:.0%})"
    assert f"{share} is what starting and copying messages takes from the computation" in words
    assert "With messages that take nothing from the computation the best plan" in words


def test_sizes_that_are_planned_as_padded_are_named() -> None:
    cost = LinearCost(4, 1e-4, 1e-9, {"padded": [[16384, 2.8e-3]]})
    assert any(sentence.startswith("Larger messages are faster than") for sentence in summarize(case_of(cost)))
    assert not any("padded" in sentence for sentence in summarize(case_of(replace(cost, source={}))))


def test_without_a_cost_the_bottleneck_is_communication_and_no_more_is_said() -> None:
    step = predict(TRACE, LinearCost(4, 0.5, 1e-9), find_plan(TRACE, LinearCost(4, 0.5, 1e-9)))
    (case,) = find_cases(Inputs(timelines=(("t.json", step),)))
    words = summarize(case)
    assert "The bottleneck is communication." in words
    assert not any("By the model" in sentence for sentence in words)


@settings(max_examples=50)
@given(traces(), linear_costs)
def test_a_remedy_never_makes_the_best_plan_slower(trace: ModelTrace, cost: LinearCost) -> None:
    merging, bandwidth, startup = (remedy.iteration_s for remedy in find_remedies(trace, cost))
    assert bandwidth <= merging * (1 + 1e-12)
    assert startup <= merging * (1 + 1e-12)


@settings(max_examples=50)
@given(traces(max_layers=5), piecewise_costs())
def test_words_are_found_for_every_case(trace: ModelTrace, cost: KnownCost) -> None:
    (case,) = find_cases(Inputs(traces=(("t", trace),), costs=(("c", cost),)))
    assert summarize(case)[0].startswith("random on 2 workers")


def test_the_gain_that_is_promised_is_the_planners() -> None:
    cost = LinearCost(4, 1e-4, 1.6e-9)
    now = predict(TRACE, cost, find_plan(TRACE, cost, "bucket")).iteration_s
    plan = find_plan(TRACE, cost)
    best_s = predict(TRACE, cost, plan).iteration_s
    words = " ".join(summarize(case_of(cost)))
    assert f"a step takes {format_seconds(now)} (predicted)" in words
    assert f"into {plan.num_groups} messages" in words
    assert f"{now / best_s:.3g} times as fast ({format_seconds(best_s)} instead of {format_seconds(now)}, both" in words


def test_of_a_benchmark_the_measured_default_is_compared_with_the_fastest() -> None:
    found = bench()
    (case,) = find_cases(Inputs(benches=(("b", found),)))
    fastest = min(found.strategies, key=lambda result: result.measured_s)
    words = " ".join(summarize(case))
    assert (
        f"with PyTorch's default buckets (ddp) a step takes {format_seconds(found['ddp'].measured_s)} "
        "(measured, median of 3 turns)"
    ) in words
    assert f"The shortest step measured is that of {fastest.strategy}" in words
    assert "Predictions are off by 9.1% on average, by -9.1% at worst." in words


def test_runs_say_what_they_reached_or_how_far_they_are(tmp_path: Path) -> None:
    done = TrainingRun.load(write_run(tmp_path / "a"))
    going = TrainingRun.load(write_run(tmp_path / "b", finished=False))
    first, second = summarize_runs([("a", done), ("b", going)])
    assert first == (
        "a: toy with optimal on 2 workers reached 70.00% top-1 accuracy in 3 epochs, at 915 samples per second "
        "(measured)."
    )
    assert "not finished; after 3 epochs its top-1 accuracy is 70.00%" in second


def test_a_sweep_is_summed_up_at_its_most_workers() -> None:
    from mgwfbp.report.tables import bench_rows

    (words,) = summarize_scaling(bench_rows([bench(2), bench(4)]))
    assert "measured: on 4 workers" in words


def test_of_what_was_run_the_measured_strategy_is_the_current_one(tmp_path: Path) -> None:
    run = TrainingRun.load(write_run(tmp_path / "run"))
    (case,) = find_cases(Inputs(runs=(("run", run),)))
    current = find_current(case, step_rows(case))
    assert (current.strategy, current.how) == ("optimal", "measured")


def test_where_predictions_are_far_off_the_model_is_not_quoted() -> None:
    found = bench()
    worse = [
        StrategyResult.of_turns("ddp", [1.0, 1.0], TRACE.compute_s, num_messages=2, predicted_s=0.03),
        StrategyResult.of_turns("wfbp", [0.5, 0.5], TRACE.compute_s, num_messages=12, predicted_s=0.03),
    ]
    (case,) = find_cases(Inputs(benches=(("b", replace(found, strategies=tuple(worse))),)))
    words = " ".join(summarize(case))
    assert "By the model" not in words
    assert "The bottleneck is communication." in words
    assert "too far to say what else would help" in words
    assert "The shortest step measured is that of wfbp" in words


def test_communication_that_was_measured_but_not_predicted_is_not_called_computation() -> None:
    case = case_of(LinearCost(4, 1e-9, 1e-12))
    predicted = find_current(case, step_rows(case))
    measured = replace(
        predicted, how="measured", exposed_s=predicted.iteration_s, iteration_s=2 * predicted.iteration_s
    )
    assert find_bottleneck(measured, predicted, find_remedies(TRACE, LinearCost(4, 1e-9, 1e-12))) == "communication"


# ---- measured and predicted are never compared as if they were one

TIME = re.compile(r"\d (s|ms|us|ns)\b")
RATIO = re.compile(r"\d times\b")


def cases_with_words(folder: Path) -> list[Case]:
    """Cases of every kind: planned, of a benchmark, of a run, of two runs, of timelines alone."""
    runs = tuple((run.name, TrainingRun.load(run)) for run in [*write_demo(folder), write_run(folder / "one")])
    step = predict(TRACE, LinearCost(4, 0.5, 1e-9), find_plan(TRACE, LinearCost(4, 0.5, 1e-9)))
    return [
        *find_cases(Inputs(benches=(("b", bench()),))),
        *find_cases(Inputs(runs=runs[:2])),
        *find_cases(Inputs(runs=runs[2:])),
        *find_cases(Inputs(timelines=(("t.json", step), ("predicted.json", step)))),
        *(
            case_of(cost)
            for cost in (LinearCost(4, 1e-6, 1e-7), LinearCost(4, 1e-4, 1.6e-9), LinearCost(4, 1e-9, 1e-12))
        ),
    ]


def test_every_time_is_marked_and_a_ratio_is_one_of_likes(tmp_path: Path) -> None:
    num_times = num_ratios = 0
    for case in cases_with_words(tmp_path):
        for sentence in summarize(case):
            marks = {word for word in ("measured", "predicted") if word in sentence}
            if TIME.search(sentence):
                num_times += 1
                assert marks, sentence
            if RATIO.search(sentence):
                num_ratios += 1
                assert len(marks) == 1, sentence
    assert num_times > 10
    assert num_ratios > 3


def run_at(folder: Path, measured_s: float) -> Case:
    """A run whose plan is poor by the model and whose step was measured to take so long."""
    cost = measured_cost(2)
    run = TrainingRun.load(write_run(folder, plan=find_plan(TRACE, cost, "bucket")))
    assert run.timeline is not None
    timeline = stretched(run.timeline, measured_s / run.timeline.iteration_s)
    (case,) = find_cases(Inputs(runs=(("run", replace(run, timeline=timeline)),)))
    return case


def test_no_gain_is_promised_over_a_step_that_is_as_short_already(tmp_path: Path) -> None:
    cost = measured_cost(2)
    best_s, poor_s = (predict(TRACE, cost, find_plan(TRACE, cost, name)).iteration_s for name in ("optimal", "bucket"))
    assert poor_s > 1.06 * best_s
    slow = summarize(run_at(tmp_path / "slow", poor_s))
    assert f"The bottleneck is {'the way gradients are merged'}." in slow
    promised = (
        f"{poor_s / best_s:.3g} times as fast ({format_seconds(best_s)} instead of {format_seconds(poor_s)}, both"
    )
    assert promised in " ".join(slow)
    fast = summarize(run_at(tmp_path / "fast", best_s))
    assert "The bottleneck is the way gradients are merged." not in fast
    words = " ".join(fast)
    assert f"{format_seconds(best_s)} of optimal (measured) is as good" in words
    assert f"{poor_s / best_s:.3g} times" not in words


def test_a_run_whose_step_was_not_observed_is_judged_by_its_own_strategy(tmp_path: Path) -> None:
    run = replace(TrainingRun.load(write_run(tmp_path / "run")), timeline=None)
    (case,) = find_cases(Inputs(runs=(("run", run),)))
    assert run.predicted is not None
    expected = f"with optimal a step takes {format_seconds(run.predicted.iteration_s)} (predicted)"
    assert expected in summarize(case)[0]


def test_two_runs_are_compared_as_they_were_measured_and_as_the_tuner_raced_them(tmp_path: Path) -> None:
    runs = [(path.name, TrainingRun.load(path)) for path in write_demo(tmp_path)]
    (case,) = find_cases(Inputs(runs=tuple(runs)))
    words = " ".join(summarize(case))
    ddp, auto = (run.timeline for _, run in runs)
    assert ddp is not None
    assert auto is not None
    assert f"a step takes {format_seconds(ddp.iteration_s)} (measured, one observed step)" in words
    assert (
        f"The shortest step measured is that of auto: {format_seconds(auto.iteration_s)} in "
        f"{len(auto.messages)} messages, {ddp.iteration_s / auto.iteration_s:.3g} times as fast."
    ) in words
    assert "Runs come one after the other" in words
    assert "measured by its tuner: DDP's buckets 41.2 ms a step, the chosen plan 38.7 ms." in words
