"""The same command once per local worker: started, waited for and ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mgwfbp.errors import MeasureError
from mgwfbp.lab.kernel import die_with_parent

__all__ = ["free_port", "run_workers", "start_child"]

# How long the others have to say why they end, once a worker has failed.
GRACE_S = 10.0
# How long a worker may take to end when it is told to; one that is stopped never does.
END_S = 5.0
_POLL_S = 0.02


def run_workers(command: Sequence[str], workers: int) -> int:
    """Run a command once per worker, with the environment that torchrun sets; return 0, or the first failure's status.

    A worker that a signal ends is a `MeasureError`. However this function is left, no worker is.
    """
    with _started(command, workers) as processes:
        failed = _first_failure(processes)
        if failed is None:
            return 0
        _wait(processes, GRACE_S)
    status = processes[failed].returncode
    if status < 0:
        known = -status in {number.value for number in signal.Signals}
        name = signal.Signals(-status).name if known else f"signal {-status}"
        raise MeasureError(f"worker {failed} was killed ({name})")
    return status  # the worker has said why


@contextmanager
def _started(command: Sequence[str], workers: int) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start the workers; at the end those that are left are told to end, then made to."""
    # As torchrun does, one thread each.
    shared = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(workers)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(workers):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(start_child(command, env=own, stdin=subprocess.DEVNULL))
        yield processes
    finally:
        try:
            for process in processes:
                process.terminate()
            _wait(processes, END_S)
        finally:  # also after a second Ctrl-C
            for process in processes:
                process.kill()
                process.wait()


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command of ours that the kernel ends with us; Ctrl-C on the terminal is for us alone."""
    ends_with_us = die_with_parent if sys.platform == "linux" else None
    return subprocess.Popen(command, start_new_session=True, preexec_fn=ends_with_us, **options)  # noqa: S603


def _first_failure(processes: Sequence[subprocess.Popen[Any]]) -> int | None:
    """Wait until all have ended well, or one has not; return which."""
    while True:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status:
                return rank
        if None not in statuses:
            return None
        time.sleep(_POLL_S)


def _wait(processes: Sequence[subprocess.Popen[Any]], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def free_port() -> int:
    """Return a port of this machine that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
