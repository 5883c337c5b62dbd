"""What a step of training takes of the host for many small parameters: torch's DDP, and a sharded optimizer.

    mgwfbp lab --hosts 2 --rate 10gbit -- python benchmarks/sharded_host.py --parameters 600
    torchrun --nproc-per-node 2 benchmarks/sharded_host.py --parameters 600

Processor time of the thread that trains: what messages take in other threads is not in it, but what these make it wait
for Python is. The ways take turns. Prints medians in ms, of rank 0.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, ShardedOptimizer
from mgwfbp.cli.workers import process_group

WIDTH, BUCKET_MB, SETTLE, STEPS, TURNS = 32, 0.2, 8, 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=160)
    number = parser.parse_args().parameters
    torch.set_num_threads(1)
    with process_group("cpu", None, timeout_s=60):
        steps = {name: stepper(number, name) for name in ("ddp", "sharded", "all-reduced")}
        taken_s: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(TURNS + 1):
            for name, step in steps.items():
                for _ in range(STEPS if turn else SETTLE):
                    begin_s = time.thread_time()
                    step()
                    if turn:
                        taken_s[name].append(time.thread_time() - begin_s)
        if dist.get_rank() == 0:
            found = ", ".join(f"{name} {1e3 * median(taken):.1f} ms" for name, taken in taken_s.items())
            print(f"{number} parameters: {found}")


def stepper(number: int, way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(number // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    module, x = nn.Sequential(*layers), torch.randn(4, WIDTH)
    model: nn.Module
    optimizer: optim.Optimizer
    if way == "ddp":
        model = StockDdp(module, bucket_cap_mb=BUCKET_MB)
        optimizer = optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    else:
        model = ours = DistributedDataParallel(module, tune=False, bucket_cap_mb=BUCKET_MB)
        assert ours.plan is not None  # of its own buckets
        plan = None if way == "sharded" else replace(ours.plan, gathers=())
        optimizer = ShardedOptimizer(ours, optim.SGD, plan=plan, lr=1e-3, momentum=0.9, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
