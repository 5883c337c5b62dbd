"""Results of benchmarks: the same after a trip through a file, refused when impossible, and what is derived of them."""

import copy
import json
import pickle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import (
    BenchResult,
    Cost,
    FormatError,
    LinearCost,
    MergePlan,
    MgwfbpError,
    ModelTrace,
    ResultError,
    StrategyResult,
    predict,
)
from tests.examples import linear_costs, make_trace, piecewise_costs, traces

TRACE = make_trace([2.0, 3.0], [8, 4], forward_s=1.0)
COST = LinearCost(4, 1.0, 0.125)
PLAN = MergePlan.of_sizes(TRACE, [1, 1])


def strategy(name: str, *turns_s: float, **others: Any) -> StrategyResult:
    return StrategyResult.of_turns(name, turns_s, 3.0, num_messages=2, **others)


def bench(*strategies: StrategyResult) -> BenchResult:
    return BenchResult("toy", 4, "a wire", 3.0, strategies, TRACE, COST, {"torch": "2.15"})


FULL = bench(
    strategy(
        "ddp",
        6.0,
        5.0,
        6.5,
        predicted_s=5.5,
        plan=PLAN,
        timeline=predict(TRACE, COST, PLAN),
        predicted_timeline=predict(TRACE, COST, PLAN),
    ),
    strategy("bucket-5", 5.0),
    strategy("optimal", 4.0, predicted_s=4.5),
)

seconds = st.floats(1e-12, 1e6)
turns = st.lists(seconds, min_size=1, max_size=7)


@st.composite
def results(draw: st.DrawFn) -> BenchResult:
    trace: ModelTrace = draw(traces(max_layers=3))
    cost: Cost = draw(st.one_of(linear_costs, piecewise_costs()))
    plan = MergePlan.of_sizes(trace, [len(trace.layers)])
    compute_s = draw(seconds)
    measured = []
    for name in draw(st.sets(st.sampled_from(["ddp", "bucket-5", "auto", "naïve"]), min_size=1)):
        others = {
            "predicted_s": draw(st.none() | seconds),
            "plan": draw(st.none() | st.just(plan)),
            "timeline": draw(st.none() | st.just(predict(trace, cost, plan))),
        }
        measured.append(StrategyResult.of_turns(name, draw(turns), compute_s, num_messages=1, **others))
    kept = draw(st.booleans())
    return BenchResult(
        trace.model,
        2,
        "lo",
        compute_s,
        tuple(measured),
        trace if kept else None,
        cost if kept else None,  # type: ignore[arg-type]
    )


@given(results())
def test_a_result_survives_its_file_pickle_and_copy(
    tmp_path_factory: pytest.TempPathFactory, result: BenchResult
) -> None:
    path = tmp_path_factory.mktemp("results") / "result.json"
    result.save(path)
    assert BenchResult.load(path) == result
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result  # noqa: S301 - our own bytes
    assert len(repr(result)) < 300


def test_the_file_has_the_fields_that_others_read() -> None:
    data = FULL.to_json()
    assert list(data) == [
        "format", "model", "workers", "network", "compute_s", "strategies", "trace", "cost", "source",
    ]  # fmt: skip
    assert data["format"] == "mgwfbp.bench/1"
    assert list(data["strategies"][0]) == [
        "strategy", "num_messages", "measured_s", "low_s", "high_s", "turns_s", "predicted_s", "exposed_s", "plan",
        "timeline", "predicted_timeline",
    ]  # fmt: skip
    assert data["strategies"][0]["plan"]["format"] == MergePlan.FORMAT
    assert data["strategies"][1]["timeline"] is None


@given(turns, seconds)
def test_turns_are_summed_up_by_their_median_between_their_quartiles(turns_s: list[float], compute_s: float) -> None:
    result = StrategyResult.of_turns("ddp", turns_s, compute_s, num_messages=1)
    assert min(turns_s) <= result.low_s <= result.measured_s == median(turns_s) <= result.high_s <= max(turns_s)
    assert result.exposed_s == max(0.0, median(turns_s) - compute_s)


def test_ratios_are_how_many_times_faster_a_strategy_is() -> None:
    assert FULL.ratio_to("optimal") == 6.0 / 4.0
    assert FULL.ratio_to("optimal", "bucket-5") == 5.0 / 4.0
    assert FULL.ratio_to("ddp", "naive") is None
    assert FULL.best_bucket is FULL["bucket-5"]
    assert FULL.ratio_to_best_bucket("ddp") == 5.0 / 6.0
    assert bench(strategy("auto", 4.0)).ratio_to_best_bucket("auto") is None


def test_efficiency_is_computation_over_the_step_and_speedup_that_of_all_workers() -> None:
    assert FULL.efficiency("ddp") == 0.5
    assert FULL.speedup("ddp") == 2.0


def test_the_error_of_a_prediction_is_positive_when_it_is_too_long() -> None:
    assert FULL["optimal"].prediction_error == 0.125
    assert FULL["bucket-5"].prediction_error is None
    assert FULL.prediction_errors == {"ddp": 5.5 / 6.0 - 1, "optimal": 0.125}


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ResultError, match="'nccl' was not measured; there are ddp, bucket-5, optimal"):
        FULL["nccl"]


def changed(**changes: Any) -> dict[str, Any]:
    return {**FULL.to_json(), **changes}


def changed_strategy(**changes: Any) -> dict[str, Any]:
    return changed(strategies=[{**FULL.to_json()["strategies"][0], **changes}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object"),
        (changed(format="mgwfbp.bench/2"), "format: expected 'mgwfbp.bench/1'"),
        (changed(strategies=[]), "strategies: empty"),
        (changed(strategies=[FULL.to_json()["strategies"][0]] * 2), "strategy 'ddp' stands twice"),
        (changed(workers=0), "workers is 0"),
        (changed(compute_s=-1.0), "compute_s is -1.0"),
        (changed(network=""), "network is ''"),
        (changed(cost={"format": "mgwfbp.cost/1", "kind": "cubic"}), "cost: kind: expected 'linear'"),
        (changed(trace={"format": "mgwfbp.trace/1"}), "trace: layers: missing"),
        (changed_strategy(num_messages=0), r"strategies\[0\]: strategy 'ddp': num_messages is 0"),
        (changed_strategy(measured_s=99.0), r"strategies\[0\]: strategy 'ddp': low_s .* expected them in this order"),
        (changed_strategy(predicted_s="1"), r"strategies\[0\]: strategy 'ddp': predicted_s is '1'"),
        (changed_strategy(turns_s=[None]), r"turns_s\[0\] is None"),
        (changed_strategy(turns_s=3), r"strategies\[0\]\.turns_s: expected a list"),
        (changed_strategy(plan={}), r"strategies\[0\]\.plan: format: missing"),
        (changed_strategy(timeline=[]), r"strategies\[0\]\.timeline: .*expected an object"),
    ],
)
def test_a_bad_result_is_refused_with_file_and_field(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    with pytest.raises((FormatError, ResultError), match=message) as caught:
        BenchResult.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_no_turns_make_no_result() -> None:
    with pytest.raises(MgwfbpError, match="no turns"):
        strategy("ddp")
