"""Workers that start, meet and end together: real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from mgwfbp import MeasureError
from mgwfbp.cli import children, meeting
from mgwfbp.cli.children import free_port, run_workers
from mgwfbp.runtime.messages import gloo
from tests.forking import context
from tests.train.ranks import wait_until

PATIENCE_S, LONG_S = 2.0, 30.0


def be_rank(rank: int, hows: list[str], port: int, folder: Path) -> None:
    """Come to the meeting, or stop on the way; what is said goes to ``rankN.txt``."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(hows)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, sys.stderr.fileno())  # torch's own words, too
    meeting.ANSWER_S = 0.5
    if hows[rank] == "stops before":
        stop()
    if hows[rank] == "stops while it waits":
        threading.Timer(1.0, stop).start()
    try:
        with meeting.meeting(LONG_S if set(hows) == {"comes"} else PATIENCE_S) as store:
            if hows[rank] == "stops when all are there":
                stop()
            gloo.init_process_group(store=store, rank=rank, world_size=len(hows))
        dist.barrier()  # rank 0 keeps the store; it may not leave before the others have connected
    except MeasureError as error:
        os.write(said, f"{error}\n".encode())
        os._exit(1)
    os._exit(0)


def meet(folder: Path, hows: list[str]) -> list[tuple[int | None, str]]:
    """Let ranks meet; return each one's status (None: it is still there) and what it said."""
    port = free_port()
    ranks = [context().Process(target=be_rank, args=(rank, hows, port, folder)) for rank in range(len(hows))]
    for rank in ranks:
        rank.start()
    try:
        for how, rank in zip(hows, ranks, strict=True):
            rank.join(30 if how == "comes" else 0)
        return [(rank.exitcode, (folder / f"rank{place}.txt").read_text()) for place, rank in enumerate(ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_ranks_that_all_come_meet(tmp_path: Path) -> None:
    assert meet(tmp_path, ["comes"] * 3) == [(0, "")] * 3


@pytest.mark.parametrize(
    ("hows", "words"),
    [
        (["comes", "comes", "stops before"], "rank 2 did not come within 2 s"),
        (["stops before", "comes", "comes"], "rank 0 did not come within 2 s"),
        (["comes", "stops when all are there", "comes"], "rank 1 came, but did not connect to the others within 2 s"),
        (["stops while it waits", "comes", "stops before"], "rank 0 does not answer at 127.0.0.1:"),
    ],
)
def test_a_rank_that_is_stopped_is_named_by_the_others_in_one_line(tmp_path: Path, hows: list[str], words: str) -> None:
    for how, (status, said) in zip(hows, meet(tmp_path, hows), strict=True):
        if how == "comes":
            assert (status, said.count("\n")) == (1, 1), said
            assert words in said
        else:
            assert status is None


def worker(*lines: str) -> list[str]:
    """A command that does this, knowing its rank."""
    return [sys.executable, "-c", "\n".join(["import os, signal, sys, time", "rank = os.environ['RANK']", *lines])]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_worker_that_a_signal_ends_is_named_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0.2)
    command = worker("if rank == '1':", f"  os.kill(os.getpid(), signal.{name})", "time.sleep(60)")
    with pytest.raises(MeasureError, match=rf"worker 1 was killed \({name}\)"):
        run_workers(command, 3)


def test_the_status_of_the_first_worker_that_fails_counts() -> None:
    assert run_workers(worker("sys.exit(0)"), 2) == 0
    assert run_workers(worker("time.sleep(0.5 * int(rank))", "sys.exit(7 if rank == '1' else 0)"), 2) == 7


def test_no_worker_outlives_a_failure_be_it_stopped_or_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0.2)
    monkeypatch.setattr(children, "END_S", 0.5)
    command = worker(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        f"open(os.path.join({str(tmp_path)!r}, rank), 'w').write(str(os.getpid()))",
        "if rank == '0':",
        "  os.kill(os.getpid(), signal.SIGSTOP)",
        f"while rank == '2' and len(os.listdir({str(tmp_path)!r})) < 3:",
        "  time.sleep(0.01)",
        "sys.exit(3) if rank == '2' else time.sleep(60)",
    )
    assert run_workers(command, 3) == 3
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_no_worker_outlives_whoever_started_it(tmp_path: Path) -> None:
    lines = (f"open(os.path.join({str(tmp_path)!r}, rank), 'w').write(str(os.getpid()))", "time.sleep(60)")
    code = f"from mgwfbp.cli.children import run_workers; run_workers({worker(*lines)!r}, 2)"
    starter = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2, 30)
    starter.kill()
    starter.wait()
    wait_until(lambda: not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir()), 10)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
