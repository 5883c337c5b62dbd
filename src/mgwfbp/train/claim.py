"""One run at a time in a folder, and a restart that goes on with nobody's run but its own."""

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from mgwfbp.errors import FileError

__all__ = ["FolderClaim", "Job", "make_folder"]

# What a file system says that knows no locks; training does without.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Job:
    """The job of an elastic agent, which starts its workers again when one of them dies."""

    name: str
    is_restarted: bool


def make_folder(folder: Path) -> None:
    """Make a run's folder unless it is there, or raise where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be made: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{folder}: cannot be written")


class FolderClaim:
    """Says whose a run's folder is. The kernel gives it up when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._handle: int | None = None

    def take(self) -> str:
        """Claim the folder or raise where another run has it; return the name of the job that signed last."""
        make_folder(self._path.parent)
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            is_ours, signed = _lock(self._handle), os.pread(self._handle, 1000, 0)
        except OSError as error:
            raise FileError(f"{self._path}: cannot be written: {error.strerror or error}") from error
        if not is_ours:
            raise FileError(
                f"{self._path.parent}: another process is training there; wait for it, or choose another folder"
            )
        return signed.decode(errors="replace")

    def sign(self, name: str) -> None:
        """Let the job's restarts know that the run is theirs."""
        assert self._handle is not None  # noqa: S101  # take comes first
        try:
            os.truncate(self._handle, 0)
            os.pwrite(self._handle, name.encode(), 0)
        except OSError as error:
            raise FileError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def release(self) -> None:
        """Leave the folder to others."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
