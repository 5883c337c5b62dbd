"""What the tuner decides in simulated worlds in which the true step of every plan is known.

    python benchmarks/decisions.py --seeds 500
    python benchmarks/decisions.py --seeds 150 --tune-steps 60 --wire bfloat16
    python benchmarks/decisions.py --seeds 30 --predictions
    python benchmarks/decisions.py --seeds 34 --planners
    python benchmarks/decisions.py --seeds 1000 --rivals 1 --slower 0.002

A world is a recorded model, a link, 2 to 64 workers, noise of 0.2 to 4 % a step, slow spells, batches that vary, and a
cost of messages to the computation (`tests/runtime/worlds.py`). *Simulated*: nothing is timed.
With `--rivals` no plan is faster than torch's buckets: so many that are as fast, or slower by a part of the step, are
compared with them in each of these worlds, with its noise, spells and batches, and it is counted how often one is kept.
Prints Markdown.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1]))

from mgwfbp import LayerTrace, LinearCost, MergePlan, ModelTrace
from mgwfbp.planners import find_plan, plan_wire
from mgwfbp.runtime.observe.steps import Seen
from mgwfbp.runtime.tune.race import Limits, compare
from mgwfbp.runtime.tune.tuning import Candidate
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
    candidates: tuple[Candidate, ...]
    over_best: float  # the true step of the plan that was kept, over the shortest there is, less 1
    over_default: float  # over that of torch's buckets
    steps: int


def decide_in(seed: int, limits: Limits, wire: str | None) -> Decision:
    world = random_world(seed)
    candidates = tune_in(world, limits, wire=wire).candidates
    kept_s = world.truth(candidates[0].plan).iteration_s
    default_s, best_s = world.truth(world.default).iteration_s, world.best_s()
    if wire is not None:
        best_s = min(best_s, world.truth(plan_wire(world.trace, world.cost, wire)).iteration_s)
    return Decision(seed, world, candidates, kept_s / best_s - 1, kept_s / default_s - 1, world.steps)


def print_predictions(decisions: Sequence[Decision]) -> None:
    """Print how far predictions of candidates are from their true steps, and how many these ranges hold."""
    rows: dict[str, list[tuple[float, bool]]] = {}
    for decision in decisions:
        for one in decision.candidates:
            true_s = decision.world.truth(one.plan).iteration_s
            low_s, high_s = one.between_s or (0.0, 0.0)
            found = one.predicted_s / true_s - 1, low_s <= true_s <= high_s
            for name in ("all", one.name.split()[0].split("-")[0]):
                rows.setdefault(name, []).append(found)
    print("| plans of | number | signed error | absolute error | in their range |")
    print("|---|--:|--:|--:|--:|")
    for name, some in rows.items():
        errors = [error for error, _ in some]
        held = sum(is_held for _, is_held in some) / len(some)
        print(f"| {name} | {len(some)} | {fmean(errors):+.1%} | {fmean(map(abs, errors)):.1%} | {held:.0%} |")


def print_planners(seeds: int, limits: Limits) -> None:
    """Print how good plans are that are made of what the tuner has learnt at its end, without a comparison."""
    over_best: dict[str, list[float]] = {"optimal": [], "cautious": []}
    for seed in range(seeds):
        world = random_world(seed)
        learnt, best_s = tune_in(world, limits), world.best_s()
        for name, some in over_best.items():
            some.append(world.truth(find_plan(learnt.trace, learnt.cost, name)).iteration_s / best_s - 1)
    print("| planner | worlds | within 1 % of the best | behind it, mean |")
    print("|---|--:|--:|--:|")
    for name, some in over_best.items():
        near = sum(one <= 0.01 for one in some) / len(some)
        print(f"| {name} | {len(some)} | {near:.1%} | {fmean(some):.2%} |")


def keeps_a_rival(seed: int, rivals: int, slower: float) -> bool:
    """Say whether one of some plans that are no faster than the buckets in force is kept in a world."""
    like = random_world(seed)
    trace = ModelTrace("no plan is faster", 1.0, (LayerTrace("a", 2.0, 4),))
    world = replace(like, trace=trace, cost=LinearCost(2, 0.0, 0.0), per_message_s=0.0)
    plans = [MergePlan(trace.model, f"plan {number}", (("a",),)) for number in range(rivals + 1)]
    turns = compare([Candidate(plan.planner, plan, 1.0) for plan in plans], Limits())
    try:
        turn = next(turns)
        while True:
            plain = world.answer(turn).plain
            assert plain is not None
            longer = 1.0 if turn.plan == plans[0] else 1 + slower
            turn = turns.send(Seen(plain=replace(plain, length_s=tuple(longer * one for one in plain.length_s))))
    except StopIteration as end:
        ranked, _ = end.value
        return bool(ranked[0].plan != plans[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--tune-steps", type=int, default=Limits().steps, help="in which plans may be compared")
    parser.add_argument("--wire", help="the precision in which messages may travel")
    parser.add_argument("--predictions", action="store_true", help="print how far predictions are from true steps")
    parser.add_argument("--planners", action="store_true", help="print how good planners are with what was learnt")
    parser.add_argument("--rivals", type=int, default=0, help="compare so many plans that are no faster")
    parser.add_argument("--slower", type=float, default=0.0, help="by which part of the step these are slower")
    options = parser.parse_args()
    if options.rivals:
        kept = sum(keeps_a_rival(seed, options.rivals, options.slower) for seed in range(options.seeds))
        print("| worlds | rivals | slower by | one was kept |")
        print("|--:|--:|--:|--:|")
        print(f"| {options.seeds} | {options.rivals} | {options.slower:.1%} | {kept} ({kept / options.seeds:.2%}) |")
        return
    limits = Limits(steps=options.tune_steps)
    if options.planners:
        print_planners(options.seeds, limits)
        return
    decisions = [decide_in(seed, limits, options.wire) for seed in range(options.seeds)]
    if options.predictions:
        print_predictions(decisions)
        return
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
