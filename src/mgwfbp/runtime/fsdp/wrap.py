"""Torch's FSDP2 with the groups, the resharding and the prefetching of a plan: `fully_shard`."""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import or_
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError, StrategyError
from mgwfbp.fsdp import FsdpPlan, bound_words
from mgwfbp.fsdp_units import whole_units
from mgwfbp.measure.agreement import agree_on_fsdp_plan, differing_field, reduce_values
from mgwfbp.measure.modules import called_of, kept_units, outer_of, unit_bytes, unit_names
from mgwfbp.measure.workload import LossFn
from mgwfbp.record import check_items
from mgwfbp.runtime.fsdp.checks import check_dtypes, checked_arguments, listed
from mgwfbp.runtime.fsdp.planning import MOST_UNKNOWN, FsdpInputs, FsdpPlanning, Place, make_plan, plan_together
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_seconds, plural, quote

__all__ = ["FsdpPlanning", "fully_shard", "plan_fully_shard"]

_log = logging.getLogger("mgwfbp")
AnyModule = TypeVar("AnyModule", bound=nn.Module)

SILENT = "is not called by itself"
# What a plan says of modules that must be there, by where it says it; of several the last counts.
SAID = {
    "at_root": SILENT,
    "read_elsewhere": "has parameters that are read while it does not run",
    "returned": "returns a parameter of its own, or a view of one",
    "no_gradient": "is trained, and returns nothing that gets a gradient",
}
CHOSEN = "is put there by the plan"


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """What becomes of a plan for a model."""

    groups: tuple[tuple[nn.Module, ...], ...]  # in forward order, none empty
    reshard: tuple[bool, ...]  # of each
    is_reached: tuple[bool, ...]  # by the backward pass, of each
    idle: tuple[nn.Module, ...]  # that no step uses
    kept: Mapping[str, str]  # units that stay with the root, and why
    frozen: tuple[int, int]  # parameters that get no gradient and are in no unit, and their bytes


def fully_shard(
    model: AnyModule,
    plan: FsdpPlan | str | os.PathLike[str] | None = None,
    *,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    trace: ModelTrace | str | os.PathLike[str] | None = None,
    cost: Cost | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    **arguments: Any,
) -> AnyModule:
    """Apply torch's FSDP2 to a model, in the groups of a plan, with its resharding and its prefetching.

    Without a plan it makes one, as `plan_fully_shard` does with the same arguments. The first rank logs it.

    Each group of the plan becomes one call of `torch.distributed.fsdp.fully_shard`, and what is in none becomes the
    root's, which is gathered first and stays. What comes out is FSDP2's in every way: parameters are `DTensor`, and
    checkpoints, clipping and ``set_requires_gradient_sync`` are torch's. Make the optimizer afterwards. A forward pass
    without gradients leaves nothing gathered, groups that the plan keeps included.

    A unit of the plan stays with the root where FSDP2 cannot gather it by itself: it shares a parameter with a module
    outside of it (an embedding that is tied to the head), has parameters and no forward pass, or is read by a
    `torch.nn.MultiheadAttention` without being called. So do those that the plan has there: what is measured is looked
    at for modules that are not called, are read while they do not run, or return parameters of theirs. A container
    without a forward pass is wrapped as the modules in it. The first rank of the mesh logs what stays and why.

    All ranks of the mesh must call it, with the same plan, or with what to plan with.

    Args:
        model: whose parameters are not sharded yet.
        plan: an `FsdpPlan` for this model or the path of one (``mgwfbp plan --engine fsdp2``).
        batch: as `plan_fully_shard` takes it, and so are ``loss_fn``, ``trace``, ``cost`` and ``memory_limit``.
        loss_fn: see there.
        trace: see there.
        cost: see there.
        memory_limit: see there.
        **arguments: what torch's ``fully_shard`` takes besides (``mesh``, ``mp_policy``, ``offload_policy``,
            ``ignored_params``, ``shard_placement_fn``), for every group; not ``reshard_after_forward``, which the plan
            says. None stands for torch's default.

    Returns:
        The model itself.

    Raises:
        PlanError: on every rank and before anything is wrapped, where the plan is not one for this model, or not that
            of all ranks, where there is nothing to plan with, or no plan fits into the limit, where an argument is not
            torch's, or where torch could not shard the model so: scalar parameters, several dtypes in one group.
        MeasureError: on every rank, where the model or the network cannot be measured.
        StrategyError: where this torch has no public ``fully_shard``.
    """
    shard = _torchs_fully_shard()
    inputs, wrapping = FsdpInputs(batch, loss_fn, trace, cost, memory_limit), None
    made: FsdpPlan | None = None

    def prepare() -> FsdpPlan:
        nonlocal wrapping
        if plan is not None and (besides := inputs.given()):
            raise PlanError(f"plan is given, and {' and '.join(besides)} to make one of: leave out one or the other")
        if not isinstance(plan, FsdpPlan | str | os.PathLike | None):
            raise PlanError(f"plan is {quote(plan)}, expected an FsdpPlan or the path of one")
        loaded = made or (plan if isinstance(plan, FsdpPlan) else FsdpPlan.load(plan))  # type: ignore[arg-type]
        wrapping = _wrapping_of(model, loaded, ignored)
        return loaded

    with _ranks_of(arguments.get("mesh")) as group:
        arguments = _checked_together(model, arguments, group)
        ignored = set(map(id, arguments.get("ignored_params", ())))
        is_first = dist.get_rank(group) == 0
        # Ranks that make a plan talk of it in other messages than ranks that compare the one they were given.
        if reduce_values([float(plan is None)], "sum", group)[0] not in (0, dist.get_world_size(group)):
            raise PlanError("plan is given on some ranks only: give it to every rank or to none")
        if plan is None:
            made = _made(model, inputs, arguments, group).plan
        agreed = agree_on_fsdp_plan(prepare, group)
    assert wrapping is not None  # noqa: S101 - the plan was prepared
    if is_first:
        _log_kept(wrapping)
        _warn_of_plan(model, agreed, wrapping, ignored)
    # Units never nest, so that groups may be wrapped in any order; the root comes last.
    for parts, is_resharded in zip(wrapping.groups, wrapping.reshard, strict=True):
        shard(parts[0] if len(parts) == 1 else list(parts), reshard_after_forward=is_resharded, **arguments)
    for part in wrapping.idle:
        shard(part, reshard_after_forward=True, **arguments)
    shard(model, reshard_after_forward=False, **arguments)
    _set_prefetching(model, wrapping, agreed)
    model.register_forward_hook(_reshard_after_evaluation)
    return model


def plan_fully_shard(
    model: nn.Module,
    *,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    trace: ModelTrace | str | os.PathLike[str] | None = None,
    cost: Cost | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    **arguments: Any,
) -> FsdpPlanning:
    """Return the plan that `fully_shard` makes of a model, and the trace and the cost it is made of; wrap nothing.

    What is not given is measured first, in some seconds: the model by a few forward and backward passes on ``batch``
    (parameters, buffers, gradients and random generators are afterwards as they were), and the network between the
    ranks that share parameters. Rank 0 plans for all; all ranks of the mesh must call it.

    Args:
        model: whose parameters are not sharded yet.
        batch: what the model is called with; a dict becomes keyword arguments, a tuple positional ones.
        loss_fn: turns what the model returns into one number; its ``loss``, or the mean of its tensors, if not given.
        trace: of this model, or the path or the name of one; then ``batch`` is not needed.
        cost: between as many ranks as share parameters, or the path of one, with halves or without.
        memory_limit: bytes, or a size such as ``"40GiB"``, that a rank may have for parameters, gradients and two
            states of the optimizer; activations come on top. Without it a plan needs no more than wrapping by block
            where more gains less than 0.1 %. Else one that is made of ``batch`` on a GPU may take what the device has
            beside the activations of the measured step, and any other keeps all groups gathered.
        **arguments: what torch's ``fully_shard`` will be given; of these ``mesh``, ``mp_policy``, ``offload_policy``
            and ``ignored_params`` matter.

    Raises:
        PlanError: on every rank, where there is nothing to plan with, no plan fits into the limit, an argument is not
            torch's, or torch cannot shard the model.
        MeasureError: on every rank, where the model or the network cannot be measured.
        StrategyError: where this torch has no public ``fully_shard``.
    """
    _torchs_fully_shard()
    with _ranks_of(arguments.get("mesh")) as group:
        arguments = _checked_together(model, arguments, group)
        return _made(model, FsdpInputs(batch, loss_fn, trace, cost, memory_limit), arguments, group)


def _torchs_fully_shard() -> Any:
    """Return torch's function, with a process group to use it in."""
    shard: Any = getattr(torch.distributed.fsdp, "fully_shard", None)
    if shard is None:
        raise StrategyError(f"torch {torch.__version__} has no public fully_shard (FSDP2): install torch 2.6 or newer")
    if not dist.is_initialized():
        dist.init_process_group()  # as torch's does
    return shard


def _checked_together(
    model: nn.Module, arguments: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return the arguments for torch, of which ranks must have the same precision and ignore the same parameters."""
    checked: dict[str, Any] = plan_together(lambda: checked_arguments(model, arguments), group)
    ignored = set(map(id, checked.get("ignored_params", ())))
    names = [name for name, one in model.named_parameters() if id(one) in ignored]
    policy = checked.get("mp_policy")
    dtypes = [str(getattr(policy, name, None)) for name in ("param_dtype", "reduce_dtype")]
    if differs := differing_field({"mp_policy": dtypes, "ignored_params": names}, group):
        raise PlanError(f"{differs}: give every rank the same")
    return checked


def _made(
    model: nn.Module, inputs: FsdpInputs, arguments: Mapping[str, Any], group: dist.ProcessGroup | None
) -> FsdpPlanning:
    """Make a plan and log it."""

    def stay() -> list[str]:
        if "dp_mesh_dims" in arguments:
            raise PlanError(
                "dp_mesh_dims is given, and a plan is made for a mesh whose last dimension shards: give plan=, or such "
                "a mesh"
            )
        return list(kept_units(model, unit_names(model)))

    made = make_plan(model, inputs, Place.of(group, arguments), stay)
    if dist.get_rank(group) == 0:
        predicted = made.plan.predicted
        _log.info(
            "planned %r: step predicted %s, %s; %s a rank beside activations",
            made.plan,
            format_seconds(predicted["iteration_s"]),
            bound_words(predicted),
            format_bytes(predicted["memory_bytes"]),
        )
        if alone := [unit.name for unit in whole_units(made.trace).values() if unit.is_alone]:
            _log.info(
                "%s", f"planned by themselves, and as if gathered once: {listed(alone)}, which run again in a step"
            )
    return made


@contextlib.contextmanager
def _ranks_of(mesh: Any) -> Iterator[dist.ProcessGroup | None]:
    """Yield the ranks of a mesh, which must have the same plan; None stands for all.

    A mesh has a group for each of its dimensions: where it has several and is not all ranks, one is made meanwhile.
    """
    if mesh is None or mesh.size() == dist.get_world_size():
        yield None
    elif mesh.ndim == 1:
        yield mesh.get_group()
    else:
        # Over gloo: nccl may split a communicator of all ranks, and those outside of this mesh do not come here.
        group: Any = dist.new_group(mesh.mesh.flatten().tolist(), backend="gloo", use_local_synchronization=True)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _wrapping_of(model: nn.Module, plan: FsdpPlan, ignored: Collection[int]) -> _Wrapping:
    """Check the plan against the model, and return which modules are wrapped together."""
    modules, units = dict(model.named_modules()), unit_names(model)
    planned = {*chain(*plan.groups), *plan.root, *plan.idle}
    trained = unit_names(model, is_trained=True)
    if planned != units and planned == trained:
        units = trained  # a plan of a trace that has no frozen parameters
    plan.check_covers(units)
    kept = kept_units(model, units)
    groups, reshard, is_reached = list[tuple[tuple[str, ...], tuple[nn.Module, ...]]](), [], []
    not_reached = plan.predicted.get("not_reached", sorted(units - trained))
    for names, is_resharded in zip(plan.groups, plan.reshard, strict=True):
        group = [one for name in names if name not in kept for one in called_of(modules[name]) or ()]
        if group:
            groups.append((names, tuple(group)))
            reshard.append(is_resharded)
            is_reached.append(not set(names).issubset(not_reached))
            if is_resharded and is_reached[-1] and names[-1] in plan.predicted.get("not_reached", ()):
                raise PlanError(
                    f"the plan's group of {listed(names)} ends with {quote(names[-1])}, whose output gets no gradient, "
                    "so that FSDP2 would not gather it for the backward pass: make a new plan"
                )
    # A plan that does not say what the backward pass reaches is taken to have nothing trained before its groups.
    if "not_reached" not in plan.predicted:
        is_reached = list(accumulate(is_reached, or_))
    idle = [one for name in plan.idle if name not in kept for one in called_of(modules[name]) or ()]
    check_dtypes(model, (*groups, *((plan.idle, (one,)) for one in idle)), ignored)
    frozen = [
        one.nbytes
        for name, one in model.named_parameters()
        if not one.requires_grad and units.isdisjoint(outer_of(name))
    ]
    because = dict.fromkeys(plan.root, CHOSEN)
    for kind, why in SAID.items():
        names = check_items(plan.predicted.get(kind, ()), str, f"predicted: {kind}", PlanError)
        because.update({name: why for name in names if name in because})
    return _Wrapping(
        tuple(parts for _, parts in groups),
        tuple(reshard),
        tuple(is_reached),
        tuple(idle),
        {name: why for name, why in {**because, **kept}.items() if name not in plan.idle},
        (len(frozen), sum(frozen)),
    )


def _set_prefetching(model: nn.Module, wrapping: _Wrapping, plan: FsdpPlan) -> None:
    """Say which groups each group asks for ahead; the root asks for the first ones of the forward pass.

    In the backward pass the root comes first, and asks for the last group, which is torch's default; where that is not
    reached, for the last one that is.
    """
    firsts: Sequence[Any] = [group[0] for group in wrapping.groups]
    root: Any = model
    root.set_modules_to_forward_prefetch(firsts[: plan.forward_prefetch])
    for place, first in enumerate(firsts):
        first.set_modules_to_forward_prefetch(firsts[place + 1 : place + 1 + plan.forward_prefetch])
        before = range(place - 1, max(0, place - plan.backward_prefetch) - 1, -1)
        ahead = [firsts[one] for one in before if wrapping.reshard[one] and wrapping.is_reached[one]]
        # Without a list torch asks for the group before: one that the backward pass does not reach is not wanted, and
        # to ask for itself does nothing.
        goes_on = place > 0 and wrapping.is_reached[place - 1]
        first.set_modules_to_backward_prefetch(ahead or ([] if goes_on else [first]))
    reached = [first for first, is_reached in zip(firsts, wrapping.is_reached, strict=True) if is_reached]
    if reached and reached[-1] is not firsts[-1]:
        root.set_modules_to_backward_prefetch(reached[-1:])


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Let no forward pass without gradients leave whole parameters behind.

    Torch frees those of kept groups in the backward pass that follows. Where none does, they would be used in later
    forward passes, whatever has changed the model's own since.
    """
    if torch.is_grad_enabled():
        return
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()


def _log_kept(wrapping: _Wrapping) -> None:
    """Log what stays with the root, and why; and what the plan does not have."""
    because: dict[str, list[str]] = {}
    for name, why in wrapping.kept.items():
        because.setdefault(why, []).append(name)
    parts = [f"{listed(names)} ({'each ' if len(names) > 1 else ''}{why})" for why, names in because.items()]
    number, size = wrapping.frozen
    if number:
        parts.append(f"{plural(number, 'frozen parameter')} of {format_bytes(size)} (in no module of the plan)")
    if parts:
        _log.info("fully_shard keeps with the root, gathered first and never resharded: %s", "; ".join(parts))


def _warn_of_plan(model: nn.Module, plan: FsdpPlan, wrapping: _Wrapping, ignored: Collection[int]) -> None:
    """Warn where a plan can be run, and was made for another step: with other modules in the root, or other sizes."""
    if lost := [name for name in chain(*plan.groups) if name in wrapping.kept]:
        _log.warning(
            "the plan has %s in groups, not with the root: it predicts another step and its memory", listed(lost)
        )
    sizes = unit_bytes(model, ignored=ignored).values()
    stored, trained = (sum(size[place] for size in sizes) for place in range(2))
    was_stored, was_trained = (plan.predicted.get(name) for name in ("parameter_bytes", "trained_bytes"))
    # A trace may not know a few frozen parameters.
    if was_trained not in (None, trained) or not stored * (1 - MOST_UNKNOWN) <= (was_stored or stored) <= stored:
        _log.warning(
            "%s",
            f"the plan is for {was_stored} B of parameters, {was_trained} of them trained, the model has {stored} B, "
            f"{trained} of them trained: it predicts another step and its memory",
        )
