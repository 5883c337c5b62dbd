"""What a run writes into its folder; on all ranks but one, nothing."""

import csv
import io
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mgwfbp.errors import FileError, MgwfbpError
from mgwfbp.files import write_text
from mgwfbp.record import Record
from mgwfbp.run import LoggedEpoch, LoggedStep, log_line, read_log
from mgwfbp.train.listener import Listener

__all__ = ["RunWriter", "SilentWriter", "describe_environment"]


class SilentWriter:
    """Writes nothing: for the ranks whose numbers are those of the one that writes."""

    def log_step(self, line: LoggedStep) -> None:
        """Log steps."""

    def log_epoch(self, line: LoggedEpoch) -> None:
        """Log an epoch."""

    def save(self, name: str, record: Record | Mapping[str, Any] | None) -> None:
        """Write a record, or a free-form object."""

    def remove(self, name: str) -> None:
        """Remove a file that no longer tells the truth."""

    def close(self) -> None:
        """Finish."""


class RunWriter(SilentWriter):
    """Writes logs and records; a disk that is full costs lines of the log, not the run."""

    def __init__(self, folder: Path, listener: Listener, *, tensorboard: bool) -> None:
        self._folder = folder
        self._listener = listener
        self._has_complained = False
        self._board: Any = None
        self._tensorboard = tensorboard
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{folder}: cannot be made: {error.strerror or error}") from error

    def open_logs(self, *, step: int, epoch: int) -> None:
        """Begin after so many steps and epochs: lines of what will be done again are dropped."""
        steps = [line for line in _lines(self._folder / "log.jsonl", LoggedStep) if line.step <= step]
        epochs = [line for line in _lines(self._folder / "epochs.jsonl", LoggedEpoch) if line.epoch < epoch]
        write_text(self._folder / "log.jsonl", "".join(map(log_line, steps)))
        write_text(self._folder / "log.csv", _csv_header() + "".join(map(_csv_line, steps)))
        write_text(self._folder / "epochs.jsonl", "".join(map(log_line, epochs)))
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step + 1)

    def log_step(self, line: LoggedStep) -> None:
        """Add a line to log.jsonl, log.csv and TensorBoard."""
        self._append("log.jsonl", log_line(line))
        self._append("log.csv", _csv_line(line))
        self._plot({f"train/{name}": value for name, value in asdict(line).items() if name != "step"}, line.step)

    def log_epoch(self, line: LoggedEpoch) -> None:
        """Add a line to epochs.jsonl and TensorBoard."""
        self._append("epochs.jsonl", log_line(line))
        self._plot({f"epoch/{name}": value for name, value in asdict(line).items() if name != "epoch"}, line.epoch)

    def save(self, name: str, record: Record | Mapping[str, Any] | None) -> None:
        """Write a record or a free-form object to ``name``; None: there is none."""
        if record is None:
            return
        text = record.dumps() if isinstance(record, Record) else json.dumps(record, indent=1, allow_nan=False) + "\n"
        try:
            write_text(self._folder / name, text)
        except MgwfbpError as error:
            self._complain(error)

    def remove(self, name: str) -> None:
        """Remove a file that no longer tells the truth."""
        (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                self._complain(error)

    def _append(self, name: str, text: str) -> None:
        try:
            with (self._folder / name).open("ab", buffering=0) as file:
                begin = file.tell()
                try:
                    if file.write(text.encode()) == len(text.encode()):
                        return
                    problem = "no space left"
                except OSError as error:
                    problem = error.strerror or str(error)
                file.truncate(begin)  # half a line would spoil the next
        except OSError as error:
            problem = error.strerror or str(error)
        self._complain(FileError(f"{self._folder / name}: {problem}"))

    def _plot(self, values: Mapping[str, float | None], step: int) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._listener.say(f"the run's folder cannot be written, and training goes on without: {error}")


def _lines(path: Path, kind: Any) -> tuple[Any, ...]:
    return read_log(path, kind) if path.exists() else ()


def _csv_header() -> str:
    return ",".join(one.name for one in fields(LoggedStep)) + "\n"


def _csv_line(line: LoggedStep) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["" if value is None else value for value in asdict(line).values()])
    return text.getvalue()


def describe_environment(device: torch.device, backend: str, network: str, hosts: list[str]) -> dict[str, Any]:
    """Return what a result depends on besides the configuration."""
    libraries = {}
    for name in ("mgwfbp", "torch", "torchvision", "numpy", "scikit-learn"):
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:  # run from a checkout, or not needed
            continue
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "libraries": libraries,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": cuda,
        "backend": backend,
        "network": network,
        "hosts": hosts,
        "command": sys.argv,
    }
