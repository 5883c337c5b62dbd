"""Strategies side by side on three real ranks."""

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given

from mgwfbp import BenchResult, LinearCost, MergePlan, ModelTrace, PiecewiseCost, StrategyError, predict
from mgwfbp.bench.contenders import HOOKED, Contender, Known, Measured, check_strategies, predict_contender
from mgwfbp.bench.servers import ServerCosts, predict_servers
from tests.bench.ranks import LOW, PLANNED, STRATEGIES, all_scenarios
from tests.examples import linear_costs, make_trace, traces
from tests.train.ranks import started

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores
WORLD = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of tests/bench/ranks.py wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    with started(all_scenarios, WORLD, folder, folder, timeout_s=150.0) as running:
        codes = running.wait()
    # What a rank wrote counts, not its exit status: torch's threads were seen to abort a process at its very end.
    files = [folder / f"rank{rank}.json" for rank in range(WORLD)]
    assert all(file.exists() for file in files), codes
    return [json.loads(file.read_text()) for file in files]


def test_all_ranks_have_the_same_result_but_for_their_own_timelines(ranks: list[Any]) -> None:
    results = []
    for one in ranks:
        strategies = [{**strategy, "timeline": None} for strategy in one["sides"]["result"]["strategies"]]
        results.append({**one["sides"]["result"], "strategies": strategies})
    for result in results:
        result["source"]["tuning"].pop("spent_s")  # each rank's own
    assert results[0] == results[1] == results[2]


def test_a_contest_gives_a_result_for_every_strategy_in_the_order_asked_for(ranks: list[Any]) -> None:
    result = BenchResult.from_json(ranks[0]["sides"]["result"])
    assert [one.strategy for one in result.strategies] == list(STRATEGIES)
    assert (result.workers, result.network, result.model) == (WORLD, "files", "toy")
    for one in result.strategies:
        assert len(one.turns_s) == 2
        assert one.measured_s > 0
        assert one.plan is not None
        assert one.timeline is not None
        assert [message.layers for message in one.timeline.messages] == list(one.plan.groups)
        assert (one.predicted_s is None) == (one.strategy == "ps")  # nobody swept the servers here
        assert one.predicted_timeline is None or one.predicted_timeline.iteration_s == one.predicted_s
    assert result["naive"].num_messages == result["wfbp"].num_messages == result["ps"].num_messages == 8
    assert result["single"].num_messages == 1
    assert result.compute_s >= result.source["recorded_compute_s"]
    assert result.source["tuning"]["state"] == "settled"


def test_a_contest_says_which_strategies_sent_the_same_messages_in_the_same_way(ranks: list[Any]) -> None:
    result = BenchResult.from_json(ranks[0]["sides"]["result"])
    # Those two send the messages of wfbp, but after the backward pass, and through servers.
    groups = {one.strategy: one.plan.groups for one in result.strategies if one.plan and one.strategy not in HOOKED}
    pairs = [(one, other) for one, other in combinations(groups, 2) if groups[one] == groups[other]]
    assert list(result.source["same_plan"]) == pairs
    assert ("bucket", "ddp") in pairs  # buckets of 25 MiB and torch's own hold this small model in the same way


def test_strategies_that_send_in_low_precision_take_part_and_are_predicted_with_what_such_messages_took(
    ranks: list[Any],
) -> None:
    result = BenchResult.from_json(ranks[0]["low"]["result"])
    assert [one.strategy for one in result.strategies] == list(LOW)
    wires = {one.strategy: one.plan.wire for one in result.strategies if one.plan is not None}
    assert wires["ddp"] == wires["bf16-hook-1"] == ()
    assert set(wires["ddp+bf16"]) == {"bfloat16"}
    assert set(wires["bucket-1+fp16"]) == {"float16"}
    assert set(wires["optimal+bf16"]) <= {"", "bfloat16"} >= set(wires["auto+bf16"])
    assert [one.strategy for one in result.strategies if one.predicted_s is None] == ["bf16-hook-1"]
    assert result.source["tuning of auto+bf16"]["state"] == "settled"
    assert result.source["tuning"] is None
    # Of buckets of 1 and of 25 MiB, which were observed in low precision.
    points = dict(result.source["low_cost"]["points"])
    seen = dict(result.source["low_cost"]["source"]["under_load"])
    assert set(seen) == {1_600_008, 1_400_408, 4, 3_000_420} <= set(points)
    assert list(points.values()) == sorted(points.values())
    assert 0 < points[4] < points[3_000_420]


def test_a_contest_learns_what_messages_and_gradients_take_in_training(ranks: list[Any]) -> None:
    result = BenchResult.from_json(ranks[0]["sides"]["result"])
    assert result.trace is not None
    assert result.cost is not None
    # Every message of the watched plans: one of all bytes, each gradient alone, torch's buckets.
    seen = {size for size, _ in result.cost.source["under_load"]}
    assert seen >= {3_000_420, 400_000, 8, 1_200_000, 400, 1_000_000, 4, 1_600_008}
    assert [layer.name for layer in result.trace.layers] == [f"part{index}.weight" for index in range(8)]
    assert result.trace.model == "toy"
    *known, best = [(terms["strategy"], terms["num_messages"]) for terms in result.source["terms"]]
    assert known == [("single", 1), ("wfbp", 8), ("ddp", 2)]
    assert best[0] == "optimal"
    assert all(terms["slowest_rank"] >= 0 for terms in result.source["terms"])
    assert set(result.source["predicted_before_learning_s"]) == set(STRATEGIES)


def test_every_strategy_sends_the_messages_of_its_plan_also_after_others_had_their_turn(ranks: list[Any]) -> None:
    for one in ranks:
        for name in PLANNED:
            assert one["sent"][name]["held"] == one["sent"][name]["plan"], name
    plans = {name: tuple(ranks[0]["sent"][name]["plan"]) for name in PLANNED}
    assert len(set(plans.values())) >= 4  # else the turns would compare the same thing


def test_every_strategy_averages_over_all_ranks_and_the_turn_without_communication_does_not(ranks: list[Any]) -> None:
    for rank, one in enumerate(ranks):
        for name in PLANNED:
            assert one["sent"][name]["average"] == pytest.approx([1.0]), name  # of 0, 1 and 2
        assert one["sent"]["alone"] == [float(rank)]


def test_ways_are_interleaved_and_every_second_turn_runs_backwards(ranks: list[Any]) -> None:
    there = ["enter a", "a", "a", "a", "enter b", "b", "b", "b"]
    back = ["enter b", "b", "b", "b", "enter a", "a", "a", "a"]
    for one in ranks:
        assert one["turns"]["calls"] == [*there, *back, *there]
        assert one["turns"]["told"] == [0, 1, 2]
        assert [len(turns) for turns in one["turns"]["times"].values()] == [3, 3]


def test_the_slowest_rank_counts_and_all_ranks_know(ranks: list[Any]) -> None:
    assert ranks[0]["turns"]["times"] == ranks[1]["turns"]["times"] == ranks[2]["turns"]["times"]
    assert all(one["turns"]["slowest"] == [WORLD - 1.0, 0.0] for one in ranks)


@pytest.mark.parametrize("name", ["alone", "shared"])
def test_the_servers_cost_is_one_for_all_ranks_and_reaches_the_largest_gradient(ranks: list[Any], name: str) -> None:
    costs = [PiecewiseCost.from_json(one["servers"][name]) for one in ranks]
    assert costs[0] == costs[1] == costs[2]
    assert costs[0].points[-2][0] == 5000  # the last point lies beyond what was measured
    assert costs[0].workers == WORLD


@given(traces(), linear_costs, linear_costs)
def test_no_server_is_predicted_to_end_before_the_links_or_any_owner_could(
    trace: ModelTrace, alone: LinearCost, shared: LinearCost
) -> None:
    plan = MergePlan.of_sizes(trace, [1] * len(trace.layers), planner="ps")
    predicted = predict_servers(trace, ServerCosts(shared, alone), plan)
    assert predicted.iteration_s >= predict(trace, shared, plan).iteration_s
    for layer, ready_s in zip(trace.layers, trace.ready_s, strict=True):
        assert predicted.iteration_s >= ready_s + alone(layer.grad_bytes)
    # One owner who does everything is the slowest way there is to queue.
    assert predicted.iteration_s <= max(
        predict(trace, alone, plan).iteration_s, predict(trace, shared, plan).iteration_s
    )


def test_two_owners_average_at_the_same_time() -> None:
    """Two gradients ready at once, 10 s each alone and 6 s as a share: links end at 12 s, queues at 10 s."""
    trace = make_trace([0.0, 0.0], [8, 8])
    plan = MergePlan.of_sizes(trace, [1, 1])
    ten, six, four = (LinearCost(2, startup_s, 0.0) for startup_s in (10.0, 6.0, 4.0))
    assert predict_servers(trace, ServerCosts(six, ten), plan).iteration_s == 12.0
    assert predict_servers(trace, ServerCosts(four, ten), plan).iteration_s == 10.0
    # One queue for all: a message takes no longer than its share of a burst.
    assert predict_servers(trace, ServerCosts(four, None), plan).iteration_s == 8.0


def test_only_what_overlaps_nothing_is_predicted_from_what_was_measured_apart() -> None:
    trace, slowed = make_trace([1.0, 2.0], [4, 4]), make_trace([3.0, 4.0], [4, 4])
    known = Known(Measured(trace, LinearCost(2, 1.0, 0.0)), Measured(slowed, LinearCost(2, 5.0, 0.0)))
    plans = {name: MergePlan.of_sizes(trace, sizes) for name, sizes in (("single", [2]), ("wfbp", [1, 1]))}
    plans["naive"] = plans["wfbp"]
    ends = {}
    for name, plan in plans.items():
        timeline = predict_contender(Contender(name, plan), known)
        assert timeline is not None
        ends[name] = timeline.iteration_s
    assert ends == {"naive": 4.0, "single": 9.0, "wfbp": 13.0}
    assert predict_contender(Contender("ps", plans["wfbp"]), known) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "no strategy is given"),
        (("ddp", "wfbp", "ddp"), "'ddp' stands twice"),
        (
            ("ddp", "horovod"),
            "'horovod' is unknown, expected one of auto, ddp.*cautious.*or bf16-hook-N for torch's own",
        ),
        (("plan.json",), r"'plan.json' is unknown.*naive and ps also with \+bf16 or \+fp16"),
        (("naive+bf16",), r"'naive\+bf16' is unknown"),
        (("bucket-0",), "'bucket-0' is unknown"),
        (("bf16-hook-nan",), "'bf16-hook-nan' is unknown"),
        (("bf16-hook--5",), "'bf16-hook--5' is unknown"),
    ],
)
def test_strategies_that_cannot_take_part_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        check_strategies(names)
