"""A directory per lab, locked while the lab lives, so that the next one finds and removes what a killed one left."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mgwfbp.errors import LabError

__all__ = ["RunDirectory", "run_directory"]

_LOCK = "lock"


class RunDirectory(NamedTuple):
    """What `run_directory` gives."""

    path: Path
    lock: int  # descriptor; whoever has it open keeps the directory
    removed: tuple[str, ...]  # the labs, by process number, whose directories were removed


@contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Make a directory for one lab, and remove it at the end; first remove those whose labs are dead."""
    base = Path(tempfile.gettempdir(), f"mgwfbp-lab-{os.geteuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        raise LabError(f"{base} belongs to someone else: remove it, or set TMPDIR to a directory of your own")
    # One at a time: else a directory that is not yet locked would look like a dead lab's.
    with _locked(base / _LOCK):
        removed = _remove_dead(base)
        path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
        lock = _open(path / _LOCK)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield RunDirectory(path, lock, removed)
    finally:
        with _locked(base / _LOCK):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_dead(base: Path) -> tuple[str, ...]:
    removed = []
    for path in sorted(base.iterdir()):
        if not path.is_dir():
            continue
        lock = _open(path / _LOCK)
        with suppress(BlockingIOError):  # its lab lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name.split("-")[0])
        os.close(lock)
    return tuple(removed)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
