"""What a rank holds with torch's DDP and a plain optimizer, and with a sharded one.

    python benchmarks/sharded_memory.py

Real processes over gloo; a model of 48 layers and 50 million parameters, Adam, 6 steps. Memory is what the process has
resident (Linux counts its peak) beyond what it had before the model was made; state is counted by its tensors.
Prints Markdown, in units of the parameters' bytes.
"""

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, ShardedOptimizer

WIDTH, DEPTH, STEPS = 1024, 48, 6
WAYS = ("torch's DDP", "sharded", "torch's DDP, views", "sharded, views")


def resident(what: str) -> int:
    """Return bytes that this process has resident now (VmRSS) or had at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {what}")


def be_rank(rank: int, world: int, way: str, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    before = resident("VmRSS")
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    unit = sum(one.nbytes for one in model.parameters())
    views = way.endswith("views")
    optimizer: Any
    if way.startswith("sharded"):
        model = DistributedDataParallel(model, tune=False, gradient_as_bucket_view=views)
        optimizer = ShardedOptimizer(model, torch.optim.Adam)
        states = optimizer._inner.state
    else:
        model = StockDdp(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.Adam(model.parameters())
        states = optimizer.state
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
    held = sum(value.nbytes for state in states.values() for value in state.values() if isinstance(value, Tensor))
    results.put((held / unit, (resident("VmHWM") - before) / unit))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, way: str) -> tuple[float, float]:
    """Return the state and the peak of the rank that has most of each."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [context.Process(target=be_rank, args=(rank, world, way, folder, results)) for rank in range(world)]
        for one in ranks:
            one.start()
        found = [results.get() for _ in ranks]
        for one in ranks:
            one.join()
    return max(state for state, _ in found), max(peak for _, peak in found)


def main() -> None:
    print("| ranks | | optimizer's state | peak |\n|--:|---|--:|--:|")
    for world in (2, 4):
        for way in WAYS:
            state, peak = measure(world, way)
            print(f"| {world} | {way} | {state:.2f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
