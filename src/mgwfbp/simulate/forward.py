"""A forward pass beside which parameters are gathered: `GatheredForward`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mgwfbp.simulate.contention import Times, finished_s

__all__ = ["GatheredForward"]


@dataclass(frozen=True, slots=True)
class GatheredForward:
    r"""What a forward pass waits for: its layers in its own order, when each has been gathered, what is taken of it.

    Gathers start when the step does and depend on nothing that is computed, so that they end at the same moments in
    every step and on every worker. With :math:`x` times the computation of the trace a worker's forward pass ends at

    .. math:: E(x) = \max_k\; a_k + x q_k

    where :math:`a_k` is when layer k has been gathered and :math:`q_k` what it and those after it take; what gathers
    take from the computation is added to the layers that lose it. The last gather ends no later than the pass does:
    the pass uses what it brings. So no gather is under way in the backward pass.
    """

    layers_s: Sequence[float]  # computation
    arrived_s: Sequence[float]
    taken_s: Sequence[float]

    def end_s(self, factors: Times, contention: float) -> Times:
        """Return when the pass ends where its computation takes so many times as long."""
        now_s, last_s = np.zeros_like(factors), max(self.arrived_s)
        for layer_s, arrived_s, taken_s in zip(self.layers_s, self.arrived_s, self.taken_s, strict=True):
            now_s = np.maximum(now_s, arrived_s)
            if contention == 1.0:
                now_s = now_s + taken_s + layer_s * factors
            else:  # gathers follow one another without a break until the last has ended
                now_s = finished_s(taken_s + layer_s * factors, now_s, np.maximum(now_s, last_s), contention)
        return now_s
