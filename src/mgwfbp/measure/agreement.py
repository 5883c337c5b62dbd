"""What ranks tell one another: numbers reduced over all, texts from one to all, and errors on every rank alike.

What a rank sends and works out does not grow with the number of ranks (`gather` apart). Every function here must be
called by all ranks of the group, in the same order.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.errors import MeasureError, MgwfbpError, PlanError
from mgwfbp.fsdp import FsdpPlan
from mgwfbp.measure.group_buffer import Group, all_reduce, broadcast, first_line, on_device, raise_readably
from mgwfbp.plan import MergePlan
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import plural, quote

__all__ = [
    "OtherRankError",
    "agree_on_cost",
    "agree_on_fsdp_plan",
    "agree_on_plan",
    "agree_on_trace",
    "backend_name",
    "broadcast_text",
    "differing_field",
    "first_line",
    "first_problem",
    "gather",
    "on_device",
    "problem_of",
    "reduce_values",
    "together",
    "try_together",
]

T = TypeVar("T")
AnyCost = TypeVar("AnyCost", LinearCost, PiecewiseCost)
Groups = Sequence[Sequence[str]] | None  # of a plan; None where DDP's own buckets are wanted
How = Literal["max", "min", "sum"]

_OPERATIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "sum": dist.ReduceOp.SUM}


class OtherRankError(MeasureError):
    """Another rank did not come. Why is known there, if it failed: of ranks that fail together, that one is named."""


def reduce_values(values: Sequence[float], how: How, group: Group = None) -> list[float]:
    """Return the largest, smallest or sum over all ranks of each value; every rank gives equally many."""
    reduced = all_reduce(torch.tensor(values, dtype=torch.float64), _OPERATIONS[how], group)
    return [float(value) for value in reduced.tolist()]


def broadcast_text(text: str, source: int, group: Group = None) -> str:
    """Return on every rank what the rank ``source`` of the group says."""
    said = bytearray(text.encode() if dist.get_rank(group) == source else b"")
    length = int(broadcast(torch.tensor([len(said)], dtype=torch.int64), source, group).item())
    if not length:
        return ""
    content = torch.frombuffer(said, dtype=torch.uint8) if said else torch.zeros(length, dtype=torch.uint8)
    return bytes(broadcast(content, source, group).tolist()).decode()


def gather(text: str, group: Group = None) -> list[str]:
    """Return what every rank says, by rank; for what must name them all, since it grows with their number."""
    said: list[str] = [""] * dist.get_world_size(group)
    raise_readably(lambda: dist.all_gather_object(said, text, group=group))
    return said


def first_problem(problem: str, group: Group = None, *, is_anothers: bool = False) -> tuple[int, str] | None:
    """Return the first rank that has a problem, and its problem; None where no rank has one.

    A rank whose problem ``is_anothers``, for which it waited say, comes after those that have one of their own.
    """
    rank = _lowest_rank(bool(problem), group, comes_later=is_anothers)
    return None if rank is None else (rank, broadcast_text(problem, rank, group))


def backend_name(group: Group = None) -> str:
    """Return what people call the backend of a group: gloo with one thread (`mgwfbp.runtime.messages.gloo`) is gloo."""
    name = str(dist.get_backend(group))
    return "gloo" if name.startswith("gloo") else name


def problem_of(error: BaseException) -> str:
    """Return what other ranks are told of an error: its first line, and its type unless it is ours, which says all."""
    return f"{'' if isinstance(error, MgwfbpError) else f'{type(error).__name__}: '}{first_line(error)}"


def try_together(work: Callable[[], T], group: Group = None) -> tuple[T, tuple[int, str] | None, Exception | None]:
    """Do local work on every rank; return its result, the first rank that failed and why, and this rank's own error.

    The work itself must not wait for other ranks, or only for a while: then it raises an `OtherRankError`, which is
    told only where no rank has another error. Where a rank failed, the result is not to be used.
    """
    problem, caught, result = "", None, None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must be told
        problem, caught = problem_of(error), error
    failed = first_problem(problem, group, is_anothers=isinstance(caught, OtherRankError))
    return result, failed, caught  # type: ignore[return-value]  # a T unless a rank failed


def together(work: Callable[[], T], group: Group = None) -> T:
    """Do local work on every rank; where it fails on one, fail on all, so that nobody waits for the one that failed.

    The work itself must not wait for other ranks.
    """
    result, failed, caught = try_together(work, group)
    if failed is not None:
        raise MeasureError(f"rank {failed[0]} failed: {failed[1]}") from caught
    return result


def agree_on_trace(trace: ModelTrace, group: Group = None) -> ModelTrace:
    """Combine the traces of all ranks: a gradient is ready when it is on the slowest.

    Every rank gets the same trace. The ready order is that of the combined times; ties keep rank 0's. Ranks whose
    models differ get the same error, which names the first difference. Sparse gradients are as large as each rank's
    batch makes them: the largest counts. A layer's share of the forward pass, where all ranks know it, is its time on
    the rank that is slowest at it over the sum of such times.
    """
    sparse = set(trace.source.get("sparse", ()))
    sizes = {layer.name: layer.grad_bytes for layer in trace.layers}
    fixed = {name: -1 if name in sparse else size for name, size in sizes.items()}
    other = _first_difference(json.dumps(fixed, sort_keys=True), group)
    if other is not None:
        first, second = (json.loads(broadcast_text(json.dumps(sizes), rank, group)) for rank in (0, other))
        raise MeasureError(_describe_models(first, second, other))
    order = json.loads(broadcast_text(json.dumps(list(sizes)), 0, group))
    ready_s = dict(zip(sizes, trace.ready_s, strict=True))
    parts_s = {layer.name: layer.forward_s for layer in trace.layers}
    own = [(ready_s[name], float(sizes[name]), parts_s[name] or 0.0) for name in order]
    is_unknown = trace.layers[0].forward_s is None
    forward_s, some_unknown, *values = reduce_values(
        [trace.forward_s, float(is_unknown), *(value for row in own for value in row)], "max", group
    )
    moments = sorted(zip(order, values[::3], values[1::3], strict=True), key=lambda moment: moment[1])
    slowest_s = dict(zip(order, values[2::3], strict=True))
    factor = forward_s / (sum(slowest_s.values()) or 1.0)
    known_s = {} if some_unknown else {name: part_s * factor for name, part_s in slowest_s.items()}
    layers = layers_of([(name, moment_s, int(size)) for name, moment_s, size in moments], forward_s, known_s)
    source = {**trace.source, "ranks": dist.get_world_size(group), "combined": "slowest rank"}
    return ModelTrace(trace.model, forward_s, layers, json.loads(broadcast_text(json.dumps(source), 0, group)))


def agree_on_cost(cost: AnyCost, group: Group = None) -> AnyCost:
    """Combine the costs of all ranks: a message has arrived when it has on the slowest. Every rank gets the same."""
    points: tuple[tuple[int, float], ...] = cost.points if isinstance(cost, PiecewiseCost) else ()
    if differs := _difference([type(cost).__name__, cost.workers, [size for size, _ in points]], group):
        other, first, second = differs
        shapes = [quote(json.dumps(shape)) for shape in (first, second)]
        raise MeasureError(f"the costs differ: rank 0 has {shapes[0]}, rank {other} {shapes[1]}")
    source = json.loads(broadcast_text(json.dumps(cost.to_json()["source"]), 0, group))
    if isinstance(cost, PiecewiseCost):
        times = reduce_values([time for _, time in points], "max", group)
        return replace(cost, points=tuple(zip((size for size, _ in points), times, strict=True)), source=source)
    startup_s, per_byte_s = reduce_values([cost.startup_s, cost.per_byte_s], "max", group)
    return replace(cost, startup_s=startup_s, per_byte_s=per_byte_s, source=source)


def agree_on_plan(
    prepare: Callable[[], MergePlan | None], group: Group = None, *, tunes: bool = False, wire: str | None = None
) -> MergePlan | None:
    """Prepare a plan on every rank and compare; nobody gets one unless all have the same.

    ``prepare`` reads and checks this rank's plan and must not wait for others; None stands for DDP's own buckets.
    Where it fails on a rank, that rank raises what it met and the others name the rank. No rank's plan is taken for
    the others: ranks that were given different plans were started wrongly, and would mix up gradients of equal shape.
    ``tunes`` says whether this rank means to tune, which it cannot do alone, and ``wire`` in which precision its
    messages may travel.
    """
    plan = _prepared(prepare, group)
    if differs := _difference(None if plan is None else plan.groups, group):
        other, first, second = differs
        raise PlanError(describe_difference(first, second, other))
    if differs := _difference([] if plan is None else plan.wires, group):
        other, first, second = differs
        index = next(index for index, (mine, theirs) in enumerate(zip(first, second, strict=True)) if mine != theirs)
        mine, theirs = (f"travels in {said[index]}" if said[index] else "travels as it is" for said in (first, second))
        raise PlanError(_different(f"message {index} {mine} on rank 0 and {theirs} on rank {other}"))
    if differs := _difference([] if plan is None else plan.gathers, group):
        gathered = "parameters are gathered in other groups on rank 0 than on rank"
        raise PlanError(_different(f"{gathered} {differs[0]}"))
    if differing := differing_field({"tune": tunes, "wire": wire}, group):
        raise PlanError(f"{differing}; give all the same")
    return plan


def agree_on_fsdp_plan(prepare: Callable[[], FsdpPlan], group: Group = None) -> FsdpPlan:
    """Prepare a plan for FSDP2 on every rank and compare, as `agree_on_plan` does."""
    plan = _prepared(prepare, group)
    if differs := _difference(plan.groups, group):
        other, first, second = differs
        raise PlanError(describe_difference(first, second, other, ("group", "module")))
    rest = {
        **{f"the resharding of group {index}": is_gone for index, is_gone in enumerate(plan.reshard)},
        "forward_prefetch": plan.forward_prefetch,
        "backward_prefetch": plan.backward_prefetch,
        "idle": plan.idle,
    }
    if differing := differing_field(rest, group):
        raise PlanError(_different(differing))
    return plan


def differing_field(fields: dict[str, Any], group: Group = None) -> str:
    """Say in which of these fields a rank first differs from rank 0, and what both have; empty where all are equal."""
    differs = _difference(fields, group)
    if differs is None:
        return ""
    other, first, second = differs
    name = next(name for name in first if first[name] != second.get(name))
    return f"{name} is {first[name]} on rank 0 and {second.get(name)} on rank {other}"


def _difference(value: object, group: Group) -> tuple[int, Any, Any] | None:
    """Return the first rank that has another value than rank 0, rank 0's value and its; None where all are equal."""
    text = json.dumps(value)
    other = _first_difference(text, group)
    if other is None:
        return None
    first, second = (json.loads(broadcast_text(text, rank, group)) for rank in (0, other))
    return other, first, second


def _different(difference: str) -> str:
    return f"the ranks have different plans: {difference}; give every rank the same plan"


def _prepared(prepare: Callable[[], T], group: Group) -> T:
    """Return this rank's plan; where a rank has none it raises what it met, and the others name the rank."""
    plan, problem, caught = None, "", None
    try:
        plan = prepare()
    except Exception as error:  # whatever it is, the other ranks must be told
        problem, caught = f"{type(error).__name__}: {first_line(error)}", error
    failed = first_problem(problem, group)
    if caught is not None:
        raise caught
    if failed is not None:
        raise PlanError(f"rank {failed[0]} has no plan to run: {failed[1]}")
    return plan  # type: ignore[return-value]  # a T, since it did not raise


def describe_difference(
    first: Groups, second: Groups, other: int, words: tuple[str, str] = ("message", "gradient")
) -> str:
    """Say in which message, and in which gradient of it, the plan of rank 0 and that of another rank first differ.

    ``words`` says what a plan's groups, and the things in them, are called.

    >>> print(describe_difference([["b"], ["a"]], [["b", "a"]], 2))
    the ranks have different plans: message 0 holds 1 gradient on rank 0 and 2 on rank 2, and there 'a' comes after \
'b'; give every rank the same plan
    """
    if first is None or second is None:
        has = ["no plan" if groups is None else "a plan" for groups in (first, second)]
        difference = f"rank 0 has {has[0]}, rank {other} {has[1]}"
    else:
        index, mine, theirs = next(
            (index, mine, theirs) for index, (mine, theirs) in enumerate(zip_longest(first, second)) if mine != theirs
        )
        difference = _describe_message(index, mine or [], theirs or [], other, words)
    return _different(difference)


def _describe_message(
    index: int, mine: Sequence[str], theirs: Sequence[str], other: int, words: tuple[str, str]
) -> str:
    """Name the first gradient in which a message of rank 0 and of another rank differ; whole ones may look alike."""
    group, thing = words
    counts = f"{group} {index} holds {plural(len(mine), thing)} on rank 0 and {len(theirs)} on rank {other}"
    place = next(place for place, pair in enumerate(zip_longest(mine, theirs)) if pair[0] != pair[1])
    after = f" after {quote(mine[place - 1])}" if place else " first"
    if place >= len(mine):
        return f"{counts}, and there {quote(theirs[place])} comes{after}"
    if place >= len(theirs):
        return f"{counts}, and on rank 0 {quote(mine[place])} comes{after}"
    return f"{counts}: {quote(mine[place])} comes{after} on rank 0 and {quote(theirs[place])} on rank {other}"


def _describe_models(first: dict[str, int], second: dict[str, int], other: int) -> str:
    name = next(name for name in [*first, *second] if first.get(name) != second.get(name))
    has = ["none" if size is None else f"{size} bytes" for size in (first.get(name), second.get(name))]
    return f"the models differ: gradient {quote(name)} is {has[0]} on rank 0 and {has[1]} on rank {other}"


def _first_difference(text: str, group: Group) -> int | None:
    """Return the first rank whose text differs from rank 0's, if one does."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.int64)
    return _lowest_rank(not torch.equal(mine, broadcast(mine, 0, group)), group)


def _lowest_rank(is_meant: bool, group: Group, *, comes_later: bool = False) -> int | None:
    """Return the lowest rank that means itself, if any does; one that ``comes_later`` only where no other does."""
    world = dist.get_world_size(group)
    place = dist.get_rank(group) + world * comes_later if is_meant else 2 * world
    found = int(all_reduce(torch.tensor([place], dtype=torch.int64), dist.ReduceOp.MIN, group).item())
    return None if found == 2 * world else found % world
