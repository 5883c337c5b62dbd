"""From a strategy's name to a wrapped model; what a planner needs is measured if it was not given."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp.cost import Cost
from mgwfbp.costs import WireCost, cost_with_halves, cost_with_low, halved_words
from mgwfbp.errors import TrainError
from mgwfbp.files import naming, read_json
from mgwfbp.measure.agreement import agree_on_trace, together
from mgwfbp.measure.allreduce import measure_allreduce, measure_halves, measure_wire
from mgwfbp.measure.backward import measure_backward
from mgwfbp.measure.factory import model_name
from mgwfbp.measure.meta import built_on
from mgwfbp.plan import SHORT_WIRES, MergePlan
from mgwfbp.planners.sharded import SHARDED, plan_sharded
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.messages.wire import check_wire
from mgwfbp.runtime.strategies import STRATEGIES, parallel, plan_for, split_wire
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.models import build_model, classification_loss
from mgwfbp.units import quote

__all__ = ["Wrapped", "assumed_words", "check_strategy", "needs_measuring", "wrap"]

# Strategies whose planners need a trace and a cost.
_PLANNED = ("mgwfbp", "optimal", "cautious")
# Plans are compared in so many steps at most, or in one of so many of the run.
_TUNE_STEPS, _TUNE_SHARE = 1200, 4
# How long the network may be measured when a run begins.
_SWEEP_BUDGET_S = 3.0
_SWEEP_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model whose gradients are averaged, and what its plan was made from."""

    ddp: DistributedDataParallel
    trace: ModelTrace | None
    cost: Cost | None
    sharded_plan: MergePlan | None = None  # for the sharded optimizer, which knows what to do without


def is_plan(strategy: str) -> bool:
    """Say whether a strategy is the path of a plan."""
    return strategy.endswith(".json") or os.sep in strategy


def _name(config: TrainConfig) -> str:
    """Return the strategy's name; the precision in which it may send stands behind it."""
    if config.wire is None or is_plan(config.strategy):
        return config.strategy
    return f"{config.strategy}+{SHORT_WIRES[config.wire]}"


def _wire_of(config: TrainConfig) -> str | None:
    """Return the precision in which messages may travel, however it was said."""
    return config.wire or split_wire(config.strategy)[1]


def _load_cost(config: TrainConfig) -> Cost | None:
    """Return the cost that was given, if one was, with those of halves or of low precision, whichever the run sends."""
    if config.cost is None:
        return None
    data = read_json(config.cost)
    with naming(config.cost):
        return cost_with_halves(data) if config.shard_optimizer else cost_with_low(data, _wire_of(config))


def _is_planned(config: TrainConfig) -> bool:
    return split_wire(config.strategy)[0] in _PLANNED


def assumed_words(config: TrainConfig, cost: Cost | None) -> str:
    """Say what a plan of both precisions was made without; empty where there was its cost, or no such plan."""
    wire = _wire_of(config)
    if wire is None or cost is None or isinstance(cost, WireCost) or not _is_planned(config):
        return ""
    return halved_words(wire)


def needs_measuring(config: TrainConfig) -> bool:
    """Say whether a run begins with measurements."""
    return _is_planned(config) and (config.trace is None or config.cost is None)


def check_strategy(config: TrainConfig, *, num_classes: int, channels: int) -> None:
    """Raise unless the strategy, plan, trace and cost of a run exist and are for its model; builds no weights."""
    with built_on(torch.device("meta")):
        model = build_model(config.model, num_classes=num_classes, channels=channels)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise TrainError(f"model {quote(config.model)} has no parameter that requires a gradient: nothing to train")
    base, suffix = split_wire(config.strategy)
    if config.wire is not None and base not in ("auto", "optimal") and not is_plan(config.strategy):
        short = SHORT_WIRES[config.wire]
        raise TrainError(
            f"wire {quote(config.wire)} lets auto, optimal or a plan choose messages for it, and the strategy is "
            f"{quote(config.strategy)}: with {quote(f'{base}+{short}')} all its messages travel so"
        )
    if config.wire is not None and suffix is not None:
        raise TrainError(f"wire {quote(config.wire)} and strategy {quote(config.strategy)} both name a precision")
    if config.wire_tolerance is not None and (base not in ("optimal", "auto") or _wire_of(config) is None):
        raise TrainError(
            "wire_tolerance is for strategies 'optimal' and 'auto' with a wire; all others choose no precision: leave "
            "it out"
        )
    if config.shard_optimizer and (config.wire or suffix or base in ("naive", "ps")):
        raise TrainError(
            f"--shard-optimizer sends gradients itself, and so does "
            f"{quote(config.strategy if config.wire is None else 'wire ' + config.wire)}: leave one out"
        )
    if is_plan(config.strategy):
        plan = MergePlan.load(config.strategy)
        if not config.shard_optimizer:
            plan.check_all_reduced("`mgwfbp train` without --shard-optimizer")
        plan.check_covers(names, what="the model")
        check_wire(plan.wire, config.wire)
    elif base not in STRATEGIES or (suffix is not None and base in ("naive", "ps")):
        plan_for(model, config.strategy)  # bucket-N, or an error that lists what there is
    if config.trace is not None:
        layers = {layer.name for layer in load_trace(config.trace).layers}
        if layers != set(names):
            odd = sorted(layers ^ set(names))[0]
            raise TrainError(
                f"the trace {quote(config.trace)} is of another model: {quote(odd)} is in one of them only"
            )
    _load_cost(config)
    if _is_planned(config) and config.cost is None and config.workers == 1:
        raise TrainError(
            f"strategy {quote(config.strategy)} plans for the network between workers, and there is 1; "
            "start more, or give --cost"
        )


def wrap(
    module: nn.Module,
    config: TrainConfig,
    first_batch: Callable[[], tuple[Tensor, Tensor]],
    *,
    group: dist.ProcessGroup,
    num_steps: int,
    plan_before: str | None,
    is_tuned: bool,
) -> Wrapped:
    """Wrap a model on its device by the strategy of a run; gradients travel in ``group``. All ranks must call it.

    A run that goes on keeps the plan that it had (``plan_before``, JSON): measuring anew might give another, and with
    more than two ranks another order of sums. One whose tuner had settled (``is_tuned``) is not tuned again. A tuner
    compares plans in a quarter of the run's ``num_steps`` at most.
    """
    on_gpu = next(module.parameters()).device.type == "cuda"
    arguments: dict[str, Any] = {"process_group": group}
    if on_gpu:
        arguments["device_ids"] = [torch.cuda.current_device()]
    if plan_before is not None and (_is_planned(config) or is_tuned):
        plan = MergePlan.from_json(json.loads(plan_before))
        arguments["wire"] = next(filter(None, plan.wire), None)
        return _planned(module, config, plan, arguments)
    if is_tuned:  # and torch's own buckets were the fastest
        return Wrapped(parallel(module, "ddp", **arguments), None, None)
    if is_plan(config.strategy):
        return _planned(module, config, MergePlan.load(config.strategy), {**arguments, "wire": config.wire})
    if split_wire(config.strategy)[0] == "auto":
        arguments["tune_steps"] = min(_TUNE_STEPS, num_steps // _TUNE_SHARE)
    trace = load_trace(config.trace) if config.trace is not None else None
    cost = _load_cost(config)
    if _is_planned(config):
        if trace is None:
            trace = _measure_trace(module, config, first_batch, group)
        if cost is None:
            wire = _wire_of(config)
            measured = measure_halves if config.shard_optimizer else measure_allreduce
            cost = (measured if wire is None else partial(measure_wire, wire))(
                group,
                device=next(module.parameters()).device,
                max_bytes=max(8, trace.grad_bytes),
                budget_s=_SWEEP_BUDGET_S,
                max_rounds=_SWEEP_ROUNDS,
            )
    if config.wire_tolerance is not None:
        arguments["wire_tolerance"] = config.wire_tolerance
    if config.shard_optimizer and config.strategy == "optimal":
        plan = replace(plan_for(module, "optimal", trace=trace, cost=cost, planner=plan_sharded), planner=SHARDED)
        return replace(_planned(module, config, plan, arguments), trace=trace, cost=cost)
    return Wrapped(parallel(module, _name(config), trace=trace, cost=cost, **arguments), trace, cost)


def _planned(module: nn.Module, config: TrainConfig, plan: MergePlan, arguments: dict[str, Any]) -> Wrapped:
    """Wrap a model by a plan, whose gathers are the sharded optimizer's, if there is one.

    A plan of another planner, without gathers, says nothing of them; one for a sharded optimizer all-reduces all then.
    """
    is_sharded = config.shard_optimizer and bool(plan.gathers or plan.planner == SHARDED)
    ddp = parallel(module, replace(plan, gathers=(), predicted={}) if plan.gathers else plan, **arguments)
    return Wrapped(ddp, None, None, plan if is_sharded else None)


def _measure_trace(
    module: nn.Module,
    config: TrainConfig,
    first_batch: Callable[[], tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
) -> ModelTrace:
    def local() -> ModelTrace:
        images, labels = first_batch()
        part = config.batch_size // config.accumulation_steps
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return measure_backward(
            module,
            images[:part],
            lambda output: classification_loss(output, labels[:part], label_smoothing=config.label_smoothing),
            name=model_name(config.model, module) if ":" in config.model else config.model,
            accumulation_steps=config.accumulation_steps,
            autocast_dtype=dtypes.get(config.autocast or ""),
        )

    dist.barrier(group)  # all of them measure at the same time, as they train
    return agree_on_trace(together(local, group), group)
