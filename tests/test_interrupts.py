"""Ctrl-C at any moment: status 130 and not a word, from the first line of ours on."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["mgwfbp"].split(":")
# What pip makes of the entry point.
SCRIPT = ("-c", f"import sys\nfrom {MODULE} import {FUNCTION}\nsys.exit({FUNCTION}())")
# Half a minute of work, so that it is not over before the signal comes.
LONG = ("simulate", "--trace", "resnet50-k80-b32", "--network", "1gbe", "--workers", "4096", "--jitter", "0.1")


def interrupted(delay_s: float, *arguments: str, whole_group: bool = False) -> tuple[int, str]:
    """Start a command, send it SIGINT after a while, and return its status and what it said."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        time.sleep(delay_s)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, said


def check(status: int, said: str) -> None:
    ours = [line for line in said.splitlines() if "/mgwfbp/" in line and "/mgwfbp/__init__.py" not in line]
    if not ours and status != 130:
        # Python was not yet at the first line that can see to it: it dies of the signal, or shows frames of its own.
        assert status == -signal.SIGINT or "Traceback" in said
        return
    assert (status, said) == (130, "")


@pytest.mark.parametrize("start", [("-m", "mgwfbp"), SCRIPT], ids=["module", "script"])
def test_an_interrupt_while_a_command_starts_is_status_130_without_a_word(start: tuple[str, ...]) -> None:
    ends = []
    for delay_s in (0, 0.03, 0.06, 0.1, 0.2, 0.4, 0.6, 1.2, 2.4, 4.8, 9.6):
        if delay_s > 0.6 and (130, "") in ends:  # some came when there was something to see to
            break
        ends.append(interrupted(delay_s, *start, *LONG, "--steps", "100000"))
        check(*ends[-1])
    assert (130, "") in ends


@pytest.mark.parametrize("delay_s", [0.3, 1.0, 1.7, 2.4])
def test_an_interrupt_while_torch_is_imported_is_status_130_without_a_word(delay_s: float) -> None:
    factory = ("--factory", "tests.measure.models:factory", "--steps", "1000000")
    check(*interrupted(delay_s, "-m", "mgwfbp", "measure", "backward", *factory))


@pytest.mark.parametrize("delay_s", [1.0, 2.0, 3.0, 4.0])
def test_an_interrupt_while_workers_start_ends_them_without_a_word(tmp_path: Path, delay_s: float) -> None:
    output = str(tmp_path / "cost.json")
    arguments = ("measure", "allreduce", "--workers", "2", "--budget", "60", "-o", output)
    check(*interrupted(delay_s, "-m", "mgwfbp", *arguments, whole_group=True))
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if output in text_of(path)]
    assert left == []


def test_an_interrupted_demo_leaves_no_run_behind(tmp_path: Path) -> None:
    arguments = ("-m", "mgwfbp", "demo", "--no-lab", "-o", str(tmp_path / "demo"))
    for delay_s in (1.5, 3, 6, 12):  # where the machine is busy, Python itself has not started by then
        status, said = interrupted(delay_s, *arguments)
        if status == 130:
            break
    assert status == 130
    assert "Traceback" not in said
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path / "demo") in text_of(path)]
    assert left == []


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_where_interrupts_are_ignored_they_stay_so(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' INT; : > {ready}; exec \"$@\"", "sh", sys.executable, "-m", "mgwfbp", "traces"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ready.exists():
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err, "Interrupt" in err) == (0, False, False)
    assert "resnet50-k80-b32" in out
