"""Several ranks, real processes: the same result on every one, or the same error."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import ModelTrace, PiecewiseCost
from mgwfbp.costs import ShardedCost, WireCost
from tests.forking import run_module

Results = list[dict[str, Any] | None]


def run_ranks(folder: Path, world: int, *scenarios: str) -> tuple[Results, list[int | None]]:
    """Run scenarios of tests/measure/ranks.py; return what each rank wrote (None for nothing) and its exit status."""
    statuses = run_module("tests.measure.ranks", scenarios, folder, world, timeout_s=90)
    files = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], statuses


def run_well(folder: Path, world: int, *scenarios: str) -> dict[str, list[Any]]:
    """Run scenarios that end on every rank; return what each rank found, by scenario."""
    results, statuses = run_ranks(folder, world, *scenarios)
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    assert statuses == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)
    return {scenario: [result[scenario] for result in results if result] for scenario in scenarios}


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    scenarios = ("different_models", "different_settings", "no_time", "large", "one_fails", "sparse", "slowest")
    types = ("element_types", "different_types", "a_type_of_no_gradient")
    halves = ("halves", "halves_of_some", "halves_on_a_gpu_over_gloo", "rows_by_hand")
    low = ("low_precision", "low_precision_of_some", "unknown_precision", "low_precision_on_a_gpu_over_gloo")
    return run_well(folder, 3, *scenarios, *types, *halves, *low, "beside", "beside_fails")


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_hold_the_identical_trace_and_cost(tmp_path: Path, world: int) -> None:
    results = run_well(tmp_path, world, "identical")["identical"]
    assert len(results) == world
    assert all(result == results[0] for result in results)
    trace, cost = ModelTrace.from_json(results[0]["trace"]), PiecewiseCost.from_json(results[0]["cost"])
    assert trace.source["ranks"] == world
    assert cost.workers == world
    # Doubling, and the largest message itself.
    assert [size for size, _ in cost.source["isolated"]] == [*(4 * 2**power for power in range(10)), 4000]
    assert all(time > 0 for _, time in cost.source["streamed"])
    assert cost.source["rounds"] == 3


def test_ranks_with_different_models_all_name_the_first_difference(of_three: dict[str, list[Any]]) -> None:
    message = "the models differ: gradient '1.weight' is 16 bytes on rank 0 and 20 bytes on rank 2"
    assert [result["error"] for result in of_three["different_models"]] == [message] * 3


def test_ranks_that_sweep_differently_all_say_so(of_three: dict[str, list[Any]]) -> None:
    errors = [result["error"] for result in of_three["different_settings"]]
    assert errors == [errors[0]] * 3
    assert "rank 0 was given max_bytes=4096" in errors[0]
    assert "rank 1 max_bytes=4097" in errors[0]


def test_messages_have_the_type_that_is_asked_for_and_the_same_bytes(of_three: dict[str, list[Any]]) -> None:
    sizes = [*(4 * 2**power for power in range(10)), 4000]
    for result in of_three["element_types"]:
        for dtype in ("torch.float32", "torch.bfloat16", "torch.float16"):
            assert result[dtype]["sent"] == [[dtype, size] for size in sizes]
            source = result[dtype]["cost"]["source"]
            assert source["dtype"] == dtype.removeprefix("torch.")
            assert [size for size, _ in source["streamed"]] == sizes


def test_types_that_differ_or_that_no_gradient_has_are_refused(of_three: dict[str, list[Any]]) -> None:
    for result in of_three["different_types"]:
        assert "rank 0 was given" in result["error"]
        assert "float32, rank 1" in result["error"]
    for result in of_three["a_type_of_no_gradient"]:
        assert result["error"] == "dtype is int64, expected float32, bfloat16 or float16"


def test_halves_are_measured_at_the_sizes_of_all_reduces(of_three: dict[str, list[Any]]) -> None:
    first, second, third = of_three["halves"]
    assert first == second
    assert third == {"all": first["all"]}
    for name, workers in (("all", 3), ("two", 2)):
        cost = ShardedCost.from_json(first[name])
        assert cost.workers == workers
        parts = (cost.all_reduce, cost.reduce_scatter, cost.all_gather)
        assert [part.source["measured"] for part in parts] == ["allreduce", "reduce_scatter", "all_gather"]
        for part in parts:
            assert (part.source["dtype"], part.source["rounds"]) == ("bfloat16", 3)
            for times in ("isolated", "streamed"):
                assert [size for size, _ in part.source[times]] == [*(4 * 2**power for power in range(10)), 4000]
                assert all(time_s > 0 for _, time_s in part.source[times])
            assert part.source["fit"]["num_sizes"] == 11


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce(of_three: dict[str, list[Any]]) -> None:
    """3 ranks, 7 numbers: rows of 3, the last with one number and two places of filling."""
    summed = [6.0] * 7 + [0.0] * 2  # 1 + 2 + 3
    for rank, result in enumerate(of_three["rows_by_hand"]):
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert result[dtype] == [summed[3 * rank : 3 * rank + 3], summed]


def test_halves_that_not_all_ranks_want_or_that_cannot_be_sent_are_refused(of_three: dict[str, list[Any]]) -> None:
    for result in of_three["halves_of_some"]:
        assert "rank 0 was given max_bytes=4096" in result["error"]
        assert (
            "kinds=allreduce and reduce_scatter and all_gather, dtype=float32, rank 1 max_bytes=4096" in result["error"]
        )
    for result in of_three["halves_on_a_gpu_over_gloo"]:
        assert result["error"] == (
            "a sharded optimizer on cuda sends over nccl, and the backend is gloo: measure there, or without the halves"
        )


def test_messages_in_low_precision_are_measured_at_the_sizes_of_all_reduces(of_three: dict[str, list[Any]]) -> None:
    first, second, third = of_three["low_precision"]
    assert first == second
    assert third == {"all": first["all"]}
    for name, workers, wire in (("all", 3, "float16"), ("two", 2, "bfloat16")):
        cost = WireCost.from_json(first[name])
        assert (cost.workers, cost.wire) == (workers, wire)
        assert [part.source["measured"] for part in (cost.full, cost.low)] == ["allreduce", f"allreduce in {wire}"]
        for part in (cost.full, cost.low):
            assert (part.source["dtype"], part.source["rounds"]) == ("float32", 3)  # of the gradients
            assert [size for size, _ in part.source["streamed"]] == [*(4 * 2**power for power in range(10)), 4000]
            assert all(time_s > 0 for _, time_s in part.source["streamed"])
        assert cost.full.source["streamed"] != cost.low.source["streamed"]


def test_low_precision_that_ranks_do_not_agree_on_or_that_cannot_be_sent_is_refused(
    of_three: dict[str, list[Any]],
) -> None:
    for result in of_three["low_precision_of_some"]:
        assert "kinds=allreduce and allreduce in bfloat16, dtype=float32, rank 1" in result["error"]
    for result in of_three["unknown_precision"]:
        assert result["error"] == "wire is 'int8', expected one of bfloat16, float16"
    for result in of_three["low_precision_on_a_gpu_over_gloo"]:
        assert result["error"].startswith("a model with wire= on cuda sends over nccl, and the backend is gloo")


def test_what_a_byte_takes_is_what_passes_take_longer_for_each_byte_that_travels_beside_them(
    of_three: dict[str, list[Any]],
) -> None:
    results = of_three["beside"]
    assert results == [results[0]] * 3
    assert results[0]["passes"] == 8  # alone and beside messages, the first two not counted
    # Two pairs of 1,200 bytes, half of them beside passes, which take at least 0.6 s longer: of ranks the mean.
    cost = ShardedCost.from_json(results[0]["cost"])
    assert cost.all_gather.taken_per_byte_s == cost.reduce_scatter.taken_per_byte_s == pytest.approx(0.6 / 2400)
    assert cost.taken_per_byte_s == 2 * cost.all_gather.taken_per_byte_s
    assert cost.all_gather.taken_s == 1e-5


def test_a_pass_that_fails_beside_messages_is_an_error_on_all(of_three: dict[str, list[Any]]) -> None:
    assert [result["error"] for result in of_three["beside_fails"]] == ["rank 2 failed: ValueError: no luck"] * 3


def test_without_time_the_least_is_measured(of_three: dict[str, list[Any]]) -> None:
    assert all(result["cost"] == of_three["no_time"][0]["cost"] for result in of_three["no_time"])
    for result in of_three["no_time"]:
        source = result["cost"]["source"]
        assert [size for size, _ in source["isolated"]] == [4, 2**16]  # of two tiny ones nothing would follow
        assert source["rounds"] == 3
        assert result["reported"] == sorted(result["reported"])
        assert result["reported"][-1] == 1.0


def test_the_largest_message_is_timed_where_there_is_time_for_one(of_three: dict[str, list[Any]]) -> None:
    results = of_three["large"]
    assert all(result == results[0] for result in results)
    largest, budget_s = results[0]["largest"], results[0]["budget_s"]
    top, top_s = results[0]["isolated"][-1]
    # On a machine that became busy meanwhile there may be no time for one.
    assert top == largest or largest * top_s / top > budget_s


def test_a_failure_on_one_rank_is_an_error_on_all(of_three: dict[str, list[Any]]) -> None:
    assert [result["error"] for result in of_three["one_fails"]] == ["rank 1 failed: ValueError: no luck"] * 3


def test_the_slowest_rank_counts_gradient_by_gradient_and_size_by_size(of_three: dict[str, list[Any]]) -> None:
    for result in of_three["slowest"]:
        trace = ModelTrace.from_json(result["trace"])
        # The forward pass ends at 2 on rank 1; b is ready at 5 on rank 2, a at 8.25 on rank 1.
        assert (trace.forward_s, trace.ready_s) == (2.0, (5.0, 8.25))
        assert [layer.forward_s for layer in trace.layers] == [None, None]
        # b takes at most 1 (on rank 2), a at most 1.5 (on rank 1), and both together the 2 that rank 1 takes.
        known = ModelTrace.from_json(result["known"])
        assert {layer.name: layer.forward_s for layer in known.layers} == pytest.approx({"b": 0.8, "a": 1.2})
        assert (known.forward_s, known.ready_s) == (2.0, (5.0, 8.25))
        assert ModelTrace.from_json(result["known by some"]) == trace
        assert (result["line"]["startup_s"], result["line"]["per_byte_s"]) == (3.0, 3.0)
        assert result["curve"]["points"] == [[4, 2.0], [8, 5.0]]


def test_of_a_sparse_gradient_the_largest_counts(of_three: dict[str, list[Any]]) -> None:
    traces = [ModelTrace.from_json(result["trace"]) for result in of_three["sparse"]]
    assert traces[1:] == traces[:-1]
    assert traces[0].grad_bytes == 3 * (8 + 4 * 4)  # three tokens on the last rank: an index and four numbers each


def test_a_killed_rank_ends_the_others_with_an_error(tmp_path: Path) -> None:
    results, statuses = run_ranks(tmp_path, 3, "killed")
    assert statuses[1] == -signal.SIGKILL
    assert results[1] is None
    for result in (results[0], results[2]):
        assert result is not None
        assert "the all-reduce sweep failed, a rank may have died" in result["killed"]["error"]


def test_the_order_of_the_trace_is_the_order_ddps_reducer_saw(tmp_path: Path) -> None:
    results = run_well(tmp_path, 1, "order:resnet18", "order:googlenet", "order:transformer")
    assert len(results) == 3
    for (found,) in results.values():
        assert len(found["trace"]) > 10
        assert found["trace"] == found["reducer"]
