"""A link that becomes slower in mid-run, and fast again: a model that looks again beside one that does not.

    mgwfbp measure analytic --model mobilenet_v2 -o mobilenet.json
    mgwfbp lab --hosts 2 --rate 1gbit --rate-change 180s=200mbit --rate-change 500s=1gbit -- \
        python benchmarks/drift.py mobilenet.json --seconds 700 -o drift.json
    mgwfbp lab --hosts 2 --rate 1gbit -- python benchmarks/drift.py mobilenet.json --quiet-steps 2000 -o quiet.json

Models are stand-ins for MobileNet-v2 with a quarter of its gradients that wait for 125 ms where it would compute
(`Replay`); messages are real. In the first run one tunes itself; once it has settled another that keeps the plan
it found trains beside it, step by step in turns, over the same links. In the second, one goes on for so many steps
after it has settled.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp import DistributedDataParallel, load_trace
from mgwfbp.bench.replay import Replay, replayable
from mgwfbp.runtime.messages.gloo import init_process_group

COMPUTE_S, SHARE = 0.125, 0.25
BLOCK = 100  # steps of a row of the table, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--quiet-steps", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    started_s = time.perf_counter()
    torch.set_num_threads(1)
    init_process_group()
    trace = load_trace(options.trace)
    trace = trace.scaled(COMPUTE_S / trace.compute_s)
    smaller = tuple(replace(layer, grad_bytes=int(SHARE * layer.grad_bytes)) for layer in trace.layers)
    trace = replayable(replace(trace, layers=smaller))
    models = {"looks again": DistributedDataParallel(Replay(trace))}
    start = torch.zeros(1, requires_grad=True)
    steps: list[dict[str, Any]] = []
    quiet = 0
    while True:
        row: dict[str, Any] = {"at_s": time.perf_counter() - started_s}
        for name, model in models.items():
            begun_s = time.perf_counter()
            model.zero_grad()
            model(start).sum().backward()
            row[name] = time.perf_counter() - begun_s
            row[f"{name}: tuning"] = f"{model.tuning.state} {model.tuning.retuned}"
        steps.append(row)
        if not options.quiet_steps and len(models) == 1 and models["looks again"].tuning.state == "settled":
            models["does not"] = DistributedDataParallel(Replay(trace), plan=models["looks again"].plan)
        quiet += models["looks again"].tuning.state == "settled"
        # Rank 0's clock decides for both.
        is_over = torch.tensor(
            [float(quiet >= options.quiet_steps if options.quiet_steps else row["at_s"] > options.seconds)]
        )
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
    if dist.get_rank() == 0:
        found = {"steps": steps, "tuning": {name: repr(model.tuning) for name, model in models.items()}}
        options.output.write_text(json.dumps(found), encoding="utf-8")
        print(json.dumps(found["tuning"], indent=1))
        for line in describe([row for row in steps if len(row) == 1 + 2 * len(models)], list(models)):
            print(line)
    dist.destroy_process_group()


def describe(steps: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return rows of Markdown: medians over the stretches in which no tuner changed its state."""
    lines = ["| from, s | steps | " + " | ".join(f"{name}: state, ms" for name in names) + " |"]
    stretch: list[dict[str, Any]] = []
    for row, following in zip(steps, [*steps[1:], None], strict=True):
        stretch.append(row)
        states = [row[f"{name}: tuning"] for name in names]
        if following is None or [following[f"{name}: tuning"] for name in names] != states or len(stretch) >= BLOCK:
            cells = [
                f"{state}, {1e3 * sorted(one[name] for one in stretch)[len(stretch) // 2]:.1f}"
                for name, state in zip(names, states, strict=True)
            ]
            lines.append(f"| {stretch[0]['at_s']:.0f} | {len(stretch)} | {' | '.join(cells)} |")
            stretch = []
    return lines


if __name__ == "__main__":
    main()
