"""What one operation of torch costs: its floating-point operations, and whether it does anything at all."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

__all__ = ["flops_of", "takes_no_time"]

_aten = torch.ops.aten

# What torch's table calls an operation's result.
_OUT = "out_val" if "out_val" in shape_wrapper(len).__code__.co_varnames else "out"

# No kernel runs: another shape of the same memory that torch does not call a view, and memory without content.
_NOTHING_RUNS = {
    _aten._unsafe_view,
    _aten.as_strided_,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


def takes_no_time(func: Any) -> bool:
    """Say whether an operation only names memory: views, reshapes and allocations."""
    return bool(func.is_view or func.namespace == "prim" or func.overloadpacket in _NOTHING_RUNS)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the floating-point operations of one call by torch's own table, or ours where that is wrong or silent.

    Matrix products, convolutions and attention count, a multiply and an add being two; all else is taken for traffic.
    """
    counter = _OURS.get(func.overloadpacket)
    if counter is not None:
        return counter(*args, **kwargs)
    torchs = flop_registry.get(func.overloadpacket)
    return int(torchs(*args, **kwargs, **{_OUT: out})) if torchs else 0


def _convolution_backward(
    grad_output: Tensor, images: Tensor, weight: Tensor, *settings: Any, output_mask: list[bool] | None = None
) -> int:
    """Count the gradients of a convolution: those of its input and of its weight go through the forward's products.

    Every number of the weight meets every place of the output once (of the input, if the convolution is transposed).
    Torch's table takes grouped convolutions for dense ones.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, *mask = settings
    wanted = output_mask if output_mask is not None else mask[0]
    places = (images if transposed else grad_output).shape[2:]
    forward = 2 * images.shape[0] * weight.numel() * math.prod(places)
    return forward * sum(wanted[:2])  # the bias is a sum


def _grouped_mm(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count a product of parts: a flat side (2-D) is cut up among the groups, so that each part is met once."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


_OURS: dict[Any, Callable[..., int]] = {_aten.convolution_backward: _convolution_backward}
if hasattr(_aten, "_grouped_mm"):  # not in older versions of torch
    _OURS[_aten._grouped_mm] = _grouped_mm
