"""What stands where a gradient was of which every rank has a row: `SpreadGradient`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgwfbp.errors import ShardError
from mgwfbp.runtime.rows.rows import Owned

__all__ = ["SpreadGradient", "tensors_in"]

# What a module that is moved or converted calls for gradients.
CONVERSIONS = (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default)


class SpreadGradient(torch.Tensor):
    """Stands where the gradient of a parameter was whose averaged rows the ranks have: whatever uses it fails.

    But for `torch.amp.GradScaler`, which divides this rank's row and is told of values that any rank found. A module
    that is moved, converted or shared does the same with gradients: of this one it gets another that has no numbers.
    """

    # Not the parameter: it holds its gradient, and would never end.
    of: str  # its name
    row: nn.Parameter
    group: Any

    @staticmethod
    def __new__(cls, owned: Owned, group: Any) -> "SpreadGradient":
        """Make one that looks like the parameter and has no numbers."""
        made = cls._looking_like(owned.parameter, owned.parameter.device)
        made.of, made.row, made.group = owned.name, owned.row, group
        return made

    @classmethod
    def _looking_like(cls, like: torch.Tensor, device: torch.device) -> "SpreadGradient":
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )

    def _converted(self, func: Any, device: torch.device | None = None, **options: Any) -> "SpreadGradient":
        """Return one that looks like what a function of another dtype or device, or of memory, makes of a tensor."""
        own = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        made = self._looking_like(func(own, device="meta", **options), self.device if device is None else device)
        made.of, made.row, made.group = self.of, self.row, self.group
        return made

    def share_memory_(self) -> "SpreadGradient":
        """Share nothing: torch's would take memory that is not there in C++, which asks nobody."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found, *scale = args
            func([one.row.grad if isinstance(one, cls) else one for one in grads], found, *scale)
            group = next(one.group for one in grads if isinstance(one, cls))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return None
        if func in CONVERSIONS:
            return args[0]._converted(func, **(kwargs or {}))
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
