"""What stands where a gradient was of which every rank has a row: `SpreadGradient`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgwfbp.errors import ShardError
from mgwfbp.runtime.rows.rows import Owned

__all__ = ["SpreadGradient", "tensors_in"]


class SpreadGradient(torch.Tensor):
    """Stands where the gradient of a parameter was whose averaged rows the ranks have: whatever uses it fails.

    But for `torch.amp.GradScaler`, which divides this rank's row and is told of values that any rank found.
    """

    # Not the parameter: it holds its gradient, and would never end.
    of: str  # its name
    row: nn.Parameter
    group: Any

    @staticmethod
    def __new__(cls, owned: Owned, group: Any) -> "SpreadGradient":
        """Make one that looks like the parameter and has no numbers."""
        like = owned.parameter
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.of, made.row, made.group = owned.name, owned.row, group
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found, *scale = args
            func([one.row.grad if isinstance(one, cls) else one for one in grads], found, *scale)
            group = next(one.group for one in grads if isinstance(one, cls))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return None
        name = next(one.of for one in tensors_in(args) if isinstance(one, cls))
        raise ShardError(
            f"the gradient of {name} was averaged and each rank has a row of it, so that {func} cannot be: clip with "
            "optimizer.clip_grad_norm_(), call optimizer.zero_grad() before the next backward pass, and to accumulate "
            "run all backward passes but the last inside model.no_sync()"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpreadGradient({self.of})"


def tensors_in(values: Any) -> Iterator[Any]:
    """Return what lists, tuples, sets and dicts hold, and what such in them hold."""
    for one in values:
        if isinstance(one, (list, tuple, set)):
            yield from tensors_in(one)
        elif isinstance(one, dict):
            yield from tensors_in(one.values())
        else:
            yield one
