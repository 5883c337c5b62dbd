"""``mgwfbp measure`` as a user runs it: files, usage, failures; with workers and under torchrun in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mgwfbp import MergePlan, ModelTrace, PiecewiseCost, load_cost
from mgwfbp.cli import run
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.planners import find_sharded_plan, find_wire_plan
from tests.commands import ENVIRONMENT, LAUNCHER, mgwfbp
from tests.measure.models import factory

FACTORY = ("--factory", "tests.measure.models:factory")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fails(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    """Run a command that must end with a status, one line, and nothing written; return the line."""
    assert run(["measure", *arguments, "-o", "out.json"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []
    return err


# ---- what they write -------------------------------------------------------------------------------------------------


def test_backward_writes_a_trace() -> None:
    assert run(["measure", "backward", *FACTORY, "--batch-size", "3", "--steps", "2", "-o", "trace.json"]) == 0
    trace = ModelTrace.load("trace.json")
    assert trace.model == "factory"
    assert {layer.name for layer in trace.layers} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (trace.source["measured"], trace.source["batch_size"], trace.source["steps"]) == ("backward", 3, 2)


def test_analytic_writes_a_trace_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "analytic", "--model", "resnet18", "--device", "v100", "--images-per-second", "100"]) == 0
    out, err = capsys.readouterr()
    assert "62 gradients" in err
    Path("trace.json").write_text(out)
    trace = ModelTrace.load("trace.json")
    assert trace.compute_s == pytest.approx(32 / 100)
    assert trace.source["device"] == "v100"


def test_analytic_counts_mixed_precision() -> None:
    options = ["--model", "resnet18", "--device", "a100"]
    assert run(["measure", "analytic", *options, "-o", "plain.json"]) == 0
    assert run(["measure", "analytic", *options, "--autocast", "bf16", "-o", "mixed.json"]) == 0
    plain, mixed = ModelTrace.load("plain.json"), ModelTrace.load("mixed.json")
    assert mixed.source["autocast"] == "bfloat16"
    assert mixed.compute_s < plain.compute_s
    assert mixed.grad_bytes == plain.grad_bytes


def test_profile_writes_a_trace() -> None:
    model, batch = factory()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for _ in range(2):
            model(batch).sum().backward()
    prof.export_chrome_trace("profile.json")
    assert run(["measure", "profile", "profile.json", *FACTORY, "-o", "trace.json"]) == 0
    assert len(ModelTrace.load("trace.json").layers) == 4


def test_allreduce_between_local_workers_writes_a_cost() -> None:
    options = ("--workers", "2", "--budget", "0.5", "--max-mb", "0.01", "--dtype", "bfloat16")
    done = mgwfbp("measure", "allreduce", *options, "-o", "cost.json")
    assert done.returncode == 0, done.stderr
    cost = load_cost("cost.json")
    assert isinstance(cost, PiecewiseCost)
    assert cost.workers == 2
    assert cost.source["backend"] == "gloo"
    assert cost.source["dtype"] == "bfloat16"
    assert done.stderr.count("wrote cost.json") == 1  # one rank writes
    assert "mean error" in done.stderr


def test_what_is_measured_makes_a_plan_for_a_sharded_optimizer_and_nothing_is_assumed() -> None:
    assert run(["measure", "backward", *FACTORY, "--steps", "2", "-o", "trace.json"]) == 0
    options = ("--workers", "2", "--budget", "0.5", "--max-mb", "0.01", "--halves")
    done = mgwfbp("measure", "allreduce", *options, "-o", "cost.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mean error") == 3
    cost = ShardedCost.load("cost.json")
    assert {part.source["network"] for part in (cost.all_reduce, cost.reduce_scatter, cost.all_gather)} == {
        "gloo on one machine"
    }
    assert load_cost("cost.json") == cost.all_reduce
    planned = mgwfbp("plan", "--trace", "trace.json", "--cost", "cost.json", "--engine", "sharded", "-o", "plan.json")
    assert planned.returncode == 0, planned.stderr
    assert "taken" not in planned.stderr
    found = find_sharded_plan(ModelTrace.load("trace.json"), cost)
    assert MergePlan.load("plan.json") == found


def test_what_is_measured_in_low_precision_makes_a_plan_of_both_and_nothing_is_assumed() -> None:
    assert run(["measure", "backward", *FACTORY, "--steps", "2", "-o", "trace.json"]) == 0
    options = ("--workers", "2", "--budget", "0.5", "--max-mb", "0.01", "--wire", "bfloat16")
    done = mgwfbp("measure", "allreduce", *options, "-o", "cost.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mean error") == 2
    both = WireCost.load("cost.json")
    assert {part.source["network"] for part in (both.full, both.low)} == {"gloo on one machine"}
    assert load_cost("cost.json") == both
    files = ("--trace", "trace.json", "--cost", "cost.json", "--wire", "bfloat16", "--wire-cost", "cost.json")
    planned = mgwfbp("plan", *files, "-o", "plan.json")
    assert planned.returncode == 0, planned.stderr
    assert "taken to cost" not in planned.stderr
    assert MergePlan.load("plan.json") == find_wire_plan(ModelTrace.load("trace.json"), both)
    other = mgwfbp("compare", *files[:4], "--wire", "float16", "--wire-cost", "cost.json")
    assert other.returncode == 2
    assert "is of bfloat16, and --wire is float16" in " ".join(other.stderr.replace("│", "").split())


def test_low_precision_goes_with_all_reduces_of_float32_only(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--halves"], ["--dtype", "bfloat16"]):
        assert run(["measure", "allreduce", "--workers", "2", "--wire", "bfloat16", *more]) == 2
        assert "goes with all-reduces of float32 only" in capsys.readouterr().err


def test_backward_between_local_workers_writes_one_trace() -> None:
    done = mgwfbp("measure", "backward", "--workers", "2", *FACTORY, "--steps", "2", "-o", "trace.json")
    assert done.returncode == 0, done.stderr
    trace = ModelTrace.load("trace.json")
    assert trace.source["ranks"] == 2
    assert trace.source["threads"] == 1  # as under torchrun: workers share the cores
    assert done.stderr.count("wrote trace.json") == 1


def test_torchruns_workers_are_used() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = mgwfbp("measure", "backward", *FACTORY, "--steps", "2", "-o", "trace.json", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert ModelTrace.load("trace.json").source["ranks"] == 2


def test_a_factory_beside_us_is_found() -> None:
    Path("my_own_model.py").write_text(
        "import torch\nclass Own(torch.nn.Linear): pass\n"
        "def make(): return Own(2, 2), torch.ones(1, 2), lambda output: output.sum()\n"
    )
    assert run(["measure", "analytic", "--factory", "my_own_model:make", "-o", "trace.json"]) == 0
    assert ModelTrace.load("trace.json").model == "Own"


# ---- wrong usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("backward",), "give exactly one"),
        (("backward", "--model", "resnet18", *FACTORY), "give exactly one"),
        (("analytic",), "give exactly one"),
        (("profile", "p.json"), "give exactly one"),
        (("backward", "--factory", "no_colon"), "expected package.module:function"),
        (("backward", *FACTORY, "--workers", "0"), "--workers"),
        (("backward", *FACTORY, "--batch-size", "0"), "--batch-size"),
        (("backward", *FACTORY, "--device", "tpu"), "tpu"),
        (("backward", *FACTORY, "--image-size", "64"), "only models of torchvision have one; leave it out"),
        (("analytic", *FACTORY, "--sequence-length", "64"), "only models hf:TYPE have one; leave it out"),
        (("backward", "--model", "hf:bert", "--image-size", "64"), "only models of torchvision have one"),
        (("analytic", "--model", "resnet18", "--sequence-length", "64"), "only models hf:TYPE have one"),
        (("backward", *FACTORY, "--autocast", "int8"), "int8"),
        (("analytic", *FACTORY, "--autocast", "int8"), "int8"),
        (("analytic", *FACTORY, "--device", "k79"), "'k79' is not one of k80, p100"),
        (("analytic", *FACTORY, "--images-per-second", "-1"), "--images-per-second"),
        (("allreduce",), "one worker has nobody to talk to"),
        (("allreduce", "--workers", "1"), "one worker has nobody to talk to"),
        (("allreduce", "--workers", "2", "--budget", "0"), "--budget"),
        (("allreduce", "--workers", "2", "--budget", "nan"), "--budget"),
        (("allreduce", "--workers", "2", "--budget", "inf"), "finite"),
        (("allreduce", "--workers", "2", "--max-mb", "inf"), "finite"),
        (("allreduce", "--workers", "2", "--backend", "carrier-pigeon"), "carrier-pigeon"),
        (("allreduce", "--workers", "2", "--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, 2, *arguments)


def test_workers_that_torchrun_did_not_start_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(LAUNCHER, ("0", "0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert "3, but 2 were started" in fails(capsys, 2, "backward", *FACTORY, "--workers", "3")


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("backward", "--model", "resnet51"), ["no classification model 'resnet51'", "resnet50"]),
        (("analytic", "--model", "resnet51"), ["no classification model 'resnet51'"]),
        (
            ("backward", "--factory", "tests.measure.models:not_a_factory"),
            ["returned 'int', expected a torch.nn.Module, (model, batch)"],
        ),
        (
            ("backward", "--factory", "tests.measure.models:broken_factory"),
            ["failed: RuntimeError: ", "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x8)", "linear.py"],
        ),
        (
            ("backward", "--factory", "tests.measure.models:raising_factory"),
            ["model 'tests.measure.models:raising_factory' failed: KeyError", "models.py:LINE, forward"],
        ),
        (("analytic", "--factory", "tests.measure.models:raising_factory"), ["failed: KeyError"]),
        (
            ("backward", *FACTORY, "--batch-size", str(10**13)),
            ["out of memory", f"--batch-size {10**13} does not fit on cpu; lower --batch-size"],
        ),
        (("profile", "none.json", *FACTORY), ["none.json: cannot be read"]),
        (("analytic", *FACTORY, "--autocast", "bf16"), ["k80 has no units for matrices of bfloat16", "--device"]),
        (
            ("analytic", "--factory", "tests.measure.models:looking_factory"),
            ["failed: RuntimeError: ", "models.py:", "looks at values, and counting computes none", "measure backward"],
        ),
        (("backward", *FACTORY, "--device", "cuda"), ["no CUDA device here", "measure analytic"]),
        (("backward", *FACTORY, "--device", "cuda", "--workers", "2"), ["no CUDA device here"]),
        (("allreduce", "--device", "cuda", "--workers", "2"), ["no CUDA device here"]),
    ],
)
def test_a_failure_is_one_line_and_status_1_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], messages: list[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    line = fails(capsys, 1, *arguments)
    raised_at = next(
        number
        for number, text in enumerate((Path(__file__).parent / "models.py").read_text().splitlines(), 1)
        if "raise KeyError" in text
    )
    for message in messages:
        assert message.replace("LINE", str(raised_at)) in line


def test_a_broken_profile_is_no_fault_of_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 10**400, "dur": 1}]
    path = tmp_path.parent / "broken-profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    line = fails(capsys, 1, "profile", str(path), *FACTORY)
    assert line.startswith(f"mgwfbp: {path}: traceEvents: ts of 'aten::add' is 1000")
    assert "model" not in line


def test_a_model_that_fails_on_the_workers_is_one_line_on_every_rank() -> None:
    done = mgwfbp(
        "measure", "backward", "--workers", "2", "--factory", "tests.measure.models:broken_factory", "-o", "trace.json"
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("mgwfbp")]
    assert sorted(line.partition(": ")[0] for line in lines) == ["mgwfbp, rank 0", "mgwfbp, rank 1"]
    assert all("rank 0 failed: model" in line and "mat1 and mat2" in line for line in lines)
    assert done.stderr.count("\n") == 2
    assert not Path("trace.json").exists()


def test_a_worker_that_is_killed_ends_the_sweep() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "mgwfbp", "measure", "allreduce", "--workers", "3", "--budget", "90", "-o", "cost.json"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        victim = in_the_sweep(started.pid, workers=3)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        _, err = started.communicate(timeout=80)
    finally:
        started.kill()
        started.wait()
    assert started.returncode == 1
    assert time.monotonic() - killed_s < 60  # the timeout of a rank
    assert "was killed (SIGKILL)" in err
    assert "Traceback" not in err
    assert all(line.startswith("mgwfbp") for line in err.splitlines())
    assert not Path("cost.json").exists()


def in_the_sweep(parent: int, workers: int) -> int:
    """Wait until all workers talk to one another and return one of them."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        talking = [
            child
            for child in children
            if any("gloo" in name.read_text() for name in Path("/proc", child, "task").glob("*/comm"))
        ]
        if len(talking) == workers:
            time.sleep(0.5)  # well into it: the budget is far longer
            return int(talking[-1])
        time.sleep(0.05)
    raise AssertionError("the workers did not start")
