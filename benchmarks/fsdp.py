"""Whole training steps with torch's FSDP2, wrapped by hand and by plan, beside DDP, in interleaved turns.

    mgwfbp lab --hosts 4 --rate 10gbit -- python benchmarks/fsdp.py --device cuda --model bert --output bert-10.json
    python benchmarks/fsdp.py --show benchmarks/fsdp/*.json
    python benchmarks/fsdp.py --simulate llama.json

Every way has a model of its own and takes whole steps with SGD and momentum. *Ours* is what `mgwfbp.fully_shard` makes
without a plan: it measures the model and the network for some seconds, and plans; *within per block's memory* has the
limit of what wrapping by block needs. What was measured also gives the predictions of the other ways, to which a rank's
part of the update is added, timed by itself. The result is written after every turn. Prints Markdown.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mgwfbp
from mgwfbp import FsdpPlan, ModelTrace, fsdp_lower_bound_s, load_network, load_trace, predict, predict_fsdp
from mgwfbp.bench.turns import Schedule, Step, take_turns
from mgwfbp.bench.whole_steps import (
    SGD,
    fsdp_step,
    plain_step,
    stock_ddp_step,
    table_row,
    tell,
    tuned_step,
)
from mgwfbp.cli.workers import process_group
from mgwfbp.fsdp_units import ROOT, units_of
from mgwfbp.measure.agreement import broadcast_text, first_line
from mgwfbp.measure.workload import Workload, build_workload, run_to_loss
from mgwfbp.memory import Precision
from mgwfbp.planners import plan_bucket
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import plan_blocks_alone, plan_by_block
from mgwfbp.simulate import Cluster

TITLES = {
    "none": "no communication",
    "ddp": "DDP",
    "auto": "our DDP",
    "sharded": "our sharded optimizer",
    "block": "FSDP2 per block",
    "rest": "per block, the rest in the root",
    "prefetch": "per block, prefetching 2",
    "kept": "per block, kept",
    "whole": "whole model",
    "ours": "`mgwfbp.fully_shard`",
    "ours-block": "the same within per block's memory",
}
OURS = ("ours", "ours-block")
# What is aimed at: never so far behind per block, so far ahead in the mean, predicted so well.
BEHIND, AHEAD, OFF = 0.01, 0.03, 0.05
# Linear layers of a model of its own, for a try on a host.
TINY = "tiny"
MODELS = {"bert": "hf:bert", "gpt2": "hf:gpt2"}
WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert", help="bert, gpt2, tiny, or whatever `mgwfbp measure backward` takes")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", default=",".join(TITLES), help=f"any of {','.join(TITLES)}")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tune-steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--profile", type=Path, help="also write rank 0's torch.profiler export of two steps of ours")
    parser.add_argument("--show", type=Path, nargs="+", help="results: print one table of them, and run nothing")
    parser.add_argument("--simulate", help="a trace: print what is predicted on clusters, and run nothing")
    options = parser.parse_args()
    if options.show:
        overview(options.show)
        return
    if options.simulate:
        simulated(load_trace(options.simulate))
        return
    ways = options.ways.split(",")
    if unknown := [name for name in ways if name not in TITLES]:
        parser.error(f"--ways: {unknown[0]!r} is none of {', '.join(TITLES)}")
    with process_group(options.device, None, timeout_s=300):
        found = compare(options, ways)
        if dist.get_rank() == 0:
            show(found)


class Contest:
    """The ways that could be made, what is known of each, and a file that always holds all of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else None
        self.started_s = time.perf_counter()
        self.steps: dict[str, Step] = {}
        self.found: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "model": options.model,
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "turns_s": {},
            "predicted_s": {},
            "memory_bytes": {},
            "failed": {},
        }

    def work(self) -> Workload:
        """Make the model anew, with the same weights."""
        torch.manual_seed(0)
        if self.options.model == TINY:
            return tiny(self.device or torch.device("cpu"))
        name = MODELS.get(self.options.model, self.options.model)
        return build_workload(name, batch_size=self.options.batch_size, device=self.device or "cpu")

    def add(self, name: str, make: Callable[[Workload], Step]) -> None:
        """Make a way and run it a little; one that fails (on all ranks alike) is left out."""
        before = 0
        if self.device is not None:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        try:
            step = make(self.work())
            for _ in range(WARMUP):
                step()
        except Exception as error:
            self.found["failed"][name] = f"{type(error).__name__}: {first_line(error)}"
            self.say(f"{name} failed: {self.found['failed'][name]}")
            return
        self.steps[name] = step
        if self.device is not None:
            torch.cuda.synchronize()
            self.found["memory_bytes"][name] = torch.cuda.max_memory_allocated() - before
        self.say(f"{name} is ready")

    def say(self, text: str) -> None:
        tell(f"{time.perf_counter() - self.started_s:6.1f} s  {text}")
        self.write()

    def write(self) -> None:
        if self.options.output is not None and dist.get_rank() == 0:
            beside = self.options.output.with_suffix(".part")
            beside.write_text(json.dumps(self.found, indent=1))
            beside.replace(self.options.output)


def compare(options: argparse.Namespace, ways: Sequence[str]) -> dict[str, Any]:
    contest = Contest(options)
    found = contest.found
    by_hand = ("block", "kept", "prefetch", "rest")
    if {*OURS, *by_hand} & set(ways):
        planned(contest)
    makers: dict[str, Callable[[Workload], Step]] = {
        "none": partial(updating, contest),
        "ddp": stock_ddp_step,
        "auto": partial(tuned, contest, "auto"),
        "sharded": partial(tuned, contest, "sharded"),
        **{name: partial(by_plan, contest, name, wrap_by_hand) for name in by_hand},
        **{name: partial(by_plan, contest, name, mgwfbp.fully_shard) for name in OURS},
        "whole": partial(fsdp_step, wrap=wrap_whole),
    }
    for name in ways:
        contest.add(name, makers[name])
    if options.profile is not None and "ours" in contest.steps:
        profiled(contest.steps["ours"], options.profile)

    def note(turn: int, turns_s: Mapping[str, float]) -> None:
        for name, turn_s in turns_s.items():
            found["turns_s"].setdefault(name, []).append(turn_s)
        shown = ", ".join(f"{name} {1e3 * turn_s:.1f}" for name, turn_s in turns_s.items())
        contest.say(f"turn {turn + 1} of {options.turns}, ms: {shown}")

    def stepping(step: Step) -> Callable[[], Step]:
        return lambda: step

    made = {name: stepping(step) for name, step in contest.steps.items()}
    schedule = Schedule(options.turns, options.steps, settle=1)
    take_turns(made, schedule, contest.device or torch.device("cpu"), on_turn=note)
    return found


def tuned(contest: Contest, name: str, work: Workload) -> Step:
    step, model = tuned_step(work, contest.options.tune_steps, is_sharded=name == "sharded")
    contest.found.setdefault("tuning", {})[name] = str(model.tuning)
    return step


def wrap_whole(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def tiny(device: torch.device) -> Workload:
    """A model that a host trains in milliseconds."""
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(64, 128))
    for place in range(4):
        model.add_module(str(place), nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)))
    model.add_module("head", nn.Linear(128, 512))
    return Workload(TINY, model.to(device), torch.rand(8, 64, device=device), 8)


def planned(contest: Contest) -> None:
    """Measure once what all predictions are made of, and plan."""
    work, found = contest.work(), contest.found
    started_s = time.perf_counter()
    plan, trace, cost = mgwfbp.plan_fully_shard(work.model, batch=work.batch, loss_fn=work.loss_fn)
    found["planning_s"] = time.perf_counter() - started_s
    found["trace"], found["cost"] = trace.to_json(), cost.to_json()  # type: ignore[attr-defined]  # measured
    block = plan_by_block(trace, plan.root)
    limit = predict_fsdp(trace, cost, block).memory_bytes
    # Rank 0's, as in `mgwfbp.fully_shard`.
    mine = plan_fsdp(trace, cost, memory_limit=limit, root=plan.root).dumps() if dist.get_rank() == 0 else ""
    plans = {
        "block": block,
        "rest": plan_blocks_alone(trace, plan.root),
        "prefetch": replace(block, forward_prefetch=2, backward_prefetch=2),
        "kept": replace(block, reshard=(False,) * len(block.groups)),
        "ours": plan,
        "ours-block": FsdpPlan.from_json(json.loads(broadcast_text(mine, 0))),
    }
    units = [unit.name for unit in units_of(trace) if unit.name != ROOT]
    for name, one in {**plans, "whole": FsdpPlan("by hand", (), (), root=tuple(units))}.items():
        step = predict_fsdp(trace, cost, one)
        found["predicted_s"][name] = step.iteration_s
        found.setdefault("predicted_memory_bytes", {})[name] = step.memory_bytes
    found["plans"] = {name: one.to_json() for name, one in plans.items()}
    found["predicted_s"]["ddp"] = predict(trace, cost, plan_bucket(trace, cost)).iteration_s
    found["predicted_s"]["none"] = trace.compute_s
    found["predicted_s"]["bound"] = fsdp_lower_bound_s(trace, cost)
    contest.say(f"planned in {found['planning_s']:.1f} s: {plan!r}")


def by_plan(contest: Contest, name: str, wrap: Callable[..., object], work: Workload) -> Step:
    plan = FsdpPlan.from_json(contest.found["plans"][name])
    return fsdp_step(work, partial(wrap, plan=plan))


def wrap_by_hand(model: nn.Module, plan: FsdpPlan) -> None:
    """Call torch's FSDP2 as people do: prefetching is set only where it goes further than torch does by itself."""
    from torch.distributed.fsdp import fully_shard

    groups: list[list[Any]] = [[model.get_submodule(name) for name in group] for group in plan.groups]
    for group, reshard in zip(groups, plan.reshard, strict=True):
        fully_shard(group if len(group) > 1 else group[0], reshard_after_forward=reshard)
    fully_shard(model)
    firsts = [group[0] for group in groups]
    if plan.forward_prefetch > 1:
        for place, first in enumerate(firsts):
            first.set_modules_to_forward_prefetch(firsts[place + 1 : place + 1 + plan.forward_prefetch])
            first.set_modules_to_backward_prefetch(firsts[max(0, place - plan.backward_prefetch) : place][::-1])


def updating(contest: Contest, work: Workload) -> Step:
    """Return a step without communication, and note what its update takes: ranks of FSDP2 update a share of it."""
    step = plain_step(work)
    run_to_loss(work.model, work.batch, work.loss_fn).backward()
    optimizer = torch.optim.SGD(work.model.parameters(), **SGD)
    taken_s = []
    for _ in range(5):
        synchronize()
        started_s = time.perf_counter()
        optimizer.step()
        synchronize()
        taken_s.append(time.perf_counter() - started_s)
    contest.found["update_s"] = median(taken_s)
    return step


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def predicted_with_update(found: Mapping[str, Any], name: str) -> float | None:
    """Return what a way is predicted to take, the update of a rank included."""
    if name not in found["predicted_s"]:
        return None
    share = found["ranks"] if name in (*OURS, "block", "rest", "prefetch", "kept", "whole") else 1
    return float(found["predicted_s"][name] + found.get("update_s", 0.0) / share)


def profiled(step: Step, path: Path) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(2):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


def show(found: dict[str, Any]) -> None:
    """Print one result."""
    print("| | step, ms | quartiles | predicted, ms | times as fast as per block |\n|---|--:|--:|--:|--:|")
    base_s = median(found["turns_s"]["block"]) if "block" in found["turns_s"] else None
    for name, turns_s in found["turns_s"].items():
        print(table_row(TITLES[name], turns_s, predicted_with_update(found, name), base_s))
    if bound_s := found["predicted_s"].get("bound"):
        print(f"| bound | | | {1e3 * bound_s:.1f} | |")


def overview(paths: Sequence[Path]) -> None:
    """Print medians in ms, a row for each result; what is predicted stands in brackets; then what was aimed at."""
    results = {path.stem: json.loads(path.read_text()) for path in paths}
    ways = [name for name in TITLES if any(name in found["turns_s"] for found in results.values())]
    print(f"| | {' | '.join(TITLES[name] for name in ways)} |")
    print(f"|---{'|--:' * len(ways)}|")
    gains: dict[str, dict[str, float]] = {name: {} for name in OURS}
    errors: dict[str, float] = {}
    for title, found in results.items():
        step_s = {name: median(turns_s) for name, turns_s in found["turns_s"].items()}
        cells = []
        for name in ways:
            predicted_s = predicted_with_update(found, name)
            bracket = "" if predicted_s is None else f" ({1e3 * predicted_s:.1f})"
            cells.append(f"{1e3 * step_s[name]:.1f}{bracket}" if name in step_s else "")
            if name in OURS and name in step_s and predicted_s is not None:
                errors[f"{title}, {TITLES[name]}"] = predicted_s / step_s[name] - 1
            if name in OURS and name in step_s and "block" in step_s:
                gains[name][title] = step_s["block"] / step_s[name]
        print(f"| {title} | {' | '.join(cells)} |")
    print()
    for verdict in verdicts(gains, errors):
        print(f"- {verdict}")


def verdicts(gains: Mapping[str, Mapping[str, float]], errors: Mapping[str, float]) -> list[str]:
    """Say of each aim whether it was met, and by what."""
    said = []
    for name, by_title in gains.items():
        if not by_title:
            continue
        worst = min(by_title, key=by_title.__getitem__)
        mean = geometric_mean(by_title.values())
        never = "met" if by_title[worst] >= 1 - BEHIND else "missed"
        said.append(
            f"{TITLES[name]}: never more than {BEHIND:.0%} behind per block: {never} ({by_title[worst]:.3f} times as "
            f"fast, {worst})"
        )
        ahead = "met" if mean >= 1 + AHEAD else "missed"
        said.append(f"{TITLES[name]}: {AHEAD:.0%} ahead in the mean: {ahead} ({mean:.3f} times as fast)")
    if errors:
        worst = max(errors, key=lambda title: abs(errors[title]))
        close = "met" if abs(errors[worst]) <= OFF else "missed"
        said.append(f"predicted within {OFF:.0%}, the update included: {close} ({errors[worst]:+.1%}, {worst})")
    return said


def simulated(trace: ModelTrace) -> None:
    """Print both ways to wrap by hand beside ours on clusters of nodes of 8, with limits between what they need.

    Parameters are gathered and gradients sent in 16 bits; a rank's share is of parameters and gradients in 32 bits and
    of two states.
    """
    precision = Precision(gather=0.5, reduce=0.5)
    print("| computes, s | Gbit a node | GPUs | per block | memory | blocks, rest in the root | memory | ", end="")
    print("ours, within per block's memory | no plan within it is below | ", end="")
    print("ours, within 1.5 times that | ours, any memory | memory | no plan is below |")
    print(f"|{'--:|' * 13}")
    for scale in (1.0, 0.3):
        short = trace.scaled(scale)
        for network in ("100gbe", "ib-ndr"):
            cluster = Cluster(load_network(network), load_network("nvlink3"), 8)
            for workers in (64, 512):
                cost = cluster.cost(workers)
                block, rest = (
                    predict_fsdp(short, cost, way(short), precision=precision)
                    for way in (plan_by_block, plan_blocks_alone)
                )
                cells = [f"{short.compute_s:.2f}", f"{8e-9 / cluster.network.per_byte_s:.0f}", str(workers)]
                for step in (block, rest):
                    cells += [f"{step.iteration_s:.3f}", f"{step.memory_bytes / 1e9:.2f} GB"]
                for factor in (1.0, 1.5, None):
                    limit = None if factor is None else int(factor * block.memory_bytes)
                    plan = plan_fsdp(short, cost, memory_limit=limit, precision=precision)
                    step_s, held = plan.predicted["iteration_s"], plan.predicted["memory_bytes"]
                    cells.append(f"{step_s:.3f} ({block.iteration_s / step_s:.3f}x)")
                    cells += [f"{plan.predicted['lower_bound_s']:.3f}"] if factor == 1.0 else []
                    cells += [f"{held / 1e9:.1f} GB"] if factor is None else []
                bound_s = fsdp_lower_bound_s(short, cost, precision=precision)
                print(f"| {' | '.join([*cells, f'{bound_s:.3f}'])} |", flush=True)


if __name__ == "__main__":
    main()
