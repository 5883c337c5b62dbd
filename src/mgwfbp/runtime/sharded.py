"""An optimizer of which every rank does its share while parameters travel: `ShardedOptimizer`."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from mgwfbp.errors import ShardError
from mgwfbp.measure.agreement import agree_on_plan, first_problem, on_device
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.kinds import read_plan
from mgwfbp.runtime.reducer import Buckets, Parameters, cannot_hold, missing
from mgwfbp.runtime.rows import Owned, Shards, is_dense
from mgwfbp.units import quote

__all__ = ["ELEMENTWISE", "ShardedOptimizer"]

# What updates every number by itself, so that it may be given rows of parameters.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
_NOT = {
    "Adafactor": "keeps averages of whole rows and columns of a matrix",
    "Muon": "makes whole matrices orthogonal",
    "LBFGS": "looks at all parameters together",
    "SparseAdam": "is for sparse gradients",
}
Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class ShardedOptimizer(optim.Optimizer):
    """An optimizer of torch's, of which each rank does a share, and whose second half hides behind the forward pass.

    Each rank owns one N-th of every parameter. Gradients are reduce-scattered during the backward pass, `step` updates
    what this rank owns (with 1/N of the optimizer's state and work) and begins to gather the parameters, and the next
    forward pass waits for each parameter when it uses it: see [Note: rows] and [Note: nothing is read too early] in
    ``rows.py``. An all-reduce is a reduce-scatter and an all-gather: the bytes and the arithmetic are the same, and
    parameters after a step are those of torch's DDP with the plain optimizer, bitwise at 2 ranks (clipping apart, whose
    norm is summed in another order).

    After a backward pass that averaged gradients ``parameter.grad`` can only be set to None: no rank has all of it, and
    whatever else uses it fails. Clip with `clip_grad_norm_`. ``no_sync``, autocast, `torch.amp.GradScaler`,
    learning-rate schedulers and parameter groups work as always. Whoever holds parameters, and reads one between `step`
    and the forward pass that uses it, calls ``model.synchronize()`` first.

    All ranks must make it, and call `step`, `clip_grad_norm_` and `state_dict`.

    Args:
        model: one of ours, whose parameters are not yet another sharded optimizer's.
        optimizer_class: one of `torch.optim` that updates every number by itself.
        params: all parameters that the model averages gradients of, or groups of them as torch takes them; those of the
            model where it is not given.
        plan: a `MergePlan` with gathers or the path of one (``mgwfbp plan --engine sharded``): which gradients, and
            which parameters, travel together. Messages whose parameters it does not gather are all-reduced, and every
            rank updates all of these parameters and has all of their state. Without a plan gradients travel in the
            model's buckets and parameters in the same groups, and the model's tuner finds better ones for both.
        **defaults: what the class takes.

    Raises:
        ShardError: on every rank, where that cannot be; it says why.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer_class: type[optim.Optimizer],
        params: Params | None = None,
        *,
        plan: MergePlan | str | os.PathLike[str] | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ShardError(f"the model is a {type(model).__name__}, expected mgwfbp.DistributedDataParallel")
        groups = _groups(model.module.parameters() if params is None else params)
        problem = _problem(model, optimizer_class, groups)
        with on_device(model.device):
            failed = first_problem(problem, model.process_group)
        if failed is not None:
            raise ShardError(f"rank {failed[0]}: {failed[1]}")
        self._model = model
        own = self._own = Parameters(model)
        given = self._agree_on(plan)
        rank, world = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
        shared = set() if given is None else set(given.layer_names).difference(*given.gathers)
        owned = [
            Owned(name, one, 0, 1) if name in shared else Owned(name, one, rank, world)
            for name, one in zip(own.names, own.parameters, strict=True)
        ]
        self._owned = {id(one.parameter): one for one in owned}
        rows = [{**group, "params": list(map(self._row, group["params"]))} for group in groups]
        self._options = defaults
        self._inner = optimizer_class(rows, **defaults)
        super().__init__(groups, self._inner.defaults)
        self._pull()
        self._shards = Shards(owned, model.process_group, _gather_group(model))
        model._shard_with(self._shards)
        if given is not None:
            model.replan(replace(given, predicted={}))
        self._is_made = True

    def _agree_on(self, plan: MergePlan | str | os.PathLike[str] | None) -> MergePlan | None:
        """Return the plan that all ranks have, if any."""

        def prepare() -> MergePlan | None:
            return None if plan is None else read_plan(plan, self._own, None, is_sharded=True)

        with on_device(self._model.device):
            return agree_on_plan(prepare, self._model.process_group)

    @property
    def gathers(self) -> tuple[tuple[str, ...], ...]:
        """The groups in which parameters are gathered, in the order in which they are."""
        return self._own.groups_of(self._groups_to_gather)

    @property
    def _groups_to_gather(self) -> Buckets:
        handle = self._model._handle
        assert handle is not None  # noqa: S101 - it shards
        return handle.groups_to_gather

    def _row(self, parameter: Tensor) -> Tensor:
        """Return what this rank updates of a parameter: nothing of one that is frozen."""
        owned = self._owned.get(id(parameter))
        return nn.Parameter(parameter.detach().flatten()[:0], requires_grad=False) if owned is None else owned.row

    def _numbered(self) -> Iterator[tuple[int, Owned]]:
        """Return what this rank owns, with the numbers that a state dict has for parameters."""
        for number, parameter in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if id(parameter) in self._owned:
                yield number, self._owned[id(parameter)]

    def _push(self) -> None:
        """Tell the optimizer of the rows what was set here: a scheduler sets learning rates."""
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update((key, value) for key, value in mine.items() if key != "params")

    def _pull(self) -> None:
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update((key, value) for key, value in inner.items() if key != "params")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the rows that this rank owns, and begin to gather all parameters. All ranks must call it.

        Args:
            closure: computes the loss anew, as with torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [one.name for one in self._owned.values() if one.has_moved]
        if moved:
            raise ShardError(
                f"the parameter {moved[0]} has other memory than when the optimizer was made: move and convert models "
                "before DistributedDataParallel, and load weights in place (without assign=True)"
            )
        self._shards.finish_all()
        self._shards.take_gradients()
        self._push()
        self._inner.step()
        self._pull()
        self._shards.gather(self._groups_to_gather)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; they become None in either case, for no rank has one to set to 0."""
        del set_to_none
        for group in (*self.param_groups, *self._inner.param_groups):
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients down so that their norm over all ranks' rows is ``max_norm`` at most.

        As `torch.nn.utils.clip_grad_norm_` of the averaged gradients, but for the order in which it sums. All ranks
        must call it, between the backward pass and `step`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: of the norm; may be ``inf``.
            error_if_nonfinite: raise where the norm is not finite.

        Returns:
            The norm before.
        """
        self._shards.take_gradients()
        norm_type = float(norm_type)
        is_largest = norm_type == float("inf")
        group, device = self._model.process_group, next(iter(self._owned.values())).memory.device
        counts_all = dist.get_rank(group) == 0  # what every rank has is counted once
        # What every rank has is scaled itself: its row's gradient may be a copy of it, and `step` makes another.
        found = [(one, one.parameter.grad if one.is_whole else one.row.grad) for one in self._owned.values()]
        grads = [grad for _, grad in found if grad is not None]
        norms = [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
            for one, grad in found
            if grad is not None and grad.numel() and (counts_all or not one.is_whole)
        ]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if is_largest:
            total = torch.stack([zero, *norms]).max()
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        else:
            total = torch.stack([zero, *(norm**norm_type for norm in norms)]).sum()
            dist.all_reduce(total, group=group)
            total = total ** (1 / norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped"
            )
        norm = total.to(torch.promote_types(torch.float32, grads[0].dtype) if grads else torch.float32)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.dtype))
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while it is made; later there is nothing to add, since it has all parameters."""
        if getattr(self, "_is_made", False):
            raise ShardError("the optimizer has all parameters of the model: make a new one with other groups")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's would be: the state of whole parameters. All ranks must call it.

        It can be loaded into the plain optimizer, and into a sharded one with any number of ranks.
        """
        packed = self._inner.state_dict()
        group, keys = self._model.process_group, self._elementwise_keys
        for number, owned in self._numbered():
            if number in packed["state"]:
                packed["state"][number] = {
                    key: owned.whole(value, group) if key in keys else value
                    for key, value in packed["state"][number].items()
                }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of whole parameters, and keep this rank's rows of it."""
        state, keys = dict(state_dict["state"]), self._elementwise_keys
        for number, owned in self._numbered():
            if number in state:
                state[number] = {
                    key: owned.part_of(value) if key in keys else value for key, value in state[number].items()
                }
        self._inner.load_state_dict({**state_dict, "state": state})
        self._pull()

    def sharded_state_dict(self, *, to_load: bool = False) -> dict[str, Any]:
        """Return the state for `torch.distributed.checkpoint`, which saves each rank's rows and gathers nothing.

        State is by the names of parameters, each tensor a flat `DTensor` of which a rank has its row, and so are the
        options of groups. All ranks must call it.

        Args:
            to_load: return a state of zeros for `torch.distributed.checkpoint.load` to fill, which cuts rows anew for
                any number of ranks; then call `load_sharded_state_dict`.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard  # since torch 2.5

        mesh = DeviceMesh.from_group(self._model.process_group, self._model.device.type)
        keys, states = self._elementwise_keys, self._states_to_load() if to_load else self._inner.state
        state: dict[str, Any] = {}
        for _, owned in self._numbered():
            size = torch.Size([owned.memory.numel()])
            state[owned.name] = {
                key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=size, stride=(1,))
                if key in keys and not owned.is_whole
                else value
                for key, value in states.get(owned.row, {}).items()
            }
        options = [{key: value for key, value in one.items() if key != "params"} for one in self.param_groups]
        return {"state": state, "param_groups": {str(number): one for number, one in enumerate(options)}}

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``sharded_state_dict(to_load=True)`` gave, filled by `torch.distributed.checkpoint.load`."""
        for _, owned in self._numbered():
            state = state_dict["state"].get(owned.name)
            if state:
                self._inner.state[owned.row] = {
                    key: value.to_local() if hasattr(value, "to_local") else value for key, value in state.items()
                }
        for number, group in enumerate(self.param_groups):
            group.update(state_dict["param_groups"][str(number)])

    def _states_to_load(self) -> dict[Tensor, dict[str, Any]]:
        """Return by row what the optimizer's state is like, with other tensors than its own."""
        owned = [one for _, one in self._numbered()]
        copies = {id(one.row): torch.zeros_like(one.row).requires_grad_() for one in owned}
        states = self._state_after_a_step(lambda row: copies.get(id(row)))
        return {one.row: states.get(copies[id(one.row)], {}) for one in owned}  # plain SGD has none

    @property
    def _elementwise_keys(self) -> set[str]:
        """What of a state has a number for each of a parameter; a count of steps, say, has one for all."""
        toys = self._state_after_a_step(lambda row: torch.zeros(1, device=row.device, requires_grad=True))
        values = [pair for state in toys.values() for pair in state.items()]
        return {key for key, value in values if isinstance(value, Tensor) and value.dim()}

    def _state_after_a_step(self, stand_in: Callable[[Tensor], Tensor | None]) -> dict[Tensor, dict[str, Any]]:
        """Return the state of an optimizer like this one, of what stands in for rows, after an empty step."""
        groups = []
        for group in self._inner.param_groups:
            stand_ins = [one for one in map(stand_in, group["params"]) if one is not None]
            groups.append({**group, "params": stand_ins})
            for one in stand_ins:
                one.grad = torch.zeros_like(one)
        made = type(self._inner)([group for group in groups if group["params"]], **self._options)
        made.step()
        return dict(made.state)

    def __getstate__(self) -> Any:
        raise ShardError("a sharded optimizer cannot be copied or pickled: keep its state_dict()")


def _groups(params: Params) -> list[dict[str, Any]]:
    listed = list(params)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    found = []
    for group in listed:
        assert isinstance(group, dict)  # noqa: S101 - torch's optimizers say what is wrong with others
        given = group["params"]
        found.append({**group, "params": [given] if isinstance(given, Tensor) else list(given)})
    return found


def _problem(
    model: DistributedDataParallel, optimizer_class: type[optim.Optimizer], groups: list[dict[str, Any]]
) -> str:
    """Say why a model cannot have such an optimizer; empty where it can."""
    name = getattr(optimizer_class, "__name__", quote(optimizer_class))
    if optimizer_class not in ELEMENTWISE:
        reason = _NOT.get(name, "is not known to update every number by itself")
        return f"{name} {reason}, and a rank has only rows of parameters: expected one of {_names()}"
    return _cannot_shard(model) or _problem_with_parameters(Parameters(model), groups)


def _cannot_shard(model: DistributedDataParallel) -> str:
    """Say why no sharded optimizer can have a model's gradients; empty where one can."""
    if absent := missing():
        return f"torch {torch.__version__} lacks {', '.join(absent)}"
    if model._shards is not None:
        return "the model has a sharded optimizer already, and a parameter can have one only"
    if model._wire is not None:
        return f"wire={model._wire!r} and a sharded optimizer each say how gradients travel: leave one out"
    if model._comm_hooks or model._builtin_hook is not None:
        return "a communication hook says how gradients travel, and so does a sharded optimizer: leave one out"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "messages without a used gradient are skipped (skip_all_reduce_unused_params), and rows wait for all"
    if getattr(model, "mixed_precision", None) is not None:
        return "mixed_precision says itself what parameters and gradients are (autocast is fine)"
    return cannot_hold(model)


def _problem_with_parameters(own: Parameters, groups: list[dict[str, Any]]) -> str:
    given = {id(one) for group in groups for one in group["params"]}
    names = dict(zip(map(id, own.parameters), own.names, strict=True))
    if strangers := [one for group in groups for one in group["params"] if id(one) not in names and one.requires_grad]:
        return f"a parameter of shape {list(strangers[0].shape)} is not one that the model averages gradients of"
    if absent := [name for place, name in names.items() if place not in given]:
        return f"the parameter {absent[0]} is trained by the model and was not given: give all of them"
    if any(own.sparse):
        return "gradients are sparse, and a rank has only rows of dense ones"
    for name, one in zip(own.names, own.parameters, strict=True):
        if not one.is_floating_point():
            return f"the parameter {name} is {one.dtype}, expected floating-point numbers"
        if not is_dense(one) or not one.numel():
            return f"the parameter {name} has strides {one.stride()}, expected one that fills its memory"
    devices = {one.device for one in own.parameters}
    if len(devices) > 1:
        return f"parameters are on {len(devices)} devices, expected one"
    return ""


def _names() -> str:
    return ", ".join(one.__name__ for one in ELEMENTWISE)


def _gather_group(model: DistributedDataParallel) -> Any:
    """Return the group that parameters are gathered in, where it must be another than the gradients'.

    Over nccl what a group is given runs one after another, and a forward pass begins with buffers that rank 0 sends:
    they would wait for all parameters. Over gloo gathers have a thread and a group of their own in any case.
    """
    if model.device.type != "cuda":
        return None
    ranks = dist.get_process_group_ranks(model.process_group)
    return dist.new_group(ranks, use_local_synchronization=len(ranks) < dist.get_world_size())
