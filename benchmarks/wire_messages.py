"""What a message takes in fp32 and in bf16, by its size: all-reduces, ours, and the parts that ours is made of.

    mgwfbp lab --hosts 2 --rate 600mbit -- python benchmarks/wire_messages.py
    mgwfbp lab --hosts 4 --rate 10gbit -- python benchmarks/wire_messages.py --backend nccl --sizes 1000000,28000000

One message at a time and nothing beside it; each time is that of the slowest rank, their mean stands in the table.
Sizes are bytes of gradients. The all-reduce in bf16 converts nothing; ours has both conversions in it, the parts have
none: each is of the bytes that ours sends or adds up. Rank 0 prints Markdown.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.measure import low
from mgwfbp.runtime.messages.gloo import destroy_process_group, init_process_group
from mgwfbp.units import format_bytes

WIRE = torch.bfloat16


def kinds_of(message: Tensor, group: Any) -> Mapping[str, Callable[[], object]]:
    """Return what is timed of a message, by its name."""
    rows = low._lowered(message, WIRE, group.size())
    received, summed, half = torch.empty_like(rows), rows[0].clone(), message.to(WIRE)
    sent, read, own = (one.view(torch.uint8) for one in (rows, received, summed))
    return {
        "fp32, all-reduce": lambda: dist.all_reduce(message),
        "bf16, all-reduce (sums in bf16)": lambda: dist.all_reduce(half),
        "ours, bf16 (sums in fp32)": lambda: low.average_in(WIRE, message, group),
        "ours, with the backend's all-to-all and all-gather": lambda: with_collectives(message, group),
        "of that: all-to-all": lambda: dist.all_to_all_single(read, sent),
        "sum": lambda: low._summed(received),
        "all-gather": lambda: dist.all_gather_into_tensor(sent.flatten(), own),
    }


def with_collectives(message: Tensor, group: Any) -> None:
    """Send a message as ours is sent over nccl, also over gloo."""
    rows = low._lowered(message, WIRE, group.size())
    received = torch.empty_like(rows)
    dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8))
    dist.all_gather_into_tensor(rows.view(torch.uint8).flatten(), low._summed(received).view(torch.uint8))
    low._raise(rows, message)


def timed_s(send: Callable[[], object], device: torch.device) -> float:
    """Return what it takes the slowest rank, all beginning together."""
    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)
    start_s = time.perf_counter()
    send()
    synchronize(device)
    took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join(backend: str) -> torch.device:
    if backend == "gloo":
        torch.set_num_threads(1)
        init_process_group()
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--sizes", default="1000000,14000000", help="bytes of gradients, separated by commas")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    device = join(options.backend)
    lines: list[str] = []
    for num_bytes in map(int, options.sizes.split(",")):
        kinds = kinds_of(torch.zeros(num_bytes // 4, device=device), dist.group.WORLD)
        if not lines:
            lines += ["| ms | hosts | " + " | ".join(kinds) + " |", "|---|--:|" + "--:|" * len(kinds)]
        found_s: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(1 + options.repeats):
            for name, send in kinds.items():
                took_s = timed_s(send, device)
                if turn:  # connections and memory are made in the first
                    found_s[name].append(took_s)
        cells = " | ".join(f"{1e3 * fmean(some):.1f}" for some in found_s.values())
        lines.append(f"| {format_bytes(num_bytes)} of gradients | {dist.get_world_size()} | {cells} |")
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    destroy_process_group()


if __name__ == "__main__":
    main()
