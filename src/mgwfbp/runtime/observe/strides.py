"""The names that DDP's warning about strides leaves out."""

import warnings

import torch
from torch import Tensor, nn

from mgwfbp.measure.hooks import GradientHooks
from mgwfbp.runtime.observe.observer import weakly
from mgwfbp.runtime.reducer.handle import ReducerHandle

__all__ = ["StrideWatch"]


class StrideWatch:
    """Looks at the first backward pass's gradients; warns of those whose strides differ from their bucket's.

    Torch warns of this once per process and names no parameter. Its warning appears when the backward pass returns, so
    ours comes with the forward pass after it; with that it ends and leaves nothing behind.
    """

    def __init__(self, model: nn.Module, reducer: ReducerHandle) -> None:
        self._reducer = reducer
        self._found: list[str] = []
        self._has_seen = False
        self._hooks = GradientHooks(reducer.parameters, weakly(self._look))
        self._handle = model.register_forward_pre_hook(weakly(self._report))

    def stop(self) -> None:
        """End it."""
        self._hooks.remove()
        self._handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self, place: int, gradient: Tensor | None) -> None:
        self._has_seen = True
        if gradient is None or gradient.layout is not torch.strided:  # None: a part of the graph without a gradient
            return
        parameter = self._reducer.parameters[place]
        # Its own strides for a dense parameter, else row after row: the layout of its view in the bucket.
        view = torch.empty_like(parameter, device="meta").stride()
        strides = _strides_to_be(parameter, gradient, view)
        if strides != view:
            self._found.append(f"{self._reducer.names[place]!r} (gradient {strides}, bucket {view})")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _report(self, *_: object) -> None:
        if not self._has_seen:
            return
        self.stop()
        if self._found:
            found = list(dict.fromkeys(self._found))  # a gradient in several parts was seen several times
            shown = ", ".join(found[:10]) + (", …" if len(found) > 10 else "")
            warnings.warn(
                f"gradients of {len(found)} of the parameters have other strides than their places in DDP's buckets, "
                f"which costs a slow copy each: {shown}; convert the model's memory format before it is wrapped",
                stacklevel=3,
            )


def _strides_to_be(parameter: Tensor, gradient: Tensor, view: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that ``parameter.grad`` will have once autograd has accumulated ``gradient``.

    An old gradient is added to. Else autograd keeps the new one if its layout is the parameter's, and compares only
    strides of dimensions longer than 1; otherwise it copies into the right layout.

    >>> by_channel = torch.ones(8).as_strided((4, 2, 1, 1), (2, 1, 2, 2))
    >>> _strides_to_be(torch.ones(4, 2, 1, 1), by_channel, (2, 1, 1, 1))
    (2, 1, 2, 2)
    """
    if parameter.grad is not None:
        return parameter.grad.stride()
    same = all(size == 1 or a == b for size, a, b in zip(parameter.shape, gradient.stride(), view, strict=True))
    return gradient.stride() if same else view
