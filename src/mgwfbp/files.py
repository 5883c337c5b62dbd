"""Files that others may have made: read with care, up to a limit, and written whole or not at all.

Every error names the file. Pipes and devices are read and written too; a pipe with nobody at its other end is given up.
"""

import errno
import gzip
import io
import json
import os
import select
import stat
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mgwfbp.errors import FileError, FormatError, MgwfbpError
from mgwfbp.units import quote

__all__ = [
    "count_values",
    "naming",
    "parse_json",
    "read_json",
    "read_text",
    "show_path",
    "write_bytes",
    "write_text",
]

# A trace of 100,000 layers is about 10 MB. Anything much larger is another kind of file.
MAX_FILE_BYTES = 64 * 2**20
# Our own files, as they are written, have at least 16 bytes for each value. Python needs up to 100 for it: a file of
# nothing but brackets would fill the memory long before its format is looked at.
MAX_VALUES = MAX_FILE_BYTES // 16
# How long a pipe may have nobody at its other end.
PIPE_WAIT_S = 10.0


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the file's name before the message of any error of ours."""
    try:
        yield
    except MgwfbpError as error:
        raise type(error)(f"{show_path(path)}: {error}") from error


def show_path(path: str | os.PathLike[str]) -> str:
    """Return a path as a message shows it: quoted if a control character or nothing at all is in it."""
    name = os.fspath(path)
    return name if name and name.isprintable() else repr(name)


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read a UTF-8 file of a sane size, unpacked if its name ends in ``.gz``."""
    name = show_path(path)
    try:
        raw = _read_bytes(path, max_bytes + 1)
        if os.fspath(path).endswith(".gz") and len(raw) <= max_bytes:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
                raw = packed.read(max_bytes + 1)
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{name}: not a whole gzip file: {error}") from error
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{name}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL byte in the name
        raise FileError(f"{name}: cannot be read: {error}") from error
    if len(raw) > max_bytes:
        raise FileError(f"{name}: larger than {max_bytes >> 20} MiB, more than is read of such a file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 text (byte {error.start})") from None


def _read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the first ``limit`` bytes: a limit on what is read, not a look at the size first, holds for pipes too."""
    # Without O_NONBLOCK opening a pipe waits for its writer, however long.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return file.read(limit)
        # A pipe that a shell made, `<(command)`, has no name; its writer was there before us, and may have ended.
        may_get_writer = stat.S_ISFIFO(mode) and os.path.exists(os.path.realpath(path))  # noqa: PTH110
        content = _read_stream(descriptor, limit, PIPE_WAIT_S if may_get_writer else 0.0)
    if content is None:
        raise FileError(f"{show_path(path)}: cannot be read: a pipe that nobody writes to ({PIPE_WAIT_S:g} s)")
    return content


def _read_stream(descriptor: int, limit: int, patience_s: float) -> bytes | None:
    """Read a pipe or a device to its end; return None where nobody came to write in ``patience_s``, unless that is 0.

    A read that would block says that there is a writer, one that gives nothing that there is none (any more).
    """
    content, deadline_s = bytearray(), time.monotonic() + patience_s
    seen_writer = not patience_s
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(content) < limit:
        try:
            chunk = os.read(descriptor, min(2**20, limit - len(content)))
        except BlockingIOError:
            seen_writer = True
            poll.poll()
            continue
        content += chunk
        seen_writer = seen_writer or bool(chunk)
        if not chunk and seen_writer:
            break
        if not chunk:
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.02)
    return bytes(content)


def read_json(path: str | os.PathLike[str]) -> object:
    """Parse a JSON file as `parse_json` does."""
    text = read_text(path)
    with naming(path):
        if not text.strip():
            raise FormatError("empty, expected JSON")
        return parse_json(text)


def parse_json(text: str) -> Any:
    """Parse JSON: no NaN, no infinity, no repeated field, and no more values than files of ours have.

    >>> parse_json('[1, {"a": null}]')
    [1, {'a': None}]
    """
    if count_values(text) > MAX_VALUES:
        raise FormatError(f"more than {MAX_VALUES:,} values, which no file of ours has")
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_reject_repeats)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise FormatError(f"not JSON ({line}column {error.colno}): {error.msg}") from None
    except RecursionError:
        raise FormatError("JSON nested too deeply") from None
    except MgwfbpError:
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise FormatError("not JSON that can be read: a number of thousands of digits") from None


def count_values(text: str) -> int:
    """Return about how many values JSON holds, before it is parsed: never fewer, more where texts have commas."""
    return 1 + sum(text.count(mark) for mark in ",[{")


def _reject_constant(name: str) -> None:
    raise FormatError(f"{name} is no number here")


def _reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise FormatError(f"the field {quote(repeated)} stands twice in one object")
    return content


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        found = quote(text[error.start : error.end])
        raise FileError(f"{show_path(path)}: cannot be written: {found} in its text is not valid Unicode") from None
    write_bytes(path, content)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            with open(_open_stream(target), "wb") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(target))  # keep a symbolic link, replace what it points at
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(scratch).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(scratch).unlink()
            raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{show_path(path)}: cannot be written: {reason}") from error


def _open_stream(target: Path) -> int:
    """Open a pipe or a device to write; a pipe whose reader does not come is given up."""
    deadline_s = time.monotonic() + PIPE_WAIT_S
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO or not target.is_fifo():
                raise
            if time.monotonic() > deadline_s:
                raise OSError(errno.ENXIO, f"a pipe that nobody reads ({PIPE_WAIT_S:g} s)") from None
            time.sleep(0.02)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
