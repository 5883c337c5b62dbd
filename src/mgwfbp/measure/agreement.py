"""All ranks hold the identical trace and cost, or all of them hold the same error."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.errors import MeasureError, MgwfbpError
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import quote

__all__ = ["agree_on_cost", "agree_on_trace", "backend_name", "first_line", "gather", "problem_of", "together"]

T = TypeVar("T")
AnyCost = TypeVar("AnyCost", LinearCost, PiecewiseCost)


def gather(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return what every rank of the group says, by rank. All ranks must call it."""
    said: list[str] = [""] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, text, group=group)
    except RuntimeError as error:
        raise MeasureError(f"a rank did not answer, it may have died: {first_line(error)}") from error
    return said


def backend_name(group: dist.ProcessGroup | None = None) -> str:
    """Return what people call the backend of a group: gloo with one thread (`mgwfbp.runtime.gloo`) is gloo."""
    name = str(dist.get_backend(group))
    return "gloo" if name.startswith("gloo") else name


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message of one line."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def problem_of(error: BaseException) -> str:
    """Return what other ranks are told of an error: its first line, and its type unless it is ours, which says all."""
    return f"{'' if isinstance(error, MgwfbpError) else f'{type(error).__name__}: '}{first_line(error)}"


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do local work on every rank; where it fails on one, fail on all, so that nobody waits for the one that failed.

    The work itself must not wait for other ranks.
    """
    problem, caught, result = "", None, None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem, caught = problem_of(error), error
    for rank, said in enumerate(gather(problem, group)):
        if said:
            raise MeasureError(f"rank {rank} failed: {said}") from caught
    return result  # type: ignore[return-value]  # the work returned, or we raised


def agree_on_trace(trace: ModelTrace, group: dist.ProcessGroup | None = None) -> ModelTrace:
    """Combine the traces of all ranks: a gradient is ready when it is on the slowest.

    Every rank gets the same trace. The ready order is that of the combined times; ties keep rank 0's. Ranks whose
    models differ get the same error, which names the first difference. Sparse gradients are as large as each rank's
    batch makes them: the largest counts.
    """
    traces = [ModelTrace.from_json(json.loads(said)) for said in gather(trace.dumps(), group)]
    first, sizes = traces[0], _agreed_sizes(traces)
    forward_s = max(other.forward_s for other in traces)
    ready_s = {layer.name: 0.0 for layer in first.layers}
    for other in traces:
        for layer, moment_s in zip(other.layers, other.ready_s, strict=True):
            ready_s[layer.name] = max(ready_s[layer.name], moment_s)
    order = sorted((layer.name for layer in first.layers), key=lambda name: ready_s[name])
    layers = layers_of([(name, ready_s[name], sizes[name]) for name in order], forward_s)
    source = {**first.source, "ranks": len(traces), "combined": "slowest rank"}
    return ModelTrace(first.model, forward_s, layers, source)


def _agreed_sizes(traces: Sequence[ModelTrace]) -> dict[str, int]:
    """Return the bytes of every gradient, or raise unless all ranks have the same ones of the same size."""
    sizes = [{layer.name: layer.grad_bytes for layer in trace.layers} for trace in traces]
    varying = {name for trace in traces for name in trace.source.get("sparse", [])}
    for rank, theirs in enumerate(sizes):
        for name in [*sizes[0], *theirs]:
            both = [sizes[0].get(name), theirs.get(name)]
            if both[0] != both[1] and (name not in varying or None in both):
                has = ["none" if size is None else f"{size} bytes" for size in both]
                raise MeasureError(
                    f"the models differ: gradient {quote(name)} is {has[0]} on rank 0 and {has[1]} on rank {rank}"
                )
    return {name: max(theirs[name] for theirs in sizes) for name in sizes[0]}


def agree_on_cost(cost: AnyCost, group: dist.ProcessGroup | None = None) -> AnyCost:
    """Combine the costs of all ranks: a message has arrived when it has on the slowest. Every rank gets the same."""
    kind = type(cost)
    said = [json.loads(text) for text in gather(cost.dumps(), group)]
    shapes = [(one["kind"], one["workers"], [size for size, _ in one.get("points", [])]) for one in said]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise MeasureError(f"the costs differ: rank 0 has {quote(shapes[0])}, rank {rank} {quote(shape)}")
    costs = [kind.from_json(one) for one in said]
    first = costs[0]
    if isinstance(first, PiecewiseCost):
        times = [max(column) for column in zip(*([time for _, time in one.points] for one in costs), strict=True)]
        return replace(first, points=tuple(zip((size for size, _ in first.points), times, strict=True)))
    return replace(
        first, startup_s=max(one.startup_s for one in costs), per_byte_s=max(one.per_byte_s for one in costs)
    )
