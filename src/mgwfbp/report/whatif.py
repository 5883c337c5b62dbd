"""What the reader may turn on the page: workers, bandwidth, start-up time; and costs as they might be."""

from dataclasses import dataclass, replace
from typing import Any

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.fitting import SHORTEST_S, fit
from mgwfbp.network import Network
from mgwfbp.planners.fixed import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mgwfbp.report.cases import Case
from mgwfbp.report.inputs import KnownCost
from mgwfbp.trace import ModelTrace

__all__ = ["WhatIf", "faster_bandwidth", "find_what_if", "no_startup", "straight_line"]

# The settings there are; those of the case itself are added.
WORKERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
GIGABITS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
LATENCIES_US = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A model and a network to start from."""

    title: str
    trace: ModelTrace
    network: Network
    workers: int
    note: str

    def to_json(self) -> dict[str, Any]:
        """Return what the page's own planner needs: the trace and the network in full, and the settings there are."""
        network = self.network
        gigabits = 8e-9 / network.per_byte_s if network.per_byte_s else 0.0
        return {
            "title": self.title,
            "note": self.note,
            "model": {
                "forward_s": self.trace.forward_s,
                "backward_s": [layer.backward_s for layer in self.trace.layers],
                "grad_bytes": [layer.grad_bytes for layer in self.trace.layers],
            },
            "network": {
                "algorithm": network.algorithm,
                "latency_s": network.latency_s,
                "per_byte_s": network.per_byte_s,
                "reduce_per_byte_s": network.reduce_per_byte_s,
            },
            "workers": self.workers,
            "choices": {
                "workers": sorted({*WORKERS, self.workers}),
                # Pairs of what is shown and what is computed with, so that the case's own values stay exact.
                "bandwidth": _choices(((rate, 8e-9 / rate) for rate in GIGABITS), gigabits, network.per_byte_s),
                "latency": _choices(
                    ((us, us * 1e-6) for us in LATENCIES_US), network.latency_s * 1e6, network.latency_s
                ),
            },
            "bucket": {"first_bytes": DEFAULT_FIRST_BUCKET_BYTES, "later_bytes": DEFAULT_BUCKET_BYTES},
        }


def _choices(listed: Any, shown: float, exact: float) -> list[tuple[float, float]]:
    others = [(label, value) for label, value in listed if abs(label - shown) > 1e-9 * max(label, shown)]
    return sorted([*others, (shown, exact)] if shown or not exact else others)


def find_what_if(case: Case) -> WhatIf | None:
    """Return what the page needs to plan this case anew, or None where nothing is known of trace or network."""
    if case.trace is None or case.cost is None or min(case.workers, case.cost.workers) < 2:
        return None
    if case.network is not None:
        note = f"The network is {case.network!r}; every point is planned anew."
        return WhatIf(case.title, case.trace, case.network, case.workers, note)
    line = straight_line(case.cost)
    hops = 2 * (line.workers - 1)
    latency_s, per_byte_s = line.startup_s / hops, line.per_byte_s * line.workers / hops
    if not per_byte_s:
        return None
    kind = "measured cost" if isinstance(case.cost, LinearCost) else "straight line nearest to the measured curve"
    note = f"The {kind} is taken for that of a ring, so that it can be carried over to other numbers of workers."
    return WhatIf(case.title, case.trace, Network("what-if", "ring", latency_s, per_byte_s), case.workers, note)


def straight_line(cost: KnownCost) -> LinearCost:
    """Return the cost itself, or the line nearest to a curve."""
    if isinstance(cost, LinearCost):
        return cost
    samples = [(size, time) for size, time in cost.points if time >= SHORTEST_S]
    if len(samples) >= 2:
        found = fit(samples, cost.workers, kind="linear").cost
        if isinstance(found, LinearCost):
            return found
    (first, first_s), (last, last_s) = cost.points[0], cost.points[-1]
    return LinearCost(cost.workers, first_s, (last_s - first_s) / (last - first))


def faster_bandwidth(cost: KnownCost, times: float = 2.0) -> KnownCost:
    """Return the cost with bytes going so many times as fast; start-up times stay.

    >>> faster_bandwidth(LinearCost(2, 1.0, 0.5))(10)
    3.5
    """
    if isinstance(cost, LinearCost):
        return replace(cost, per_byte_s=cost.per_byte_s / times)
    start_s = cost(0)
    return PiecewiseCost(cost.workers, tuple((size, start_s + (time - start_s) / times) for size, time in cost.points))


def no_startup(cost: KnownCost) -> KnownCost:
    """Return the cost without what a message of no bytes takes.

    >>> no_startup(PiecewiseCost(2, ((0, 1.0), (10, 3.0))))(10)
    2.0
    """
    if isinstance(cost, LinearCost):
        return replace(cost, startup_s=0.0)
    start_s = cost(0)
    return PiecewiseCost(cost.workers, tuple((size, time - start_s) for size, time in cost.points))
