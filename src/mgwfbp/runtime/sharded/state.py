"""The state of an optimizer of rows, as that of whole parameters or as shards: `RowStates`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mgwfbp.errors import ShardError
from mgwfbp.runtime.rows.rows import Owned

__all__ = ["RowStates", "step_alone"]

LAYOUT = "layout"  # beside what the optimizer has of a parameter: the shape and strides by which that was cut into rows


def step_alone(optimizer: Optimizer) -> None:
    """Step without the hooks that torch calls for the steps of all optimizers: this one is a part of another."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


class RowStates:
    """The state of an optimizer that was given rows, ``inner``, made with these ``defaults``.

    ``owned`` is what this rank owns, by the id of the parameter. ``group`` has all ranks. Tensors are made outside of
    an inference mode that a caller is in, for no optimizer could update them later.
    """

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], owned: Mapping[int, Owned], group: Any) -> None:
        self._inner, self._defaults, self._owned, self._group = inner, defaults, owned, group
        self._numbered: list[tuple[int, Owned]] = []  # by the number that a state dict has for the parameter

    def number(self, parameters: Iterable[Tensor]) -> None:
        """Give what the groups list its numbers, in their order; what is in none has no number."""
        numbered = enumerate(map(id, parameters))
        self._numbered = [(number, self._owned[one]) for number, one in numbered if one in self._owned]

    @property
    def listed(self) -> list[Owned]:
        """What this rank owns of the parameters that the groups list."""
        return [owned for _, owned in self._numbered]

    @torch.inference_mode(False)
    @torch.no_grad()
    def whole(self) -> dict[str, Any]:
        """Return the state dict that the plain optimizer would have. All ranks must call it.

        What is gathered goes to the host tensor by tensor: a GPU may have no room for all. Loading moves it back.

        Raises:
            ShardError: where a parameter has a state and is in no group, so that it has no number.
        """
        self._refuse_unlisted()
        packed = self._inner.state_dict()
        keys = self._elementwise_keys(self._inner.param_groups)
        for number, owned in self._numbered:
            if number in packed["state"]:
                packed["state"][number] = {
                    key: owned.whole(owned.flat(value), self._group).cpu() if key in keys else value
                    for key, value in packed["state"][number].items()
                }
        return packed

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_whole(self, state_dict: dict[str, Any]) -> None:
        """Keep this rank's rows of such a state dict.

        Raises:
            ShardError: before anything is taken, where a parameter had another shape.
        """
        state, groups = dict(state_dict["state"]), state_dict["param_groups"]
        is_alike = len(groups) == len(self._inner.param_groups)  # else torch says what is wrong
        keys = self._elementwise_keys(groups) if is_alike else set[str]()
        # Torch has them numbered, and names of its own where it makes a state dict itself.
        called = list(chain.from_iterable(group["params"] for group in groups))
        found = [(called[number], owned) for number, owned in self._numbered if number < len(called)]
        for name, owned in found:
            if name in state:
                state[name] = {
                    key: _part_of(owned, value) if key in keys else value for key, value in state[name].items()
                }
        self._inner.load_state_dict({**state_dict, "state": state})

    def _refuse_unlisted(self) -> None:
        listed = set(map(id, self.listed))
        for owned in self._owned.values():
            if owned.row in self._inner.state and id(owned) not in listed:
                raise ShardError(
                    f"the parameter {owned.name} has a state and is in no group of the optimizer: put it back into "
                    "one, or delete optimizer.state[parameter], before states are saved"
                )

    @torch.inference_mode(False)
    @torch.no_grad()
    def sharded(self, *, to_load: bool) -> dict[str, Any]:
        """Return state by the names of parameters, each tensor a flat `DTensor` of which a rank has its row.

        What has a state also has its parameter's shape and strides, by which rows are laid out. With ``to_load`` they
        are None, so that what a file does not have can be told, and tensors are zeros, in other memory than the
        optimizer's. All ranks must call it.

        Raises:
            ShardError: where a parameter has a state and is in no group.
        """
        self._refuse_unlisted()
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard  # since torch 2.5

        mesh = DeviceMesh.from_group(self._group, next(iter(self._owned.values())).memory.device.type)
        keys = self._elementwise_keys(self._inner.param_groups)
        states = self._after_an_empty_step() if to_load else self._inner.state

        def saved(owned: Owned, part: Tensor) -> Tensor:
            flat, size = owned.flat(part), torch.Size([owned.memory.numel()])
            if owned.is_whole:
                return flat
            return DTensor.from_local(flat, mesh, [Shard(0)], run_check=False, shape=size, stride=(1,))

        state: dict[str, Any] = {}
        for owned in self.listed:
            state[owned.name] = {
                key: saved(owned, value) if key in keys else value for key, value in states.get(owned.row, {}).items()
            }
            if state[owned.name]:
                state[owned.name][LAYOUT] = None if to_load else owned.layout
        return state

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_sharded(self, state: dict[str, Any]) -> None:
        """Take what `sharded` gave to load, filled; a parameter that was not filled has no state. All ranks must.

        Raises:
            ShardError: before anything is taken, where a parameter had another shape.
        """
        layouts = {owned.name: state.get(owned.name, {}).get(LAYOUT) for owned in self.listed}
        for owned in self.listed:
            if (layout := layouts[owned.name]) is not None:
                _refuse_shape(owned, layout[0])
        keys = self._elementwise_keys(self._inner.param_groups)
        for owned in self.listed:
            self._inner.state.pop(owned.row, None)
            if (layout := layouts[owned.name]) is None:
                continue
            found = {key: value for key, value in state[owned.name].items() if key != LAYOUT}
            found = {key: value.to_local() if hasattr(value, "to_local") else value for key, value in found.items()}
            if owned.is_whole or tuple(layout[1]) != owned.layout[1]:
                for key in keys & found.keys():
                    found[key] = owned.part_of(owned.whole(found[key], self._group, strides=layout[1]))
            self._inner.state[owned.row] = found

    def begin(self) -> None:
        """Have the state that an optimizer has after a step with gradients of 0, which changes no parameter."""
        self._inner.state.update((row, state) for row, state in self._after_an_empty_step().items() if state)

    def _after_an_empty_step(self) -> dict[Tensor, dict[str, Any]]:
        """Return by row what the optimizer's state is like, with other tensors than its own."""
        copies = {id(one.row): torch.zeros_like(one.row).requires_grad_() for one in self.listed}
        states = self._state_after_a_step(self._inner.param_groups, lambda row: copies.get(id(row)))
        return {one.row: states.get(copies[id(one.row)], {}) for one in self.listed}  # plain SGD has none

    def _elementwise_keys(self, options: Sequence[dict[str, Any]]) -> set[str]:
        """Return what of a state has a number for each of a parameter; a count of steps, say, has one for all."""
        toys = self._state_after_a_step(options, lambda row: torch.zeros(1, device=row.device, requires_grad=True))
        values = [pair for state in toys.values() for pair in state.items()]
        return {key for key, value in values if isinstance(value, Tensor) and value.dim()}

    def _state_after_a_step(
        self, options: Sequence[dict[str, Any]], stand_in: Callable[[Tensor], Tensor | None]
    ) -> dict[Tensor, dict[str, Any]]:
        """Return the state of an optimizer with these options of groups after an empty step; something stands in."""
        groups = []
        for group, own in zip(options, self._inner.param_groups, strict=True):
            stand_ins = [one for one in map(stand_in, own["params"]) if one is not None]
            groups.append({**{key: group[key] for key in group if key != "param_names"}, "params": stand_ins})
            for one in stand_ins:
                one.grad = torch.zeros_like(one)
        if not (groups := [group for group in groups if group["params"]]):
            return {}
        made = type(self._inner)(groups, **self._defaults)
        step_alone(made)
        return dict(made.state)


def _part_of(owned: Owned, value: Any) -> Any:
    """Return this rank's row of what an optimizer has of a parameter, some of which is None in states of old torchs."""
    if not isinstance(value, Tensor):
        return value
    _refuse_shape(owned, value.shape)
    return owned.part_of(value)


def _refuse_shape(owned: Owned, shape: Sequence[int]) -> None:
    if tuple(shape) != owned.layout[0]:
        raise ShardError(
            f"the state of {owned.name} is of shape {list(shape)}, and the parameter of {list(owned.layout[0])}: load "
            "it into the model that it was saved of"
        )
