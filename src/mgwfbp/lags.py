"""What messages take from the computation, and by how much that makes gradients late: `lags_s`."""

from itertools import pairwise

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import low_precision_cost, sharded_cost
from mgwfbp.plan import MergePlan
from mgwfbp.trace import ModelTrace

__all__ = ["lags_s", "message_costs", "sent_with"]


def sent_with(trace: ModelTrace, cost: Cost, plan: MergePlan) -> list[tuple[int, float]]:
    """Return for each message the place of the gradient it is sent with, and what messages before it have taken.

    A message is sent when its last gradient is ready and those before it in the plan have been sent.
    """
    row_of = {layer.name: row for row, layer in enumerate(trace.layers)}
    found, row, taken_s = [], 0, 0.0
    for group, kind in zip(plan.groups, message_costs(cost, plan), strict=True):
        row = max(row, *(row_of[name] for name in group))
        found.append((row, taken_s))
        taken_s += taken_by(kind, sum(trace.layers[row_of[name]].grad_bytes for name in group))
    return found


def message_costs(cost: Cost, plan: MergePlan) -> list[Cost]:
    """Return the cost of each message of a plan: in its precision, of an all-reduce or of a reduce-scatter."""
    low, reduce_scatter = low_precision_cost(cost), sharded_cost(cost)[0]
    kinds = zip(plan.wires, plan.sharded, strict=True)
    return [low if wire else reduce_scatter if is_sharded else cost for wire, is_sharded in kinds]


def lags_s(trace: ModelTrace, cost: Cost, plan: MergePlan) -> list[float]:
    """Return by how much each gradient is late, in ready order: what messages took that were sent before it was ready.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> lags_s(trace, LinearCost(2, 2.0, 0.1, taken_s=1.0), MergePlan.of_sizes(trace, [1, 1, 1]))
    [0.0, 1.0, 2.0]
    """
    # What was taken once the messages of a row were sent is what the message after them finds.
    after_row = {row: taken_s for (row, _), (_, taken_s) in pairwise(sent_with(trace, cost, plan))}
    lags = [0.0]
    for row in range(len(trace.layers) - 1):
        lags.append(after_row.get(row, lags[-1]))
    return lags
