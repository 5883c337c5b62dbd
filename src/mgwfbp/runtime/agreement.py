"""All ranks run the same plan, or all of them hold an error that says what differs."""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch.distributed as dist

from mgwfbp.errors import PlanError
from mgwfbp.measure.agreement import first_line, gather
from mgwfbp.plan import MergePlan
from mgwfbp.units import plural, quote

__all__ = ["agree_on_plan"]

Groups = Sequence[Sequence[str]] | None  # of a plan; None where DDP's own buckets are wanted


def agree_on_plan(
    prepare: Callable[[], MergePlan | None], group: dist.ProcessGroup | None = None, *, tunes: bool = False
) -> MergePlan | None:
    """Prepare a plan on every rank and compare; nobody gets one unless all have the same.

    ``prepare`` reads and checks this rank's plan and must not wait for others; None stands for DDP's own buckets.
    Where it fails on a rank, that rank raises what it met and the others name the rank. No rank's plan is taken for
    the others: ranks that were given different plans were started wrongly, and would mix up gradients of equal shape.
    ``tunes`` says whether this rank means to tune, which it cannot do alone.
    """
    plan, problem, caught = None, "", None
    try:
        plan = prepare()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem, caught = f"{type(error).__name__}: {first_line(error)}", error
    groups = None if plan is None else plan.groups
    said = [json.loads(text) for text in gather(json.dumps([problem, fingerprint(groups), tunes]), group)]
    if caught is not None:
        raise caught
    for rank, (other_problem, _, _) in enumerate(said):
        if other_problem:
            raise PlanError(f"rank {rank} has no plan to run: {other_problem}")
    if any(print_ != said[0][1] for _, print_, _ in said):
        raise PlanError(describe_difference([json.loads(text) for text in gather(json.dumps(groups), group)]))
    for rank, (_, _, others_tune) in enumerate(said):
        if others_tune != said[0][2]:
            raise PlanError(f"tune is {said[0][2]} on rank 0 and {others_tune} on rank {rank}; give all the same")
    return plan


def _describe_message(index: int, mine: Sequence[str], theirs: Sequence[str], other: int) -> str:
    """Name the first gradient in which a message of rank 0 and of another rank differ; whole ones may look alike."""
    counts = f"message {index} holds {plural(len(mine), 'gradient')} on rank 0 and {len(theirs)} on rank {other}"
    place = next(place for place, pair in enumerate(zip_longest(mine, theirs)) if pair[0] != pair[1])
    after = f" after {quote(mine[place - 1])}" if place else " first"
    if place >= len(mine):
        return f"{counts}, and there {quote(theirs[place])} comes{after}"
    if place >= len(theirs):
        return f"{counts}, and on rank 0 {quote(mine[place])} comes{after}"
    return f"{counts}: {quote(mine[place])} comes{after} on rank 0 and {quote(theirs[place])} on rank {other}"


def fingerprint(groups: Groups) -> str:
    """Return a short text that differs where the messages of two plans differ."""
    return "" if groups is None else hashlib.sha256(json.dumps(groups).encode()).hexdigest()


def describe_difference(by_rank: Sequence[Groups]) -> str:
    """Say which ranks differ from rank 0, and in which message first.

    >>> print(describe_difference([[["b"], ["a"]], [["b"], ["a"]], [["b", "a"]], None]))
    the ranks have different plans: message 0 holds 1 gradient on rank 0 and 2 on rank 2, and there 'a' comes after \
'b' (ranks that differ from rank 0: 2, 3); give every rank the same plan
    """
    others = [rank for rank, groups in enumerate(by_rank) if groups != by_rank[0]]
    shown = ", ".join(str(rank) for rank in others[:8]) + (", …" if len(others) > 8 else "")
    first, other = by_rank[0], by_rank[others[0]]
    if first is None or other is None:
        has = ["no plan" if groups is None else "a plan" for groups in (first, other)]
        difference = f"rank 0 has {has[0]}, rank {others[0]} {has[1]}"
    else:
        index, mine, theirs = next(
            (index, mine, theirs) for index, (mine, theirs) in enumerate(zip_longest(first, other)) if mine != theirs
        )
        difference = _describe_message(index, mine or [], theirs or [], others[0])
    return (
        f"the ranks have different plans: {difference} (ranks that differ from rank 0: {shown}); "
        "give every rank the same plan"
    )
