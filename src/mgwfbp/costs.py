"""What several kinds of messages cost: `WireCost` of both precisions, `ShardedCost` of an all-reduce and its halves."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost, cost_from_json, taken_by
from mgwfbp.errors import CostError, FormatError
from mgwfbp.files import naming, read_json
from mgwfbp.record import Fields, Record, check_text
from mgwfbp.units import plural, quote

__all__ = [
    "CheaperCost",
    "LowCost",
    "ShardedCost",
    "WireCost",
    "cheaper_cost",
    "cheapest_s",
    "cost_with_halves",
    "cost_with_low",
    "full_precision_cost",
    "halved",
    "halved_words",
    "load_cost",
    "low_precision_cost",
    "part_by_part",
    "sharded_cost",
    "sharded_of",
]


def _check_parts(cost: object, first: str, *others: str) -> None:
    """Raise unless all parts of a cost are costs of as many workers."""
    for name in (first, *others):
        part, workers = getattr(cost, name), getattr(getattr(cost, first), "workers", None)
        if not isinstance(part, LinearCost | PiecewiseCost):
            raise CostError(f"{name} is {quote(part)}, expected a linear or a piecewise cost")
        if part.workers != workers:
            raise CostError(f"{name} is of {plural(part.workers, 'worker')}, {first} of {workers}")


@dataclass(frozen=True, slots=True)
class WireCost(Record):
    """What a message costs as its gradients are, and what it costs in a lower precision.

    It is the former's cost; ``low`` is that of a message of so many bytes of *gradients* in the latter, conversions
    included, and has what such a message takes from the computation. Its file is a ``cost.json`` of the former that
    holds the latter besides, and says in ``wire`` which precision that is. Where ``low`` there says nothing of what is
    taken, messages of both take alike, `LowCost`.

    >>> cost = WireCost(LinearCost(2, 1.0, 0.5), LinearCost(2, 1.5, 0.25))
    >>> cost(10), cost.low(10)
    (6.0, 4.0)
    """

    FORMAT: ClassVar[str] = "mgwfbp.cost/1"

    full: LinearCost | PiecewiseCost
    low: LinearCost | PiecewiseCost
    wire: str = ""  # the precision of the latter; without it there is no file

    def __post_init__(self) -> None:
        _check_parts(self, "full", "low")

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes as they are."""
        return self.full(num_bytes)

    @property
    def workers(self) -> int:
        """How many workers take part."""
        return self.full.workers

    @property
    def source(self) -> Mapping[str, Any]:
        """Where the cost of messages as they are is from."""
        return self.full.source

    @property
    def taken_s(self) -> float:
        """What a message as it is takes from the computation, whatever its size."""
        return self.full.taken_s

    @property
    def taken_per_byte_s(self) -> float:
        """And for each of its bytes."""
        return self.full.taken_per_byte_s

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``cost.json``."""
        if not self.wire:
            raise CostError("a cost of both precisions is written with the name of the lower: give wire=")
        low = self.low.to_json()
        if _takes_something(self.full):  # then it is known of both; a sweep says nothing of it
            low |= {name: getattr(self.low, name) for name in ("taken_s", "taken_per_byte_s")}
        return {**self.full.to_json(), "wire": self.wire, "low": low}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a cost from the content of ``cost.json``."""
        full, fields = cost_from_json(data), Fields(data)
        low = LowCost(_part(fields, "low"), knows_taken="taken_s" in fields.child("low"))
        return cls(full, low.beside(full), check_text(fields["wire"], "wire", FormatError))


@dataclass(frozen=True, slots=True)
class LowCost:
    """What messages in low precision cost, by themselves, and whether it is known what they take from the computation.

    A sweep on an idle machine does not see that. Its file says nothing of it, and nothing is not zero: messages that
    were observed in training may take nothing.
    """

    cost: LinearCost | PiecewiseCost
    knows_taken: bool

    def beside(self, full: Cost) -> LinearCost | PiecewiseCost:
        """Return the cost, where nothing is known taking what messages as they are take.

        >>> full, low = LinearCost(2, 1.0, 0.5, taken_s=3.0), LinearCost(2, 1.0, 0.25)
        >>> [LowCost(low, knows_taken).beside(full).taken_s for knows_taken in (False, True)]
        [3.0, 0.0]
        """
        if self.knows_taken:
            return self.cost
        return replace(self.cost, taken_s=taken_by(full, 0), taken_per_byte_s=_taken_per_byte_s(full))


def halved(cost: Cost) -> Cost:
    """Return what messages of half the bytes cost, by the bytes that they stand for; converting costs nothing.

    >>> halved(LinearCost(2, 1.0, 0.5))(10)
    3.5
    >>> halved(PiecewiseCost(2, ((0, 1.0), (10, 2.0))))(20)
    2.0
    """
    if isinstance(cost, LinearCost):
        return replace(cost, per_byte_s=cost.per_byte_s / 2)
    if isinstance(cost, PiecewiseCost):
        return replace(cost, points=tuple((2 * size, time_s) for size, time_s in cost.points))
    return _Part(cost, of_bytes=2)


def halved_words(wire: str) -> str:
    """Say what is assumed of messages in low precision whose cost was not measured, `halved`."""
    return (
        f"no cost of messages in {wire} is given: they are taken to cost what half the bytes cost, and converting "
        "nothing; `mgwfbp measure allreduce --wire` measures it"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Any other cost, of a part of the bytes, or a part of its time."""

    cost: Cost
    of_bytes: int = 1  # one in so many
    of_time: float = 1.0

    @property
    def workers(self) -> int:
        return self.cost.workers

    @property
    def taken_s(self) -> float:
        return taken_by(self.cost, 0)

    @property
    def taken_per_byte_s(self) -> float:
        return self.of_time * _taken_per_byte_s(self.cost)

    def __call__(self, num_bytes: int, /) -> float:
        return self.of_time * self.cost(num_bytes // self.of_bytes)


@dataclass(frozen=True, slots=True)
class ShardedCost(Record):
    """What an all-reduce costs, and what its two halves cost where each is a message: reduce-scatter and all-gather.

    It is the all-reduce's cost, and so is its file: a ``cost.json`` of the all-reduce that holds those of its halves
    besides. Whoever needs no halves reads it with `load_cost`.

    >>> cost = ShardedCost(LinearCost(2, 2.0, 0.5), LinearCost(2, 1.5, 0.25), LinearCost(2, 1.0, 0.25))
    >>> cost(10), cost.reduce_scatter(10), cost.all_gather(10)
    (7.0, 4.0, 3.5)
    """

    FORMAT: ClassVar[str] = "mgwfbp.cost/1"

    all_reduce: LinearCost | PiecewiseCost
    reduce_scatter: LinearCost | PiecewiseCost  # by the bytes of the gradients that all ranks hold before it
    all_gather: LinearCost | PiecewiseCost  # by the bytes of the parameters that all ranks hold after it

    def __post_init__(self) -> None:
        _check_parts(self, "all_reduce", "reduce_scatter", "all_gather")

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes."""
        return self.all_reduce(num_bytes)

    @property
    def workers(self) -> int:
        """How many workers take part."""
        return self.all_reduce.workers

    @property
    def source(self) -> Mapping[str, Any]:
        """Where the cost of all-reduces is from."""
        return self.all_reduce.source

    @property
    def taken_s(self) -> float:
        """What an all-reduce takes from the computation, whatever its size."""
        return self.all_reduce.taken_s

    @property
    def taken_per_byte_s(self) -> float:
        """And for each of its bytes."""
        return self.all_reduce.taken_per_byte_s

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``cost.json``."""
        return {
            **self.all_reduce.to_json(),
            "reduce_scatter": self.reduce_scatter.to_json(),
            "all_gather": self.all_gather.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a cost from the content of ``cost.json``."""
        all_reduce, fields = cost_from_json(data), Fields(data)
        return cls(all_reduce, _part(fields, "reduce_scatter"), _part(fields, "all_gather"))


def _part(fields: Fields, name: str) -> LinearCost | PiecewiseCost:
    fields.child(name)  # an object, or an error
    try:
        return cost_from_json(fields[name])
    except (FormatError, CostError) as error:
        raise type(error)(f"{name}: {error}") from None


def sharded_of(reduce_scatter: PiecewiseCost, all_gather: PiecewiseCost) -> ShardedCost:
    """Return the cost of the two halves, and of an all-reduce that takes as long as both together.

    >>> half = PiecewiseCost(2, ((1, 1.0), (9, 2.0)), taken_s=0.5)
    >>> sharded_of(half, half)(9), sharded_of(half, half).taken_s
    (4.0, 0.5)
    """
    sizes = sorted({size for cost in (reduce_scatter, all_gather) for size, _ in cost.points})
    points = tuple((size, reduce_scatter(size) + all_gather(size)) for size in sizes)
    taken_per_byte_s = reduce_scatter.taken_per_byte_s + all_gather.taken_per_byte_s
    both = replace(reduce_scatter, points=points, taken_per_byte_s=taken_per_byte_s)
    return ShardedCost(both, reduce_scatter, all_gather)


def sharded_cost(cost: Cost) -> tuple[Cost, Cost]:
    """Return what a reduce-scatter and what an all-gather cost: as was measured, or else half an all-reduce each.

    A ring all-reduce is a ring reduce-scatter and a ring all-gather, of as many rounds and bytes, so that for a ring
    half is exact (but for the additions). Other algorithms may have a cheaper all-reduce than the two together.

    Of what an all-reduce takes from the computation, h + g M, each half takes all of h, since it is started like any
    message, and half of g, since the two copy together what one all-reduce copies.

    >>> sharded_cost(LinearCost(2, 2.0, 0.5, taken_s=1.0, taken_per_byte_s=0.5))[0]
    LinearCost(2 workers: 1 s + 2.5e+08 ns/B, taking 1 s + 2.5e+08 ns/B from the computation)
    """
    if isinstance(cost, ShardedCost):
        return cost.reduce_scatter, cost.all_gather
    cost = full_precision_cost(cost)
    half: Cost
    if isinstance(cost, LinearCost):
        startup_s, per_byte_s, taken_s = (0.5 * x for x in (cost.startup_s, cost.per_byte_s, cost.taken_per_byte_s))
        half = replace(cost, startup_s=startup_s, per_byte_s=per_byte_s, taken_per_byte_s=taken_s)
    elif isinstance(cost, PiecewiseCost):
        points = tuple((size, 0.5 * time_s) for size, time_s in cost.points)
        half = replace(cost, points=points, taken_per_byte_s=0.5 * cost.taken_per_byte_s)
    else:
        half = _Part(cost, of_time=0.5)
    return half, half


def low_precision_cost(cost: Cost) -> Cost:
    """Return what messages in low precision cost: as was measured, or else half the bytes."""
    return cost.low if isinstance(cost, WireCost) else halved(full_precision_cost(cost))


def full_precision_cost(cost: Cost) -> Cost:
    """Return what all-reduced messages cost as their gradients are."""
    if isinstance(cost, ShardedCost):
        return cost.all_reduce
    return cost.full if isinstance(cost, WireCost) else cost


def part_by_part(cost: Cost, change: Callable[[LinearCost | PiecewiseCost], LinearCost | PiecewiseCost]) -> Cost:
    """Return a cost with every line and curve that it is made of changed; any other function as it is."""
    if isinstance(cost, WireCost):
        return replace(cost, full=change(cost.full), low=change(cost.low))
    if isinstance(cost, ShardedCost):
        return ShardedCost(change(cost.all_reduce), change(cost.reduce_scatter), change(cost.all_gather))
    return change(cost) if isinstance(cost, LinearCost | PiecewiseCost) else cost


@dataclass(frozen=True, slots=True)
class CheaperCost:
    """What a message costs in whichever precision is cheaper for its size; it takes the less of what both take."""

    full: Cost
    low: Cost

    def __call__(self, num_bytes: int, /) -> float:
        """Return the seconds an all-reduce of ``num_bytes`` takes at least."""
        return min(self.full(num_bytes), self.low(num_bytes))

    @property
    def workers(self) -> int:
        """How many workers take part."""
        return self.full.workers

    @property
    def taken_s(self) -> float:
        """What a message takes from the computation, whatever its size."""
        return min(taken_by(self.full, 0), taken_by(self.low, 0))

    @property
    def taken_per_byte_s(self) -> float:
        """And for each of its bytes."""
        return min(_taken_per_byte_s(self.full), _taken_per_byte_s(self.low))


def cheaper_cost(cost: Cost) -> Cost:
    """Return what messages cost that travel in the cheaper precision for their size.

    What they take from the computation is the less of both, so that a plan's step is never below what this says of it.

    >>> cheaper_cost(WireCost(LinearCost(2, 1.0, 0.5), LinearCost(2, 2.0, 0.25)))(2)
    2.0
    """
    full, low = full_precision_cost(cost), low_precision_cost(cost)
    either = CheaperCost(full, low)
    if isinstance(full, LinearCost) and isinstance(low, LinearCost):
        taken_s, taken_per_byte_s = either.taken_s, either.taken_per_byte_s
        if low.startup_s <= full.startup_s and low.per_byte_s <= full.per_byte_s:
            return replace(low, taken_s=taken_s, taken_per_byte_s=taken_per_byte_s)
        if full.startup_s <= low.startup_s and full.per_byte_s <= low.per_byte_s:
            return replace(full, taken_s=taken_s, taken_per_byte_s=taken_per_byte_s)
    return either


def _takes_something(cost: LinearCost | PiecewiseCost) -> bool:
    return bool(cost.taken_s or cost.taken_per_byte_s)


def _taken_per_byte_s(cost: Cost) -> float:
    return float(getattr(cost, "taken_per_byte_s", 0.0))


def cost_with_halves(data: object) -> LinearCost | PiecewiseCost | ShardedCost:
    """Make a cost from the content of ``cost.json``, with those of its halves where it has one."""
    fields = Fields(data)
    if "reduce_scatter" in fields or "all_gather" in fields:
        return ShardedCost.from_json(data)
    return cost_from_json(data)


def cost_with_low(data: object, wire: str | None) -> LinearCost | PiecewiseCost | WireCost:
    """Make a cost from the content of ``cost.json``, with that of this low precision where it has it."""
    fields = Fields(data)
    if wire is not None and "low" in fields and fields.get("wire", None) == wire:
        return WireCost.from_json(data)
    return cost_from_json(data)


def load_cost(path: str | os.PathLike[str]) -> LinearCost | PiecewiseCost | WireCost:
    """Read a cost from ``cost.json``: a line or a curve, or where it knows what low precision costs both, a `WireCost`.

    Of either it is what an all-reduce takes, ``cost(num_bytes)``; `predict` takes the other part for messages in low
    precision, whichever that is: ``wire`` names the one that was measured. Where the file holds halves, too,
    `ShardedCost.load` reads them.

    Args:
        path: the file.

    Raises:
        FileError: where the file cannot be read.
        FormatError: where it holds no cost.
    """
    data = read_json(path)
    with naming(path):
        return cost_with_low(data, Fields(data).get("wire", None))


def cheapest_s(cost: Cost, num_bytes: int) -> float:
    r"""Return a time below which ``num_bytes`` cannot be sent, however they are split into messages.

    A message of m of the M bytes takes at least its share at the best rate there is,

    .. math:: T(m) \ge m \min_{0 < x \le M} T(x) / x

    and these shares add up to M times that rate. On a straight line T(x)/x is monotone, so the minimum is at a
    point of the curve or at M itself. For ``a + b M`` this is T(M): one message is the cheapest way.

    >>> cheapest_s(PiecewiseCost(2, ((0, 1.0), (10, 2.0), (20, 22.0))), 20)
    4.0
    """
    cost = full_precision_cost(cost)
    if num_bytes == 0 or isinstance(cost, LinearCost):
        return cost(num_bytes)
    if isinstance(cost, _Part) and cost.of_bytes == 1:
        return cost.of_time * cheapest_s(cost.cost, num_bytes)
    if isinstance(cost, CheaperCost):
        return min(cheapest_s(cost.full, num_bytes), cheapest_s(cost.low, num_bytes))
    if isinstance(cost, PiecewiseCost):
        sizes = [size for size, _ in cost.points if 0 < size < num_bytes]
        return min(cost(size) * num_bytes / size for size in [*sizes, num_bytes])
    return cost(0)  # of any other function only this is known: it does not fall
