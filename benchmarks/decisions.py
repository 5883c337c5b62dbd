"""What the tuner decides in simulated worlds in which the true step of every plan is known.

    python benchmarks/decisions.py --seeds 500

A world is a recorded model, a link, 2 to 64 workers, noise of 0.2 to 4 % a step, slow spells, batches that vary, and a
cost of messages to the computation (`tests/runtime/worlds.py`). *Simulated*: nothing is timed.
Prints Markdown.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runtime.worlds import World, random_world, tune_in

KINDS: dict[str, Callable[[World], bool]] = {
    "all": lambda world: True,  # noqa: ARG005
    "noise below 1 % a step": lambda world: world.noise < 0.01,
    "noise of 1 to 4 %": lambda world: world.noise >= 0.01,
    "batches that vary by 20 %": lambda world: world.batches >= 0.2,
    "slow spells": lambda world: world.spell_chance > 0,
    "messages that cost the computation": lambda world: world.per_message_s > 0,
}


@dataclass(frozen=True)
class Decision:
    """What came of one world."""

    seed: int
    world: World
    over_best: float  # the true step of the plan that was kept, over the shortest there is, less 1
    over_default: float  # over that of torch's buckets
    steps: int


def decide_in(seed: int) -> Decision:
    world = random_world(seed)
    kept_s = world.truth(tune_in(world).candidates[0].plan).iteration_s
    default_s = world.truth(world.default).iteration_s
    return Decision(seed, world, kept_s / world.best_s() - 1, kept_s / default_s - 1, world.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    decisions = [decide_in(seed) for seed in range(parser.parse_args().seeds)]
    print(
        "| worlds | number | within 1 % of the best | slower than torch's buckets by over 0.5 % | mean gain | steps |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name, belongs in KINDS.items():
        some = [one for one in decisions if belongs(one.world)]
        near = sum(one.over_best <= 0.01 for one in some)
        hurt = sum(one.over_default > 0.005 for one in some)
        gain = fmean(1 / (1 + one.over_default) for one in some)
        middle, most = median(one.steps for one in some), quantiles((one.steps for one in some), n=20)[-1]
        print(f"| {name} | {len(some)} | {near / len(some):.1%} | {hurt} | {gain:.3f} | {middle:.0f} ({most:.0f}) |")
    worst = sorted(decisions, key=lambda one: -one.over_best)[:5]
    print("\nThe worst:", "; ".join(f"seed {one.seed}, {one.over_best:.1%} behind the best" for one in worst))
    print(f"The slowest against torch's buckets: {max(one.over_default for one in decisions):+.2%}")


if __name__ == "__main__":
    main()
