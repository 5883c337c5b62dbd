"""What all-reduces take between emulated hosts, and what TCP makes of the links, by its congestion control.

for name in bbr reno bbr reno bbr reno; do
  mgwfbp lab --hosts 4 --rate 1gbit --congestion-control $name -- python benchmarks/lab_tcp.py $name
done
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.cli.machine import meters
from mgwfbp.runtime.messages.gloo import init_process_group
from mgwfbp.units import format_bytes, format_seconds

# (bytes of a message, messages one behind the other, how often)
BURSTS = ((4096, 32, 10), (65536, 32, 10), (500_000, 16, 10), (4_000_000, 4, 10), (50_000_000, 1, 12))


def main() -> None:
    torch.set_num_threads(1)
    init_process_group()
    for size, count, repeats in ((4096, 4, 5), *BURSTS):
        buffers = [torch.zeros(size // 4) for _ in range(count)]
        times_s = sorted(burst_s(buffers) / count for _ in range(repeats))
        if dist.get_rank() == 0 and (size, count, repeats) in BURSTS:
            print(
                f"{sys.argv[1]:5} {format_bytes(size):>8} median {format_seconds(median(times_s)):>9} "
                f"from {format_seconds(times_s[0]):>9} to {format_seconds(times_s[-1]):>9}",
                flush=True,
            )
    counts = torch.tensor(list(meters()["tcp"].values()))  # of this host, which is as old as this run
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        sent, again, early = counts.tolist()
        print(
            f"{sys.argv[1]:5} all hosts sent {sent} packets, {again} of them again; {early} came too early", flush=True
        )
    dist.destroy_process_group()


def burst_s(buffers: list[torch.Tensor]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        if work is not None:
            work.wait()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
