"""Does the way gradients travel change what is learnt? Every strategy from one seed, real processes.

``python -m benchmarks.convergence --workers 2 -o convergence-2.json`` trains the small net on the digits for 13 epochs
with every strategy, and with DDP's own buckets from other seeds to show what noise is; prints the tables of
convergence.md.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mgwfbp import TrainingRun
from mgwfbp.runtime.strategies import STRATEGIES
from mgwfbp.train.checkpoints import CheckpointFolder


def train(folder: Path, *, strategy: str, seed: int, workers: int, epochs: int) -> dict[str, Any]:
    """Run ``mgwfbp train`` and return what came of it."""
    command = [sys.executable, "-m", "mgwfbp", "train", "--strategy", strategy, "--seed", str(seed)]
    command += ["--workers", str(workers), "--epochs", str(epochs), "--no-tensorboard", "--output", str(folder)]
    command += ["--wire", "bfloat16"] if strategy.endswith(".json") else []  # a plan may send in it
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603
    run = TrainingRun.load(folder)
    assert run.results is not None
    checkpoint, _ = CheckpointFolder(run.checkpoints, keep=1).newest()
    assert checkpoint is not None
    digest = hashlib.sha256()
    for name, tensor in checkpoint.model.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return {
        "strategy": strategy,
        "seed": seed,
        "workers": workers,
        "num_messages": run.results.num_messages,
        "train_loss": [line.train_loss for line in run.epochs],
        "valid_loss": [line.valid_loss for line in run.epochs],
        "top1": [line.top1 for line in run.epochs],
        "weights_sha256": digest.hexdigest(),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table; the first run is what the others are compared with."""
    lines = [
        "| strategy | seed | messages | top-1 after 1, 3, 6 epochs | top-1 at the end | train loss at the end "
        "| largest distance of the loss curve | weights |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    first = runs[0]
    for one in runs:
        distance = max(abs(a - b) for a, b in zip(one["train_loss"], first["train_loss"], strict=True))
        early = ", ".join(f"{one['top1'][epoch - 1]:.1%}" for epoch in (1, 3, 6) if epoch <= len(one["top1"]))
        same = "identical" if one["weights_sha256"] == first["weights_sha256"] else "differ"
        messages = one["num_messages"] or "torch's"
        lines.append(
            f"| {one['strategy']} | {one['seed']} | {messages} | {early} | {one['top1'][-1]:.2%} "
            f"| {one['train_loss'][-1]:.5f} | {distance:.2g} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=13)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--noise-seeds", type=int, default=2, help="further seeds for DDP's own buckets")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    names = [name for name in options.strategies.split(",") if name != "ddp"]
    cases = [("ddp", 0), *((name, 0) for name in names), *(("ddp", seed) for seed in range(1, 1 + options.noise_seeds))]
    output = Path(options.output)
    # What is there already, of a run that was interrupted, is not trained again.
    runs: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    done = {(one["strategy"], one["seed"]) for one in runs}
    with tempfile.TemporaryDirectory() as scratch:
        for strategy, seed in cases:
            if (strategy, seed) in done:
                continue
            print(f"{strategy}, seed {seed}", file=sys.stderr)
            folder = Path(scratch) / f"{strategy}-{seed}"
            runs.append(train(folder, strategy=strategy, seed=seed, workers=options.workers, epochs=options.epochs))
            output.write_text(json.dumps(runs, indent=1) + "\n")
    places = {case: place for place, case in enumerate(cases)}
    runs.sort(key=lambda one: places.get((one["strategy"], one["seed"]), len(cases)))
    output.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
