"""The process inside a lab: builds the network, starts the ranks, passes on what they write, and ends them.

Started by `mgwfbp.lab.launch` as ``python -m mgwfbp.lab.supervisor FRAMES_FD LOCK_FD``, with its order on standard
input. The end of standard input means: end the ranks. See [Note: who holds what] in `mgwfbp.lab.kernel`.
"""

import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mgwfbp.errors import LabError
from mgwfbp.lab import mps
from mgwfbp.lab.cluster import Cluster, Rank
from mgwfbp.lab.hosts import build_hosts, change_rate
from mgwfbp.lab.kernel import cover_file, die_with_parent, inside, make_namespaces, mount_own_proc
from mgwfbp.lab.wire import Frame, FrameWriter, Kind, Order
from mgwfbp.units import format_seconds

__all__ = ["GRACE_S", "main"]

GRACE_S = 5.0  # from asking a rank to end to killing it
_CHUNK_BYTES = 1 << 16
_STDIN = 0


def main(arguments: list[str]) -> int:
    """Run the supervisor; the exit status says only whether the supervisor itself did its work."""
    frames_fd, lock_fd = (int(argument) for argument in arguments)
    for descriptor in (frames_fd, lock_fd):
        os.set_inheritable(descriptor, False)
    die_with_parent()
    line = _read_line(_STDIN)
    if not line:
        return 0  # the process outside has gone already
    order = Order.loads(line)
    frames = FrameWriter(frames_fd)
    try:
        make_namespaces()
    except LabError as error:
        frames.send(Frame(Kind.FAILURE, payload=str(error).encode()))
        return 0
    die_with_parent()  # again: gaining rights in a user namespace may have cleared it
    if os.getppid() != order.parent_pid:
        return 0
    first = os.fork()
    if first == 0:
        die_with_parent()
        status = 1
        try:
            _be_first_process(order, frames)
            status = 0
        except BrokenPipeError:
            status = 0  # nobody listens any more
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    # Ending the first process, and only that, lets us wait until the kernel has ended all others.
    signal.signal(signal.SIGTERM, lambda *_: _kill(first))
    os.close(frames_fd)
    return abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return b""
        line += chunk
    return bytes(line)


def _be_first_process(order: Order, frames: FrameWriter) -> None:
    """Build the lab, run the ranks, and end all else in this process namespace."""
    # Signals come from inside the lab only, where nobody may end it; the process outside closes our input instead.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mount_own_proc()
    _name_hosts(order.cluster, Path(order.directory, "hosts"))
    try:
        networks = build_hosts(order.cluster)
        mps_variables = _start_mps(order, frames)
        ranks = _Ranks(order, frames)
        try:
            ranks.start(networks, {**order.environment, **mps_variables})
        except LabError:
            ranks.end()
            ranks.wait()
            raise
        ranks.wait()
    except LabError as error:
        frames.send(Frame(Kind.FAILURE, payload=str(error).encode()))
        _kill_all()
        return
    if order.mps_control and mps_variables:
        mps.stop(order.mps_control, _mps_directory(order), order.environment)
    # Only after this do the pipes end: a rank may have left processes that hold them.
    _kill_all()
    ranks.drain()


def _name_hosts(cluster: Cluster, path: Path) -> None:
    """Let the hosts be found by name, and their names by address, which torch looks up and warns if it finds none."""
    target = Path("/etc/hosts")
    lines = [
        f"{prefix}{cluster.address(host)} {cluster.host_name(host)}\n"
        for host in range(cluster.num_hosts)
        for prefix in ("", "::ffff:")  # as torch's IPv6 sockets know them
    ]
    with suppress(OSError):  # addresses are enough
        path.write_bytes(target.read_bytes() + b"\n" + "".join(lines).encode("ascii"))
        cover_file(path, target)


def _mps_directory(order: Order) -> Path:
    return Path(order.directory, "mps")


def _start_mps(order: Order, frames: FrameWriter) -> dict[str, str]:
    """Start CUDA MPS if asked to, and return what the ranks need to use it."""
    if order.mps_control is None:
        return {}
    directory = _mps_directory(order)
    try:
        mps.start(order.mps_control, directory, order.environment)
    except LabError as error:
        frames.send(Frame(Kind.NOTE, payload=f"no CUDA MPS, so ranks take turns on a GPU: {error}".encode()))
        return {}
    return {**mps.client_environment(order.environment), **mps.mps_environment(directory)}


def _kill_all() -> None:
    """Kill every process of the lab but this one."""
    if os.getpid() != 1:  # outside a process namespace this would be every process of the machine
        raise RuntimeError("the supervisor is not the first process of a process namespace")
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


class _Ranks:
    """The ranks, from the start of the first to the end of the last."""

    def __init__(self, order: Order, frames: FrameWriter) -> None:
        self._order = order
        self._frames = frames
        self._running: dict[int, Rank] = {}  # by process number
        self._kill_at_s: float | None = None  # set once they have been asked to end
        self._end_at_s = None if order.timeout_s is None else time.monotonic() + order.timeout_s
        now_s = time.monotonic()
        self._changes = [(now_s + after_s, rate) for after_s, rate in order.cluster.rate_changes]
        self._networks: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._open_pipes = 0
        self._listen_for_ends()

    def _listen_for_ends(self) -> None:
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        self._selector.register(_STDIN, selectors.EVENT_READ, None)

    def start(self, networks: list[int], environment: dict[str, str]) -> None:
        """Start all ranks, each in its host's network namespace and in a session of its own."""
        cluster, self._networks = self._order.cluster, networks
        _allow_open_files(2 * cluster.num_ranks + cluster.num_hosts + 64)
        for rank in cluster.ranks:
            with inside(networks[rank.host]):
                self._start(rank, cluster.environment(rank, environment))

    def _start(self, rank: Rank, environment: dict[str, str]) -> None:
        command = self._order.command
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        try:
            pid = os.posix_spawn(
                self._order.program,
                command,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, stdout_write, 1),
                    (os.POSIX_SPAWN_DUP2, stderr_write, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
            )
        except OSError as error:
            raise LabError(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(stdout_write)
            os.close(stderr_write)
        self._running[pid] = rank
        for descriptor, kind in ((stdout_read, Kind.STDOUT), (stderr_read, Kind.STDERR)):
            self._selector.register(descriptor, selectors.EVENT_READ, (rank, kind))
            self._open_pipes += 1

    def end(self) -> None:
        """Ask all ranks to end; those that do not are killed after a while."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + GRACE_S
            # Only the ranks themselves: one that saves its work may need its helpers for it.
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self) -> None:
        """Pass on what the ranks write until the last has ended; the first that fails ends the others."""
        self._reap()
        while self._running:
            self._check_time()
            for key, _ in self._selector.select(self._patience_s()):
                self._answer(key)
            self._reap()

    def _check_time(self) -> None:
        now_s = time.monotonic()
        while self._changes and self._changes[0][0] <= now_s:
            change_rate(self._order.cluster, self._networks, self._changes.pop(0)[1])
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + GRACE_S
            self._signal(signal.SIGKILL)
        elif self._kill_at_s is None and self._end_at_s is not None and now_s >= self._end_at_s:
            limit = format_seconds(self._order.timeout_s or 0)
            self._frames.send(Frame(Kind.FAILURE, payload=f"the ranks did not end within {limit}".encode()))
            self.end()

    def _patience_s(self) -> float | None:
        until_s = self._end_at_s if self._kill_at_s is None else self._kill_at_s
        moments_s = [*([] if until_s is None else [until_s]), *(after_s for after_s, _ in self._changes[:1])]
        return max(0.0, min(moments_s) - time.monotonic()) if moments_s else None

    def _answer(self, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, _CHUNK_BYTES)
        if key.data is not None:
            self._pass_on(key, chunk)
        elif key.fd == _STDIN and not chunk:
            self._selector.unregister(_STDIN)
            self.end()

    def _pass_on(self, key: selectors.SelectorKey, chunk: bytes) -> None:
        rank, kind = key.data
        if chunk:
            self._frames.send(Frame(kind, rank.rank, payload=chunk))
            return
        self._selector.unregister(key.fd)
        os.close(key.fd)
        self._open_pipes -= 1

    def _reap(self) -> None:
        for pid, status in _ended_children():
            rank = self._running.pop(pid, None)
            if rank is None:
                continue  # someone's orphan: we are the first process, so it falls to us
            self._frames.send(Frame(Kind.EXIT, rank.rank, status))
            if status != 0:
                self.end()

    def drain(self) -> None:
        """Pass on what is still in the pipes of ranks that have all ended."""
        while self._open_pipes:
            for key, _ in self._selector.select():
                self._answer(key)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield process number and exit status, 128 + signal for a killed one, of all children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            yield ended[0], code if code >= 0 else 128 - code


def _allow_open_files(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    if hard != resource.RLIM_INFINITY and hard < num_files:
        raise LabError(f"so many ranks need {num_files} open files, the limit is {hard} (`ulimit -Hn`)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
