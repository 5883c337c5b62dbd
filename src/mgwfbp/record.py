"""What all records share: values checked at birth, and a JSON form that is read with care and written whole.

A record is a frozen dataclass that derives from `Record`. It says its `FORMAT`, turns itself `to_json` and is made
`from_json`; reading, checking and writing files is done here, once.
"""

import gzip
import json
import math
import numbers
import operator
import os
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from mgwfbp.errors import FileError, FormatError, MgwfbpError
from mgwfbp.units import quote

__all__ = [
    "Fields",
    "Record",
    "check_count",
    "check_free_form",
    "check_items",
    "check_real",
    "check_text",
    "first_repeated",
    "naming",
    "read_json",
    "read_text",
    "write_bytes",
    "write_text",
]

# A trace of 100,000 layers is about 10 MB. Anything much larger is another kind of file.
MAX_FILE_BYTES = 64 * 2**20

T = TypeVar("T")


def check_real(value: object, what: str, error: type[MgwfbpError]) -> float:
    """Return ``value`` as a float, or raise unless it is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{what} is {quote(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise error(f"{what} is {quote(value)}, expected a finite number of 0 or more")
    return number


def check_count(value: object, what: str, error: type[MgwfbpError], *, minimum: int = 0) -> int:
    """Return ``value`` as an int, or raise unless it is a whole number of ``minimum`` or more."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{what} is {quote(value)}, expected a whole number")
    count = operator.index(value)
    # 2**53: beyond it floats, and so times that grow with sizes, skip whole numbers.
    if not minimum <= count <= 2**53:
        raise error(f"{what} is {quote(count)}, expected a whole number from {minimum} to 2**53")
    return count


def check_text(value: object, what: str, error: type[MgwfbpError]) -> str:
    """Return ``value``, or raise unless it is a non-empty string that UTF-8 can hold."""
    if not isinstance(value, str) or not value:
        raise error(f"{what} is {quote(value)}, expected a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(f"{what} is {quote(value)}, which is not valid Unicode") from None
    return value


def check_items(value: object, kind: type[T], what: str, error: type[MgwfbpError]) -> tuple[T, ...]:
    """Return ``value`` as a tuple, or raise unless it is a sequence of one kind of thing."""
    if not isinstance(value, (list, tuple)):
        raise error(f"{what} is {quote(value)}, expected a list")
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            raise error(f"{what}[{index}] is {quote(item)}, expected a {kind.__name__}")
    return tuple(value)


class FrozenDict(dict[str, Any]):
    """A dict that is not changed after it was made, so that a frozen record is frozen all through."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a record's content cannot be changed; make a new record with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


def check_free_form(value: object, what: str, error: type[MgwfbpError]) -> FrozenDict:
    """Return a deep, frozen copy of a free-form JSON object, or raise unless JSON can hold it."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {quote(value)}, expected an object")
    try:
        json.dumps(value, allow_nan=False, default=dict)
        return FrozenDict((key, _freeze(item)) for key, item in _text_keys(value))
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(f"{what} cannot be written as JSON: {problem}") from None


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict((key, _freeze(item)) for key, item in _text_keys(value))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value


def _text_keys(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in mapping.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {quote(key)} is not a string")
        yield key, item


class Fields:
    """A JSON object that knows where it stands, so that a missing field is named in full."""

    def __init__(self, data: object, where: str = "") -> None:
        if not isinstance(data, dict):
            raise FormatError(f"{where or 'the file'}: expected an object, found {quote(data)}")
        self._data = data
        self.where = where

    def __getitem__(self, name: str) -> Any:
        if name not in self._data:
            raise FormatError(f"{self.path(name)}: missing")
        return self._data[name]

    def get(self, name: str, default: Any) -> Any:
        """Return the field, or ``default`` where it is absent."""
        return self._data.get(name, default)

    def path(self, name: str) -> str:
        """Name a field as a reader of the file would find it, e.g. ``layers[3].name``."""
        return f"{self.where}.{name}" if self.where else name

    def items(self, name: str) -> Sequence[Any]:
        """Return a field that must be a list."""
        value = self[name]
        if not isinstance(value, list):
            raise FormatError(f"{self.path(name)}: expected a list, found {quote(value)}")
        return value

    def objects(self, name: str) -> Iterator["Fields"]:
        """Walk over a field that must be a list of objects."""
        for index, item in enumerate(self.items(name)):
            yield Fields(item, f"{self.path(name)}[{index}]")

    def child(self, name: str) -> "Fields":
        """Return a field that must be an object."""
        return Fields(self[name], self.path(name))

    def check_format(self, expected: str) -> None:
        """Raise unless the file says that it is of the ``expected`` format."""
        found = self["format"]
        if found != expected:
            raise FormatError(f"format: expected {expected!r}, found {quote(found)}")


class Record:
    """Base of all records: a JSON form, and files of it."""

    __slots__ = ()

    FORMAT: ClassVar[str]

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready data, ``format`` first."""

    @classmethod
    @abstractmethod
    def from_json(cls, data: object) -> Self:
        """Make the record from parsed JSON; the opposite of `to_json`."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read the record from a file; every error names the file and, where there is one, the field."""
        data = read_json(path)
        with naming(path):
            return cls.from_json(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, whole or not at all."""
        write_text(path, self.dumps())

    def dumps(self) -> str:
        """Return the text of the record's file."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


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
        # A limit on what is read, not a look at the size first: it also holds for pipes.
        with gzip.open(path) if os.fspath(path).endswith(".gz") else Path(path).open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{name}: not a whole gzip file: {error}") from error
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


def _reject_constant(name: str) -> None:
    raise FormatError(f"{name} is no number here")


def _reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = first_repeated(name for name, _ in pairs)
    if repeated is not None:
        raise FormatError(f"the field {quote(repeated)} stands twice in one object")
    return dict(pairs)


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before, if any."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_json(path: str | os.PathLike[str]) -> object:
    """Parse a JSON file: no NaN, no infinity, no repeated field."""
    name = show_path(path)
    text = read_text(path)
    if not text.strip():
        raise FormatError(f"{name}: empty, expected JSON")
    try:
        with naming(path):
            return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_reject_repeats)
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}: not JSON (line {error.lineno}, column {error.colno}): {error.msg}") from None
    except RecursionError:
        raise FormatError(f"{name}: JSON nested too deeply") from None
    except MgwfbpError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise FormatError(f"{name}: not JSON: {error}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            with target.open("wb") as stream:
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
