"""What the tests of the lab share: labs as real processes, and lists of what they could leave behind."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mgwfbp.errors import LabError
from mgwfbp.lab import Cluster, run_lab

MARK = "MGWFBP_TEST_MARK"
LAB = [sys.executable, "-c", "from mgwfbp.__main__ import main; main()", "lab"]


def skip_without_a_lab() -> None:
    """Skip the tests of a module where the kernel does not let us make a lab at all."""
    pytest.importorskip("pyroute2")
    try:
        run_lab(Cluster(num_hosts=1, rate_bits_per_s=1e9), ["true"], timeout_s=30)
    except LabError as error:
        if "does not let us" not in str(error):
            raise
        pytest.skip(str(error), allow_module_level=True)


class Machine:
    """All of a machine that labs of one test, known by a mark in their environment, could change."""

    def __init__(self, temporary: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = temporary
        self.environment = {**os.environ, MARK: self.mark, "TMPDIR": str(temporary)}
        self._links = list_links()
        self._named = list_named_networks()

    @contextmanager
    def lab(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Start a lab, and see that it ends."""
        with subprocess.Popen(
            [*LAB, *arguments],
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a lab to its end."""
        with self.lab(*arguments, environment=environment) as process:
            stdout, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr, stderr
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environments, by process number, of all processes of our labs, the lab's own among them."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                environment = read_environment(entry)
                if environment.get(MARK) == self.mark:
                    found[int(entry.name)] = environment
        return found

    def networks(self) -> dict[str, Path]:
        """Return the network namespaces, other than our own, of our labs' processes, and where to find each."""
        found = {}
        for path in [Path(f"/proc/{pid}/ns/net") for pid in self.processes()]:
            with suppress(OSError):  # it has just ended
                found[str(path.readlink())] = path
        found.pop(str(Path("/proc/self/ns/net").readlink()), None)
        return found

    def check_nothing_is_left(self, *, directories: int = 0) -> None:
        """Compare with what was there before: no process (and so no namespace without a name), link, or directory."""
        wait_until(lambda: not self.processes())
        assert list_links() == self._links
        assert list_named_networks() == self._named
        assert len([path for path in self.temporary.glob("mgwfbp-lab-*/*") if path.is_dir()]) == directories


def list_links() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def list_named_networks() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def read_environment(process: Path) -> dict[str, str]:
    try:
        entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}  # it has just ended, or is another user's
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def wait_until(is_true: Callable[[], bool], patience_s: float = 20.0) -> None:
    end_s = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)


def wait_for_lines(process: subprocess.Popen[str], text: str, num_lines: int) -> None:
    """Read a lab's output until so many lines hold the text."""
    assert process.stdout is not None
    seen: list[str] = []
    while sum(text in line for line in seen) < num_lines:
        line = process.stdout.readline()
        assert line, f"the lab ended; it wrote {seen}, {process.stderr and process.stderr.read()}"
        seen.append(line)
