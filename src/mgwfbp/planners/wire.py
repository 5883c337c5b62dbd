"""Which messages travel in low precision: as few bytes of gradients as a step that is nearly the shortest needs.

[Note: the front]
A message of gradients i+1..j in precision k, behind others that have taken A from the computation, ends at

    F' = max(F, r_j + A) + T_k(P_j - P_i),    A' = A + h_k + g_k (P_j - P_i)

Of what came before it, it is enough to know the end F of the link, the bytes W in low precision, A, and how many
messages there were, n. Of two states at a cut one is dropped that is smaller than the other in none of the four:
whatever follows both, the other stays ahead. F is lifted to the moment at which the next gradient is ready, since
nothing starts before it. Where both precisions take alike, h n + g P_i, A is n in other words.

What remains is a front, and it can be exponentially long: this is a knapsack. So states are dropped

1. that no messages can complete by the deadline D: F > X(i), the latest end at cut i from which the cheaper of both
   precisions for every message still meets D;
2. that need more bytes in low precision than a plan already found: W + B above it, [Note: the price of a second];
3. if more are left than `WIDTH`, those with the largest W + B. The least of these is a bound: no plan has fewer bytes
   in low precision than it, or than the plan that was found.

[Note: the price of a second]
Let a second cost so many bytes, lambda, and let V(i, G) be the least that the messages after cut i cost together, the
end of the step being paid for from D on. On the clock that stops ([Note: a clock that stops] in ``counted.py``), where
G = F - A and T'_k(m) = T_k(m) - h_k - g_k m,

    V(i, G) = min over j > i and both k of  [m if low] + lambda (h_k + g_k m) + V(j, max(G, r_j) + T'_k(m)),
    V(L, G) = lambda (G - D),    m = P_j - P_i

A plan that ends by D pays nothing or less for its end, so a state has V(i, G) + lambda A bytes in low precision or more
before it. V is kept for a grid of G. Between two places of it V is at least that of the earlier, and at least that of
the later less lambda for every second between: a link that is free later ends no earlier, and later by no more. The
bytes that are needed, B, are the largest of these for several lambda. That a gap appears in which the link waits for
gradients does not weaken it, nor does what messages take.

[Note: the shortest step]
D is a part longer than the shortest step C of both precisions. Where both take alike, each message of its plan is in
the cheaper one for its size, and `plan_optimal` finds it. Else a message may be shorter and take more, and that is a
knapsack, too: the same search finds the front of (F, A), with V for lambda = 1 and no bytes, which is how long the step
is at least. It is left out where `plan_optimal`, with messages that take the less of both, is as fast.

docs/optimality.md has the proofs.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from mgwfbp.cost import Cost
from mgwfbp.costs import cheaper_cost, full_precision_cost, low_precision_cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import SHORT_WIRES, WIRES, MergePlan
from mgwfbp.planners.optimal import plan_optimal
from mgwfbp.planners.precisions import Found, Row
from mgwfbp.planners.slack import TIE
from mgwfbp.record import check_real
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = ["DEFAULT_TOLERANCE", "plan_wire", "wire_planner_name"]

# Which part longer than the shortest the step may be.
DEFAULT_TOLERANCE = 0.01

# States kept for every cut: to find some plan, and then the best; of models with many gradients fewer, so that no more
# than `MOST_REACHED` messages are tried from them. More of them are seldom needed, and then gain some hundred bytes.
NARROW, WIDTH, MOST_REACHED = 16, 1024, 2**27


def wire_planner_name(wire: str) -> str:
    """Return what tables call the planner whose messages may travel in this precision.

    >>> wire_planner_name("bfloat16")
    'optimal+bf16'
    """
    if wire not in WIRES:
        raise PlanError(f"wire is {quote(wire)}, expected one of {', '.join(WIRES)}")
    return f"optimal+{SHORT_WIRES[wire]}"


def plan_wire(
    trace: ModelTrace, cost: Cost, wire: str = "bfloat16", *, tolerance: float = DEFAULT_TOLERANCE
) -> MergePlan:
    """Find the plan with the fewest bytes in low precision whose step is nearly as short as any.

    C is the shortest step over all partitions into neighbours with any of the messages in low precision. Of all plans
    whose step is at most (1 + tolerance) C (and one part in 10^12) the one with the fewest bytes of gradients in low
    precision; of those one with the shortest step, and then the fewest messages. If it needs none, it is
    `plan_optimal`'s.

    ``plan.predicted`` holds ``low_bytes``, its bytes of gradients in low precision, and ``low_bytes_bound``: no plan
    within the tolerance has fewer. Where the two are equal, the plan is exact.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 4) for name in "dcba"))
    >>> plan_wire(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.5), tolerance=0.1)
    MergePlan('toy' by 'optimal+bf16': 4 gradients in 2 messages, 1+3, 1 of them in bfloat16)

    Args:
        trace: when each gradient is ready.
        cost: what a message takes; in low precision as `low_precision_cost` has it.
        wire: the low precision, one of `WIRES`.
        tolerance: which part longer than the shortest the step may be.

    Raises:
        PlanError: where there is no such precision, or the tolerance is no number of 0 or more.
        CostError: where the cost gives no numbers that can be planned with.
    """
    planner = wire_planner_name(wire)
    tolerance = check_real(tolerance, "tolerance", PlanError)
    fastest = _shortest(trace, cost, wire)
    deadline_s = (1 + tolerance) * fastest.amount * TIE
    plain = plan_optimal(trace, cost)
    if predict(trace, cost, plain).iteration_s <= deadline_s:
        return replace(plain, planner=planner, predicted={"low_bytes": 0, "low_bytes_bound": 0})
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    known = replace(fastest, amount=_plan(trace, fastest, wire).low_bytes(size_of))
    found = _search(trace, Row(trace, cost, deadline_s, wants_bytes=True), known)
    return replace(
        _plan(trace, found, wire),
        planner=planner,
        predicted={"low_bytes": int(found.amount), "low_bytes_bound": int(min(found.amount, found.bound))},
    )


def _search(trace: ModelTrace, row: Row, known: Found) -> Found:
    """Find some plan that is better than the one known, and then the best."""
    found = row.search(NARROW, known)
    return row.search(max(NARROW, min(WIDTH, MOST_REACHED // len(trace.layers) ** 2)), found)


def _shortest(trace: ModelTrace, cost: Cost, wire: str) -> Found:
    """Return the plan with the shortest step, whatever it sends in low precision: [Note: the shortest step]."""
    full, low, either = full_precision_cost(cost), low_precision_cost(cost), cheaper_cost(cost)

    def judged(plan: MergePlan, is_low: Callable[[int], bool]) -> Found:
        """Return messages as a plan has them, those in low precision for whose bytes it is said."""
        marks = tuple(is_low(message.num_bytes) for message in predict(trace, full, plan).messages)
        found = Found((0, *accumulate(plan.group_sizes)), marks, 0.0)
        return replace(found, amount=predict(trace, cost, _plan(trace, found, wire)).iteration_s)

    relaxed = plan_optimal(trace, either)
    least_s = predict(trace, either, relaxed).iteration_s
    found = judged(relaxed, lambda size: low(size) < full(size))
    if found.amount > least_s * TIE:
        others = judged(plan_optimal(trace, full), lambda _: False), judged(plan_optimal(trace, low), lambda _: True)
        found = min(found, *others, key=lambda one: one.amount)
    if found.amount > least_s * TIE:
        found = _search(trace, Row(trace, cost, found.amount * TIE, wants_bytes=False), found)
    return found


def _plan(trace: ModelTrace, found: Found, wire: str) -> MergePlan:
    plan = MergePlan.of_sizes(trace, found.sizes)
    return replace(plan, wire=tuple(wire if low else "" for low in found.is_low))
