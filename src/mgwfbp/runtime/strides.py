"""The names that DDP's warning about strides leaves out."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["watch_strides"]


def watch_strides(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Look once at every gradient's strides; where some differ from their bucket's, warn before the next forward pass.

    Torch warns of this once per process and names no parameter; its warning appears when the backward pass returns, so
    ours comes with the forward pass after it. A parameter's watch ends with its first gradient and costs nothing then.
    """
    warning = _StrideWarning()
    for name, parameter in parameters:
        watch = _Watch(name, model, warning)
        watch.handle = parameter.register_post_accumulate_grad_hook(watch)


class _Watch:
    """Sees a parameter's first gradient before the Reducer does, which may replace it by a view of its bucket."""

    handle: RemovableHandle

    def __init__(self, name: str, model: nn.Module, warning: "_StrideWarning") -> None:
        self._name, self._model, self._warning = name, model, warning

    def __call__(self, parameter: Tensor) -> None:
        self.handle.remove()
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        # Its own strides for a dense parameter, else row after row: the layout of its view in the bucket.
        view = torch.empty_like(parameter, device="meta").stride()
        if gradient.stride() != view:
            self._warning.add(self._model, f"{self._name!r} (gradient {gradient.stride()}, bucket {view})")


class _StrideWarning:
    """A forward pre-hook that warns once; in place only while there is something to say."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._handle: RemovableHandle | None = None

    def add(self, model: nn.Module, description: str) -> None:
        if self._handle is None:
            self._handle = model.register_forward_pre_hook(self)
        self._found.append(description)

    def __call__(self, *_: Any) -> None:
        assert self._handle is not None  # noqa: S101  # set before this could be called
        self._handle.remove()
        shown = ", ".join(self._found[:10]) + (", …" if len(self._found) > 10 else "")
        warnings.warn(
            f"{len(self._found)} gradients have other strides than their place in DDP's buckets, which costs a slow "
            f"copy each step: {shown}; convert the model's memory format before it is wrapped",
            stacklevel=2,
        )
        self._found.clear()
        self._handle = None
