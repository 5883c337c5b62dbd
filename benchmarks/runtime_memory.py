"""How much memory a model takes while it tunes: torch's DistributedDataParallel beside ours, in units of the gradients.

    python benchmarks/runtime_memory.py
    python benchmarks/runtime_memory.py --device cuda

Each row is a run of two ranks of its own: a stack of linear layers trains with plain SGD, ours until it has settled,
torch's for 60 steps. On a CPU the peak of the resident memory counts, from the moment before the model is
wrapped; on a GPU (two emulated hosts, nccl) what torch's allocator had handed out, and had reserved, less the
parameters. The larger of the two ranks counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel
from mgwfbp.runtime.messages.gloo import init_process_group

WIDTH, LAYERS = 2048, 24
BATCH = 8
TUNE_STEPS = 60  # a limit for our class: all plans have been run by then
STOCK_STEPS = 60
LARGE_MIB = 100  # of torch's buckets in the rows "large": messages as large as in some plans that our class tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # of a rank: class, views and where to write
    options = parser.parse_args()
    if options.cell:
        run_rank(options.device, *options.cell.split(","))
        return
    rows = [
        run_cell(options.device, which, views) for views in ("copies", "views") for which in ("stock", "large", "ours")
    ]
    print(json.dumps({"device": options.device, "torch": torch.__version__, "rows": rows}, indent=1))


def run_cell(device: str, which: str, views: str) -> dict[str, Any]:
    launch = {
        "cpu": ["torch.distributed.run", "--nproc-per-node", "2"],
        "cuda": ["mgwfbp", "lab", "--hosts", "2", "--rate", "25gbit", "--", sys.executable],
    }[device]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", *launch, __file__, "--device", device, "--cell", f"{which},{views},{found}"]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603
        row: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return row


def run_rank(kind: str, which: str, views: str, output: str) -> None:
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        init_process_group()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    sample = torch.randn(BATCH, WIDTH, device=device)
    gradient_bytes = sum(parameter.nbytes for parameter in net.parameters())
    arguments: dict[str, Any] = {"tune_steps": TUNE_STEPS} if which == "ours" else {}
    arguments |= {"bucket_cap_mb": LARGE_MIB} if which == "large" else {}
    wrap = DistributedDataParallel if which == "ours" else StockDdp
    train(wrap(nn.Linear(WIDTH, 8).to(device), **arguments), sample)  # loads code that is loaded when needed
    before = start_peak(device)
    model = wrap(net, gradient_as_bucket_view=views == "views", **arguments)
    train(model, sample)
    peaks = torch.tensor(peak_bytes(device), dtype=torch.float64, device=device) - before
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        names = ("resident",) if kind == "cpu" else ("allocated", "reserved")
        row = {"class": which, "gradients": views, "gradient_bytes": gradient_bytes}
        row |= {name: round(peak / gradient_bytes, 3) for name, peak in zip(names, peaks.tolist(), strict=True)}
        if isinstance(model, DistributedDataParallel):
            row["tuning"] = repr(model.tuning)
            row["plans_run"] = [candidate.plan.num_groups for candidate in model.tuning.candidates]
        Path(output).write_text(json.dumps(row), encoding="utf-8")
    dist.destroy_process_group()


def train(model: StockDdp, sample: torch.Tensor) -> None:
    """Train, and where the model tunes itself until it has ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in count():
        tunes = isinstance(model, DistributedDataParallel) and model.tuning.state == "working"
        if step >= STOCK_STEPS and not tunes:
            break
        optimizer.zero_grad()
        model(sample).square().mean().backward()
        optimizer.step()


def start_peak(device: torch.device) -> float:
    """Forget earlier peaks; return what is in use and will stay so: the parameters, and on a CPU the whole process."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # nccl makes its own buffers at its first message
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes("VmRSS")


def peak_bytes(device: torch.device) -> list[float]:
    if device.type == "cuda":
        return [float(torch.cuda.max_memory_allocated(device)), float(torch.cuda.max_memory_reserved(device))]
    return [resident_bytes("VmHWM")]


def resident_bytes(which: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    main()
