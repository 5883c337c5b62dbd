"""What the settled class costs: our DistributedDataParallel, after it has tuned, beside torch's with the same buckets.

    torchrun --nproc-per-node 2 benchmarks/runtime_overhead.py --model resnet18 --image-size 64
    mgwfbp lab --hosts 4 --rate 25gbit -- python benchmarks/runtime_overhead.py --device cuda --model resnet50

Three train a copy of one model: torch's, ours, and torch's once more, the control, whose ratio shows what the machine
does by itself. They take turns in changing order, the slowest rank counts, ratios are within a round. Beside the time
of a step stands what processors spent on it, which other work on the machine disturbs less. Turns scatter by more than
what is looked for, so take hundreds: the median comes with an interval that holds the true one 19 times in 20.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, permutations
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MergePlan
from mgwfbp.measure.workload import Workload, build_workload, run_to_loss
from mgwfbp.runtime.messages.gloo import init_process_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        init_process_group()
    steppers: dict[str, Any] = {}
    for name, wrap in (("stock", StockDdp), ("ours", DistributedDataParallel), ("again", StockDdp)):
        torch.manual_seed(0)
        workload = build_workload(
            options.model,
            batch_size=options.batch_size,
            device=device,
            image_size=options.image_size,
        )
        model = wrap(workload.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        steppers[name] = (model, partial(train_step, model, optimizer, workload))
    stock, ours = steppers["stock"][0], steppers["ours"][0]
    while ours.tuning.state == "working":
        steppers["ours"][1]()
    with ours.observe(steps=2):  # as the tuner does, also where it has nothing to tune: one rank
        for _ in range(2):
            steppers["ours"][1]()
    for _ in range(3):
        steppers["stock"][1]()
        steppers["again"][1]()
    names = {id(parameter): name for name, parameter in stock.module.named_parameters()}
    groups = [
        [names[id(one)] for one in bucket.parameters()] for bucket in stock.reducer._get_zeros_like_grad_buckets()
    ]
    ours.replan(MergePlan("same", "ddp", tuple(tuple(group) for group in groups)))
    times: dict[str, list[float]] = {name: [] for name in steppers}
    busy: dict[str, list[float]] = {name: [] for name in steppers}
    for _, order in zip(range(options.turns), cycle(permutations(steppers)), strict=False):
        for name in order:
            step_s, busy_s = timed(steppers[name][1], options.steps, device)
            times[name].append(step_s)
            busy[name].append(busy_s)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "model": options.model,
                    "device": options.device,
                    "backend": dist.get_backend(),
                    "workers": dist.get_world_size(),
                    "messages": len(groups),
                    "stock_ms": round(1e3 * median(times["stock"]), 3),
                    "ours_ms": round(1e3 * median(times["ours"]), 3),
                    "turns": options.turns,
                    "steps": options.steps,
                    "ratio": summary(times["ours"], times["stock"]),
                    "control": summary(times["again"], times["stock"]),
                    "processor_ratio": summary(busy["ours"], busy["stock"]),
                    "processor_control": summary(busy["again"], busy["stock"]),
                    "tuning": repr(ours.tuning),
                    "torch": torch.__version__,
                }
            )
        )
    dist.destroy_process_group()


def summary(these: Sequence[float], those: Sequence[float]) -> dict[str, Any]:
    """Return the median ratio, its quartiles and its interval: order statistics, whatever the distribution."""
    ratios = [this / that for this, that in zip(these, those, strict=True)]
    ordered, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = max(0, math.floor(len(ratios) / 2 - half)), min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return {
        "median": round(median(ratios), 4),
        "interval": [round(ordered[low], 4), round(ordered[high], 4)],
        "quartiles": [round(quartile, 4) for quartile in quantiles(ratios, n=4)[::2]],
    }


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload) -> None:
    optimizer.zero_grad()
    run_to_loss(model, workload.batch, workload.loss_fn).backward()
    optimizer.step()


def timed(step: Callable[[], None], count: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank, and those that processors spent on it, of all ranks."""
    step()
    wait(device)
    dist.barrier()
    started_s, busy_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    wait(device)
    slowest = torch.tensor([(time.perf_counter() - started_s) / count], device=device)
    total = torch.tensor([(time.process_time() - busy_s) / count], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest.item()), float(total.item())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
