"""Strategies by name: `parallel` wraps a module in a DistributedDataParallel that averages gradients in one way."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mgwfbp.cost import Cost, LinearCost
from mgwfbp.costs import low_precision_cost
from mgwfbp.errors import PlanError, StrategyError
from mgwfbp.plan import SHORT_WIRES, MergePlan
from mgwfbp.planners import Planner, find_plan, plan_wfbp, plan_wire, planner_of
from mgwfbp.planners.wire import DEFAULT_TOLERANCE
from mgwfbp.runtime.baselines import NaiveSgd, ParameterServers, assign_owners, push_and_pull, send_after_backward
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.reducer.kinds import Kind, split_by_kind
from mgwfbp.runtime.reducer.parameters import uncompiled
from mgwfbp.trace import LayerTrace, ModelTrace
from mgwfbp.units import quote

__all__ = ["STRATEGIES", "parallel", "plan_for", "split_wire"]

STRATEGIES = ("auto", "ddp", "naive", "wfbp", "single", "bucket", "mgwfbp", "optimal", "cautious", "ps")

# Strategies whose plan depends on times, not only on the order of the gradients.
_TIMED = ("mgwfbp", "optimal", "cautious")
_FREE = LinearCost(workers=1, startup_s=0.0, per_byte_s=0.0)  # for planners that take a cost and do not look at it


def parallel(
    module: nn.Module,
    strategy: str | MergePlan | os.PathLike[str],
    *,
    trace: ModelTrace | None = None,
    cost: Cost | None = None,
    wire_tolerance: float = DEFAULT_TOLERANCE,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Wrap a module so that its gradients are averaged by a strategy. All ranks must call it alike.

    ``strategy`` is one of `STRATEGIES`, ``bucket-N`` for buckets of N MiB, a plan, or the path of one:

    ==========  =====================================================================================
    auto        the tuner finds out, in the first steps
    ddp         torch's own buckets, and nothing measured
    naive       one message per gradient, all after the backward pass (S-SGD, Eq. (3))
    wfbp        one message per gradient, as soon as it is ready
    single      one message for all (SyncEASGD)
    bucket      messages as large as torch's buckets, filled in ready order
    mgwfbp      the paper's Algorithm 1; needs ``trace`` and ``cost``
    optimal     the shortest step there is; needs ``trace`` and ``cost``
    ps          every gradient through the rank that owns it, as soon as it is ready (parameter server)
    ==========  =====================================================================================

    With ``+bf16`` or ``+fp16`` behind its name a strategy sends in low precision (but for naive and ps): ``auto`` and
    ``optimal`` the messages for which it shortens the step, the others all, ``ddp`` those of ``bucket``.

    Where no ``trace`` is given gradients are taken to be ready in the reverse order of ``module.named_parameters()``.
    A plan's message that would merge several dtypes or devices, or a sparse gradient with others, becomes several.
    All other strategies average alike: up to the order of sums, training is the same with each.

    Args:
        module: the model.
        strategy: see above.
        trace: when gradients are ready.
        cost: what a message takes.
        wire_tolerance: which part longer than the shortest the step of ``optimal``, or ``auto``, may be, to keep
            precision.
        **ddp_arguments: as `mgwfbp.DistributedDataParallel` takes them.

    Raises:
        StrategyError: where the strategy is unknown, lacks a trace or a cost, or cannot do what is asked.
        PlanError: on every rank, where the plan cannot be run or ranks differ.
    """
    if isinstance(strategy, MergePlan) or not isinstance(strategy, str) or _is_path(strategy):
        return DistributedDataParallel(module, plan=strategy, **ddp_arguments)
    name, wire = split_wire(strategy)
    if wire is not None:
        ddp_arguments["wire"] = wire
    if name == "auto" or strategy == "ddp":
        if ddp_arguments.get("wire") is not None:
            ddp_arguments["wire_tolerance"] = wire_tolerance
        return DistributedDataParallel(module, tune=name == "auto", **ddp_arguments)
    planner = partial(plan_wire, wire=wire, tolerance=wire_tolerance) if wire and name == "optimal" else None
    plan = plan_for(module, strategy, trace=trace, cost=cost, delayed=_delayed(ddp_arguments), planner=planner)
    if strategy == "naive" and ddp_arguments.get("skip_all_reduce_unused_params"):
        raise StrategyError("strategy 'naive' waits for all gradients; leave out skip_all_reduce_unused_params")
    if strategy == "ps" and (sparse := _sparse_names(module) & set(plan.layer_names)):
        raise StrategyError(f"strategy 'ps' cannot average the sparse gradient of {quote(min(sparse))}; use another")
    ddp = DistributedDataParallel(module, plan=plan, **ddp_arguments)
    if strategy == "naive":
        ddp.register_comm_hook(NaiveSgd(ddp.process_group, len(plan.layer_names)), send_after_backward)
    if strategy == "ps":
        parameters = {uncompiled(name): parameter for name, parameter in module.named_parameters()}
        owned = [parameters[uncompiled(name)] for name in plan.layer_names]
        owners = assign_owners([parameter.nbytes for parameter in owned], ddp.process_group.size())
        by_parameter = {id(parameter): owner for parameter, owner in zip(owned, owners, strict=True)}
        ddp.register_comm_hook(ParameterServers(by_parameter, ddp.process_group), push_and_pull)
    return ddp


def plan_for(
    module: nn.Module,
    strategy: str,
    *,
    trace: ModelTrace | None = None,
    cost: Cost | None = None,
    delayed: frozenset[str] = frozenset(),
    planner: Planner | None = None,
) -> MergePlan:
    """Return the plan of a strategy that has one, for a module's gradients.

    Args:
        module: the model.
        strategy: one of `STRATEGIES` but ``auto`` and ``ddp``, or ``bucket-N``, any with ``+bf16`` or ``+fp16``.
        trace: when gradients are ready; needed by ``mgwfbp`` and ``optimal``.
        cost: what a message takes; needed by the same.
        delayed: names of gradients that are left out.
        planner: who plans, if not the strategy's own planner.

    Raises:
        StrategyError: where the strategy is unknown, or lacks a trace or a cost.

    >>> plan_for(nn.Linear(2, 3), "wfbp").groups
    (('bias',), ('weight',))
    """
    planner = planner or _planner(strategy)
    if split_wire(strategy)[0] in _TIMED and (trace is None or cost is None):
        absent = " and ".join(name for name, given in (("trace", trace), ("cost", cost)) if given is None)
        raise StrategyError(
            f"strategy {quote(strategy)} needs a trace and a cost, and no {absent} is given; "
            "measure them with `mgwfbp measure backward` and `mgwfbp measure allreduce`"
        )
    if trace is None:
        trace = _guessed_trace(module, delayed)
    # What is predicted is a plan's step: naive S-SGD and a parameter server take another one.
    hooked = strategy in ("naive", "ps")
    plan = planner(trace, _FREE) if cost is None or hooked else find_plan(trace, cost, planner)
    return replace(split_by_kind(plan, _kinds(module)), planner=strategy)


def split_wire(strategy: str) -> tuple[str, str | None]:
    """Return a strategy's name without what it says of precision, and the precision in which it may send.

    >>> split_wire("bucket-5+bf16"), split_wire("wfbp")
    (('bucket-5', 'bfloat16'), ('wfbp', None))
    """
    name, plus, short = strategy.partition("+")
    wires = {short: wire for wire, short in SHORT_WIRES.items()}
    return (name, wires[short]) if plus and short in wires else (strategy, None)


def _planner(strategy: str) -> Planner:
    name, wire = split_wire(strategy)
    if wire is not None and name not in ("naive", "ps"):
        return partial(plan_wire, wire=wire) if name == "optimal" else partial(_plan_all_in, wire, _planner(name))
    if strategy in ("naive", "ps"):
        return plan_wfbp
    try:
        return planner_of(strategy)
    except PlanError:
        raise StrategyError(
            f"strategy {quote(strategy)} is unknown, expected one of {', '.join(STRATEGIES)}, bucket-N for N MiB, or "
            "the path of a plan"
        ) from None


def _plan_all_in(wire: str, planner: Planner, trace: ModelTrace, cost: Cost) -> MergePlan:
    """Plan for messages that all travel in low precision."""
    plan = planner(trace, low_precision_cost(cost))
    return replace(plan, wire=(wire,) * plan.num_groups)


def _is_path(text: str) -> bool:
    return text.endswith(".json") or os.sep in text


def _delayed(ddp_arguments: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, _ in ddp_arguments.get("delay_all_reduce_named_params") or ())


def _guessed_trace(module: nn.Module, delayed: frozenset[str]) -> ModelTrace:
    """Return a trace without times in which the last parameter is ready first."""
    ignored = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *delayed}
    layers = [
        LayerTrace(uncompiled(name), 0.0, parameter.nbytes)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    return ModelTrace(type(module).__name__, 0.0, tuple(reversed(layers)))


def _sparse_names(module: nn.Module) -> set[str]:
    return {
        uncompiled(f"{prefix}.weight") if prefix else "weight"
        for prefix, one in module.named_modules()
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse
    }


def _kinds(module: nn.Module) -> dict[str, Kind]:
    """Return by name what must be equal within a message."""
    named = [(uncompiled(name), parameter) for name, parameter in module.named_parameters()]
    sparse = _sparse_names(module)
    return {name: Kind(parameter.dtype, parameter.device, name in sparse) for name, parameter in named}
