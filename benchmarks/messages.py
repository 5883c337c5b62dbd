"""What a message takes by its size, and the parts that ours is made of: in low precision, or in halves.

    mgwfbp lab --hosts 2 --rate 600mbit -- python benchmarks/messages.py
    mgwfbp lab --hosts 4 --rate 625mbit -- python benchmarks/messages.py --halves
    mgwfbp lab --hosts 4 --rate 10gbit -- python benchmarks/messages.py --backend nccl --sizes 1000000,28000000

One message at a time and nothing beside it; each time is that of the slowest rank, their median stands in the table.
Sizes are bytes of gradients. The all-reduce in bf16 converts nothing; ours has both conversions in it, the parts have
none: each is of the bytes that ours sends or adds up. ``--halves``: as a sharded optimizer sends them over gloo, to one
rank after another, beside rows to all at once. Rank 0 prints Markdown.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.measure import low
from mgwfbp.measure.halves import all_gather, exchange, reduce_scatter, wait_for
from mgwfbp.runtime.messages.gloo import destroy_process_group, init_process_group
from mgwfbp.units import format_bytes

WIRE = torch.bfloat16
Kinds = Mapping[str, Callable[[], object]]  # what is timed of a message, by its name


def in_low_precision(message: Tensor, group: Any) -> Kinds:
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


def in_halves(message: Tensor, group: Any) -> Kinds:
    rows = message.view(group.size(), -1)
    received, own = torch.empty_like(rows), rows[0].clone()

    def sum_at_once() -> None:
        wait_for(exchange(received, rows, group))
        torch.sum(received, dim=0, out=own)

    return {
        "all-reduce": lambda: dist.all_reduce(message),
        "reduce-scatter, in turn": lambda: reduce_scatter(rows, own, received, group),
        "reduce-scatter, at once": sum_at_once,
        "all-gather, in turn": lambda: all_gather(rows, own, group),
        "all-gather, at once": lambda: wait_for(exchange(rows, own.expand_as(rows), group)),
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
    parser.add_argument("--halves", action="store_true", help="messages of a sharded optimizer over gloo")
    parser.add_argument("--sizes", default="1000000,14000000", help="bytes of gradients, separated by commas")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    if options.halves and options.backend != "gloo":
        parser.error("--halves is for gloo: over nccl they are its own collectives")
    device, kinds_of = join(options.backend), in_halves if options.halves else in_low_precision
    lines: list[str] = []
    for num_bytes in map(int, options.sizes.split(",")):
        world = dist.get_world_size()
        kinds = kinds_of(torch.zeros(num_bytes // 4 // world * world, device=device), dist.group.WORLD)
        if not lines:
            lines += ["| ms | hosts | " + " | ".join(kinds) + " |", "|---|--:|" + "--:|" * len(kinds)]
        found_s: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(1 + options.repeats):
            for name, send in kinds.items():
                took_s = timed_s(send, device)
                if turn:  # connections and memory are made in the first
                    found_s[name].append(took_s)
        cells = " | ".join(f"{1e3 * median(some):.1f}" for some in found_s.values())
        lines.append(f"| {format_bytes(num_bytes)} of gradients | {world} | {cells} |")
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    destroy_process_group()


if __name__ == "__main__":
    main()
