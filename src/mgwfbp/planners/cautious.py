"""`cautious`: of exact plans, the one that is good for slower messages too, where the cost says how far it may be off.

The plan that is the best for an uncertain cost is the one whose messages that cost underestimates most. So where the
cost knows its spread, exact plans are made for it, for messages half as much slower as it may be off, and for messages
as much slower, and the one is taken whose step is the shortest in the mean over these three costs.
"""

from dataclasses import replace

from mgwfbp.cost import Cost, taken_by
from mgwfbp.plan import MergePlan
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.ranges import off_by, spread_of
from mgwfbp.trace import ModelTrace

__all__ = ["plan_cautiously"]

# Messages are slower by so many times what the cost may be off by.
CAUTIONS = (0.0, 0.5, 1.0)


def plan_cautiously(trace: ModelTrace, cost: Cost) -> MergePlan:
    """Return, of the exact plans for likely costs, the one whose step is the shortest in the mean over all of them.

    Where the cost does not say how far it may be off, `spread_of`, or is not off at all, it is `plan_optimal`'s plan,
    exact for the cost as it is. Else its step for the cost as it is may be longer than the shortest: by no more than it
    is shorter, together, for the two slower costs. Takes as long as three of `plan_optimal`'s.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 1) for name in "dcba"))
    >>> sure = LinearCost(workers=2, startup_s=1.0, per_byte_s=1.0)
    >>> plan_cautiously(trace, sure).groups == plan_optimal(trace, sure).groups
    True
    """
    if not any(spread_of(cost) or ()):
        return replace(plan_optimal(trace, cost), planner="cautious")
    costs = [off_by(cost, caution) for caution in CAUTIONS]
    plans = {plan.groups: replace(plan, planner="cautious") for plan in (plan_optimal(trace, one) for one in costs)}
    if len(plans) == 1:
        return next(iter(plans.values()))
    return min(plans.values(), key=lambda plan: sum(_end_s(trace, one, plan) for one in costs))


def _end_s(trace: ModelTrace, cost: Cost, plan: MergePlan) -> float:
    """Return the end of the last message as `mgwfbp.timeline.predict` has it, in half the time: no step is laid out."""
    free_s, taken_s, row, ready_s = 0.0, 0.0, 0, trace.ready_s
    for size in plan.group_sizes:
        num_bytes = sum(layer.grad_bytes for layer in trace.layers[row : row + size])
        row += size
        free_s = max(free_s, ready_s[row - 1] + taken_s) + cost(num_bytes)
        taken_s += taken_by(cost, num_bytes)
    return free_s
