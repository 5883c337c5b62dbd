"""Several ranks, real processes: the same result on every one, or the same error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import ModelTrace, PiecewiseCost


def run_ranks(scenario: str, folder: Path, world: int) -> tuple[list[Any], list[int]]:
    """Run a scenario of tests/measure/ranks.py; return what each rank wrote (None for nothing) and its exit status."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.measure.ranks", scenario, str(folder)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        statuses = [process.wait(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], statuses


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_hold_the_identical_trace_and_cost(tmp_path: Path, world: int) -> None:
    results, statuses = run_ranks("identical", tmp_path, world)
    assert statuses == [0] * world
    assert all(result == results[0] for result in results)
    trace, cost = ModelTrace.from_json(results[0]["trace"]), PiecewiseCost.from_json(results[0]["cost"])
    assert trace.source["ranks"] == world
    assert cost.workers == world
    assert [size for size, _ in cost.source["isolated"]] == [4 * 2**power for power in range(11)]
    assert all(time > 0 for _, time in cost.source["streamed"])


def test_ranks_with_different_models_all_name_the_first_difference(tmp_path: Path) -> None:
    results, _ = run_ranks("different_models", tmp_path, 3)
    message = "the models differ: gradient '1.weight' is 16 bytes on rank 0 and 20 bytes on rank 2"
    assert [result["error"] for result in results] == [message] * 3


def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    results, _ = run_ranks("one_fails", tmp_path, 3)
    assert [result["error"] for result in results] == ["rank 1 failed: ValueError: no luck"] * 3


def test_a_killed_rank_ends_the_others_with_an_error(tmp_path: Path) -> None:
    results, statuses = run_ranks("killed", tmp_path, 3)
    assert statuses[1] == -signal.SIGKILL
    assert results[1] is None
    for rank in (0, 2):
        assert "the all-reduce sweep failed, a rank may have died" in results[rank]["error"]


@pytest.mark.parametrize("model", ["resnet18", "googlenet", "transformer"])
def test_the_order_of_the_trace_is_the_order_ddps_reducer_saw(tmp_path: Path, model: str) -> None:
    results, statuses = run_ranks(f"order:{model}", tmp_path, 1)
    assert statuses == [0]
    assert len(results[0]["trace"]) > 10
    assert results[0]["trace"] == results[0]["reducer"]
