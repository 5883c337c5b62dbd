"""Checkpoints: complete, written whole or not at all, and recognised when they are torn.

A checkpoint is two files, ``step-00000040.pt`` and, written after it, ``step-00000040.json`` with its size and SHA-256.
Without the second, or where they do not fit, the first is not a checkpoint, and the one before it is used.
"""

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, ClassVar, Self, cast

import torch

from mgwfbp.errors import FileError, FormatError, MgwfbpError
from mgwfbp.record import Fields, Record, check_count, check_text
from mgwfbp.units import quote

__all__ = ["Checkpoint", "CheckpointFolder"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    FORMAT: ClassVar[str] = "mgwfbp.checkpoint/1"

    step: int  # steps done, on which the learning rate depends
    epoch: int  # where to go on: the epoch and
    batch: int  # the first batch of it that was not trained on yet
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    scaler: Mapping[str, Any]  # of fp16; empty otherwise
    rng: tuple[Mapping[str, Any], ...]  # of every rank
    loss_sum: float  # over the steps of this epoch
    seconds: float  # of training and validation so far
    plan: str | None  # the plan in force as JSON; None where the buckets are torch's own
    is_tuned: bool  # the tuner had settled
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Seal(Record):
    """What is known of a checkpoint's file."""

    FORMAT: ClassVar[str] = Checkpoint.FORMAT

    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_count(self.num_bytes, "num_bytes", FormatError)
        check_text(self.sha256, "sha256", FormatError)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.FORMAT, "num_bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: object) -> Self:
        content = Fields(data)
        content.check_format(cls.FORMAT)
        return cls(content["num_bytes"], content["sha256"])


class _Hashing(io.RawIOBase):
    """A file that is hashed while it is written, so that it need not be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.num_bytes += len(data)
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> _Seal:
        return _Seal(self.num_bytes, self._hash.hexdigest())


class CheckpointFolder:
    """The last ``keep`` checkpoints of a run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Return the steps of which there is a file, whole or not, oldest first."""
        found = (re.fullmatch(r"step-(\d+)\.pt", path.name) for path in self._folder.glob("step-*.pt"))
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self._folder / f"step-{step:08d}.pt"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint; only when it is safe on the disk older ones go.

        Where it cannot be written, a full disk for one, what was there stays and a `FileError` says why.
        """
        path = self.path(checkpoint.step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(".step-*.tmp"):  # of a process that was killed
                left.unlink()
            seal = self._write(path, checkpoint)
            seal.save(path.with_suffix(".json"))
            _sync_folder(self._folder)
        except FileError as error:
            raise FileError(f"the checkpoint of step {checkpoint.step} is not saved: {error}") from error
        except (OSError, RuntimeError) as error:  # torch turns what a write raises into a RuntimeError
            root = _root_cause(error)
            raise FileError(f"the checkpoint of step {checkpoint.step} is not saved: {path}: {root}") from error
        self._forget(checkpoint.step)
        return path

    def _write(self, path: Path, checkpoint: Checkpoint) -> _Seal:
        content = {one.name: getattr(checkpoint, one.name) for one in fields(checkpoint)}
        handle, scratch = tempfile.mkstemp(dir=self._folder, prefix=f".{path.stem}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                hashing = _Hashing(file)
                torch.save({"format": Checkpoint.FORMAT, **content}, cast("IO[bytes]", hashing))
                file.flush()
                os.fsync(file.fileno())
            # A seal that is there already belongs to an older file of this name.
            path.with_suffix(".json").unlink(missing_ok=True)
            Path(scratch).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(scratch).unlink()
            raise
        return hashing.seal()

    def _forget(self, saved_step: int) -> None:
        """Remove what is older than the last ``keep``, and what a run that was resumed further back left ahead."""
        steps = self.steps()
        kept = [step for step in steps if step <= saved_step][-self._keep :]
        for step in set(steps) - set(kept):
            with suppress(OSError):
                self.path(step).with_suffix(".json").unlink(missing_ok=True)
                self.path(step).unlink(missing_ok=True)

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step; a torn or foreign one is an error that says so."""
        path = self.path(step)
        try:
            seal = _Seal.load(path.with_suffix(".json"))
        except FileError:
            raise FormatError(f"{path}: no {path.stem}.json beside it, so it was not finished or is not ours") from None
        if (size := path.stat().st_size) != seal.num_bytes:
            raise FormatError(f"{path}: torn: {size} bytes, {seal.num_bytes} were written")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != seal.sha256:
                raise FormatError(f"{path}: damaged: its checksum is not what was written")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle raises whatever it likes
            raise FormatError(f"{path}: not a checkpoint: {_root_cause(error)}") from error
        if not isinstance(content, dict) or content.get("format") != Checkpoint.FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise FormatError(f"{path}: foreign: expected {Checkpoint.FORMAT!r}, found {quote(found)}")
        missing = [one.name for one in fields(Checkpoint) if one.name not in content]
        if missing:
            raise FormatError(f"{path}: foreign: {missing[0]!r} is missing")
        return Checkpoint(**{one.name: content[one.name] for one in fields(Checkpoint)})

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest whole checkpoint, if any, and a line on each that was refused before it."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.load(step), problems
            except (MgwfbpError, OSError) as error:
                problems.append(str(error))
        return None, problems


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    shown = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0][:200]
    return shown or type(error).__name__


def _sync_folder(folder: Path) -> None:
    """Make renames last: they are written to the folder, not to the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
