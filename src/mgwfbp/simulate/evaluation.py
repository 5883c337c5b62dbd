"""The evaluation of the paper (Section V), with its own numbers beside: what to simulate and what to compare.

`paper_rows` gives its Figs. 6 to 9, `size_distribution` and `predict_allreduce` its Fig. 5, `compare_with_paper` the
gains that its text states. What sets a trace apart from the authors' own is computed: `ready_at_half`, `logged_cost`,
`gains_by_forward`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.fitting import fit
from mgwfbp.network import Network
from mgwfbp.simulate.cluster import Cluster
from mgwfbp.simulate.sweep import Grid, Strategy, SweepRow, sweep
from mgwfbp.trace import LayerTrace, ModelTrace

__all__ = [
    "MEASURED_STARTUP_S",
    "MEASURED_WORKERS",
    "PUBLISHED",
    "SIMULATED_WORKERS",
    "GainRow",
    "PublishedGain",
    "SizeBin",
    "by_layer",
    "compare_with_paper",
    "gains_by_forward",
    "logged_cost",
    "paper_rows",
    "predict_allreduce",
    "ready_at_half",
    "size_distribution",
]

MEASURED_WORKERS = (2, 4, 8)  # Figs. 6 to 8
SIMULATED_WORKERS = (4, 8, 16, 32, 64)  # Fig. 9
MEASURED_STARTUP_S = {2: 90.52e-6, 4: 271.56e-6, 8: 633.64e-6}  # Section V-A, 10GbE, OpenMPI 3.1.1


@dataclass(frozen=True, slots=True)
class PublishedGain:
    """How many times faster than ``against`` the paper says MG-WFBP is."""

    model: str
    workers: int
    against: str  # planner
    gain: float
    how: str  # measured or simulated


# Sections V-B ("on both GoogleNet and ResNet-50") and V-C.
PUBLISHED = (
    *(
        PublishedGain(model, 8, against, gain, "measured")
        for model in ("googlenet", "resnet50")
        for against, gain in (("wfbp", 1.20), ("single", 1.36))
    ),
    PublishedGain("googlenet", 64, "wfbp", 1.78, "simulated"),
    PublishedGain("googlenet", 64, "single", 1.35, "simulated"),
    PublishedGain("resnet50", 64, "wfbp", 1.75, "simulated"),
    PublishedGain("resnet50", 64, "single", 1.45, "simulated"),
)


def by_layer(trace: ModelTrace) -> ModelTrace:
    """Put the tensors of a module together, as the paper counts: its gradients are those of learnable layers.

    A layer is ready when its last tensor is. Tensors belong together when their names agree up to the last dot.

    >>> tensors = (LayerTrace("fc.bias", 1.0, 4), LayerTrace("fc.weight", 2.0, 40), LayerTrace("conv.weight", 3.0, 8))
    >>> [(layer.name, layer.backward_s, layer.grad_bytes) for layer in by_layer(ModelTrace("toy", 0.0, tensors)).layers]
    [('fc', 3.0, 44), ('conv', 3.0, 8)]
    """
    modules = [layer.name.rpartition(".")[0] or layer.name for layer in trace.layers]
    last = {module: index for index, module in enumerate(modules)}
    layers, waiting_s, waiting_bytes = [], 0.0, Counter[str]()
    for index, (module, tensor) in enumerate(zip(modules, trace.layers, strict=True)):
        waiting_s += tensor.backward_s
        waiting_bytes[module] += tensor.grad_bytes
        if last[module] == index:
            layers.append(LayerTrace(module, waiting_s, waiting_bytes[module]))
            waiting_s = 0.0
    return replace(trace, layers=tuple(layers))


def paper_rows(trace: ModelTrace, network: Network, strategies: Sequence[Strategy]) -> list[SweepRow]:
    """Simulate all numbers of nodes of the paper, measured and simulated; a node is one worker."""
    workers = sorted({*MEASURED_WORKERS, *SIMULATED_WORKERS})
    return list(sweep(trace, Grid((Cluster(network),), tuple(workers), tuple(strategies))))


def ready_at_half(trace: ModelTrace) -> float:
    """Return which part of the bytes is ready when half of the backward pass is over.

    >>> layers = (LayerTrace("c", 1.0, 60), LayerTrace("b", 1.0, 20), LayerTrace("a", 2.0, 20))
    >>> ready_at_half(ModelTrace("toy", 5.0, layers))
    0.8
    """
    half_s = trace.forward_s + trace.backward_s / 2
    ready = sum(
        layer.grad_bytes for layer, ready_s in zip(trace.layers, trace.ready_s, strict=True) if ready_s <= half_s
    )
    return ready / trace.grad_bytes if trace.grad_bytes else 1.0


def logged_cost(trace: ModelTrace) -> LinearCost | PiecewiseCost:
    """Fit the all-reduce times that the authors logged beside their trace: ``source["allreduce"]``."""
    logged = trace.source["allreduce"]
    return fit([(size, seconds) for size, seconds in logged["points"]], logged["workers"]).cost


@dataclass(frozen=True, slots=True)
class GainRow:
    """One gain of the paper beside ours."""

    published: PublishedGain
    ours: dict[str, float]  # planner -> how many times faster than the same other it is here


def compare_with_paper(
    model: str, rows: Iterable[SweepRow], planners: Sequence[str] = ("mgwfbp", "optimal")
) -> list[GainRow]:
    """Put the paper's gains of MG-WFBP beside those that these planners have here, where there are rows of both."""
    steps_s = {(row.workers, row.planner): row.iteration_s for row in rows}
    return [
        GainRow(
            published,
            {
                planner: _gain(steps_s[published.workers, published.against], steps_s[published.workers, planner])
                for planner in planners
            },
        )
        for published in PUBLISHED
        if published.model == model and (published.workers, published.against) in steps_s
    ]


def gains_by_forward(trace: ModelTrace, network: Network, strategies: Sequence[Strategy]) -> dict[float, list[GainRow]]:
    """Compare with the paper as if the forward pass took these parts of the backward pass: a quarter, half, all."""
    found = {}
    for part in (0.25, 0.5, 1.0):
        changed = replace(trace, forward_s=part * trace.backward_s)
        found[part] = compare_with_paper(trace.model, paper_rows(changed, network, strategies))
    return found


def _gain(other_s: float, ours_s: float) -> float:
    return other_s / ours_s if ours_s else 1.0  # a model of no computation, a network of no cost: nothing to gain


@dataclass(frozen=True, slots=True)
class SizeBin:
    """How many gradients have from ``low`` up to, but not including, ``high`` elements."""

    low: int
    high: int
    num_gradients: int
    num_bytes: int


def size_distribution(trace: ModelTrace, *, bytes_per_element: int = 4) -> list[SizeBin]:
    """Count gradients by the order of magnitude of their size, Fig. 5(a).

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, (LayerTrace("b", 1.0, 400), LayerTrace("a", 1.0, 4000)))
    >>> [(size.low, size.high, size.num_gradients) for size in size_distribution(trace)]
    [(100, 1000, 1), (1000, 10000, 1)]
    """
    counts: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for layer in trace.layers:
        decade = len(str(max(1, math.ceil(layer.grad_bytes / bytes_per_element)))) - 1
        counts[decade] += 1
        sizes[decade] += layer.grad_bytes
    return [
        SizeBin(10**decade, 10 ** (decade + 1), counts[decade], sizes[decade])
        for decade in range(min(counts), max(counts) + 1)
    ]


def predict_allreduce(
    network: Network, *, workers: Sequence[int] = MEASURED_WORKERS, bytes_per_element: int = 4
) -> list[tuple[int, dict[int, float]]]:
    """Predict all-reduces of 10^2 to 10^7 elements, Fig. 5(b): for each size a time by number of workers."""
    costs = {count: network.cost(count) for count in workers}
    return [
        (10**decade, {count: cost(bytes_per_element * 10**decade) for count, cost in costs.items()})
        for decade in range(2, 8)
    ]
