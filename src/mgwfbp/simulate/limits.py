"""What a step is made of: computation, bandwidth, start-ups, messages' own time, or bytes that overlap with nothing."""

from itertools import accumulate
from typing import Literal

import numpy as np

from mgwfbp.cost import Cost
from mgwfbp.costs import sharded_cost
from mgwfbp.plan import MergePlan
from mgwfbp.simulate.compute import Computation, draw_computation
from mgwfbp.simulate.forward import GatheredForward

__all__ = ["NEAR", "Limit", "bandwidth_bound_s", "find_limit"]

# "messages' own time" is what starting and copying messages takes from the computation.
Limit = Literal["computation", "bandwidth", "start-up", "messages' own time", "not overlapped"]

NEAR = 0.05  # closer than this is "as good as"; real steps differ by as much from one to the next


def bandwidth_bound_s(computation: Computation, cost: Cost, plan: MergePlan | None = None) -> float:
    r"""Return the mean step that start-up times of zero and one message per gradient would give.

    .. math:: \max_j\; r_j + T\Big(\sum_{i \ge j} m_i\Big) - T(0)

    with the ready times of the slowest worker. Merging can bring a step down to this and no further (for a straight
    line; on a curve that is steeper for large messages it may). Where a plan gathers parameters, these are gathered one
    by one, too, and what is sharded and what all-reduced stays as the plan has it.

    Args:
        computation: the steps.
        cost: what an all-reduce takes, and its halves as `sharded_cost` has them.
        plan: says which parameters are gathered; None: none are.
    """
    trace, (reduce_scatter, all_gather) = computation.trace, sharded_cost(cost)
    gathered = {name for group in plan.gathers for name in group} if plan is not None else set()
    # Bytes of a gradient and of those after it: all-reduced, and reduce-scattered.
    kept, sharded = (
        [*accumulate(layer.grad_bytes * ((layer.name in gathered) == is_sharded) for layer in reversed(trace.layers))]
        for is_sharded in (False, True)
    )
    ready_s = computation.ready_s
    if gathered:
        arrived_s = [all_gather(num_bytes) - all_gather(0) for num_bytes in sharded]
        forward = GatheredForward(trace.layer_forward_s[::-1], arrived_s, [0.0] * len(arrived_s))
        ready_s = draw_computation(trace, computation.workers, computation.scenario, forward).ready_s
    bytes_s = np.array([cost(num_bytes) - cost(0) for num_bytes in reversed(kept)])
    bytes_s += [reduce_scatter(num_bytes) - reduce_scatter(0) for num_bytes in reversed(sharded)]
    return float((ready_s[1:] + bytes_s[:, np.newaxis]).max(axis=0).mean())


def find_limit(
    iteration_s: float, compute_s: float, bound_s: float, *, without_startup_s: float, taken_s: float = 0.0
) -> Limit:
    """Say what the step is made of: the first of computation and bandwidth that explains all but 5 % of it.

    Else messages' own time, if it is more than the communication that sticks out. Else, of what the step exceeds the
    bandwidth's bound by, the larger part: start-up times, which are what the same plan would save without them, or
    bytes that wait for gradients to travel with and then overlap with nothing.

    Args:
        iteration_s: the step.
        compute_s: the computation alone, without what messages take from it.
        bound_s: the step that bandwidth allows, `bandwidth_bound_s`.
        without_startup_s: the same plan's step if start-up times were nothing.
        taken_s: what messages take from the computation.

    >>> find_limit(1.01, 1.0, 1.0, without_startup_s=1.0), find_limit(2.05, 1.0, 2.0, without_startup_s=2.0)
    ('computation', 'bandwidth')
    >>> find_limit(3.0, 1.0, 2.0, without_startup_s=2.1), find_limit(3.0, 1.0, 2.0, without_startup_s=2.9)
    ('start-up', 'not overlapped')
    >>> find_limit(3.0, 1.0, 2.0, without_startup_s=2.9, taken_s=1.5)
    "messages' own time"
    """
    if iteration_s <= compute_s * (1 + NEAR):
        return "computation"
    if iteration_s <= bound_s * (1 + NEAR):
        return "bandwidth"
    if 2 * taken_s > iteration_s - compute_s:
        return "messages' own time"
    return "start-up" if iteration_s - without_startup_s >= without_startup_s - bound_s else "not overlapped"
