"""The error of a gradient that was averaged in low precision, by the number of workers: ours, and torch's hooks.

    python benchmarks/wire_accuracy.py

Real processes over gloo. Every worker has a gradient of normally distributed numbers; the exact average is worked out
in fp64. Errors are root mean squares, in units of the error of rounding the exact average once. Prints Markdown.
"""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MergePlan

NUMBERS = 1_000_000
WORKERS = (2, 4, 8)
WIRES: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "bfloat16": (torch.bfloat16, default_hooks.bf16_compress_hook),
    "float16": (torch.float16, default_hooks.fp16_compress_hook),
}


def wrap(kind: str, wire: str) -> nn.Module:
    module = nn.Linear(NUMBERS, 1, bias=False)
    if kind == "ours":
        plan = MergePlan("Linear", "by hand", (("weight",),), wire=(wire,))
        return DistributedDataParallel(module, plan=plan, wire=wire)
    model = StockDdp(module)
    model.register_comm_hook(None, WIRES[wire][1])
    return model


def averaged(model: nn.Module, mine: Tensor) -> Tensor:
    model(mine.unsqueeze(0)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad[0]


def work(rank: int, world: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mine = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))
    everybody = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everybody, mine)
    exact = torch.stack(everybody).double().mean(0)
    for wire, (dtype, _) in WIRES.items():
        once = (exact.to(dtype).double() - exact).square().mean().sqrt()
        for kind in ("ours", "torch's hook"):
            found = averaged(wrap(kind, wire), mine)
            error = float((found.double() - exact).square().mean().sqrt() / once)
            theirs = [torch.empty_like(found) for _ in range(world)]
            dist.all_gather(theirs, found.contiguous())
            if rank == 0:
                results.put((wire, kind, world, error, all(torch.equal(one, found) for one in theirs)))
    dist.destroy_process_group()


def main() -> None:
    context = mp.get_context("spawn")
    found: dict[tuple[str, str], dict[int, tuple[float, bool]]] = {}
    for world in WORKERS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.SimpleQueue()
        mp.spawn(work, (world, port, results), nprocs=world)  # type: ignore[attr-defined]  # not exported by name
        while not results.empty():
            wire, kind, _, error, is_same = results.get()
            found.setdefault((wire, kind), {})[world] = (error, is_same)
    out = [f"| | {' | '.join(f'{world} workers' for world in WORKERS)} | the same on all ranks |"]
    out.append("|---|" + "--:|" * len(WORKERS) + "---|")
    for (wire, kind), errors in found.items():
        cells = " | ".join(f"{errors[world][0]:.2f}" for world in WORKERS)
        out.append(f"| {wire}, {kind} | {cells} | {'yes' if all(one for _, one in errors.values()) else 'no'} |")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
