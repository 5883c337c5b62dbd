"""What benchmarks/fsdp.py runs on real ranks, what it says of its results, and what one failure leaves."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
from torch import Tensor, nn

from benchmarks import fsdp
from mgwfbp.cli.children import run_workers

ROOT = Path(__file__).parents[2]
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no public fully_shard"
)
pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


def lone() -> tuple[nn.Module, Tensor]:
    """A model that only rank 0 can make."""
    if os.environ["RANK"] == "1":
        raise MemoryError("no room")
    return nn.Linear(2, 2), torch.rand(4, 2)


class Bare(nn.Module):
    """A model that cannot be planned: its parameters are of two dtypes, and in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def bare() -> tuple[nn.Module, Tensor]:
    return Bare(), torch.rand(4, 2)


def contend(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, Any]:
    """Run the script on 2 ranks; return its status and what is in its file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    command = [sys.executable, str(ROOT / "benchmarks" / "fsdp.py"), "--output", str(folder / "found.json"), *options]
    status = run_workers([*command, "--batch-size", "4", "--turns", "1", "--steps", "1"], 2)
    return status, json.loads((folder / "found.json").read_text())


@needs_fsdp2
def test_ways_are_made_in_order_timed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = "ours,auto,sharded,block,none"
    status, found = contend(tmp_path, monkeypatch, "--model", "tiny", "--ways", ways, "--seconds", "250")
    assert (status, found["failed"], found["left_out"]) == (0, {}, [])
    assert list(found["first_s"]) == ["none", "block", "ours", "sharded", "auto"]
    assert {name: len(turns_s) for name, turns_s in found["turns_s"].items()} == dict.fromkeys(found["first_s"], 1)
    assert set(found["predicted_s"]) == {*fsdp.TITLES, "bound"}
    monkeypatch.setattr(sys, "argv", ["fsdp.py", "--show", str(tmp_path / "found.json")])
    fsdp.main()
    shown = capsys.readouterr().out
    assert "| step, ms | found |" in shown
    assert "\n| our sharded optimizer, exact plan |" in shown
    assert "`mgwfbp.fully_shard` beside per block: " in shown


def test_a_way_that_fails_on_one_rank_ends_all_and_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = contend(tmp_path, monkeypatch, "--model", "tests.bench.test_fsdp_benchmark:lone", "--ways", "none")
    assert status == 1
    assert found["failed"] == {"none": "rank 1: MemoryError: no room"}


@needs_fsdp2
def test_where_nothing_can_be_planned_what_needs_no_plan_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "tests.bench.test_fsdp_benchmark:bare"
    status, found = contend(tmp_path, monkeypatch, "--model", model, "--ways", "none,ddp,block")
    assert status == 0
    assert list(found["turns_s"]) == ["none", "ddp"]
    assert "has trained parameters of float32 and float64" in found["failed"]["planning"]
    assert found["failed"]["block"].endswith(": RuntimeError: there is no plan")  # of the rank that said so first


def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = contend(tmp_path, monkeypatch, "--model", "tiny", "--ways", "none,ddp", "--seconds", "0")
    assert (status, found["left_out"], found["turns_s"]) == (0, ["none", "ddp", "1 of 1 turns"], {})


def result(ours_s: float, **others_s: float) -> dict[str, Any]:
    """A result whose ways had a turn, all predicted to take a second."""
    times_s = {"ours": ours_s, **others_s}
    return {
        "ranks": 4,
        "update_s": 0.4,
        "first_s": {**times_s, "whole": 9.0},
        "turns_s": {name: [time_s] for name, time_s in times_s.items()},
        "predicted_s": dict.fromkeys(times_s, 1.0),
        "memory_bytes": {"ours": 2_500_000_000},
        "failed": {"rest": "rank 0: no room"},
        "left_out": ["2 of 3 turns"],
    }


def test_aims_are_judged_by_the_mean_and_by_the_worst_and_other_rivals_are_said() -> None:
    assert fsdp.verdicts({"a": result(1.0, block=1.21, kept=0.9), "b": result(2.0, block=2.0)}) == [
        "`mgwfbp.fully_shard` beside per block: 1.100 times as fast in the mean, at least 1.000 (b)",
        "`mgwfbp.fully_shard` beside the fastest by hand: 0.949 times as fast in the mean, at least 0.900 (a)",
        "`mgwfbp.fully_shard` beside per block, kept: 0.900 times as fast in the mean, at least 0.900 (a)",
        "predictions, the update included: -45.0% at worst (b, `mgwfbp.fully_shard`)",
        "`mgwfbp.fully_shard` beside per block: 3% ahead in the mean: met",
        "`mgwfbp.fully_shard` beside per block: never more than 1% behind: met",
        "predicted within 5%: missed",
    ]
    assert "`mgwfbp.fully_shard` beside per block: never more than 1% behind: missed" in fsdp.verdicts(
        {"a": result(1.0, block=0.98)}
    )
    assert (
        fsdp.verdicts({"a": result(1.0)} | {"b": {**result(1.0), "turns_s": {}}})[-1] == "predicted within 5%: missed"
    )


def test_an_overview_has_medians_predictions_memory_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    fsdp.overview({"a": result(1.0, block=1.21)})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "| step, ms | a |",
        "|---|--:|",
        "| FSDP2 per block | 1210.0 (1100.0) |",
        "| `mgwfbp.fully_shard` | 1000.0 (1100.0) |",
        "| whole model | 9000.0* |",
        "",
    ]
    assert "| `mgwfbp.fully_shard` | 2.50 |" in lines
    assert lines[-2:] == ["- a: rest: rank 0: no room", "- a: 2 of 3 turns: there was no time left"]
