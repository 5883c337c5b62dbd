"""Sweeps that other programs measured: OSU micro-benchmarks, nccl-tests, plain columns.

Logs of the first two may bear what a launcher puts before every line: a rank, a time.
"""

import math
import os
import re
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


# What a launcher may put first: the time, as ctime or ISO 8601 write it.
_TIME = re.compile(
    r"\[?(\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d)?)\]? ?"
)


def _table_lines(lines: list[str], header: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of the rank that prints the table, from its header on.

    A launcher marks lines by rank ([1,0]<stdout>: of mpirun, 0: of srun). The mark is whatever stands before the '#' of
    the header, and only lines with the same mark are of the table: other ranks talk meanwhile.
    """
    mark = None
    for number, line in enumerate(lines, 1):
        text = _TIME.sub("", line, count=1) if _TIME.match(line) else line
        if found := header.search(text):
            before = text[: found.start()].rstrip()
            if mark not in (None, before):
                raise FormatError(
                    f"line {number}: a second rank prints a table, {quote(before)} after {quote(mark)}: "
                    "is each a run of its own? Build the benchmark with MPI, or keep the lines of one rank"
                )
            mark = before
        if mark is not None and text.startswith(mark):
            yield number, text.removeprefix(mark)


def _osu_rows(lines: list[str]) -> Iterator[_Row]:
    table = list(_table_lines(lines, re.compile(r"#\s*Size\b")))
    if not table:
        raise FormatError("no header '# Size  Avg Latency(us)' found; is it the output of osu_allreduce?")
    for number, line in table:
        words = line.split()
        # What mpirun prints around the table starts with no number.
        if len(words) >= 2 and words[0].isdigit():
            yield number, words[0], words[1], 1e-6


def _nccl_rows(lines: list[str]) -> Iterator[_Row]:
    columns: list[str] = []
    times: list[int] = []
    for number, line in _table_lines(lines, re.compile(r"#\s+size\s+count\b")):
        words = line.split()
        if words[:2] == ["#", "size"]:
            # A timestamp is a date and a time, which is two words under one.
            columns = [part for name in words[1:] for part in [name] * (2 if name == "timestamp" else 1)]
            times = [place for place, name in enumerate(columns) if name == "time"]
            if not times:
                raise FormatError(f"line {number}: no column 'time'; run it without -C, which times the host")
        elif words and words[0].isdigit():
            if len(words) != len(columns):
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
