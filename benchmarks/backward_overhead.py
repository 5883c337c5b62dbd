"""Does noting when each gradient is ready distort the backward pass? Hooked and plain steps in turns, in one run.

usage: python benchmarks/backward_overhead.py [cpu|cuda] [MODEL:BATCH ...]   (prints a Markdown table)
"""

import statistics
import sys
import time

import torch

from mgwfbp.measure.backward import measure_backward
from mgwfbp.measure.workload import Workload, build_workload

ROUNDS = 20


def plain_backward_s(workload: Workload, device: str) -> float:
    """Time one backward pass as a whole, without a hook."""
    workload.model.zero_grad(set_to_none=True)
    if device == "cpu":
        loss = workload.loss()
        start_s = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    loss = workload.loss()
    start.record()
    loss.backward()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    specs = sys.argv[2:] or ["resnet50:4", "googlenet:4"]
    where = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"
    print(f"torch {torch.__version__}, {where}, {ROUNDS} rounds\n")
    print("| model | batch | plain, ms | sum of backward_s, ms | difference | spread of plain (IQR) |")
    print("|---|--:|--:|--:|--:|--:|")
    for spec in specs:
        model, _, batch = spec.rpartition(":")
        workload = build_workload(model, batch_size=int(batch), device=device)
        for _ in range(3):
            plain_backward_s(workload, device)
        plain, hooked = [], []
        for _ in range(ROUNDS):
            plain.append(plain_backward_s(workload, device))
            trace = measure_backward(workload.model, workload.batch, workload.loss_fn, steps=1, warmup=0)
            hooked.append(trace.backward_s)
        middle, watched = statistics.median(plain), statistics.median(hooked)
        quarters = statistics.quantiles(plain, n=4)
        spread = (quarters[2] - quarters[0]) / middle
        row = (
            model,
            batch,
            f"{middle * 1e3:.2f}",
            f"{watched * 1e3:.2f}",
            f"{watched / middle - 1:+.1%}",
            f"{spread:.1%}",
        )
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
