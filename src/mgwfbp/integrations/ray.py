"""Ray Train: what prepares a model for its workers, with our DDP."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mgwfbp.integrations import missing
from mgwfbp.runtime.distributed import DistributedDataParallel

try:
    import ray.train
    import ray.train.torch
except ImportError as error:
    raise missing("ray[train]", error) from None

__all__ = ["prepare_model"]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Do what ``ray.train.torch.prepare_model`` does, with our class. All workers must call it, in their loop.

    Args:
        model: the model.
        move_to_device: whether to move it to the worker's device, or the device to move it to.
        parallel_strategy_kwargs: of `mgwfbp.DistributedDataParallel`: torch's arguments, ``plan``, ``tune``, ...

    Returns:
        The model in our class, or as it is where there is one worker.

    Raises:
        PlanError: on every worker, where the plan cannot be run or workers differ.
    """
    prepared: nn.Module = ray.train.torch.prepare_model(model, move_to_device, parallel_strategy=None)
    if ray.train.get_context().get_world_size() == 1:
        return prepared
    device = move_to_device if isinstance(move_to_device, torch.device) else ray.train.torch.get_device()
    placed = {} if device.type == "cpu" else {"device_ids": [device], "output_device": device}
    return DistributedDataParallel(prepared, **{**placed, **(parallel_strategy_kwargs or {})})
