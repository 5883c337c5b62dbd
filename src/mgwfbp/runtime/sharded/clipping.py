"""The norm of gradients of which every rank has rows, and clipping by it: `clip_rows`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.runtime.rows.rows import Owned

__all__ = ["clip_rows"]


def clip_rows(
    owned: Sequence[Owned], group: Any, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Scale the gradients of rows so that their norm over all ranks is ``max_norm`` at most; return the norm before.

    All ranks must call it.

    Raises:
        RuntimeError: on all ranks, with ``error_if_nonfinite``, where the norm is not finite.
    """
    found = [(one, one.row.grad) for one in owned]
    grads = [grad for _, grad in found if grad is not None]
    counts_all = dist.get_rank(group) == 0  # what every rank has is counted once
    counted = [grad for one, grad in found if grad is not None and grad.numel() and (counts_all or not one.is_whole)]
    norms = _norms(counted, norm_type) if counted else []
    total = torch.stack([torch.zeros((), dtype=torch.float64, device=owned[0].memory.device), *norms])
    if norm_type == float("inf"):
        total = total.max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    else:
        total = (total**norm_type).sum()
        dist.all_reduce(total, group=group)
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped"
        )
    norm = total.to(torch.promote_types(torch.float32, grads[0].dtype) if grads else torch.float32)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append(grad)
    for dtype, some in by_dtype.items():
        torch._foreach_mul_(some, factor.to(dtype))
    return norm


def _norms(grads: list[Tensor], norm_type: float) -> Sequence[Tensor]:
    """Return the norm of each, in double precision."""
    try:
        return torch._foreach_norm(grads, norm_type, dtype=torch.float64)
    except TypeError:  # torch 2.3 knows no dtype there
        return [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in grads]
