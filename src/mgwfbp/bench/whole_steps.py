"""Whole training steps, the update too, of ways to train that are compared by scripts under ``benchmarks/``."""

import re
import sys
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp.bench.arena import settle
from mgwfbp.bench.turns import Step
from mgwfbp.fsdp_units import ROOT, units_of_names
from mgwfbp.measure.workload import Workload, run_to_loss, trainable
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.sharded.optimizer import ShardedOptimizer

__all__ = [
    "SGD",
    "fsdp_step",
    "plain_step",
    "stock_ddp_step",
    "table_row",
    "tell",
    "tuned_step",
    "whole_step",
    "wrap_by_block",
]

SGD: Mapping[str, Any] = {"lr": 1e-3, "momentum": 0.9}
# What people wrap by hand, of models that are compared; of others the numbered units.
BLOCKS = ("Bottleneck", "Inception", "_DenseLayer", "EncoderBlock", "BertLayer", "GPT2Block")


def whole_step(work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step of a model that is, or wraps, the workload's."""

    def step() -> None:
        optimizer.zero_grad()
        run_to_loss(model, work.batch, work.loss_fn).backward()
        optimizer.step()

    return step


def plain_step(work: Workload) -> Step:
    """Return a step without communication."""
    return whole_step(work, work.model, torch.optim.SGD(work.model.parameters(), **SGD))


def stock_ddp_step(work: Workload, bucket_cap_mb: float | None = None) -> Step:
    """Return a step of torch's DDP."""
    model = StockDdp(work.model, bucket_cap_mb=bucket_cap_mb)
    return whole_step(work, model, torch.optim.SGD(work.model.parameters(), **SGD))


def tuned_step(
    work: Workload, tune_steps: int, *, is_sharded: bool, bucket_cap_mb: float | None = None
) -> tuple[Step, DistributedDataParallel]:
    """Return a step of our DDP, with a sharded optimizer or a plain one, whose tuner has ended; and the model."""
    model = DistributedDataParallel(work.model, tune_steps=tune_steps, bucket_cap_mb=bucket_cap_mb)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(model, torch.optim.SGD, **SGD)
        if is_sharded
        else torch.optim.SGD(work.model.parameters(), **SGD)
    )
    step = whole_step(work, model, optimizer)
    settle(model, step, tune_steps)
    return step, model


def fsdp_step(work: Workload, wrap: Callable[[nn.Module], object]) -> Step:
    """Return a step of FSDP2, wrapped as ``wrap`` does."""
    wrap(work.model)
    return whole_step(work, work.model, torch.optim.SGD(work.model.parameters(), **SGD))


def block_names(model: nn.Module) -> list[str]:
    """Return the model's blocks, in the order of its modules."""
    if known := [name for name, one in model.named_modules() if type(one).__name__ in BLOCKS]:
        return known
    units = dict.fromkeys(units_of_names([name for name, _ in trainable(model)]).values())
    return [name for name in units if name != ROOT and re.search(r"[0-9]+$", name)]


def wrap_by_block(model: nn.Module) -> None:
    """Apply torch's FSDP2 to every block and to the model."""
    from torch.distributed.fsdp import fully_shard

    for name in block_names(model):
        fully_shard(model.get_submodule(name))
    fully_shard(model)


def table_row(title: str, turns_s: list[float], predicted_s: float | None, base_s: float | None) -> str:
    """Return a line of Markdown: a median of turns with quartiles, what is predicted, and how it compares."""
    low, _, high = quantiles(turns_s, n=4) if len(turns_s) > 1 else turns_s * 3
    middle = median(turns_s)
    shown = "" if predicted_s is None else f"{1e3 * predicted_s:.1f}"
    ratio = "" if base_s is None else f"{base_s / middle:.3f}"
    return f"| {title} | {1e3 * middle:.1f} | {1e3 * low:.1f} to {1e3 * high:.1f} | {shown} | {ratio} |"


def tell(text: str) -> None:
    """Say a line of progress on rank 0's stderr."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - scripts print
