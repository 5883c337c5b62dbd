"""What the halves of an all-reduce take over gloo, by size: to one rank after another, and to all at once.

    mgwfbp lab --hosts 4 --rate 625mbit -- python benchmarks/halves_messages.py

One message at a time and nothing beside it; each time is that of the slowest rank, the median of turns stands in the
table. Sizes are bytes of gradients. A sharded optimizer sends to one rank after another. Rank 0 prints Markdown.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.measure.agreement import reduce_values
from mgwfbp.measure.halves import all_gather, exchange, reduce_scatter, wait_for
from mgwfbp.runtime.messages.gloo import destroy_process_group, init_process_group
from mgwfbp.units import format_bytes


def kinds_of(num_bytes: int) -> Mapping[str, Callable[[], object]]:
    """Return what is timed of a message, by its name."""
    group, world = dist.group.WORLD, dist.get_world_size()
    rows = torch.zeros(world, num_bytes // 4 // world)
    received, own, whole = torch.empty_like(rows), rows[0].clone(), rows.flatten()

    def at_once(to: Tensor, sent: Tensor) -> None:
        wait_for(exchange(to, sent, group))

    def sum_at_once() -> None:
        at_once(received, rows)
        torch.sum(received, dim=0, out=own)

    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter, in turn": lambda: reduce_scatter(rows, own, received, group),
        "at once": sum_at_once,
        "all-gather, in turn": lambda: all_gather(rows, own, group),
        "all at once": lambda: at_once(rows, own.expand_as(rows)),
    }


def timed_s(send: Callable[[], object]) -> float:
    """Return what it takes the slowest rank, all beginning together."""
    dist.barrier()
    start_s = time.perf_counter()
    send()
    return reduce_values([time.perf_counter() - start_s], "max")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,1000000,3000000,14000000", help="bytes, separated by commas")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group()
    lines: list[str] = []
    for num_bytes in map(int, options.sizes.split(",")):
        kinds = kinds_of(num_bytes)
        if not lines:
            lines += [f"| ms | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
        found_s: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(1 + options.turns):
            for name, send in kinds.items():
                took_s = timed_s(send)
                if turn:  # connections and memory are made in the first
                    found_s[name].append(took_s)
        cells = " | ".join(f"{1e3 * median(some):.1f}" for some in found_s.values())
        lines.append(f"| {format_bytes(num_bytes)} | {cells} |")
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    destroy_process_group()


if __name__ == "__main__":
    main()
