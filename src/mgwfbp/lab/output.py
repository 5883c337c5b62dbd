"""What ranks write, cut into lines, kept in files, and its end remembered."""

import re
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mgwfbp.errors import FileError
from mgwfbp.lab.cluster import Cluster
from mgwfbp.lab.wire import Frame, Kind

__all__ = ["Line", "LineSplitter", "Output", "log_name"]

NUM_LAST_LINES = 20
_MAX_LINE_BYTES = 1 << 16  # longer ones come in pieces


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a rank wrote, or that the lab has to say."""

    rank: int | None  # None: the lab itself
    host: int | None
    label: str  # the rank's host, e.g. "host2"
    text: str
    is_error: bool  # written to standard error


class LineSplitter:
    r"""Cuts a stream of bytes into lines at ``\n``, ``\r\n``, or the ``\r`` of a progress bar.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\ntw"), splitter.feed(b"o\r\nthree"), splitter.rest()
    (['one'], ['two'], ['three'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Take what was written and return the lines that are complete."""
        # A "\r" at the very end may be the first half of "\r\n".
        *lines, self._rest = re.split(rb"\r?\n|\r(?!\Z)", self._rest + chunk)
        while len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return [_text(line) for line in lines]

    def rest(self) -> list[str]:
        """Return the last line if it did not end."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def log_name(rank: int) -> str:
    """Return the name of a rank's file in the log directory."""
    return f"rank{rank}.log"


class Output:
    """Takes the ranks' frames: writes the files, hands on the lines, remembers the last ones and the exit statuses."""

    def __init__(self, cluster: Cluster, log_dir: Path | None, on_line: Callable[[Line], None] | None) -> None:
        self._ranks = cluster.ranks
        self._labels = [cluster.label(rank) for rank in cluster.ranks]
        self._on_line = on_line
        self._splitters = {
            (rank, kind): LineSplitter() for rank in range(cluster.num_ranks) for kind in (Kind.STDOUT, Kind.STDERR)
        }
        self._last_lines: list[deque[str]] = [deque(maxlen=NUM_LAST_LINES) for _ in self._labels]
        self._files = ExitStack()
        self._logs = (
            [] if log_dir is None else [self._open(log_dir / log_name(rank)) for rank in range(len(self._labels))]
        )
        self.statuses: dict[int, int] = {}  # in the order in which ranks ended

    def _open(self, path: Path) -> Callable[[bytes], object]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._files.enter_context(path.open("wb", buffering=0)).write
        except OSError as error:
            self._files.close()
            raise FileError(f"cannot write {path}: {error.strerror}") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def take(self, frame: Frame) -> None:
        """Take one frame from inside the lab."""
        if frame.kind is Kind.EXIT:
            self.statuses[frame.rank] = frame.status
        elif frame.kind is Kind.NOTE:
            self.note(_text(frame.payload))
        elif frame.kind in (Kind.STDOUT, Kind.STDERR):
            if self._logs:
                self._logs[frame.rank](frame.payload)
            self._hand_on(frame.rank, frame.kind, self._splitters[frame.rank, frame.kind].feed(frame.payload))

    def flush(self) -> None:
        """Hand on the lines that never ended."""
        for (rank, kind), splitter in self._splitters.items():
            self._hand_on(rank, kind, splitter.rest())

    def note(self, text: str) -> None:
        """Hand on a line of the lab's own."""
        if self._on_line is not None:
            self._on_line(Line(None, None, "lab", text, is_error=True))

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return what a rank wrote last."""
        return tuple(self._last_lines[rank])

    def _hand_on(self, rank: int, kind: Kind, lines: list[str]) -> None:
        self._last_lines[rank].extend(lines)
        if self._on_line is not None:
            for text in lines:
                self._on_line(
                    Line(rank, self._ranks[rank].host, self._labels[rank], text, is_error=kind is Kind.STDERR)
                )
