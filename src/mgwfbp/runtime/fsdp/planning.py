"""A plan for FSDP2 where none is given: from a trace and a cost, or from what is measured on the spot: `make_plan`.

[Note: memory where no limit is given]
On a GPU a plan may take what the smallest of the ranks' devices has (`USABLE` of it, since the allocator loses some and
NCCL needs its own) less what the measured step needed besides parameters and gradients, which is its activations.
Where no plan fits into that it is what wrapping by block needs. Without a measured step, and on a host, there is no
limit. Where less memory costs time every group is then kept, as with ``reshard_after_forward=False``.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from mgwfbp.cost import Cost, LinearCost
from mgwfbp.costs import ShardedCost, cost_with_halves
from mgwfbp.errors import MeasureError, PlanError
from mgwfbp.files import naming, read_json
from mgwfbp.fsdp import FsdpPlan, predict_fsdp
from mgwfbp.fsdp_units import ROOT, as_if_reached, whole_units, with_dtypes, without_bytes
from mgwfbp.measure.agreement import agree_on_trace, broadcast_text, reduce_values, together, try_together
from mgwfbp.measure.allreduce import measure_halves
from mgwfbp.measure.backward import measure_backward, plain_passes
from mgwfbp.measure.beside import Load, load_beside, measure_taken
from mgwfbp.measure.modules import own_bytes, trained_dtypes, unit_bytes
from mgwfbp.measure.workload import LossFn, default_loss
from mgwfbp.memory import STATES, Precision
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import plan_by_block
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_bytes, parse_bytes, plural, quote

__all__ = ["MOST_UNKNOWN", "FsdpInputs", "FsdpPlanning", "Place", "make_plan", "plan_together"]

_log = logging.getLogger("mgwfbp")

Path = str | os.PathLike[str]
# A short look: medians of so many steps, and about so long on the network.
STEPS, WARMUP, BUDGET_S = 5, 2, 3.0
# The network is measured up to the model's bytes, or to these; larger messages go on at the last slope.
MOST_BYTES = 2**28
# Part of a device's memory that is planned with; and of the parameters that may be frozen and in no trace.
USABLE, MOST_UNKNOWN = 0.9, 0.05


class FsdpPlanning(NamedTuple):
    """A plan, the same on all ranks, and what it was made of."""

    plan: FsdpPlan
    trace: ModelTrace
    cost: Cost


@dataclass(frozen=True, slots=True)
class FsdpInputs:
    """What there is to plan with."""

    NAMES: ClassVar[tuple[str, ...]] = ("batch", "loss_fn", "trace", "cost", "memory_limit")

    batch: Any = None
    loss_fn: LossFn | None = None
    trace: ModelTrace | Path | None = None
    cost: Cost | Path | None = None
    memory_limit: int | str | None = None

    def given(self) -> list[str]:
        """Return the names of what is there."""
        return [name for name in self.NAMES if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where FSDP2 shards, and what: what is said in arguments of torch's."""

    group: dist.ProcessGroup | None  # who must have the same plan; None stands for all
    shards: dist.ProcessGroup | None  # whom gathers and reduce-scatters are between
    device: torch.device
    param_dtype: torch.dtype | None = None  # in which parameters are gathered, where not in their own
    reduce_dtype: torch.dtype | None = None  # and gradients sent
    is_offloaded: bool = False  # the host has a rank's share
    ignored: frozenset[int] = frozenset()  # ids of parameters that each rank has whole

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, arguments: Mapping[str, Any]) -> "Place":
        """Read torch's mesh, its policies for precision and offloading, and which parameters it ignores."""
        mesh, policy = arguments.get("mesh"), arguments.get("mp_policy")
        kind = mesh.device_type if mesh is not None else _accelerator()
        param_dtype = getattr(policy, "param_dtype", None)
        return cls(
            group,
            None if mesh is None else mesh.get_group(mesh.ndim - 1),
            torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind),
            param_dtype,
            getattr(policy, "reduce_dtype", None) or param_dtype,
            isinstance(arguments.get("offload_policy"), torch.distributed.fsdp.CPUOffloadPolicy),
            frozenset(map(id, arguments.get("ignored_params", ()))),
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """In which precision the model computes, where not in its own."""
        is_short = self.param_dtype is not None and self.param_dtype.itemsize == 2
        return self.param_dtype if is_short else None

    def precision_of(self, model: nn.Module) -> Precision:
        """Return what is gathered and sent for each byte of the model's parameters, whatever types these have."""
        every = [one for one in model.parameters() if id(one) not in self.ignored]
        trained = [one for one in every if one.requires_grad]
        gather, reduce = _ratio(self.param_dtype, every), _ratio(self.reduce_dtype, trained)
        return Precision(gather, reduce, kept=0.0 if self.is_offloaded else 1.0)


def _ratio(dtype: torch.dtype | None, parameters: Collection[nn.Parameter]) -> float:
    """Return what parameters take in a type for each byte that they take in their own."""
    own = sum(map(own_bytes, parameters))
    if dtype is None or not own:
        return 1.0
    return sum(own_bytes(one) // one.element_size() for one in parameters) * dtype.itemsize / own


def _accelerator() -> str:
    """Return what FSDP2 shards over where no mesh says it, as torch does."""
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return "cpu"


@dataclass(frozen=True, slots=True)
class _Read:
    """What was given, read and checked; None where it is to be measured."""

    trace: ModelTrace | None
    cost: Cost | None
    limit: int | None
    root: Collection[str]

    def kinds(self) -> list[float]:
        """Return numbers that are the same on ranks that were given the same kinds of things."""
        return [float(self.trace is None), float(self.cost is None), float(-1 if self.limit is None else self.limit)]


def make_plan(
    model: nn.Module, inputs: FsdpInputs, place: Place, find_root: Callable[[], Collection[str]]
) -> FsdpPlanning:
    """Plan, measuring what is not given; the first rank plans for all. All ranks of the group must call it.

    Args:
        model: on its device, not sharded yet; it is left as it was.
        inputs: what was given.
        place: who takes part.
        find_root: returns the units that stay with the root, or raises where the model cannot be wrapped.

    Raises:
        PlanError: on every rank, where something is missing or cannot be planned with, or no plan fits.
        MeasureError: on every rank, where something cannot be measured.
    """
    read = plan_together(lambda: _read(model, inputs, place, find_root()), place.group)
    kinds = read.kinds()
    most = reduce_values([*kinds, *(-kind for kind in kinds)], "max", place.group)
    for name, high, low in zip(("trace", "cost", "memory_limit"), most[:3], most[3:], strict=True):
        if high != -low:
            raise PlanError(f"{name} is not the same on all ranks: give it to every rank or to none")
    trace, room = (read.trace, None) if read.trace is not None else _measured_trace(model, inputs, place)
    trace = _as_sharded(trace, model, place)
    cost = read.cost or _measured_cost(model, inputs, place, trace, can_run=read.trace is None)
    precision = place.precision_of(model)
    by_block = predict_fsdp(trace, cost, plan_by_block(trace, read.root), precision=precision).memory_bytes
    is_first = dist.get_rank(place.group) == 0

    def plan() -> FsdpPlan | None:
        if not is_first:
            return None
        made = partial(plan_fsdp, trace, cost, precision=precision, root=read.root)
        if read.limit is not None or room is None:
            return made(memory_limit=read.limit)
        return plan_in_room(made, room, by_block)

    found = plan_together(plan, place.group)
    if found is not None and read.limit is None and room is None:
        _warn_of_memory(found, by_block)
    # Rank 0 plans: libm differs between processors, so two ranks could compute different plans.
    text = broadcast_text("" if found is None else found.dumps(), 0, place.group)
    return FsdpPlanning(found or FsdpPlan.from_json(json.loads(text)), trace, cost)


def plan_in_room(made: Callable[..., FsdpPlan], room: int, by_block: int) -> FsdpPlan:
    """Return a plan that fits on a device, and where none does one in the memory of wrapping by block, with a warning.

    Args:
        made: plans within ``memory_limit``, or raises a PlanError.
        room: what the device has, which nobody asked for, so that it refuses nothing.
        by_block: what wrapping by block needs.
    """
    found = made(memory_limit=None)
    if found.predicted["memory_bytes"] <= room:
        return found
    try:
        return made(memory_limit=room)
    except PlanError as problem:
        _log.warning("planned in the memory of wrapping by block, %s: %s", format_bytes(by_block), problem)
        return made(memory_limit=by_block)


def _warn_of_memory(plan: FsdpPlan, by_block: int) -> None:
    """Say what a plan holds more than wrapping by block, where nothing said how much memory there is."""
    if plan.predicted["memory_bytes"] > by_block:
        kept, groups = plan.reshard.count(False), plural(len(plan.groups), "group")
        held = format_bytes(plan.predicted["memory_bytes"])
        _log.warning(
            "%s",
            f"no memory_limit: the plan keeps {kept} of {groups} gathered from the forward to the backward pass, and a "
            f"rank holds {held} beside activations, wrapped by block {format_bytes(by_block)}; give memory_limit= to "
            "reshard",
        )


def plan_together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Do local work on every rank; where it fails a rank raises what it met, and the others say which rank failed."""
    result, failed, caught = try_together(work, group)
    if caught is not None:
        raise caught
    if failed is not None:
        raise PlanError(f"rank {failed[0]} cannot plan: {failed[1]}")
    return result


def _read(model: nn.Module, inputs: FsdpInputs, place: Place, root: Collection[str]) -> _Read:
    """Read files, and refuse what cannot be planned with or measured."""
    if inputs.trace is None and inputs.batch is None:
        raise PlanError(
            "there is no plan and nothing to make one of: give batch=, what the model is called with, so that it can "
            "be measured, or trace=, or plan="
        )
    if not isinstance(inputs.trace, ModelTrace | str | os.PathLike | None):
        raise PlanError(f"trace is {quote(inputs.trace)}, expected a ModelTrace, the path or the name of one")
    if not (isinstance(inputs.cost, str | os.PathLike | None) or callable(inputs.cost)):
        raise PlanError(f"cost is {quote(inputs.cost)}, expected a Cost or the path of one")
    limit = inputs.memory_limit
    if isinstance(limit, str):
        try:
            limit = parse_bytes(limit)
        except ValueError as problem:
            raise PlanError(f"memory_limit is {problem}") from None
    if limit is not None and not (isinstance(limit, int | float) and limit > 0):
        raise PlanError(f"memory_limit is {quote(limit)}, expected bytes, more than 0, or a size such as 40GiB")
    trace = inputs.trace
    if isinstance(trace, str | os.PathLike):
        trace = load_trace(trace)
    if trace is not None:
        _check_trace(trace, model, place)
    else:
        _check_measurable(model, place.device)
    cost = inputs.cost
    if isinstance(cost, str | os.PathLike):
        data = read_json(cost)
        with naming(cost):
            cost = cost_with_halves(data)
    workers = dist.get_world_size(place.shards)
    if cost is not None and cost.workers != workers:
        raise PlanError(
            f"cost is of {plural(cost.workers, 'worker')}, and parameters are sharded over {workers}: measure it there"
        )
    return _Read(trace, cost, limit, root)


def _as_sharded(trace: ModelTrace, model: nn.Module, place: Place) -> ModelTrace:
    """Return a trace with the dtypes of the model, and without the bytes of parameters that are not sharded."""
    dtypes = trained_dtypes(model, is_trained="frozen" not in trace.source, ignored=place.ignored)
    names = {name for name, one in model.named_parameters() if id(one) in place.ignored}
    return without_bytes(with_dtypes(trace, dtypes), names)


def _check_trace(trace: ModelTrace, model: nn.Module, place: Place) -> None:
    """Raise unless a trace is one of this model's units."""
    knows_frozen = "frozen" in trace.source
    size = sum(one.nbytes for one in model.parameters())
    frozen = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    if not knows_frozen and frozen > MOST_UNKNOWN * size:
        raise PlanError(
            f"{format_bytes(frozen)} of the model's {format_bytes(size)} of parameters are frozen, and the trace "
            f"of {quote(trace.model)} does not have them: measure it again, or give batch="
        )
    mine = unit_bytes(model, is_trained=not knows_frozen, ignored=place.ignored)
    difference = _first_difference(mine, _as_sharded(trace, model, place))
    if difference is not None:
        raise PlanError(
            f"the trace of {quote(trace.model)} is not one of this model ({difference}): measure it again, or give "
            "batch="
        )


def _first_difference(mine: Mapping[str, tuple[int, int]], trace: ModelTrace) -> str | None:
    """Say which unit is not in the model or not in a trace, or of the first that differs what it has in each."""
    theirs = {name: (unit.num_bytes, unit.trained_bytes) for name, unit in whole_units(as_if_reached(trace)).items()}
    for name in sorted((mine.keys() ^ theirs.keys()) - {ROOT}):
        return f"{quote(name)} is in {'the model' if name in mine else 'the trace'} only"
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name, (0, 0)), theirs.get(name, (0, 0))
        if here != there:
            sizes = (f"{stored} B, {trained} of them trained" for stored, trained in (here, there))
            return f"{quote(name) if name else 'what is in no module'} has {', and in the trace '.join(sizes)}"
    return None


def _check_measurable(model: nn.Module, device: torch.device) -> None:
    """Raise where the model cannot run as it is."""
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"nothing is measured on {device.type}: give trace= and cost=, or plan=")
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise PlanError(
                f"parameter {quote(name)} is on {parameter.device}, and FSDP2 trains on {device.type}: move the model "
                "there, so that it can be measured, or give trace="
            )


def _measured_trace(model: nn.Module, inputs: FsdpInputs, place: Place) -> tuple[ModelTrace, int | None]:
    """Measure the model on all ranks at once, as it trains; a gradient is ready when it is on the slowest.

    Also returns [Note: memory where no limit is given], of the rank that has least.
    """
    on_gpu = place.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
        before = torch.cuda.memory_allocated(place.device)

    def measure() -> ModelTrace:
        loss_fn, autocast_dtype = inputs.loss_fn or default_loss, place.autocast_dtype
        return measure_backward(model, inputs.batch, loss_fn, steps=STEPS, warmup=WARMUP, autocast_dtype=autocast_dtype)

    trace = agree_on_trace(together(measure, place.group), place.group)
    if not on_gpu:
        return trace, None
    taken = torch.cuda.max_memory_allocated(place.device) - before
    total = torch.cuda.get_device_properties(place.device).total_memory
    room = room_beside(model, place, total, before, taken - trace.grad_bytes)
    torch.cuda.empty_cache()  # what a step of the whole model took is more than sharded ones will
    return trace, int(reduce_values([room], "min", place.group)[0])


def room_beside(model: nn.Module, place: Place, total: int, before: int, activations: int) -> float:
    """Return what a device has for what FSDP2 shards and gathers.

    Args:
        model: which was whole on the device.
        place: says which of its parameters each rank has whole: these, their gradients and states need room, too.
        total: bytes of the device.
        before: bytes that were taken before the measured step.
        activations: and those that it took beside gradients.
    """
    sharded = sum(one.nbytes for one in model.parameters() if id(one) not in place.ignored)
    trained = sum(one.nbytes for one in model.parameters() if id(one) in place.ignored and one.requires_grad)
    others = before - sharded  # of what is ignored, buffers, the batch, and whatever else is there
    return USABLE * total - max(0, activations) - max(0, others) - (1 + STATES) * trained


def _measured_cost(model: nn.Module, inputs: FsdpInputs, place: Place, trace: ModelTrace, *, can_run: bool) -> Cost:
    """Measure gathers and reduce-scatters between those that share parameters.

    Of a model that ``can_run`` also what they take from the computation; not on a host, where FSDP2 waits for every
    message, nor beside messages of the model's own.
    """
    if dist.get_world_size(place.shards) == 1:
        return LinearCost(1, 0.0, 0.0)
    gathered_bytes = [unit.num_bytes for unit in whole_units(trace).values()]
    most = max(8, min(sum(gathered_bytes), MOST_BYTES))
    # Other ranks than those that share parameters may wait for the plan, too.
    cost = together(lambda: measure_halves(place.shards, place.device, max_bytes=most, budget_s=BUDGET_S), place.group)
    sends = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if not can_run or place.device.type != "cuda" or sends:
        return cost
    load = load_beside(cost, trace.compute_s, sum(gathered_bytes) // len(gathered_bytes))
    return cost_beside(model, inputs, place, cost, load)


def cost_beside(model: nn.Module, inputs: FsdpInputs, place: Place, cost: ShardedCost, load: Load) -> ShardedCost:
    """Return a cost with what its messages take from the model's passes; without that where it cannot be measured."""
    loss_fn, autocast_dtype = inputs.loss_fn or default_loss, place.autocast_dtype
    try:
        with contextlib.ExitStack() as stack:
            made = plain_passes(model, inputs.batch, loss_fn, autocast_dtype=autocast_dtype)
            passes = together(lambda: stack.enter_context(made), place.shards)
            return measure_taken(passes, cost, load, place.shards, place.device)
    except MeasureError as problem:  # the same on all ranks that share parameters
        _log.warning("planned without what messages take from the computation: %s", problem)
        return cost
    finally:
        torch.cuda.empty_cache()  # what a step of the whole model took is more than sharded ones will
