"""Start a lab, listen to it, and leave nothing of it behind."""

import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mgwfbp.errors import LabError
from mgwfbp.lab import mps
from mgwfbp.lab.cluster import Cluster
from mgwfbp.lab.leftovers import RunDirectory, run_directory
from mgwfbp.lab.output import Line, Output
from mgwfbp.lab.wire import Frame, Kind, Order, read_frames
from mgwfbp.units import quote

__all__ = ["LabResult", "run_lab"]

_END_S = 8.0  # a little more than the supervisor's own patience with ranks that do not end
_QUEUE_FRAMES = 64  # then ranks wait until whoever reads their output has caught up


@dataclass(frozen=True, slots=True)
class LabResult:
    """How the ranks ended."""

    statuses: tuple[int, ...]  # by rank: exit status, or 128 + the signal that killed it
    failed_rank: int | None  # the first that failed; it ended the others
    failed_label: str  # its host, e.g. "host2"; empty if none failed
    last_lines: tuple[str, ...]  # what it wrote last

    @property
    def status(self) -> int:
        """The first failing rank's exit status; 0 if none failed."""
        return 0 if self.failed_rank is None else self.statuses[self.failed_rank]

    def check(self) -> "LabResult":
        """Return this result, or raise a `LabError` if a rank failed."""
        if self.failed_rank is None:
            return self
        last = f": {self.last_lines[-1].strip()}" if self.last_lines else ""
        raise LabError(f"rank {self.failed_rank} on {self.failed_label} ended with exit status {self.status}{last}")


def run_lab(
    cluster: Cluster,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    on_line: Callable[[Line], None] | None = None,
    timeout_s: float | None = None,
    use_mps: bool = True,
) -> LabResult:
    """Run `command` once per rank of an emulated cluster, and return when the last rank has ended.

    The first rank that fails ends the others. Whatever way this function is left, by an exception or by the end of this
    process too, no process, network or CUDA MPS daemon of the lab is left.

    Args:
        cluster: the hosts and their links.
        command: program and arguments; it finds its rank in the environment, as under ``torchrun``.
        environment: what ranks inherit; this process's environment if not given.
        log_dir: where to keep all that each rank writes, in one file per rank.
        on_line: called, in this thread, with each line that a rank writes.
        timeout_s: end the ranks, and raise a `LabError`, if they run longer.
        use_mps: start CUDA MPS where it is installed and not running yet, so that ranks share a GPU.

    Returns:
        How the ranks ended; a rank that fails is no error here, `LabResult.check` makes it one.

    Raises:
        LabError: where the lab cannot be made on this machine, or runs longer than ``timeout_s``.
        FileError: where ``log_dir`` cannot be written.
    """
    inherited = dict(os.environ if environment is None else environment)
    program = _find_program(command, inherited)
    _check_needs()
    with Output(cluster, None if log_dir is None else Path(log_dir), on_line) as output, run_directory() as directory:
        for pid in directory.removed:
            output.note(f"removed what lab {pid} left behind when it was killed")
        control = mps.find_control() if use_mps else None
        if control is not None and mps.is_running(control, inherited):
            control = None  # the ranks find it as we did
        order = Order(
            cluster=cluster,
            program=program,
            command=tuple(command),
            environment=inherited,
            parent_pid=os.getpid(),
            directory=str(directory.path),
            mps_control=control,
            timeout_s=timeout_s,
        )
        failures = _listen(order, directory, output)
    if failures:
        raise LabError(failures[0])
    missing = [rank for rank in range(cluster.num_ranks) if rank not in output.statuses]
    if missing:
        raise LabError(f"the lab's supervisor was killed before rank {missing[0]} ended")
    failed = next((rank for rank, status in output.statuses.items() if status != 0), None)
    return LabResult(
        statuses=tuple(output.statuses[rank] for rank in range(cluster.num_ranks)),
        failed_rank=failed,
        failed_label="" if failed is None else cluster.label(cluster.ranks[failed]),
        last_lines=() if failed is None else output.last_lines(failed),
    )


def _find_program(command: Sequence[str], environment: Mapping[str, str]) -> str:
    if not command:
        raise LabError("no command to run")
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise LabError(f"{quote(command[0])} is not a program that can be run")
    return program


def _check_needs() -> None:
    """Raise what can be known to go wrong before anything is made."""
    if sys.platform != "linux":
        raise LabError(f"a lab needs Linux, this is {sys.platform}")
    if importlib.util.find_spec("pyroute2") is None:
        raise LabError("a lab needs pyroute2: pip install 'mgwfbp[lab]'")


def _listen(order: Order, directory: RunDirectory, output: Output) -> list[str]:
    """Run a supervisor and take its frames to the end; return what it could not do."""
    failures: list[str] = []

    def take(frame: Frame) -> None:
        if frame.kind is Kind.FAILURE:
            failures.append(frame.payload.decode())
        output.take(frame)

    with _supervisor(order, directory) as (process, frames):
        try:
            while (frame := frames.get()) is not None:
                take(frame)
        except BaseException:
            # The ranks get a moment to end, and what they write in it is kept. A second Ctrl-C ends this too.
            _close_input(process)
            with suppress(queue.Empty, BrokenPipeError):
                while (frame := frames.get(timeout=_END_S)) is not None:
                    take(frame)
            raise
    output.flush()
    return failures


@contextmanager
def _supervisor(
    order: Order, directory: RunDirectory
) -> Iterator[tuple[subprocess.Popen[bytes], "queue.Queue[Frame | None]"]]:
    """Start a supervisor and a thread that reads its frames; at the end see that both are gone."""
    frames: queue.Queue[Frame | None] = queue.Queue(_QUEUE_FRAMES)
    frames_read, frames_write = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module
            # -P: a file in the current directory that is called like a module is not that module.
            [sys.executable, "-P", "-m", "mgwfbp.lab.supervisor", str(frames_write), str(directory.lock)],
            stdin=subprocess.PIPE,
            pass_fds=(frames_write, directory.lock),
            env={**os.environ, **_supervisor_variables()},
            start_new_session=True,  # Ctrl-C on the terminal is for us; we tell the supervisor
        )
    except BaseException:
        os.close(frames_read)
        raise
    finally:
        os.close(frames_write)

    reader = _Reader(frames_read, frames)
    reader.start()
    try:
        _send(process, order.dumps())
        yield process, frames
    finally:
        _close_input(process)
        _end(process, at_once=not reader.has_ended.is_set())
        while reader.is_alive():
            with suppress(queue.Empty):
                frames.get(timeout=0.05)


def _supervisor_variables() -> dict[str, str]:
    """Return what the supervisor needs in its environment; ranks do not inherit it."""
    return {
        # All that can be imported here can be imported there.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # numpy's libraries start threads on import, and only a process with one thread may make a user namespace.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class _Reader(threading.Thread):
    """Puts frames in a queue, and None after the last.

    A thread, because an exception such as KeyboardInterrupt in the middle of a frame would lose the rest.
    """

    def __init__(self, descriptor: int, frames: "queue.Queue[Frame | None]") -> None:
        super().__init__(name="mgwfbp lab reader", daemon=True)
        self._descriptor = descriptor
        self._frames = frames
        self.has_ended = threading.Event()

    def run(self) -> None:
        """Read to the end of the pipe."""
        for frame in read_frames(self._descriptor):
            self._frames.put(frame)
        self.has_ended.set()
        self._frames.put(None)


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it died; that no frame came will say so
            process.stdin.write(line)
            process.stdin.flush()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _end(process: subprocess.Popen[bytes], *, at_once: bool) -> None:
    """Wait until the supervisor has ended, and with it all of the lab."""
    if at_once:
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
