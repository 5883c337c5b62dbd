"""Models without weights: on the meta device a tensor has a shape and a type, and no values."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["built_on", "call"]


@contextmanager
def built_on(device: torch.device) -> Iterator[None]:
    """Build models on a device.

    On the meta device that holds for parameters and buffers. All else keeps its values, on the CPU: a model may compute
    its own shape with tensors (RegNet its widths), and a loss may hold labels.
    """
    with ExitStack() as stack:
        if device.type != "meta":
            stack.enter_context(device)
        else:
            to_meta = _ToMeta()
            for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
                stack.callback(register(to_meta).remove)  # type: ignore[arg-type]  # it may return another tensor
            stack.enter_context(_Meeting())
        yield


class _ToMeta:
    """A hook that torch calls with every parameter and buffer that a module registers."""

    def __init__(self) -> None:
        # One that several modules share stays one.
        self._moved = WeakTensorKeyDictionary()

    def __call__(self, _: nn.Module, __: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device.type == "meta" or nn.parameter.is_lazy(tensor):
            return tensor
        if tensor not in self._moved:
            there = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._moved[tensor] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
        return self._moved[tensor]  # type: ignore[no-any-return]


def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operation whose tensors may be on the CPU and on the meta device: then it happens on the meta device.

    A tensor without values stays there when it is sent to the CPU, as models do that follow the device of their input.
    """
    places = {leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    if "meta" in places:
        if "cpu" in places:
            args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if func is torch.ops.aten._to_copy.default:
            kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


class _Meeting(TorchDispatchMode):
    """Lets operations mix tensors of the meta device with others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {})
