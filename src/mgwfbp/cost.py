"""What an all-reduce of M bytes costs: `LinearCost`, `PiecewiseCost`."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

from mgwfbp.errors import CostError, FormatError
from mgwfbp.record import Fields, Record, check_count, check_free_form, check_items, check_real
from mgwfbp.units import format_bytes, format_seconds, plural, quote

__all__ = [
    "Cost",
    "LinearCost",
    "PiecewiseCost",
    "cost_from_json",
    "taken_by",
    "taking_nothing",
]


class Cost(Protocol):
    """Any time of an all-reduce that never falls as the message grows.

    Planning and prediction ask no more than this of a cost. One that also has ``taken_s`` and ``taken_per_byte_s`` says
    by them what a message takes from the computation, `taken_by`.
    """

    @property
    def workers(self) -> int:
        """How many workers take part."""

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes."""


def _check_common(cost: "LinearCost | PiecewiseCost") -> None:
    object.__setattr__(cost, "workers", check_count(cost.workers, "workers", CostError, minimum=1))
    object.__setattr__(cost, "source", check_free_form(cost.source, "source", CostError))
    for name in ("taken_s", "taken_per_byte_s"):
        object.__setattr__(cost, name, check_real(getattr(cost, name), name, CostError))


def _taken_json(cost: "LinearCost | PiecewiseCost") -> dict[str, float]:
    """Return what messages take from the computation, where they take something."""
    taken = {"taken_s": cost.taken_s, "taken_per_byte_s": cost.taken_per_byte_s}
    return taken if any(taken.values()) else {}


def _taken_words(cost: "LinearCost | PiecewiseCost") -> str:
    if not _taken_json(cost):
        return ""
    return f", taking {format_seconds(cost.taken_s)} + {cost.taken_per_byte_s * 1e9:.3g} ns/B from the computation"


@dataclass(frozen=True, slots=True, repr=False)
class LinearCost(Record):
    r"""The paper's cost, Eq. (9).

    .. math:: T_{ar}(M) = a + b M

    where :math:`a` is ``startup_s`` and :math:`b` is ``per_byte_s``. ``taken_s`` and ``taken_per_byte_s`` are what a
    message takes from the computation, `taken_by`; the paper has it take nothing.

    >>> cost = LinearCost(workers=8, startup_s=633.64e-6, per_byte_s=1.4e-9)
    >>> round(cost(1_000_000), 8)
    0.00203364
    >>> cost
    LinearCost(8 workers: 633.6 us + 1.4 ns/B)
    """

    FORMAT: ClassVar[str] = "mgwfbp.cost/1"

    workers: int
    startup_s: float  # a
    per_byte_s: float  # b
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)
    taken_s: float = 0.0  # h: what a message takes from the computation, whatever its size
    taken_per_byte_s: float = 0.0  # g: and for each of its bytes

    def __post_init__(self) -> None:
        _check_common(self)
        for name in ("startup_s", "per_byte_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, CostError))

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes."""
        return self.startup_s + self.per_byte_s * num_bytes

    def __repr__(self) -> str:
        return (
            f"LinearCost({plural(self.workers, 'worker')}: {format_seconds(self.startup_s)} + "
            f"{self.per_byte_s * 1e9:.3g} ns/B{_taken_words(self)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``cost.json``."""
        return {
            "format": self.FORMAT,
            "workers": self.workers,
            "kind": "linear",
            "startup_s": self.startup_s,
            "per_byte_s": self.per_byte_s,
            **_taken_json(self),
            "source": dict(self.source),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a cost from the content of ``cost.json``."""
        fields = _cost_fields(data, "linear")
        return cls(fields["workers"], fields["startup_s"], fields["per_byte_s"], *_common(fields))


@dataclass(frozen=True, slots=True, repr=False)
class PiecewiseCost(Record):
    """Straight lines between measured points: what real networks need.

    Below the first point its time holds, beyond the last the last slope. ``taken_s`` and ``taken_per_byte_s`` are as in
    `LinearCost`.

    >>> cost = PiecewiseCost(workers=4, points=((1000, 1.0), (2000, 1.5), (4000, 4.5)))
    >>> [cost(num_bytes) for num_bytes in (0, 1000, 1500, 3000, 5000)]
    [1.0, 1.0, 1.25, 3.0, 6.0]
    """

    FORMAT: ClassVar[str] = "mgwfbp.cost/1"

    workers: int
    points: tuple[tuple[int, float], ...]  # (bytes, seconds), bytes rising, seconds never falling
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)
    taken_s: float = 0.0
    taken_per_byte_s: float = 0.0
    _sizes: tuple[int, ...] = field(init=False, compare=False)
    _slopes: tuple[float, ...] = field(init=False, compare=False)  # one per point: of the line that starts there

    def __post_init__(self) -> None:
        _check_common(self)
        listed = check_items(self.points, object, "points", CostError)
        points = tuple(_check_point(index, point) for index, point in enumerate(listed))
        if len(points) < 2:
            raise CostError(f"points: {len(points)} given, a curve needs 2 or more (for one number use kind 'linear')")
        slopes = []
        for index, ((size, time), (next_size, next_time)) in enumerate(pairwise(points), 1):
            if next_size <= size:
                raise CostError(f"points[{index}]: {next_size} bytes after {size}, expected sizes that rise")
            if next_time < time:
                raise CostError(f"points[{index}]: {next_time} s after {time} s, expected times that never fall")
            slopes.append((next_time - time) / (next_size - size))
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "_sizes", tuple(size for size, _ in points))
        object.__setattr__(self, "_slopes", (*slopes, slopes[-1]))

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes."""
        index = bisect_right(self._sizes, num_bytes) - 1
        if index < 0:
            return self.points[0][1]
        size, time = self.points[index]
        return time + self._slopes[index] * (num_bytes - size)

    def __repr__(self) -> str:
        (first, first_s), (last, last_s) = self.points[0], self.points[-1]
        return (
            f"PiecewiseCost({plural(self.workers, 'worker')}: {len(self.points)} points from {format_bytes(first)} in "
            f"{format_seconds(first_s)} to {format_bytes(last)} in {format_seconds(last_s)}{_taken_words(self)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``cost.json``."""
        return {
            "format": self.FORMAT,
            "workers": self.workers,
            "kind": "piecewise",
            "points": [list(point) for point in self.points],
            **_taken_json(self),
            "source": dict(self.source),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a cost from the content of ``cost.json``."""
        fields = _cost_fields(data, "piecewise")
        return cls(fields["workers"], tuple(fields.items("points")), *_common(fields))


def _check_point(index: int, point: object) -> tuple[int, float]:
    if not isinstance(point, (list, tuple)) or len(point) != 2:
        raise CostError(f"points[{index}] is {quote(point)}, expected [bytes, seconds]")
    size = check_count(point[0], f"points[{index}][0], bytes,", CostError)
    return size, check_real(point[1], f"points[{index}][1], seconds,", CostError)


def _cost_fields(data: object, kind: str) -> Fields:
    fields = Fields(data)
    fields.check_format(LinearCost.FORMAT)
    if fields["kind"] != kind:
        raise FormatError(f"kind: expected {kind!r}, found {quote(fields['kind'])}")
    return fields


def _common(fields: Fields) -> tuple[Any, Any, Any]:
    """Return what costs of both kinds end with; files from before messages took anything have them take nothing."""
    return fields.get("source", {}), fields.get("taken_s", 0.0), fields.get("taken_per_byte_s", 0.0)


def cost_from_json(data: object) -> LinearCost | PiecewiseCost:
    """Make a cost of either kind from the content of ``cost.json``."""
    fields = Fields(data)
    fields.check_format(LinearCost.FORMAT)
    match fields["kind"]:
        case "linear":
            return LinearCost.from_json(data)
        case "piecewise":
            return PiecewiseCost.from_json(data)
        case kind:
            raise FormatError(f"kind: expected 'linear' or 'piecewise', found {quote(kind)}")


def taken_by(cost: Cost, num_bytes: int) -> float:
    r"""Return how much later all later gradients are ready because of a message of M bytes.

    .. math:: h + g M

    where :math:`h` is ``cost.taken_s``, the host's time to start it, and :math:`g` is ``cost.taken_per_byte_s``: what
    copying and adding its bytes takes from whoever computes. Nothing for a cost that has neither.

    >>> taken_by(LinearCost(2, 1.0, 0.5, taken_s=0.25, taken_per_byte_s=0.5), 10)
    5.25
    """
    return float(getattr(cost, "taken_s", 0.0) + getattr(cost, "taken_per_byte_s", 0.0) * num_bytes)


def taking_nothing(cost: LinearCost | PiecewiseCost) -> LinearCost | PiecewiseCost:
    """Return the cost of messages that take nothing from the computation, h = g = 0.

    >>> taking_nothing(LinearCost(2, 1.0, 0.5, taken_s=0.25))
    LinearCost(2 workers: 1 s + 5e+08 ns/B)
    """
    return replace(cost, taken_s=0.0, taken_per_byte_s=0.0)
