"""An optimizer of which every rank does its share while parameters travel: `ShardedOptimizer`."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, optim

from mgwfbp.errors import ShardError
from mgwfbp.measure.agreement import agree_on_plan, differing_field, on_device, reduce_values, try_together
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.messages.gloo import group_timeout, number_beside
from mgwfbp.runtime.reducer.kinds import read_plan
from mgwfbp.runtime.reducer.parameters import Buckets, Parameters
from mgwfbp.runtime.rows.rows import Owned
from mgwfbp.runtime.rows.shards import Shards
from mgwfbp.runtime.rows.spread import SpreadGradient
from mgwfbp.runtime.sharded.clipping import clip_rows
from mgwfbp.runtime.sharded.groups import Params, checked_groups, fields_of, in_order, names_of
from mgwfbp.runtime.sharded.refusals import problem_of_groups, take_parameters
from mgwfbp.runtime.sharded.state import RowStates, step_alone
from mgwfbp.runtime.sharded.views import Finished, States

__all__ = ["ShardedOptimizer"]

_log = logging.getLogger("mgwfbp")

# Where parameters are gathered, by the group of their gradients; see `_gather_group`.
_GATHER_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

T = TypeVar("T")


class ShardedOptimizer(optim.Optimizer):
    """An optimizer of torch's, of which each rank does a share, and whose second half hides behind the forward pass.

    Each rank owns one N-th of every parameter. Gradients are reduce-scattered during the backward pass, `step` updates
    what this rank owns (with 1/N of the optimizer's state and work) and begins to gather the parameters, and the next
    forward pass waits for each parameter when it uses it: see [Note: rows] in ``rows.py`` and [Note: nothing is read
    too early] in ``guards.py``. An all-reduce is a reduce-scatter and an all-gather: the bytes and the arithmetic are
    the same, and parameters after a step are those of torch's DDP with the plain optimizer, bitwise at 2 ranks
    (clipping apart, whose norm is summed in another order).

    After a backward pass that averaged gradients ``parameter.grad`` can only be set to None: no rank has all of it, and
    whatever else uses it fails. Clip with `clip_grad_norm_`. ``no_sync``, autocast, `torch.amp.GradScaler`,
    learning-rate schedulers and parameter groups, which may be edited alike on all ranks, work as always. Whoever holds
    parameters in a list of their own, and reads one between `step` and the forward pass that uses it, calls
    ``model.synchronize()`` first.

    All ranks must make it, and call `step`, `clip_grad_norm_` and `state_dict`.

    Args:
        model: one of ours, of whose parameters no other sharded optimizer has any (any more).
        optimizer_class: one of `torch.optim` that updates every number by itself.
        params: all parameters that the model averages gradients of, or groups of them as torch takes them, in the same
            order on all ranks; those of the model where it is not given.
        plan: a `MergePlan` with gathers or the path of one (``mgwfbp plan --engine sharded``): which gradients, and
            which parameters, travel together. Messages whose parameters it does not gather are all-reduced, and every
            rank updates all of these parameters and has all of their state. Without a plan gradients travel in the
            model's buckets and parameters in the same groups, and the model's tuner finds better ones for both.
        **defaults: what the class takes, the same on all ranks.

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
        self._model = model
        groups = self._together(lambda: checked_groups(model, optimizer_class, params))
        own = self._own = model._handle or Parameters(model)
        given = self._agree_on(plan)
        rank, world = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
        shared = set() if given is None else set(given.layer_names).difference(*given.gathers)
        owned = [
            Owned(name, one, 0, 1) if name in shared else Owned(name, one, rank, world)
            for name, one in zip(own.names, own.parameters, strict=True)
        ]
        self._owned = {id(one.parameter): one for one in owned}
        self._together(lambda: self._make(optimizer_class, groups, defaults))
        with on_device(model.device):
            differing = differing_field(fields_of(self._inner, groups, model.module), model.process_group)
        if differing:
            raise ShardError(f"{differing}: give all ranks the same optimizer, and parameters in one order")
        self._states = RowStates(self._inner, defaults, self._owned, model.process_group)
        self._shards = self._shards_of(owned)
        model._shard_with(self._shards)
        for group in self.param_groups:
            group["params"] = Finished(group["params"], model.synchronize)
        self._take_listed()
        if given is not None:
            model.replan(replace(given, predicted={}))
        take_parameters(self, own.parameters)
        if rank == 0 and (early := self._shards.waits_early):
            _log.warning(
                "less hides behind the forward pass where a module keeps parameters of others (in a list or an object, "
                "say): it waits for all of these when it begins: %s",
                early,
            )
        self._is_made = True

    def _together(self, work: Callable[[], T]) -> T:
        """Do what needs no other rank; where it fails on one, raise that on all."""
        with on_device(self._model.device):
            result, failed, caught = try_together(work, self._model.process_group)
        if failed is not None:
            raise ShardError(f"rank {failed[0]}: {failed[1]}") from caught
        return result

    def _make(
        self, optimizer_class: type[optim.Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> None:
        """Make the optimizer of the rows, and this one of whole parameters with the same options."""
        rows = [{**group, "params": list(map(self._row, group["params"]))} for group in groups]
        inner = optimizer_class(rows, **defaults)
        super().__init__(groups, inner.defaults)
        self._inner = inner
        self._pull()

    def _shards_of(self, owned: list[Owned]) -> Shards:
        """Make the rows, and what they travel through: over gloo a group beside the model's, for which ranks meet."""
        group, device, number = self._model.process_group, self._model.device, None
        if device.type != "cuda":
            own = self._together(lambda: number_beside(group))
            with on_device(device):
                (highest,) = reduce_values([own], "max", group)
            number = int(highest)
        gather_group = _gather_group(self._model)
        return self._together(lambda: Shards(owned, group, gather_group, number))

    def _agree_on(self, plan: MergePlan | str | os.PathLike[str] | None) -> MergePlan | None:
        """Return the plan that all ranks have, if any."""
        group = self._model.process_group

        def prepare() -> MergePlan | None:
            return None if plan is None else read_plan(plan, self._own, None, group.size(), is_sharded=True)

        with on_device(self._model.device):
            return agree_on_plan(prepare, group)

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
        """Return what this rank updates of a parameter; one that is frozen is never updated."""
        owned = self._owned.get(id(parameter))
        return parameter if owned is None else owned.row

    @property
    def state(self) -> Any:
        """The state of each parameter's row on this rank; empty before the first step."""
        return States(self._inner, self._owned, self._model.synchronize)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        """Forget the state: so people reset optimizers. Torch's base class begins with one that is not needed here."""
        if state:
            raise ShardError("a sharded optimizer has rows of a state: give a whole one to load_state_dict()")
        if hasattr(self, "_inner"):
            self._inner.state.clear()

    def _push(self) -> None:
        """Give the optimizer of the rows the groups that are here: schedulers set options, and people edit lists.

        Raises:
            ShardError: where they have what they cannot; nothing has changed then.
        """
        if not self._is_as_listed():
            self._follow()
        pairs = zip(self.param_groups, self._rows, strict=True)
        self._inner.param_groups = [{**group, "params": rows} for group, rows in pairs]

    def _is_as_listed(self) -> bool:
        """Say whether groups list what they listed before, and have what options there are."""
        return len(self.param_groups) == len(self._listed) and all(
            isinstance(found := group.get("params"), Finished)
            and found.holds(known)
            and group.keys() >= self.defaults.keys()
            for group, known in zip(self.param_groups, self._listed, strict=True)
        )

    def _follow(self) -> None:
        """Have what groups that were edited list now."""
        for group in self.param_groups:
            if "params" in group and not isinstance(group["params"], Finished):
                group["params"] = Finished(in_order(group["params"]), self._model.synchronize)
        if problem := problem_of_groups(self.param_groups, self._owned, self.defaults):
            raise ShardError(problem)
        self._take_listed()

    def _take_listed(self) -> None:
        """Note what the groups list. No state moves: it is that of a row, whichever group has the parameter."""
        self._listed = [list(group["params"]) for group in self.param_groups]
        self._rows = [list(map(self._row, some)) for some in self._listed]
        self._states.number(chain.from_iterable(self._listed))
        frozen = [one for one in chain.from_iterable(self._listed) if id(one) not in self._owned]
        self._frozen = list(zip(names_of(frozen, self._model.module), frozen, strict=True))

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
        self._push()
        self._refuse_thawed()
        if self._is_to_make_state():
            self._states.begin()
            return loss
        self._shards.finish_all()
        self._shards.check_memory(self._model.module)
        self._shards.take_gradients()
        step_alone(self._inner)
        self._pull()
        self._shards.gather(self._groups_to_gather)
        return loss

    def _refuse_thawed(self) -> None:
        for name, one in self._frozen:
            if one.requires_grad:
                raise ShardError(
                    f"the parameter {name} was frozen when the model was wrapped and is not any more, so that nobody "
                    "averages its gradient: wrap the model again, and make a new optimizer"
                )

    def _is_to_make_state(self) -> bool:
        """Say whether nothing but state is asked for, as `torch.distributed.checkpoint.state_dict` does.

        That sets gradients of 0, and learning rates of 0, and calls `step`.
        """
        if self._inner.state or any(group["lr"] for group in self.param_groups):
            return False
        grads = [one.parameter.grad for one in self._states.listed]
        return bool(grads) and all(
            grad is not None and not isinstance(grad, SpreadGradient) and not grad.any() for grad in grads
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; they become None in either case, for no rank has one to set to 0."""
        del set_to_none
        for _, parameter in self._frozen:
            parameter.grad = None
        for owned in self._owned.values():
            owned.parameter.grad = owned.row.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients down so that their norm over all ranks' rows is ``max_norm`` at most.

        As `torch.nn.utils.clip_grad_norm_` of the averaged gradients, but for the order in which it sums. All ranks
        must call it, between the backward pass and `step`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: of the norm, more than 0; may be ``inf``.
            error_if_nonfinite: raise where the norm is not finite.

        Returns:
            The norm before.
        """
        if not norm_type > 0:
            raise ShardError(f"norm_type is {norm_type}, expected more than 0, or inf")
        self._push()
        self._refuse_thawed()
        self._shards.take_gradients()
        owned, group = list(self._owned.values()), self._model.process_group
        return clip_rows(owned, group, max_norm, float(norm_type), error_if_nonfinite=error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as with torch's optimizers: of parameters of the model that are in no other group any more."""
        super().add_param_group(param_group)
        if not getattr(self, "_is_made", False):
            return
        try:
            self._follow()
        except ShardError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's would be: the state of whole parameters. All ranks must call it.

        What was gathered is on the host, and goes to the device where it is loaded: into the plain optimizer, or into a
        sharded one with any number of ranks. Hooks that were registered for it are called as torch calls them, on every
        rank.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._shards.finish_all()  # over nccl no two groups send at once
        self._push()
        packed = self._states.whole()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of whole parameters, and keep this rank's rows of it; hooks are called as torch calls them."""
        self._push()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._states.take_whole(state_dict)
        self._pull()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def sharded_state_dict(self, *, to_load: bool = False) -> dict[str, Any]:
        """Return the state for `torch.distributed.checkpoint`, which saves each rank's rows and gathers nothing.

        State is by the names of parameters, each tensor a flat `DTensor` of which a rank has its row, and so are the
        options of groups. All ranks must call it.

        Args:
            to_load: return a state of zeros for `torch.distributed.checkpoint.load` to fill, which cuts rows anew for
                any number of ranks; then call `load_sharded_state_dict`.
        """
        self._push()
        options = [{key: value for key, value in one.items() if key != "params"} for one in self.param_groups]
        numbered = {str(number): one for number, one in enumerate(options)}
        return {"state": self._states.sharded(to_load=to_load), "param_groups": numbered}

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``sharded_state_dict(to_load=True)`` gave, filled by `torch.distributed.checkpoint.load`.

        All ranks must call it. A parameter of which the checkpoint has no state has none then.
        """
        self._push()
        self._states.take_sharded(state_dict["state"])
        for number, group in enumerate(self.param_groups):
            group.update(state_dict["param_groups"][str(number)])

    def __getstate__(self) -> Any:
        raise ShardError("a sharded optimizer cannot be copied or pickled: keep its state_dict()")


def _gather_group(model: DistributedDataParallel) -> Any:
    """Return the group that parameters are gathered in, where it must be another than the gradients'.

    Over nccl what a group is given runs one after another, and a forward pass begins with buffers that rank 0 sends:
    they would wait for all parameters. Over gloo gathers have a thread and a group of their own in any case.
    """
    group: Any = model.process_group
    if model.device.type != "cuda":
        return None
    if group not in _GATHER_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _GATHER_GROUPS[group] = dist.new_group(
            ranks,
            timeout=group_timeout(group, model.device),
            backend="nccl",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
    return _GATHER_GROUPS[group]
