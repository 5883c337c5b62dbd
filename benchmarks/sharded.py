"""Whole training steps: torch's DDP, our tuned all-reduces, and a sharded optimizer, in interleaved turns.

    mgwfbp lab --hosts 2 --rate 600mbit -- python benchmarks/sharded.py --replay mobilenet_v2-h200-b64
    mgwfbp lab --hosts 4 --rate 10gbit -- python benchmarks/sharded.py --device cuda --model resnet50 --batch-size 64
    python benchmarks/sharded.py --show benchmarks/sharded/*.json

Every way has a model of its own and takes whole steps with SGD and momentum: forward and backward pass, and the update.
Tuners work until they have settled. *Per group* is the plan that may all-reduce some messages, made with what both
tuners have learnt; it is a way of its own where it does. With ``--fsdp`` also torch's FSDP2, wrapped by block.
*Predicted* is what the trace and the costs that the tuners have learnt give (the update is not in it), and so is the
bound. The result is written after every tuner and every turn. Prints Markdown.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp import DistributedDataParallel, ShardedOptimizer, load_trace, predict
from mgwfbp.bench.replay import Replay, replayable
from mgwfbp.bench.turns import Schedule, Step, take_turns
from mgwfbp.bench.whole_steps import (
    SGD,
    fsdp_step,
    plain_step,
    stock_ddp_step,
    table_row,
    tell,
    tuned_step,
    whole_step,
    wrap_by_block,
)
from mgwfbp.bounds import sharded_lower_bound_s
from mgwfbp.cli.workers import process_group
from mgwfbp.costs import ShardedCost
from mgwfbp.measure.workload import Workload, build_workload, default_loss
from mgwfbp.planners.sharded import plan_sharded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--replay")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--bucket-cap-mb", type=float, help="of torch's DDP, and where tuners begin")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", help="results: print one table of them, and run nothing")
    options = parser.parse_args()
    if options.show:
        overview(options.show)
        return
    with process_group(options.device, None, timeout_s=300):
        device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        found = compare(options, device)
        if dist.get_rank() == 0:
            show(found)


def workload(options: argparse.Namespace, device: torch.device) -> Workload:
    torch.manual_seed(0)
    if options.replay:
        trace = replayable(load_trace(options.replay))
        return Workload(trace.model, Replay(trace), torch.zeros(1), 1, default_loss)
    return build_workload(options.model, batch_size=options.batch_size, device=device)


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    tuned: dict[str, Any] = {}
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "tuning": {},
        "turns_s": {},
    }

    def note(turn: int, turns_s: Mapping[str, float]) -> None:
        for name, turn_s in turns_s.items():
            found["turns_s"].setdefault(name, []).append(turn_s)
        tell(f"turn {turn + 1} of {options.turns}, ms: {', '.join(f'{n} {1e3 * s:.1f}' for n, s in turns_s.items())}")
        write(found, options.output)

    steps["no communication"] = plain_step(workload(options, device))
    steps["ddp"] = stock_ddp_step(workload(options, device), options.bucket_cap_mb)
    for name in ("auto", "sharded"):
        work = workload(options, device)
        steps[name], tuned[name] = tuned_step(
            work, options.tune_steps, is_sharded=name == "sharded", bucket_cap_mb=options.bucket_cap_mb
        )
        found["tuning"][name] = str(tuned[name].tuning)
        tell(f"{name}: {found['tuning'][name]}")
        write(found, options.output)
    plans = {name: model.plan for name, model in tuned.items()}
    trace, cost = learnt(tuned)
    if cost is not None:
        plans["per group"] = plan_sharded(trace, cost)
        if not all(plans["per group"].sharded):
            work = workload(options, device)
            model = DistributedDataParallel(work.model, tune=False)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, plan=plans["per group"], **SGD)
            steps["per group"] = whole_step(work, model, optimizer)
    if options.fsdp:
        steps["fsdp2"] = fsdp_step(workload(options, device), wrap_by_block)
    found["predicted_s"] = {} if cost is None else predictions(trace, cost, plans)
    found["messages"] = {name: (plan.num_groups, plan.sharded.count(False)) for name, plan in plans.items()}
    found["gathers"] = {name: len(plan.gathers) for name, plan in plans.items()}
    for step in steps.values():
        for _ in range(2):
            step()
    ways = {name: (lambda step=step: step) for name, step in steps.items()}
    take_turns(ways, Schedule(options.turns, options.steps, settle=1), device, on_turn=note)
    return found


def write(found: dict[str, Any], path: Path | None) -> None:
    """Write all that is known, on rank 0."""
    if path is not None and dist.get_rank() == 0:
        path.with_suffix(".part").write_text(json.dumps(found, indent=1))
        path.with_suffix(".part").replace(path)


def learnt(tuned: dict[str, Any]) -> tuple[Any, ShardedCost | None]:
    """What both tuners have learnt of the model, and of all-reduces and their halves."""
    plain, sharded = tuned["auto"].tuning, tuned["sharded"].tuning
    if plain.cost is None or sharded.gathering is None:
        return None, None
    return sharded.trace, ShardedCost(plain.cost, sharded.cost, sharded.gathering.cost)


def predictions(trace: Any, cost: ShardedCost, plans: dict[str, Any]) -> dict[str, float]:
    """What the model says of a step, and what it says no order of messages can undercut."""
    found = {name: predict(trace, cost, plan).iteration_s for name, plan in plans.items()}
    return {**found, "bound": sharded_lower_bound_s(trace, cost)}


def show(found: dict[str, Any]) -> None:
    print("| | step, ms | quartiles | predicted, ms | times as fast as `auto` |\n|---|--:|--:|--:|--:|")
    base = median(found["turns_s"]["auto"])
    for name, turns_s in found["turns_s"].items():
        print(table_row(name, turns_s, found["predicted_s"].get(name), base))
    if "bound" in found["predicted_s"]:
        print(f"| bound | | | {1e3 * found['predicted_s']['bound']:.1f} | |")


def overview(paths: Sequence[Path]) -> None:
    """Print medians in ms, a row for each result; what is predicted stands in brackets."""
    ways = ("no communication", "ddp", "auto", "sharded", "per group", "fsdp2")
    print(f"| | {' | '.join(ways)} | bound | sharded over auto |\n|---{'|--:' * (len(ways) + 2)}|")
    for path in paths:
        found = json.loads(path.read_text())
        step_s = {name: median(turns_s) for name, turns_s in found["turns_s"].items()}
        predicted = {name: f" ({1e3 * one:.1f})" for name, one in found["predicted_s"].items() if name in step_s}
        cells = [f"{1e3 * step_s[one]:.1f}{predicted.get(one, '')}" if one in step_s else "" for one in ways]
        bound = f"({1e3 * found['predicted_s']['bound']:.1f})"
        gain = step_s["auto"] / step_s["sharded"]
        print(f"| {path.stem} | {' | '.join(cells)} | {bound} | {gain:.3f} |")


if __name__ == "__main__":
    main()
