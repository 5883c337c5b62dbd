"""Sweeps that other programs measured: OSU micro-benchmarks, nccl-tests, plain columns."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from mgwfbp.errors import FormatError
from mgwfbp.files import naming, read_text
from mgwfbp.fitting import Sample
from mgwfbp.units import quote

__all__ = ["SWEEP_READERS", "read_nccl_tests", "read_osu", "read_points"]


def read_osu(path: str | os.PathLike[str]) -> list[Sample]:
    """Read the output of ``osu_allreduce``: bytes, average latency in microseconds."""
    return _read(path, "OSU micro-benchmark", _osu_rows)


def read_nccl_tests(path: str | os.PathLike[str]) -> list[Sample]:
    """Read the output of ``all_reduce_perf``: the in-place time where there is one, since DDP reduces in place."""
    return _read(path, "nccl-tests", _nccl_rows)


def read_points(path: str | os.PathLike[str]) -> list[Sample]:
    """Read lines of ``bytes seconds``, separated by blanks or a comma; ``#`` starts a comment."""
    return _read(path, "plain", _plain_rows)


# How `mgwfbp cost` calls them -> reader
SWEEP_READERS: Mapping[str, Callable[[str | os.PathLike[str]], list[Sample]]] = MappingProxyType(
    {"osu": read_osu, "nccl-tests": read_nccl_tests, "points": read_points}
)

_Row = tuple[int, str, str, float]  # line number, bytes, time, seconds in a unit of that time


def _read(path: str | os.PathLike[str], what: str, rows: Callable[[list[str]], Iterator[_Row]]) -> list[Sample]:
    lines = read_text(path).splitlines()
    with naming(path):
        samples = [(_whole(line, size), _number(line, time) * scale) for line, size, time, scale in rows(lines)]
        if not samples:
            raise FormatError(f"no row of {what} output found; is it the file you meant?")
    return samples


def _number(line: int, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise FormatError(f"line {line}: expected a number of 0 or more, found {quote(word)}")
    return number


def _whole(line: int, word: str) -> int:
    number = _number(line, word)
    if not number.is_integer():
        raise FormatError(f"line {line}: expected a whole number of bytes, found {quote(word)}")
    return int(number)


def _osu_rows(lines: list[str]) -> Iterator[_Row]:
    header = next((index for index, line in enumerate(lines) if line.startswith("#") and "Size" in line), None)
    if header is None:
        raise FormatError("no header '# Size  Avg Latency(us)' found; is it the output of osu_allreduce?")
    for number, line in enumerate(lines[header + 1 :], header + 2):
        words = line.split()
        # What mpirun prints around the table starts with no number.
        if len(words) >= 2 and words[0].isdigit():
            yield number, words[0], words[1], 1e-6


def _nccl_rows(lines: list[str]) -> Iterator[_Row]:
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words[:2] == ["#", "size"]:
            columns = words[1:]
        elif columns and words and words[0].isdigit():
            times = [place for place, name in enumerate(columns) if name == "time"]
            if len(words) != len(columns) or not times:
                raise FormatError(f"line {number}: {len(words)} columns, the header has {len(columns)}")
            yield number, words[0], words[times[-1]], 1e-6
    if not columns:
        raise FormatError("no header '# size count type …' found; is it the output of all_reduce_perf?")


def _plain_rows(lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2:
            raise FormatError(f"line {number}: {len(words)} columns, expected 2: bytes seconds")
        yield number, words[0], words[1], 1.0
