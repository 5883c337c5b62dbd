"""The paper's own planner, kept as a baseline: it is not optimal (docs/optimality.md)."""

from mgwfbp.cost import Cost
from mgwfbp.plan import MergePlan
from mgwfbp.trace import ModelTrace

__all__ = ["plan_mgwfbp"]


def plan_mgwfbp(trace: ModelTrace, cost: Cost) -> MergePlan:
    r"""Find the merged-gradient layers with Algorithm 1.

    From layer L down to 2, layer l is merged into layer l - 1 when (Theorem 1, Eq. (27); line 13 of the algorithm)

    .. math:: \tau_b^{(l-2)} - \tau_c^{(l)} < a

    :math:`\tau_b^{(l-2)}`, the start of the backward step of layer l - 2, is the moment gradient l - 1 is ready;
    :math:`\tau_c^{(l)}` is when l, with all that was merged into it, could be sent. So: wait for the next gradient if
    the wait is shorter than the start-up time a message costs.

    As printed, the loop of lines 9 and 10 leaves :math:`\tau_b^{(1)}` unset and line 13 reads :math:`\tau_b^{(0)}`,
    which does not exist; they are taken as the start and the end of layer 1's backward step, as Eq. (6) continues.
    Start times are recomputed after every merge there, O(L^2). A merge of l changes no start time before that of l - 1,
    which is the next one the loop looks at, so one pass that carries it along gives the same set.
    a is ``cost(0)``, also for a cost that is no straight line.
    """
    startup_s = cost(0)
    ready_s = trace.ready_s
    sizes = []
    group_size, group_bytes, start_s = 1, trace.layers[0].grad_bytes, ready_s[0]
    for layer, next_ready_s in zip(trace.layers[1:], ready_s[1:], strict=True):
        if next_ready_s - start_s < startup_s:
            group_size += 1
            group_bytes += layer.grad_bytes
            start_s = max(start_s, next_ready_s)
        else:
            sizes.append(group_size)
            start_s = max(start_s + cost(group_bytes), next_ready_s)
            group_size, group_bytes = 1, layer.grad_bytes
    sizes.append(group_size)
    return MergePlan.of_sizes(trace, sizes, planner="mgwfbp")
