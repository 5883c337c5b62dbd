"""What converting a gradient costs on this CPU, and what it loses: bfloat16, float16, and fp8 with a scale per block.

    OMP_NUM_THREADS=1 python benchmarks/wire_conversions.py

There and back, of normally distributed numbers; medians of repetitions in turns. fp8 (e4m3) as torch's operations do
it: the largest number of every block of 128, a scale, a quotient, a cast; and back. Errors are root mean squares,
relative to that of the numbers. Prints Markdown.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

NUMBERS, BLOCK, TURNS = 2**20, 128, 15
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda numbers: numbers.to(dtype).float()


def block_scaled(numbers: Tensor) -> Tensor:
    rows = numbers.view(-1, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / LARGEST
    low = (rows / scales).to(torch.float8_e4m3fn)
    return (low.float() * scales).flatten()


def main() -> None:
    torch.set_num_threads(1)
    numbers = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    ways = {
        "bfloat16": (cast(torch.bfloat16), 2.0),
        "float16": (cast(torch.float16), 2.0),
        f"fp8, a scale (fp32) for every {BLOCK}": (block_scaled, 1 + 4 / BLOCK),
    }
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (way, _) in ways.items():
            start_s = time.perf_counter()
            way(numbers)
            times_s[name].append(time.perf_counter() - start_s)
    out = ["| | bytes a number | ns a number, there and back | error |", "|---|--:|--:|--:|"]
    for name, (way, size) in ways.items():
        error = float((way(numbers) - numbers).square().mean().sqrt() / numbers.square().mean().sqrt())
        out.append(f"| {name} | {size:.2f} | {median(times_s[name]) / NUMBERS * 1e9:.2f} | {error:.2%} |")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
