"""Models and costs that several tests use, and hypothesis strategies for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from hypothesis import strategies as st

from mgwfbp import Cost, LayerTrace, LinearCost, ModelTrace, PiecewiseCost
from mgwfbp.cost import taken_by


def make_trace(ready_s: Sequence[float], sizes: Sequence[int], *, forward_s: float = 0.0) -> ModelTrace:
    """A model whose gradients are ready at these moments, counted from the start of the step."""
    layers = [
        LayerTrace(f"g{index}", end - start, size)
        for index, ((start, end), size) in enumerate(zip(pairwise([forward_s, *ready_s]), sizes, strict=True))
    ]
    return ModelTrace("example", forward_s, tuple(layers))


@dataclass(frozen=True)
class TableCost:
    """Any non-decreasing function of small sizes."""

    times: tuple[float, ...]
    workers: int = 2
    taken_s: float = 0.0
    taken_per_byte_s: float = 0.0

    def __call__(self, num_bytes: int, /) -> float:
        return self.times[min(num_bytes, len(self.times) - 1)]


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a row of so many things into groups."""
    if count == 0:
        yield ()
    for first in range(1, count + 1):
        for rest in partitions(count - first):
            yield (first, *rest)


def end_by_hand(trace: ModelTrace, cost: Cost, sizes: Sequence[int]) -> float:
    """The end of the last message, worked out without the package's recurrence."""
    now, late, taken = 0.0, 0.0, 0
    for size in sizes:
        group = trace.layers[taken : taken + size]
        taken += size
        num_bytes = sum(layer.grad_bytes for layer in group)
        now = max(now, trace.forward_s + sum(layer.backward_s for layer in trace.layers[:taken]) + late)
        now += cost(num_bytes)
        late += taken_by(cost, num_bytes)
    return now


AnyCost = TypeVar("AnyCost", LinearCost, PiecewiseCost, TableCost)

# Whole numbers, so that sums are exact and ties are ties.
small = st.integers(0, 12)


@st.composite
def traces(draw: st.DrawFn, max_layers: int = 10, *, min_layers: int = 1) -> ModelTrace:
    count = draw(st.integers(min_layers, max_layers))
    steps = draw(st.lists(small, min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    layers = [
        LayerTrace(f"g{index}", float(step), size) for index, (step, size) in enumerate(zip(steps, sizes, strict=True))
    ]
    return ModelTrace("random", float(draw(small)), tuple(layers))


linear_costs = st.builds(
    lambda startup, per_byte: LinearCost(2, float(startup), float(per_byte)), small, st.integers(0, 4)
)


@st.composite
def that_take(draw: st.DrawFn, costs: st.SearchStrategy[AnyCost]) -> AnyCost:
    """Costs of messages that also take time from the computation; quarters, so that sums are exact."""
    taken_s, taken_per_byte_s = draw(st.integers(0, 16)) / 4, draw(st.integers(0, 8)) / 4
    return replace(draw(costs), taken_s=taken_s, taken_per_byte_s=taken_per_byte_s)


@st.composite
def table_costs(draw: st.DrawFn) -> TableCost:
    rises = draw(st.lists(st.integers(0, 4), min_size=2, max_size=51))
    times, now = [], 0.0
    for rise in rises:
        now += rise
        times.append(now)
    return TableCost(tuple(times))


@st.composite
def piecewise_costs(draw: st.DrawFn) -> PiecewiseCost:
    sizes = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=6)))
    times = sorted(draw(st.lists(st.floats(0, 50), min_size=len(sizes), max_size=len(sizes))))
    return PiecewiseCost(2, tuple(zip(sizes, times, strict=True)))


@st.composite
def whole_piecewise_costs(draw: st.DrawFn) -> PiecewiseCost:
    """Curves whose slopes are whole numbers, so that ties are ties."""
    steps = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=5))
    size, time = draw(st.integers(0, 4)), float(draw(small))
    points = [(size, time)]
    for width, slope in steps:
        size, time = size + width, time + width * slope
        points.append((size, time))
    return PiecewiseCost(2, tuple(points))
