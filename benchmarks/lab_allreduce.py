"""One rank of an all-reduce sweep; rank 0 prints one line of JSON. Run it with `mgwfbp lab` or `torchrun`."""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--sizes", default="16777216", help="bytes, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds-per-size", type=float, default=3.0, help="fewer repeats rather than longer")
    options = parser.parse_args()
    device = "cpu"
    if options.backend == "nccl":
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(options.backend)
    rows = [measure(int(size), device, options) for size in options.sizes.split(",")]
    if dist.get_rank() == 0:
        found = {"backend": options.backend, "workers": dist.get_world_size(), "torch": torch.__version__, "rows": rows}
        if device == "cuda":
            nccl: Any = torch.cuda.nccl  # has no types
            found |= {"device": torch.cuda.get_device_name(), "nccl": ".".join(map(str, nccl.version()))}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def measure(num_bytes: int, device: str, options: argparse.Namespace) -> dict[str, float]:
    """Time all-reduces of one size, one after another; each sample is the slowest rank's."""
    tensor = torch.zeros(max(1, num_bytes // 4), device=device)
    once(tensor)  # connections are made on first use
    # All ranks must repeat equally often: the slowest decides.
    repeats = max(3, min(options.repeats, int(options.seconds_per_size / max(once(tensor), 1e-6))))
    samples = [once(tensor) for _ in range(repeats)]
    return {"bytes": num_bytes, "median_s": statistics.median(samples), "min_s": min(samples), "repeats": repeats}


def once(tensor: torch.Tensor) -> float:
    dist.all_reduce(torch.zeros(1, device=tensor.device))  # all ranks are here
    synchronize(tensor)
    start_s = time.perf_counter()
    dist.all_reduce(tensor)
    synchronize(tensor)
    took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64, device=tensor.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
