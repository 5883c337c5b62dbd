"""Draw the results in gpu/ and replay/ for their documents: docs/pictures/gpu.svg and replay.svg.

python benchmarks/figures.py
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from mgwfbp import BenchResult

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "pictures"
MARKS = {"wfbp": "^", "single": "s", "mgwfbp": "v", "optimal": "o", "auto": "D"}


def title(path: Path, result: BenchResult) -> str:
    again = ", again" if path.stem.endswith("repeat") else ""
    return f"{result.model}, {result.workers} hosts, {result.network.removesuffix(' (lab)')}{again}"


def draw(name: str) -> None:
    """Draw how many times as fast as DDP's default each strategy is, one row for each result."""
    found = [(path, BenchResult.load(path)) for path in sorted((HERE / name).glob("*.json"), reverse=True)]
    # Text stays text, and nothing says when or with what it was drawn.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure, axes = plt.subplots(figsize=(8, 0.9 + 0.32 * len(found)), layout="constrained")
        for strategy, mark in MARKS.items():
            ratios = [
                (result.ratio_to(strategy), row)
                for row, (_, result) in enumerate(found)
                if any(one.strategy == strategy for one in result.strategies)
            ]
            axes.plot(*zip(*ratios, strict=True), mark, label=strategy, alpha=0.8)
        axes.axvline(1, color="gray", linestyle="--", linewidth=1, zorder=0)
        axes.set_yticks(range(len(found)), [title(path, result) for path, result in found])
        axes.set_xlabel("times as fast as DDP's default, measured")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper right", ncols=len(MARKS), frameon=False)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


if __name__ == "__main__":
    for one in ("gpu", "replay"):
        draw(one)
