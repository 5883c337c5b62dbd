"""Times that no plan's step can undercut: `lower_bound_s`, `sharded_lower_bound_s`."""

from itertools import accumulate

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import cheapest_s, sharded_cost
from mgwfbp.trace import ModelTrace

__all__ = ["lower_bound_s", "sharded_lower_bound_s"]


def lower_bound_s(trace: ModelTrace, cost: Cost) -> float:
    r"""Return a time that no plan's step can undercut.

    Let the message that holds gradient j begin behind gradient i < j. It starts no earlier than :math:`r_j` and what
    the messages of the first i gradients have taken from the computation, and it and those after it carry the gradients
    behind i. So for every j

    .. math:: t_{iter} \ge r_j + \min_{i < j} \Big( h [i > 0] + g P_i + T^*(P_L - P_i) \Big)

    with :math:`P_i` the bytes of the first i gradients and :math:`T^*` the cheapest way to send so many bytes,
    `cheapest_s`. For the last gradient that is T itself: its message is the last.

    Args:
        trace: when each gradient is ready.
        cost: what a message takes.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> lower_bound_s(trace, LinearCost(workers=2, startup_s=2.0, per_byte_s=0.1))
    12.0
    """
    total = trace.grad_bytes
    bound_s, least_s, last_s, before = 0.0, float("inf"), float("inf"), 0
    for row, (layer, ready_s) in enumerate(zip(trace.layers, trace.ready_s, strict=True)):
        taken_s = taken_by(cost, before) if row else 0.0
        least_s = min(least_s, taken_s + cheapest_s(cost, total - before))
        last_s = min(last_s, taken_s + cost(total - before))
        bound_s = max(bound_s, ready_s + least_s)
        before += layer.grad_bytes
    return max(bound_s, trace.compute_s + last_s)


def sharded_lower_bound_s(trace: ModelTrace, cost: Cost) -> float:
    r"""Return a time that the period of no plan can undercut whose messages may be reduce-scattered or all-reduced.

    Messages with gradients from j on start no earlier than :math:`r_j` after the start of a backward pass. If such
    gradients are sharded, what carries them is a reduce-scatter and an all-gather, else an all-reduce; and the last of
    all these leaves at least :math:`q_j` of the next forward pass: layer j and those that come after it there. So for
    every j

    .. math:: C \ge r_j + q_j + \min\{ T_{rs}^*(M_j) + T_{ag}^*(M_j),\; T_{ar}^*(M_j) \}

    with :math:`M_j` the bytes of gradients j to L and :math:`T^*` the cheapest way to send so many bytes, `cheapest_s`;
    for the last gradient that is T itself. It holds for any groups and any order on the link. What messages take from
    the computation would only add to it, and is left out.

    Args:
        trace: when each gradient is ready, and what its layer takes in the forward pass.
        cost: what an all-reduce takes, and its halves as `sharded_cost` has them.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> sharded_lower_bound_s(trace, LinearCost(workers=2, startup_s=2.0, per_byte_s=0.1))
    12.0
    """
    reduce_scatter, all_gather = sharded_cost(cost)
    ready_s = accumulate(layer.backward_s for layer in trace.layers)
    left_s = accumulate(trace.layer_forward_s)  # q
    bound_s, left = 0.0, trace.grad_bytes
    for layer, ready, forward_s in zip(trace.layers, ready_s, left_s, strict=True):
        sharded_s = cheapest_s(reduce_scatter, left) + cheapest_s(all_gather, left)
        bound_s = max(bound_s, ready + forward_s + min(sharded_s, cheapest_s(cost, left)))
        left -= layer.grad_bytes
    last = trace.layers[-1].grad_bytes
    last_s = min(reduce_scatter(last) + all_gather(last), cost(last))
    return max(bound_s, trace.backward_s + trace.forward_s + last_s)
