"""Accuracy over all ranks, every sample counted once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp.errors import TrainError
from mgwfbp.train.models import scores

__all__ = ["Accuracy", "evaluate"]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What a model gets right."""

    num_samples: int
    top1: float  # shares of the samples
    top5: float
    loss: float  # mean cross-entropy


def evaluate(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    autocast_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Accuracy:
    """Validate on every rank's share and add up. All ranks of the group, which works on the CPU, must call it.

    Labels of -1 do not count. ``module`` is the model itself: the number of batches may differ from rank to rank, so a
    forward pass must not wait for others.
    """
    was_training = module.training
    module.eval()
    # Whole numbers and doubles: a sum that does not depend on how many ranks there are.
    counts = torch.zeros(3, dtype=torch.int64)
    loss = torch.zeros(1, dtype=torch.float64)
    autocast = torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None)
    with torch.inference_mode(), autocast:
        for images, labels in batches:
            read = labels >= 0
            output = scores(module(images))[read].float()
            counts += _count(output, labels[read]).cpu()
            loss += nn.functional.cross_entropy(output, labels[read], reduction="none").double().sum().cpu()
    module.train(was_training)
    dist.all_reduce(counts, group=group)
    dist.all_reduce(loss, group=group)
    num_samples, top1, top5 = counts.tolist()
    if not num_samples:
        raise TrainError("not one validation sample could be read")
    return Accuracy(num_samples, top1 / num_samples, top5 / num_samples, loss.item() / num_samples)


def _count(output: Tensor, labels: Tensor) -> Tensor:
    """Return how many samples there are, and in how many the label has the best score, or one of the five best."""
    best = output.topk(min(5, output.shape[1]), dim=1).indices == labels.unsqueeze(1)
    return torch.stack([torch.tensor(len(labels), device=best.device), best[:, 0].sum(), best.any(dim=1).sum()])
