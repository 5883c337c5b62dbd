"""Results to stdout or a file, talk to stderr; tables for a terminal, plain text for a pipe.

Names come from files of others: whatever is printed here is shown as `printable` has it, so that no name moves the
cursor, colours the screen or starts a line of its own.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mgwfbp.cost import Cost
from mgwfbp.errors import FileError
from mgwfbp.files import show_path
from mgwfbp.fitting import padding_words
from mgwfbp.record import Record
from mgwfbp.units import printable

__all__ = ["check_not_input", "check_writable", "print_line", "print_table", "talk", "talk_of_padding", "write_record"]


def talk(message: str) -> None:
    """Say a line that is not the result; nobody need be there to hear it."""
    with suppress(OSError):
        typer.echo(printable(message), err=True)


def talk_of_padding(cost: Cost) -> None:
    """Say which sizes of a sweep are planned with the time of larger ones, if any are."""
    if words := padding_words(cost):
        talk(words)


def print_line(text: str) -> None:
    """Print a line of the result."""
    typer.echo(printable(text))


def check_writable(*paths: str | None) -> None:
    """Raise where a result could not be written in the end, before work begins that takes long."""
    for path in paths:
        if path is None:
            continue
        folder, name = Path(os.path.realpath(path)).parent, show_path(path)
        if Path(path).is_dir():
            raise FileError(f"{name}: cannot be written: it is a folder")
        if not folder.is_dir():
            raise FileError(f"{name}: cannot be written: {show_path(folder)} is no folder")
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise FileError(f"{name}: cannot be written: permission denied")


def check_not_input(output: str | None, inputs: Iterable[str]) -> None:
    """Raise where a result would be written over a file that it is made from."""
    if output is None or not Path(output).exists():
        return
    for name in inputs:
        path = Path(name)
        same = [path, *path.glob("*.json")] if path.is_dir() else [path]
        if any(one.exists() and one.samefile(output) for one in same):
            raise FileError(f"{output}: is also an input, and would be lost; give another name to --output")


def write_record(record: Record, path: str | None) -> None:
    """Write a record to a file, whole or not at all, or to stdout."""
    if path is None:
        typer.echo(record.dumps(), nl=False)
        return
    record.save(path)
    talk(f"wrote {path}")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under titles, the first column to the left, the others to the right."""
    titles, *rows = [[printable(cell) for cell in row] for row in (titles, *rows)]
    if sys.stdout is not None and sys.stdout.isatty():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, title in enumerate(titles):
            table.add_column(title, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: a name like [red] is no markup
        console = Console()
        if table.__rich_measure__(console, console.options.update(max_width=10_000)).maximum <= console.width:
            console.print(table)
            return
    # A pipe, or a terminal too narrow for the table: whole words and lines that the terminal may wrap.
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
