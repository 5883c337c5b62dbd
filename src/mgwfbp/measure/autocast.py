"""Mixed precision without a GPU: torch's autocast, as it is for CUDA, on the meta device.

Torch has no autocast for the meta device, and that of the CPU keeps other operations in 32 bits. So the operations that
CUDA's treats are treated alike here, by kernels that stand where autocast's stand: above autograd, so that the backward
pass has the types that it has on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mgwfbp.errors import MeasureError

__all__ = ["autocast_as_cuda"]

_HALF_TYPES = (torch.float16, torch.bfloat16)

# A place for autocast's kernels that belongs to no processor in use; see [Note: autocast's place].
_PLACE, _PLACE_DEVICE = "AutocastIPU", "ipu"

# What runs in 16 bits on CUDA; where the operands' types differ, in the widest; all others that CUDA's autocast knows
# run in 32 bits. https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior".
# fmt: off
_LOWER = {
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot",
    "linalg_vecdot", "linear", "matmul", "mm", "mv",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell",
}
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
}
# fmt: on
# Kernels of CUDA's libraries, which no model calls by name.
_NEVER_CALLED = ("cudnn", "_cudnn")


@contextmanager
def autocast_as_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Run what is inside as under ``torch.autocast("cuda", dtype)``, for tensors of the meta device.

    [Note: autocast's place] The dispatcher has a place for autocast's kernels for every kind of processor. This uses
    one that is empty: kernels are put there, with a way past them for all other operations, and removed at the end.
    """
    try:
        math_in_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        kernels = _register(_Cast(dtype))
        place = torch._C._IncludeDispatchKeyGuard(getattr(torch._C.DispatchKey, _PLACE))
    except AttributeError as error:
        raise MeasureError(
            f"torch {torch.__version__} cannot be counted under autocast ({error}): leave it out"
        ) from error
    torch.set_autocast_enabled(_PLACE_DEVICE, True)
    # Attention is counted product by product; on a GPU those have its operands' type.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with place:
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(math_in_half)
        torch.set_autocast_enabled(_PLACE_DEVICE, False)
        kernels.clear()


def _register(cast: "_Cast") -> list[torch.library.Library]:
    """Put the kernels in their place; they stay there as long as what is returned."""
    kernels, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _PLACE)
    place = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _PLACE))
    for whole in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, name = whole.partition("::")
        if namespace == "aten" and not name.startswith(_NEVER_CALLED):
            kernels.impl(name, _kernel(name, cast, place), _PLACE)
    return [kernels, others]


class _Cast:
    """Casts operands; a parameter is cast once, however often it is used, as autocast does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.lower = dtype
        self._weights = WeakTensorKeyDictionary()

    def __call__(self, operands: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: self._one(tensor, dtype), operands)

    def _one(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if dtype != self.lower or not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        if tensor not in self._weights or not torch.is_autocast_cache_enabled():
            self._weights[tensor] = tensor.to(dtype)
        return self._weights[tensor]  # type: ignore[no-any-return]


def _kernel(name: str, cast: _Cast, place: Any) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    names = [argument.name for argument in operation._schema.arguments]
    sums_in = names.index("dtype") if "dtype" in names else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch._C._ExcludeDispatchKeyGuard(place):
            if sums_in is not None:
                # Takes 16 bits and gives 32, unless it is told otherwise.
                if operands[0].dtype in _HALF_TYPES and len(args) <= sums_in and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
                return operation(*args, **kwargs)
            args, kwargs = cast((args, kwargs), _type_of(name, operands, cast.lower))
            return operation(*args, **kwargs)

    return kernel


def _type_of(name: str, operands: list[Tensor], lower: torch.dtype) -> torch.dtype:
    if name in _LOWER:
        return lower
    if name in _WIDEST and all(tensor.dtype in _HALF_TYPES for tensor in operands if tensor.is_floating_point()):
        return lower
    return torch.float32
