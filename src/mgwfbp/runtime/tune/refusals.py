"""Which models are not tuned while they train, and why."""

from collections.abc import Callable
from typing import Any

import torch

from mgwfbp.runtime.reducer.handle import ReducerHandle

__all__ = ["cannot_time", "unfit_for_tuning", "unfit_hook"]

# Where torch keeps the hooks that treat every bucket alike.
STATELESS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def cannot_time(device: torch.device) -> str:
    """Say why steps of a model on this device cannot be timed; empty where they can."""
    return "" if device.type in ("cpu", "cuda") else f"the model is on {device}, where nothing can be timed"


def unfit_hook(hook: Callable[..., Any]) -> str:
    """Say why buckets must not be changed under a communication hook; empty where they may."""
    name = getattr(hook, "__qualname__", repr(hook))
    is_torchs = getattr(hook, "__module__", "") == STATELESS_HOOKS and "<locals>" not in name  # a wrapper of any other
    return "" if is_torchs else f"the communication hook {name} may keep state per bucket"


def unfit_for_tuning(reducer: ReducerHandle) -> str:
    """Say why a model's buckets must not be changed during training; empty where they may."""
    model = reducer.ddp
    if reducer.cannot_change:  # first: with mixed_precision torch registers a communication hook of its own
        return reducer.cannot_change
    if getattr(model, "_require_manual_backward_finalization", False):  # torch 2.15
        return "the end of a backward pass is finalized by hand"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "messages without a used gradient are skipped (skip_all_reduce_unused_params)"
    for hook, _ in model._comm_hooks:
        if reason := unfit_hook(hook):
            return reason
    if len({parameter.device for parameter in reducer.parameters}) > 1:
        return "the model is on several devices, which no one clock can time"
    if model._is_compiled:
        return "the model is compiled, and every change of buckets would compile it again"
    return ""
