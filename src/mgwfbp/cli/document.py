"""A result with several tables: printed on a terminal, or written as Markdown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from mgwfbp.cli.output import print_line, print_table
from mgwfbp.units import printable

__all__ = ["Grid", "Part", "Section", "print_sections", "to_markdown"]

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: titles, and rows as wide as they are."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Part = str | tuple[str, ...] | Grid


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it, in any order: paragraphs, lists (tuples of lines) and tables."""

    title: str
    parts: tuple[Part, ...]


def print_sections(sections: Sequence[Section]) -> None:
    """Print sections to stdout."""
    for section in sections:
        print_line(section.title)
        print_line("=" * len(section.title))
        for part in section.parts:
            if isinstance(part, Grid):
                print_table(part.titles, part.rows)
            elif isinstance(part, tuple):
                for line in part:
                    typer.echo(textwrap.fill(printable(line), _WIDTH, initial_indent="- ", subsequent_indent="  "))
            else:
                typer.echo(textwrap.fill(printable(part), _WIDTH))
            typer.echo("")


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the sections as a Markdown document."""
    lines = [f"# {title}"]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for part in section.parts:
            lines.append("")
            if isinstance(part, Grid):
                lines += _markdown_table(part)
            else:
                lines += [f"- {line}" for line in part] if isinstance(part, tuple) else [part]
    return "\n".join(lines) + "\n"


def _markdown_table(grid: Grid) -> list[str]:
    rule = ["---", *["--:"] * (len(grid.titles) - 1)]
    return ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in (grid.titles, rule, *grid.rows)]


def _escape(cell: str) -> str:
    return printable(cell).replace("|", "\\|")
