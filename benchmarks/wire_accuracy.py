"""The error of a gradient that was averaged in low precision, by the number of workers: ours, and torch's hooks.

    python benchmarks/wire_accuracy.py

Real processes over gloo. Every worker has a gradient of normally distributed numbers; the exact average is worked out
in fp64. Errors are root mean squares, in units of the error of rounding the exact average once to as many bits. Numbers
are also taken a thousand and a hundred thousand times as small, where float16 as it is has fewer bits. Prints Markdown.
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
# Bits of a number, the leading one included, and torch's hook.
WIRES: dict[str, tuple[int, Callable[..., Any]]] = {
    "bfloat16": (8, default_hooks.bf16_compress_hook),
    "float16": (11, default_hooks.fp16_compress_hook),
}
SCALES = ("1", "1e-3", "1e-5")


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


def rounded(numbers: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.round(mantissa * 2**bits), exponent - bits)


def work(rank: int, world: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    normal = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))
    for scale in SCALES:
        mine = float(scale) * normal
        everybody = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everybody, mine)
        exact = torch.stack(everybody).double().mean(0)
        for wire, (bits, _) in WIRES.items():
            once = (rounded(exact, bits) - exact).square().mean().sqrt()
            for kind in ("ours", "torch's hook"):
                found = averaged(wrap(kind, wire), mine)
                error = float((found.double() - exact).square().mean().sqrt() / once)
                theirs = [torch.empty_like(found) for _ in range(world)]
                dist.all_gather(theirs, found.contiguous())
                if rank == 0:
                    is_same = all(torch.equal(one, found) for one in theirs)
                    results.put((f"{wire}, {kind}, numbers of {scale}", world, error, is_same))
    dist.destroy_process_group()


def main() -> None:
    context = mp.get_context("spawn")
    found: dict[str, dict[int, tuple[float, bool]]] = {}
    for world in WORKERS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.SimpleQueue()
        mp.spawn(work, (world, port, results), nprocs=world)  # type: ignore[attr-defined]  # not exported by name
        while not results.empty():
            name, _, error, is_same = results.get()
            found.setdefault(name, {})[world] = (error, is_same)
    out = [f"| | {' | '.join(f'{world} workers' for world in WORKERS)} | the same on all ranks |"]
    out.append("|---|" + "--:|" * len(WORKERS) + "---|")
    for name, errors in found.items():
        cells = " | ".join(f"{errors[world][0]:.2f}" for world in WORKERS)
        out.append(f"| {name} | {cells} | {'yes' if all(one for _, one in errors.values()) else 'no'} |")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
