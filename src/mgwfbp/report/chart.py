"""What a picture shows, apart from how it is drawn: `Chart`, `Series`, `Table`.

A page's script and matplotlib draw the same charts; whoever wants the numbers reads the table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["STRATEGY_COLORS", "Chart", "Series", "Table", "color_of", "colors_of"]

Kind = Literal["lines", "columns", "stacked"]
Unit = Literal["", "s", "B", "%"]
Style = Literal["line", "dashed", "points"]

# A strategy keeps its colour in all pictures: places in the palette of eight, which whoever draws has.
NUM_COLORS = 8
STRATEGY_COLORS = {
    "optimal": 0,
    "auto": 0,
    "cautious": 0,
    "mgwfbp": 1,
    "wfbp": 2,
    "single": 3,
    "bucket": 4,
    "ddp": 4,
    "ps": 5,
    "naive": 6,
    "ps-sharded": 7,
}


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers as people read them, the first column their names."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON-ready data."""
        return {"titles": self.titles, "rows": self.rows}


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind: a line, a cloud of points, one part of stacked bars."""

    name: str
    points: tuple[tuple[float, float], ...]  # (x, y); in columns and stacked bars x counts the labels
    color: int = 0  # a place in the palette
    style: Style = "line"
    spread: tuple[tuple[float, float], ...] = ()  # for each point from where to where most measurements lie

    def to_json(self) -> dict[str, Any]:
        """Return the series as JSON-ready data."""
        return {
            "name": self.name,
            "points": self.points,
            "color": self.color,
            "style": self.style,
            "spread": self.spread,
        }


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of numbers and the table that stands under it."""

    title: str
    kind: Kind
    series: tuple[Series, ...]
    table: Table
    x_label: str = ""
    y_label: str = ""
    x_unit: Unit = ""
    y_unit: Unit = ""
    x_log: bool = False
    y_log: bool = False
    labels: tuple[str, ...] = ()  # of columns and stacked bars
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the chart as JSON-ready data."""
        return {
            "title": self.title,
            "kind": self.kind,
            "series": [series.to_json() for series in self.series],
            "table": self.table.to_json(),
            "x": {"label": self.x_label, "unit": self.x_unit, "log": self.x_log},
            "y": {"label": self.y_label, "unit": self.y_unit, "log": self.y_log},
            "labels": self.labels,
            "note": self.note,
        }


def color_of(name: str, place: int = 0) -> int:
    """Return the colour of a strategy; others get one by their place among their like.

    >>> color_of("optimal"), color_of("bucket-5", 9)
    (0, 1)
    """
    return STRATEGY_COLORS.get(name, place % NUM_COLORS)


def colors_of(names: Iterable[str]) -> dict[str, int]:
    """Give each name a colour, none twice while there are unused ones.

    >>> colors_of(["optimal", "mine", "wfbp"])
    {'optimal': 0, 'mine': 1, 'wfbp': 2}
    """
    listed = list(dict.fromkeys(names))
    taken = {STRATEGY_COLORS[name] for name in listed if name in STRATEGY_COLORS}
    free = [place for place in range(NUM_COLORS) if place not in taken] or list(range(NUM_COLORS))
    others = [name for name in listed if name not in STRATEGY_COLORS]
    given = {name: free[place % len(free)] for place, name in enumerate(others)}
    return {name: given.get(name, color_of(name)) for name in listed}
