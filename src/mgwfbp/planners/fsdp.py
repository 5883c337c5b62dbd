"""The planner for FSDP2: which modules are gathered together, what is resharded, how far ahead; within a memory limit.

[Note: how plans for FSDP2 are found]
Resharding only adds gathers, so what a limit does not ask for is kept. Of models with no more than `EXHAUSTED` units
every plan is tried: all runs of units, every choice of what is resharded, `PREFETCHES` in both directions; such a plan
is the best (``predicted["exact"]``). Of others a search starts from the groups that are best where nothing is resharded
([Note: a pass over cuts]; without a limit a plan that reaches what that pass says no plan undercuts is the best, too),
from groups of many sizes, with as few of the first ones, or of the largest, resharded as it takes to fit, and from what
people wrap by hand. It goes on from the best of them to the best neighbour (two groups merged, one cut, a border moved,
a group kept or resharded or traded for another) until none is better; then it is moved away from the best a few times,
and goes on from there. What it finds need not be the best, but is never behind what is wrapped by hand in the same
memory. How far it is from a time that no plan undercuts, `fsdp_lower_bound_s`, is in what it predicts; how far from the
best of all plans of small models was measured: docs/optimality.md.

Modules that run again in a step are groups by themselves in every plan ([Note: modules that run again]), and no group
has trained parameters of two dtypes (`mgwfbp.fsdp_units.reaches_of`).

The same is done with all that is no block in the root's group, as in the second way to wrap by hand: one message less
in each pass, which may be worth its memory.

Without a limit, to keep all may be memory for nothing, where a fast link hides all gathers. So plans within the memory
of wrapping by block are searched, too, and the best of them is taken if its step is at most `SPARING` times the
shortest.
"""

from collections.abc import Collection, Mapping
from typing import Any

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, predict_fsdp, reported_bound_s
from mgwfbp.fsdp_units import ROOT, idle_of, knows_modules, mixed_words, root_of, units_of, whole_units
from mgwfbp.memory import AS_STORED, Precision
from mgwfbp.planners.fsdp_by_hand import BY_HAND, plan_blocks_alone, plan_by_block
from mgwfbp.planners.fsdp_search import Found, Problem, Search
from mgwfbp.planners.slack import TIE
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, quote

__all__ = ["BY_HAND", "plan_blocks_alone", "plan_by_block", "plan_fsdp"]

# How much longer a step may be where no limit is given, and memory is spared.
SPARING = 1.001


def plan_fsdp(
    trace: ModelTrace,
    cost: Cost,
    *,
    memory_limit: int | None = None,
    precision: Precision = AS_STORED,
    root: Collection[str] = (),
) -> FsdpPlan:
    """Find groups, prefetching and resharding with the shortest step that fits, [Note: how plans for FSDP2 are found].

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 4.0, tuple(LayerTrace(f"{name}.w", 2.0, 10) for name in "dcba"))
    >>> plan_fsdp(trace, LinearCost(workers=2, startup_s=1.0, per_byte_s=0.1))
    FsdpPlan('toy': 4 modules in 4 groups, 1 of them resharded, prefetching 1 forward and 1 backward)

    Args:
        trace: what each layer takes in both passes.
        cost: what a reduce-scatter and an all-gather take by the bytes that travel, as `sharded_cost` has it.
        memory_limit: bytes that a rank may have for parameters, gradients and the optimizer's state; what activations
            need must be taken off before. Without it memory is spared only where that makes a step no more than 0.1 %
            longer: then a plan needs no more than wrapping by block.
        precision: how many bytes are gathered, sent and kept for each byte of a parameter.
        root: units that FSDP2 cannot gather by themselves, which stay with the rest of the model.

    Raises:
        PlanError: where no plan fits, with the least that one needs; where FSDP2 can run none, since what must travel
            together has several dtypes; or where the trace's names tell no modules.
    """
    problem = Problem(trace, cost, memory_limit, precision, tuple(idle_of(trace)), tuple(root_of(trace, root)))
    _check(problem)
    found = best = _find(problem)
    if memory_limit is None:
        by_block = predict_fsdp(trace, cost, plan_by_block(trace, problem.at_root), precision=precision).memory_bytes
        least_s = fsdp_lower_bound_s(trace, cost, precision=precision, memory_limit=by_block)
        most_s = SPARING * best.step.iteration_s
        if best.step.memory_bytes > by_block and least_s <= most_s:
            spared = _find(problem._replace(limit=by_block), is_short=True)
            found = spared if spared.step.iteration_s <= most_s else best
    return _plan(problem, found._replace(bound_s=best.bound_s))


def _check(problem: Problem) -> None:
    """Raise where FSDP2 can run no plan: not all parameters that must travel together have one dtype."""
    trace, at_root, idle = problem.trace, problem.at_root, problem.idle
    for unit in (*whole_units(trace).values(), *units_of(trace, at_root, idle)):
        if len(unit.dtypes) > 1:
            names = f" ({', '.join(map(quote, at_root))})" if at_root else ""
            what = quote(unit.name) if unit.name else f"what must be in the root's group{names}"
            raise PlanError(f"{mixed_words(what, unit.dtypes)}: cast it to one dtype")


def _find(problem: Problem, *, is_short: bool = False) -> Found:
    """Find the best plan that fits, with what must be in the root's group, or with all that is no block there."""
    trace, at_root = problem.trace, problem.at_root
    search, alone = Search(problem, at_root), plan_blocks_alone(trace, at_root)
    if not search.units and not at_root and not knows_modules(trace):
        raise PlanError(
            f"the parameters of {quote(trace.model)} are in no module whose name is known: expected names such as "
            "layer.0.weight"
        )
    found, searches = search.best(plan_by_block(trace, at_root), is_short=is_short), [search]
    if set(alone.root) != set(at_root):
        other = Search(problem, alone.root)
        found = _better(found, other.best(alone, is_short=is_short or found is not None))
        searches.append(other)
    if found is None:
        least = format_bytes(min(one.least.memory_bytes for one in searches), "up")
        least = least if all(one.is_small for one in searches) else f"at most {least}"
        room = format_bytes(problem.limit or 0, "down")
        raise PlanError(f"no plan for {quote(trace.model)} fits into {room}: the least is {least} a rank")
    return found


def _better(found: Found | None, other: Found | None) -> Found | None:
    """Return what has the shorter step; what neither of both undercuts counts for it."""
    if found is None or other is None:
        return found or other
    is_ahead = other.step.iteration_s * TIE < found.step.iteration_s
    return (other if is_ahead else found)._replace(bound_s=min(found.bound_s, other.bound_s))


def _plan(problem: Problem, found: Found) -> FsdpPlan:
    """Return what was found as a plan, with what is expected of it."""
    trace, cost, limit, precision, idle, at_root = problem
    root, choice, step, searched_s = found
    bound_s = fsdp_lower_bound_s(trace, cost, precision=precision, memory_limit=limit)
    units = whole_units(trace)
    reasons = ("read_elsewhere", "returned", "no_gradient")
    seen = {why: set(trace.source.get(why, ())).intersection(at_root) for why in reasons}
    predicted: Mapping[str, Any] = {
        "iteration_s": step.iteration_s,
        "exposed_s": step.iteration_s - step.compute_s,
        "lower_bound_s": reported_bound_s(bound_s, step.iteration_s),
        "memory_bytes": step.memory_bytes,
        "gathered_again_bytes": step.again_bytes,
        "exact": step.iteration_s <= max(bound_s, searched_s) * TIE,
        "precision": precision._asdict(),
        "at_root": at_root,
        **{why: sorted(names) for why, names in seen.items()},
        "not_reached": [name for name, unit in units.items() if not unit.goes_back and name not in idle],
        "parameter_bytes": sum(unit.num_bytes for unit in units.values()),
        "trained_bytes": trace.grad_bytes,
    }
    groups = tuple(group for group in step.groups if group != (ROOT,))
    ahead = choice.forward_prefetch, choice.backward_prefetch
    return FsdpPlan(trace.model, groups, choice.reshard, *ahead, predicted, root, idle)
