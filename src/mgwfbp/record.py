"""What all records share: values checked at birth, and a JSON form.

A record is a frozen dataclass that derives from `Record`. It says its `FORMAT`, turns itself `to_json` and is made
`from_json`; checking values, and reading and writing files of them, is done here, once.

[Note: the range of numbers]
Times, rates and factors are 0 or from 1e-100 to 1e100, counts at most 2**53: far beyond anything that was ever
measured, and near enough to 1 that nothing computed from them overflows. A sum of 2**53 of them, a product with a
count, a square and a ratio of two such all stay below 1e308, so what is predicted, drawn and written is a number,
without a check at every step. What is made of a product of two (a network slowed by a factor, a scaled trace) is a
record again, and checked when it is made.
"""

import json
import math
import numbers
import operator
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from mgwfbp.errors import FormatError, MgwfbpError
from mgwfbp.files import naming, read_json, write_text
from mgwfbp.units import quote

__all__ = [
    "Fields",
    "FrozenDict",
    "Record",
    "check_count",
    "check_free_form",
    "check_items",
    "check_real",
    "check_text",
    "first_repeated",
    "is_real",
]

# [Note: the range of numbers]
LARGEST, SMALLEST = 1e100, 1e-100
LARGEST_COUNT = 2**53  # beyond it floats, and so times that grow with sizes, skip whole numbers
# Free-form fields hold a few levels; Python's own limit is below a thousand.
MAX_DEPTH = 50

T = TypeVar("T")


def check_real(value: object, what: str, error: type[MgwfbpError]) -> float:
    """Return ``value`` as a float, or raise unless it is a number from 0 to 1e100; below 1e-100 it counts as 0.

    See [Note: the range of numbers].
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{what} is {quote(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise error(f"{what} is {quote(value)}, expected a finite number of 0 or more")
    if number > LARGEST:
        raise error(f"{what} is {quote(value)}, expected a number of {LARGEST:g} at most")
    return number if number >= SMALLEST else 0.0


def is_real(value: object) -> bool:
    """Say whether a value of a free-form field is a number that `check_real` lets pass."""
    try:
        check_real(value, "", FormatError)
    except FormatError:
        return False
    return True


def check_count(value: object, what: str, error: type[MgwfbpError], *, minimum: int = 0) -> int:
    """Return ``value`` as an int, or raise unless it is a whole number of ``minimum`` or more."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{what} is {quote(value)}, expected a whole number")
    count = operator.index(value)
    if not minimum <= count <= LARGEST_COUNT:
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


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before, if any."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


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
        frozen = FrozenDict((key, _freeze(item, 1)) for key, item in _text_keys(value))
        json.dumps(frozen, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(f"{what} cannot be written as JSON: {problem}") from None
    return frozen


def _freeze(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return FrozenDict((key, _freeze(item, depth + 1)) for key, item in _text_keys(value))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item, depth + 1) for item in value)
    return _valid_text(value) if isinstance(value, str) else value


def _text_keys(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in mapping.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {quote(key)} is not a string")
        yield _valid_text(key), item


def _valid_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{quote(text)} is not valid Unicode") from None
    return text


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

    def __contains__(self, name: str) -> bool:
        return name in self._data

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
        """Read the record from a file; every error names the file and, where there is one, the field.

        Raises:
            FileError: where the file cannot be read.
            FormatError: where it is not such a record: no JSON, another format, a field that is missing.
            MgwfbpError: the record's own error, where a value cannot be.
        """
        data = read_json(path)
        with naming(path):
            return cls.from_json(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, whole or not at all.

        Raises:
            FileError: where it cannot be written.
        """
        write_text(path, self.dumps())

    def dumps(self) -> str:
        """Return the text of the record's file."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
