"""``mgwfbp bench`` as a user runs it: files, usage, failures; with workers and under torchrun in real processes."""

import os
import sys
from pathlib import Path

import pytest

from mgwfbp import BenchResult, LayerTrace, ModelTrace
from mgwfbp.cli import run
from mgwfbp.cli.children import free_port
from mgwfbp.runtime.strategies import STRATEGIES
from tests.commands import mgwfbp
from tests.train.ranks import fork_all

FACTORY = ("--factory", "tests.measure.models:factory")
QUICK = ("--turns", "2", "--steps", "1", "--budget", "0.3")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layers = tuple(LayerTrace(name, 1e-3, 4000) for name in ("b.weight", "b.bias", "a.weight"))
    ModelTrace("toy", 1e-3, layers).save("trace.json")


def test_a_replay_between_local_workers_writes_a_result_and_a_table() -> None:
    chosen = ("--strategies", "naive,ps,ddp,bucket-5,optimal", "--network-label", "loopback")
    files = ("-o", "result.json", "--markdown", "table.md")
    done = mgwfbp("bench", "--replay", "trace.json", "--scale", "2", "--workers", "2", *chosen, *QUICK, *files)
    assert done.returncode == 0, done.stderr
    result = BenchResult.load("result.json")
    assert [one.strategy for one in result.strategies] == ["naive", "ps", "ddp", "bucket-5", "optimal"]
    assert (result.workers, result.network) == (2, "loopback")
    assert result.trace is not None
    assert result.source["recorded_compute_s"] == pytest.approx(8e-3)
    assert all(one.predicted_s is not None for one in result.strategies)
    assert "--replay trace.json" in result.source["command"]
    assert result.source["torch"]
    assert result.source["tcp"]["sent"] > 2 * result.source["tcp"]["sent_again"] >= 0
    processors = result.source["processors"]
    assert processors["all"] > processors["idle"] + processors["stolen"] >= 0  # somebody worked
    table = Path("table.md").read_text()
    assert "## toy, 2 workers, loopback" in table
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")] == [
        "| strategy", "| ---", "| naive", "| ps", "| ddp", "| bucket-5", "| optimal",
    ]  # fmt: skip
    assert done.stdout.splitlines()[0].startswith("strategy")
    assert done.stderr.count("turn 2 of 2") == 1  # one rank tells how far it is
    assert done.stderr.count("wrote result.json") == 1


def test_a_model_under_torchrun_is_measured_and_its_result_goes_to_stdout() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = mgwfbp("bench", *FACTORY, "--strategies", "wfbp,ddp", "--no-timelines", *QUICK, launcher=launcher)
    assert done.returncode == 0, done.stderr
    Path("result.json").write_text(done.stdout)
    result = BenchResult.load("result.json")
    assert result.model == "factory"
    assert result["wfbp"].num_messages == 4
    assert result["wfbp"].predicted_timeline is None
    assert result.trace is not None
    assert result.trace.source["measured"] == "observed in training"


def fails(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    """Run a command that must end with a status, one line, and nothing written; return the line."""
    assert run(["bench", *arguments, "-o", "out.json"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["trace.json"]
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one"),
        (("--model", "resnet18", "--replay", "trace.json"), "give exactly one"),
        (("--replay", "trace.json"), "one worker has nobody to talk to"),
        (("--replay", "trace.json", "--workers", "2", "--strategies", "ddp,horovod"), "'horovod' is unknown"),
        (("--replay", "trace.json", "--workers", "2", "--strategies", ","), "no strategy is given"),
        (("--replay", "trace.json", "--workers", "2", "--turns", "0"), "--turns"),
        (("--replay", "trace.json", "--workers", "2", "--scale", "0"), "--scale"),
        (("--replay", "trace.json", "--workers", "2", "--device", "cuda"), "a replay needs no GPU"),
        (("--replay", "trace.json", "--workers", "2", "--batch-size", "8"), "a replay has that of its trace"),
        (("--model", "resnet18", "--workers", "2", "--sequence-length", "8"), "only models hf:TYPE have one"),
        ((*FACTORY, "--workers", "2", "--scale", "10"), "only recorded times can be slowed"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, 2, *arguments)


def test_the_help_names_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    named = capsys.readouterr().out.replace("│", " ").replace(",", " ").replace(";", " ").replace(".", " ").split()
    assert {*STRATEGIES, "bucket-N", "+bf16", "+fp16", "bf16-hook-N"} <= set(named)


def test_a_trace_that_is_not_there_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'vgg99' is neither a file" in fails(capsys, 1, "--replay", "vgg99", "--workers", "2")


@pytest.mark.parametrize("option", ["--output", "--markdown"])
def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    for place in ("nowhere/result", "."):
        assert run(["bench", "--replay", "trace.json", "--workers", "2", option, place]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{place}: cannot be written" in err
        assert err.count("\n") == 1


def test_a_torn_trace_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trace.json").write_text(Path("trace.json").read_text()[:-20])
    assert "trace.json: not JSON" in fails(capsys, 1, "--replay", "trace.json", "--workers", "2")


def one_rank(rank: int, workers: int, port: int, folder: Path, *arguments: str) -> None:
    """Be one of the workers that a launcher starts; what it says goes to ``rankN.txt``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    with Path(f"rank{rank}.txt").open("w") as sys.stderr:
        status = run(["bench", *arguments])
    os._exit(status)


def test_a_model_that_fails_is_one_line_on_every_rank() -> None:
    broken = ("--factory", "tests.measure.models:broken_factory", *QUICK, "-o", "result.json")
    port = free_port()
    assert fork_all([(one_rank, (rank, 2, port, Path.cwd(), *broken)) for rank in range(2)]) == [1, 1]
    for rank in range(2):
        said = Path(f"rank{rank}.txt").read_text()
        assert said.startswith(f"mgwfbp, rank {rank}: ")
        assert "mat1 and mat2" in said
        assert said.count("\n") == 1
    assert not Path("result.json").exists()
