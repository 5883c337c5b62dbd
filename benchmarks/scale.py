"""What a rank tells the others while it tunes, by the number of ranks.

    python benchmarks/scale.py --ranks 2,8,32

A stand-in for ResNet-50 (161 gradients, a thousandth of its bytes; it waits 20 ms where it would compute) tunes itself
over gloo on this machine. Torch's buckets are a thousandth of 25 MB too: were they one message, which is best where
many ranks share few cores, nothing would be left to compare. Every collective that tuning calls in Python is counted
with its bytes; those of training are the Reducer's own. Takes some minutes and about 0.4 GB a rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp import DistributedDataParallel, load_trace
from mgwfbp.bench.replay import Replay, replayable
from mgwfbp.runtime.messages.gloo import init_process_group

COMPUTE_S, SHARE = 0.02, 1e-3
BUCKET_MB = 25 * SHARE
COUNTED = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "gather", "gather_object")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,32")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)  # of a rank: where to write
    options = parser.parse_args()
    if options.rank_output:
        be_rank(options.rank_output)
        return
    print("| ranks | steps | how it ended | collectives a rank | bytes a rank | bytes each, mean (most) | spent, s |")
    print("|--:|--:|---|--:|--:|--:|--:|")
    for world in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "found.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
            command = [*launch, __file__, "--rank-output", str(output)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=sys.stderr, env=environment)  # noqa: S603
            found = json.loads(output.read_text(encoding="utf-8"))
        said = found["said"]
        sizes = [size for _, size in said]
        print(
            f"| {world} | {found['steps']} | {found['state']}: {found['reason']} | {len(said)} | {sum(sizes):,} | "
            f"{sum(sizes) / len(sizes):.0f} ({max(sizes):,}) | {found['spent_s']:.2f} |",
            flush=True,
        )


def be_rank(output: Path) -> None:
    torch.set_num_threads(1)
    init_process_group()
    trace = load_trace("resnet50-k80-b32")
    trace = trace.scaled(COMPUTE_S / trace.compute_s)
    smaller = tuple(replace(layer, grad_bytes=int(SHARE * layer.grad_bytes)) for layer in trace.layers)
    stand_in = Replay(replayable(replace(trace, layers=smaller)))
    model = DistributedDataParallel(stand_in, tune_steps=60, bucket_cap_mb=BUCKET_MB)
    said: list[tuple[str, int]] = []
    for name in COUNTED:
        setattr(dist, name, counted(name, getattr(dist, name), said))
    start = torch.zeros(1, requires_grad=True)
    while model.tuning.state == "working":
        model.zero_grad()
        model(start).sum().backward()
    if dist.get_rank() == 0:
        found = {"said": said, "steps": model.tuning.steps, "spent_s": model.tuning.spent_s}
        found |= {"state": model.tuning.state, "reason": model.tuning.reason}
        output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def counted(name: str, real: Any, said: list[tuple[str, int]]) -> Any:
    def call(tensor: Any, *arguments: Any, **named: Any) -> Any:
        said.append((name, tensor.nbytes if isinstance(tensor, torch.Tensor) else 0))
        return real(tensor, *arguments, **named)

    return call


if __name__ == "__main__":
    main()
