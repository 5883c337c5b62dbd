"""However a lab ends, nothing of it is left."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab_tools import Machine, skip_without_a_lab, wait_for_lines, wait_until

skip_without_a_lab()

LAB_ARGUMENTS = ("--hosts", "2", "--rate", "1gbit", "--")
# Each rank leaves a process that is in no group or session of ours and does not end when asked.
LEAVE_ONE = "(trap '' TERM; setsid sleep 300) & "
STAY = ("sh", "-c", LEAVE_ONE + "echo ready; sleep 300")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def kill_rank(machine: Machine, _lab: "subprocess.Popen[str]") -> None:
    # The eldest of those with its number: what a rank starts inherits it.
    os.kill(min(pid for pid, names in machine.processes().items() if names.get("RANK") == "1"), signal.SIGKILL)


def kill_outer_supervisor(machine: Machine, lab: "subprocess.Popen[str]") -> None:
    os.kill(children(lab.pid)[0], signal.SIGKILL)


def kill_first_process(machine: Machine, lab: "subprocess.Popen[str]") -> None:
    os.kill(children(children(lab.pid)[0])[0], signal.SIGKILL)


def send(number: signal.Signals) -> "Callable[[Machine, subprocess.Popen[str]], None]":
    return lambda _machine, lab: lab.send_signal(number)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("way_out", "status"),
    [
        (send(signal.SIGINT), 130),
        (send(signal.SIGTERM), 143),
        (send(signal.SIGHUP), 129),
        (send(signal.SIGKILL), -9),
        (kill_rank, 137),
        (kill_outer_supervisor, 1),
        (kill_first_process, 1),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "rank", "outer supervisor", "first process"],
)
def test_nothing_is_left_after(
    machine: Machine, way_out: "Callable[[Machine, subprocess.Popen[str]], None]", status: int
) -> None:
    with machine.lab(*LAB_ARGUMENTS, *STAY) as lab:
        wait_for_lines(lab, "ready", 2)
        wait_until(lambda: len(machine.networks()) == 3)  # two hosts and the switch
        way_out(machine, lab)
        stderr = lab.communicate(timeout=30)[1]
    assert lab.returncode == status
    assert "Traceback" not in stderr
    machine.check_nothing_is_left(directories=1 if status == -9 else 0)


@pytest.mark.parametrize("status", [0, 3])
def test_nothing_is_left_after_ranks_that_end_by_themselves(machine: Machine, status: int) -> None:
    assert machine.run(*LAB_ARGUMENTS, "sh", "-c", f"{LEAVE_ONE} exit {status}").returncode == status
    machine.check_nothing_is_left()


def test_ranks_have_a_moment_to_end_well_and_what_they_write_in_it_is_kept(machine: Machine, tmp_path: Path) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with machine.lab("--log-dir", str(tmp_path / "logs"), *LAB_ARGUMENTS, "sh", "-c", script) as lab:
        wait_for_lines(lab, "ready", 2)
        lab.send_signal(signal.SIGINT)
        lab.communicate(timeout=30)
    assert lab.returncode == 130
    assert [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)] == ["ready\nsaved\n"] * 2


def test_ranks_that_do_not_end_when_asked_are_killed_and_at_once_on_the_second_ctrl_c(machine: Machine) -> None:
    script = "trap '' INT HUP; trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done"
    with (
        machine.lab(*LAB_ARGUMENTS, "sh", "-c", script) as patient,
        machine.lab(*LAB_ARGUMENTS, "sh", "-c", script) as hasty,
    ):
        for lab in (patient, hasty):
            wait_for_lines(lab, "ready", 2)
        for lab in (hasty, patient):
            lab.send_signal(signal.SIGINT)
        wait_for_lines(hasty, "asked", 2)
        hasty.send_signal(signal.SIGINT)
        hasty.communicate(timeout=30)
        assert patient.poll() is None  # still waiting for its ranks
        patient.communicate(timeout=30)
    assert (patient.returncode, hasty.returncode) == (130, 130)
    machine.check_nothing_is_left()


def test_the_start_after_a_killed_lab_removes_what_it_left_and_says_so_but_leaves_living_labs_alone(
    machine: Machine,
) -> None:
    with machine.lab(*LAB_ARGUMENTS, *STAY) as living, machine.lab(*LAB_ARGUMENTS, *STAY) as killed:
        for lab in (living, killed):
            wait_for_lines(lab, "ready", 2)
        killed.kill()
        assert killed.communicate(timeout=30)[1] == ""
        wait_until(lambda: len(machine.networks()) == 3)
        done = machine.run(*LAB_ARGUMENTS, "true")
        assert done.stderr == f"lab | removed what lab {killed.pid} left behind when it was killed\n"
        assert machine.run(*LAB_ARGUMENTS, "true").stderr == ""
        assert living.poll() is None
        living.terminate()
        assert living.communicate(timeout=30)[1] == ""
    machine.check_nothing_is_left()


def test_twenty_starts_and_kills_at_random_moments_leave_nothing(machine: Machine) -> None:
    choose = random.Random(4)
    num_killed = 0
    for _ in range(10):
        with machine.lab(*LAB_ARGUMENTS, *STAY) as one, machine.lab(*LAB_ARGUMENTS, *STAY) as other:
            for lab in (one, other):
                time.sleep(choose.uniform(0, 0.8))
                number = choose.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
                lab.send_signal(number)
            for lab in (one, other):
                lab.communicate(timeout=30)
                num_killed += lab.returncode == -9
    assert num_killed > 0
    wait_until(lambda: not machine.processes())
    machine.run(*LAB_ARGUMENTS, "true")
    machine.check_nothing_is_left()


# NVIDIA's control program as far as we use it; a real one needs a GPU.
CONTROL = """#!/bin/sh
directory=${CUDA_MPS_PIPE_DIRECTORY:-$DEFAULT_MPS}
if [ "$1" = -d ]; then
    [ -z "$MPS_BROKEN" ] || exit 1
    echo started >> $MPS_LOG; touch $directory/control
    setsid sh -c 'while [ -e $0/control ]; do sleep 0.02; done; echo ended >> $MPS_LOG' $directory < /dev/null &
    exit 0
fi
read request
echo $request >> $MPS_LOG
[ -e $directory/control ] || exit 1
[ $request != quit ] || { rm $directory/control; while ! grep -q ended $MPS_LOG; do sleep 0.02; done; }
"""


@pytest.fixture
def mps(machine: Machine, tmp_path: Path) -> Path:
    """Install the control program, and return where it writes what it did."""
    for name in ("bin", "default"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    log = tmp_path / "mps.log"
    log.touch()
    machine.environment |= {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "MPS_LOG": str(log),
        "DEFAULT_MPS": str(tmp_path / "default"),
    }
    machine.environment.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    return log


SHOW_MPS = ("sh", "-c", "test -e $CUDA_MPS_PIPE_DIRECTORY/control && echo with || echo without")


def test_cuda_mps_is_started_for_the_ranks_and_stopped_after_them(machine: Machine, mps: Path) -> None:
    done = machine.run(*LAB_ARGUMENTS, *SHOW_MPS)
    assert sorted(done.stdout.splitlines()) == ["host0 | with", "host1 | with"]
    assert mps.read_text().split() == ["get_server_list", "started", "quit", "ended"]
    machine.check_nothing_is_left()


def test_cuda_mps_that_runs_already_is_used_and_left_alone(machine: Machine, mps: Path, tmp_path: Path) -> None:
    (tmp_path / "default" / "control").touch()
    assert machine.run(*LAB_ARGUMENTS, "true").returncode == 0
    assert mps.read_text().split() == ["get_server_list"]
    assert (tmp_path / "default" / "control").exists()


def test_cuda_mps_is_not_started_when_not_wanted(machine: Machine, mps: Path) -> None:
    assert "without" in machine.run("--no-mps", *LAB_ARGUMENTS, *SHOW_MPS).stdout
    assert mps.read_text() == ""


def test_cuda_mps_that_does_not_start_is_said_and_the_lab_goes_on(machine: Machine, mps: Path) -> None:
    done = machine.run(*LAB_ARGUMENTS, *SHOW_MPS, environment={"MPS_BROKEN": "1"})
    assert done.returncode == 0
    assert done.stderr.startswith("lab | no CUDA MPS, so ranks take turns on a GPU: ")


def test_cuda_mps_of_ours_dies_with_a_killed_lab(machine: Machine, mps: Path) -> None:
    with machine.lab(*LAB_ARGUMENTS, *STAY) as lab:
        wait_for_lines(lab, "ready", 2)
        lab.kill()
        lab.communicate(timeout=30)
    machine.check_nothing_is_left(directories=1)


# Becomes another user, who can still run this interpreter wherever it is; then, for the second test, one who may not
# make user namespaces (in a user namespace of its own, where that limit touches nobody else).
ORDINARY_USER = """
import ctypes, os, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
call("unshare", 0x00020000)
call("mount", None, b"/", None, ctypes.c_ulong(16384 | 1 << 18), None)
for path in {sys.executable, os.path.realpath(sys.executable), *sys.path[1:]}:
    for folder in reversed(Path(path).parents):
        if not folder.stat().st_mode & 1:
            inside = {entry.name: os.open(entry, os.O_PATH) for entry in folder.iterdir() if entry.is_dir()}
            call("mount", b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), b"mode=755")
            for name, descriptor in inside.items():
                (folder / name).mkdir()
                source = f"/proc/self/fd/{descriptor}".encode()
                call("mount", source, os.fsencode(folder / name), None, ctypes.c_ulong(4096), None)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
if sys.argv[1] == "limited":
    call("prctl", 4, 1, 0, 0, 0)  # changing user had closed our own /proc/self to us
    call("unshare", 0x10000000)
    Path("/proc/self/uid_map").write_text("65534 65534 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def open_machine() -> Iterator[Machine]:
    """A machine whose directory everybody reaches: whenever pytest starts, it closes the one of all its tests."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Machine(Path(folder))


def run_as_ordinary_user(machine: Machine, limit: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    if os.geteuid() != 0:
        pytest.skip("needs root, to become someone else")
    code = "from mgwfbp.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY_USER, limit, sys.executable, "-c", code, "lab", *LAB_ARGUMENTS, *arguments],
        env=machine.environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    machine.check_nothing_is_left()
    return done


def test_an_ordinary_user_can_run_a_lab_and_gains_nothing_by_it(open_machine: Machine) -> None:
    if Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        pytest.skip("this kernel does not allow unprivileged user namespaces")
    done = run_as_ordinary_user(open_machine, "free", "sh", "-c", "id -u; grep CapEff /proc/self/status")
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["0" * 16] * 2 + ["65534"] * 2


def test_an_ordinary_user_who_may_not_is_told_what_is_missing(open_machine: Machine) -> None:
    done = run_as_ordinary_user(open_machine, "limited", "true")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "user.max_user_namespaces is 0" in done.stderr
    assert "run as root" in done.stderr
