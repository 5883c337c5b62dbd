"""``mgwfbp train`` as people and schedulers run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from mgwfbp import BenchResult, MergePlan, TrainingRun
from mgwfbp.cli import run
from mgwfbp.cli.children import free_port
from mgwfbp.cli.train import _folder
from mgwfbp.cli.train_progress import ProgressLines
from mgwfbp.run import LoggedEpoch, LoggedStep
from mgwfbp.train.config import TrainConfig
from mgwfbp.units import format_seconds
from tests.forking import context
from tests.train.ranks import equal, logged_step, said, train_to_end, wait_until, weights

ROOT = Path(__file__).parents[2]
# The same run twice: for the command line, and for workers that tests start themselves.
SMALL = ["--factory", "tests.train.models:tiny", "--data", "synthetic", "--samples", "640", "--classes", "10"]
SMALL += ["--image-size", "8", "--strategy", "wfbp", "--log-steps", "1", "--no-tensorboard", "--workers", "2"]
SMALL += ["--epochs", "24", "--checkpoint-steps", "7"]
CONFIG = TrainConfig(
    model="tests.train.models:tiny",
    data="synthetic",
    num_samples=640,
    num_classes=10,
    image_size=8,
    strategy="wfbp",
    log_steps=1,
    tensorboard=False,
    workers=2,
    epochs=24,
    checkpoint_steps=7,
)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--model", "resnet5O"], 1, "torchvision has no classification model 'resnet5O' (near: resnet50"),
        (["--factory", "nowhere:model"], 1, "No module named 'nowhere'"),
        (["--factory", "tests.train.models:not_a_model"], 1, "expected a torch.nn.Module"),
        (["--factory", "tests.train.models"], 2, "expected package.module:function"),
        (["--data", "/nowhere/at/all"], 1, "no data: '/nowhere/at/all' is no folder"),
        (["--workers", "0"], 2, "--workers"),
        (["--batch-size", "32", "--accumulation-steps", "5"], 2, "does not divide into 5 equal parts"),
        (["--global-batch-size", "100", "--workers", "3"], 2, "100 samples does not divide among 3 workers"),
        (["--global-batch-size", "100", "--batch-size", "50"], 2, "give one of them"),
        (["--batch-size", "2000"], 1, "fewer than one batch of 2000"),
        (["--strategy", "fastest"], 1, "strategy 'fastest' is unknown"),
        (["--strategy", "no/plan.json"], 1, "no/plan.json: cannot be read"),
        (["--strategy", "optimal"], 1, "there is 1; start more, or give --cost"),
        (["--factory", "tests.train.models:tiny", "--model", "resnet18"], 2, "give one of them"),
        (["--trace", "no-such-trace"], 1, "no-such-trace"),
        (["--trace", "resnet50-k80-b32"], 1, "'resnet50-k80-b32' is of another model"),
        (["--output", "/dev/null/run"], 1, "/dev/null/run: cannot be made: Not a directory"),
        (["--cost", "no-such-cost.json"], 1, "no-such-cost.json"),
        (["--lr", "-1"], 2, "lr is -1.0"),
        (["--label-smoothing", "1"], 2, "expected less than 1"),
        (["--timeout", "0"], 2, "expected 1 second or more"),
        (["--epochs", "0"], 2, "--epochs"),
        (["--schedule", "linear"], 2, "'linear' is not one of"),
        (["--autocast", "fp8"], 2, "'fp8' is not one of"),
        (["--resume"], 2, "name the run's folder"),
    ],
)
def test_bad_options_end_with_one_line_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", *options]) == status
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_model_and_a_folder_in_use_are_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MergePlan("other", "by hand", (("a", "b"),)).save(tmp_path / "plan.json")
    assert run(["train", "--strategy", str(tmp_path / "plan.json")]) == 1
    assert "it was made for another model" in capsys.readouterr().err
    MergePlan("other", "by hand", (("a", "b"),), gathers=(("b", "a"),)).save(tmp_path / "plan.json")
    assert run(["train", "--strategy", str(tmp_path / "plan.json")]) == 1
    assert (
        "for a sharded optimizer, and `mgwfbp train` without --shard-optimizer all-reduces" in capsys.readouterr().err
    )
    (tmp_path / "config.json").write_text("{}")
    assert run(["train", "-o", str(tmp_path)]) == 1
    assert "holds a run already: go on with it by --resume" in capsys.readouterr().err


def test_without_tensorboard_it_is_asked_for_or_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert run(["train"]) == 1
    assert "pip install 'mgwfbp[train]', or use --no-tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "strategy", "name"),
    [
        ("tests.train.models:tiny", "bucket-0.5", "tiny-bucket-0.5-1"),
        ("resnet18", "plans/mine.json", "resnet18-mine-1"),
    ],
)
def test_a_run_without_a_folder_is_named_after_its_model_and_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, strategy: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _folder(TrainConfig(model=model, strategy=strategy), None, resume=False) == Path("runs") / name


def test_progress_needs_nobody_to_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    lines = ProgressLines()
    lines.step(LoggedStep(1, 0, 1.0, 1.0, 1.0, 1.0), 2)
    lines.epoch(LoggedEpoch(0, 1.0, 1.0, 0.5, 0.5, 1.0), 1)


def test_the_demo_overwrites_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "config.json").write_text("{}")
    assert run(["demo", "-o", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err


@contextmanager
def training(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own; at the end neither it nor its workers are left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mgwfbp", "train", *SMALL, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for _ in range(100):
            if not workers_in(options[options.index("-o") + 1]):
                break
            time.sleep(0.1)
        for pid in workers_in(options[options.index("-o") + 1]):
            os.kill(pid, signal.SIGKILL)


def workers_in(folder: str) -> list[int]:
    """The processes of a run: those whose command names its folder, the one that started the others first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if folder in words and "train" in words:
            found.append(int(path.parent.name))
    return sorted(found)


def cpu_s(pid: int) -> float:
    """How long a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def be_an_agent(folder: Path) -> None:
    """Start the workers of a run as an elastic agent does, tell their ids, and wait to be killed."""
    port, pids = free_port(), []
    os.environ.update(TORCHELASTIC_RUN_ID="a job", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    for rank in range(2):
        if (pid := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            os._exit(run(["train", *SMALL, "-o", str(folder), "--resume"]))
        pids.append(pid)
    (folder / "pids.json").write_text(json.dumps(pids))
    signal.pause()


@contextmanager
def dying_agent(folder: Path) -> Iterator[BaseProcess]:
    """An agent that the test kills; at the end its workers are gone, too."""
    agent = context().Process(target=be_an_agent, args=(folder,))
    agent.start()
    try:
        wait_until((folder / "pids.json").exists)
        yield agent
    finally:
        agent.kill()
        agent.join(10)
        for pid in json.loads((folder / "pids.json").read_text()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(240)
def test_after_a_kill_sigterm_and_a_dead_agent_a_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training("-o", str(folder), "--max-restarts", "1") as process:
        wait_until(lambda: logged_step(folder) >= 10, 100)
        launcher, *workers = workers_in(str(folder))
        assert launcher == process.pid
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        wait_until(lambda: set(workers_in(str(folder))[1:]).isdisjoint(workers), 60)
        wait_until(lambda: logged_step(folder) >= 20 and len(workers_in(str(folder))) == 3, 100)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert "going on after step" in err
    assert "samples/s" in err
    assert "Traceback" not in err
    assert "SIGTERM: the step was finished and saved; go on with --resume" in err
    assert TrainingRun.load(folder).results is None
    stopped = weights(folder)["step"]
    assert stopped >= 20
    # Where nobody is left to start them again workers finish the step, save and leave.
    with dying_agent(folder) as agent:
        wait_until(lambda: logged_step(folder) >= stopped + 5)
        assert not (folder / "interrupted.json").exists()
        agent.kill()
        wait_until((folder / "interrupted.json").exists, 30)
    assert weights(folder)["step"] >= stopped + 5
    train_to_end(CONFIG, folder, resume=True)
    assert "not as before" not in said(folder)
    train_to_end(CONFIG, tmp_path / "whole")
    assert equal(weights(folder), weights(tmp_path / "whole"))


@pytest.mark.timeout(240)
def test_a_worker_that_somebody_ends_is_named_with_the_signal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training("-o", str(folder)) as process:
        wait_until(lambda: logged_step(folder) >= 3, 100)
        _, *workers = workers_in(str(folder))
        told = next(pid for pid in workers if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        os.kill(told, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    last = err.splitlines()[-1]
    assert last == (
        f"mgwfbp: worker 1 got SIGTERM: the step was finished and saved; go on with --resume --output {folder}"
    )
    assert json.loads((folder / "interrupted.json").read_text())["told_to_stop"] == {"1": "SIGTERM"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delay_s", [1.0, 3.0, 5.0])
def test_an_interrupt_while_training_starts_is_a_line_at_most(tmp_path: Path, delay_s: float) -> None:
    with training("-o", str(tmp_path / "run")) as process:
        time.sleep(delay_s)
        wait_until(lambda: cpu_s(process.pid) >= 0.3)  # Python itself has started
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)  # less than workers that wait for one another have
    assert process.returncode in (130, 1, 0), err
    said = [line for line in err.splitlines() if "SIGINT" in line]
    assert len(said) == (process.returncode != 130), err
    assert "Traceback" not in err


LAUNCH = """
import sys
from mgwfbp.errors import TrainError
from mgwfbp.train.launch import launch
for code in sys.argv[1:]:
    try:
        launch([sys.executable, "-c", code], workers=2, max_restarts=1, shutdown_s=5)
    except TrainError as error:
        print(error)
"""


def test_a_worker_that_fails_too_often_ends_the_job_with_one_line(tmp_path: Path) -> None:
    wrong = [
        f"import os, sys; open(f'{tmp_path}/{kind}-{{os.getpid()}}', 'w').close(); os.environ['RANK'] == '1' and {end}"
        for kind, end in enumerate(("os.kill(os.getpid(), 9)", "sys.exit(7)"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *wrong], capture_output=True, text=True, timeout=60, check=True
    )
    words = ("was killed (SIGKILL) after 1 restarts", "failed (status 7) after 1 restarts")
    for number, (line, how) in enumerate(zip(done.stdout.splitlines(), words, strict=True)):
        assert f"worker 1 {how}" in line
        assert "--resume goes on from the last checkpoint" in line
        assert 3 <= len(list(tmp_path.glob(f"{number}-*"))) <= 4  # two workers, started twice
    assert done.stderr == ""


@pytest.mark.timeout(240)
def test_the_demo_compares_and_trains_and_shows_both(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mgwfbp", "demo", "--no-lab", "--turns", "1", "--epochs", "1", "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    assert f"both, message by message: {tmp_path / 'report.html'}" in done.stdout
    for place in (tmp_path, tmp_path / "training"):
        assert (place / "report.html").read_text().startswith("<!DOCTYPE html>")
    result = BenchResult.load(tmp_path / "replay.json")
    assert [one.strategy for one in result.strategies] == ["ddp", "optimal"]
    for name, one in zip(("DDP's default", "ours"), result.strategies, strict=True):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(name))
        assert format_seconds(one.measured_s) in line
        assert f"{result['ddp'].measured_s / one.measured_s:.2f}x" in line
    run = TrainingRun.load(tmp_path / "training")
    assert run.results is not None
    assert f"{run.results.top1:.2%} of the digits right" in done.stdout
