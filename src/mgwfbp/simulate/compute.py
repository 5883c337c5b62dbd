"""When the slowest of N workers has each gradient ready, step by step."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mgwfbp.errors import SimulationError
from mgwfbp.record import check_count, check_real
from mgwfbp.simulate.forward import GatheredForward
from mgwfbp.simulate.scenario import Scenario
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural, quote

__all__ = ["Computation", "draw_computation"]

_MAX_NUMBERS = 2**27  # 1 GiB
_BLOCK_NUMBERS = 2**18  # few enough to stay in a processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """The computation of N workers, as far as messages care: when the slowest of them has each gradient ready.

    Every worker starts a step when the last message of the one before has ended, which is the same moment for all, and
    every message starts at the slowest. So no more than this of the workers matters. Times count computation only,
    from the start of the step. Without jitter all steps are alike and have one column together.
    """

    trace: ModelTrace
    workers: int
    scenario: Scenario
    ready_s: NDArray[np.float64]  # rows: end of the forward pass, then each gradient ready; a column is a step


def draw_computation(
    trace: ModelTrace, workers: int, scenario: Scenario, forward: GatheredForward | None = None
) -> Computation:
    """Draw the steps of ``workers`` workers, whose forward pass waits for nothing or for gathers.

    The same seed gives the same numbers, whatever the plan and the link: strategies are compared on the same luck.
    """
    count = check_count(workers, "workers", SimulationError, minimum=1)
    spans_s = np.array([trace.forward_s, *(layer.backward_s for layer in trace.layers)])
    if scenario.jitter:
        ready_s = _jittered(spans_s, count, scenario, forward)
    else:
        slowest = np.full((1, 1, 1), scenario.slowest(count))
        ready_s = _slowest_ends(spans_s, slowest, scenario.contention, forward).T
    check_real(float(ready_s[-1].max()), f"the computation of a step of {quote(trace.model)}", SimulationError)
    return Computation(trace, count, scenario, ready_s)


def _jittered(
    spans_s: NDArray[np.float64], num_workers: int, scenario: Scenario, forward: GatheredForward | None
) -> NDArray[np.float64]:
    """Draw the steps in blocks of mirrored pairs; the order of the draws does not depend on the size of a block."""
    num_spans = len(spans_s)
    shared, own = math.sqrt(scenario.jitter_shared), math.sqrt(1 - scenario.jitter_shared)
    num_rows = bool(shared) + num_spans * bool(own)
    if max(num_rows * num_workers, num_spans * scenario.steps) > _MAX_NUMBERS:
        raise SimulationError(
            f"{plural(scenario.steps, 'step')} of {plural(num_workers, 'worker')} with "
            f"{plural(num_spans - 1, 'gradient')} do not fit into 1 GiB; simulate fewer steps, or share the jitter "
            "(jitter_shared = 1)"
        )
    slowdowns = np.ones(num_workers)
    slowdowns[: len(scenario.stragglers)] = scenario.stragglers
    generator = np.random.default_rng(scenario.seed)
    ready_s = np.empty((num_spans, scenario.steps))
    pairs_at_once = max(1, _BLOCK_NUMBERS // (num_rows * num_workers))
    for first in range(0, scenario.steps // 2, pairs_at_once):
        num_pairs = min(pairs_at_once, scenario.steps // 2 - first)
        normals = generator.standard_normal((num_pairs, num_rows, num_workers))
        if shared and own:
            normals[:, 1:] *= own
            normals[:, 1:] += shared * normals[:, :1]
            normals = normals[:, 1:]
        normals *= scenario.jitter
        factors = np.exp(normals, out=normals)
        for mirror in (0, 1):
            if mirror:
                np.reciprocal(factors, out=factors)  # exp(-x)
            columns = slice(2 * first + mirror, 2 * (first + num_pairs), 2)
            ready_s[:, columns] = _slowest_ends(spans_s, factors * slowdowns, scenario.contention, forward).T
    return ready_s


def _slowest_ends(
    spans_s: NDArray[np.float64], factors: NDArray[np.float64], contention: float, forward: GatheredForward | None
) -> NDArray[np.float64]:
    """Return the end of each span on the slowest worker, (pair, span), from factors (pair, span or 1, worker)."""
    if factors.shape[1] == 1:
        # One factor for all spans of a worker: the worker with the largest is the slowest all along.
        factors = factors.max(axis=2, keepdims=True)
    times_s = factors * spans_s[:, np.newaxis]
    if forward is not None:
        times_s[:, 0] = forward.end_s(factors[:, 0], contention)
    np.cumsum(times_s, axis=1, out=times_s)
    slowest: NDArray[np.float64] = times_s.max(axis=2)
    return slowest
