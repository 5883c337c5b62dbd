"""Whole training steps with torch's FSDP2, wrapped by hand and by plan, beside DDP, in interleaved turns.

    mgwfbp lab --hosts 4 --rate 10gbit -- python benchmarks/fsdp.py --device cuda --model bert --output bert-10.json
    python benchmarks/fsdp.py --show benchmarks/fsdp/*.json

Every way has a model of its own and takes whole steps with SGD and momentum. *Ours* is what `mgwfbp.fully_shard` makes
without a plan: it measures the model and the network for some seconds, and plans; *in per block's memory* has the
limit of what wrapping by block needs. Nothing is tuned: our DDP and our sharded optimizer run the plans that are exact
for what was measured, which also gives the predictions of the other ways, to which a rank's part of the update is
added, timed by itself. The result is written after every way and turn. Prints Markdown.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import mgwfbp
from mgwfbp import FsdpPlan, MergePlan, ModelTrace, fsdp_lower_bound_s, predict, predict_fsdp
from mgwfbp.bench.turns import Schedule, Step, slowest, take_turns, time_steps
from mgwfbp.bench.whole_steps import SGD, fsdp_step, plain_step, stock_ddp_step, tell, whole_step
from mgwfbp.bounds import sharded_lower_bound_s
from mgwfbp.cli.workers import process_group
from mgwfbp.cost import Cost
from mgwfbp.costs import ShardedCost
from mgwfbp.fsdp import at_root_of
from mgwfbp.fsdp_units import ROOT, units_of
from mgwfbp.measure.agreement import broadcast_text, problem_of, reduce_values, together
from mgwfbp.measure.workload import Workload, build_workload, run_to_loss
from mgwfbp.planners import find_plan, find_sharded_plan, plan_bucket
from mgwfbp.planners.fsdp import plan_blocks_alone, plan_by_block, plan_fsdp

# In the order in which they are made: what the others are compared with, then what is compared, then the rest.
TITLES = {
    "none": "no communication",
    "ddp": "DDP",
    "block": "FSDP2 per block",
    "ours": "`mgwfbp.fully_shard`",
    "ours-block": "`mgwfbp.fully_shard` in per block's memory",
    "kept": "per block, kept",
    "prefetch": "per block, prefetching 2",
    "rest": "per block, the rest in the root",
    "whole": "whole model",
    "sharded": "our sharded optimizer, exact plan",
    "auto": "our DDP, exact plan",
}
UNPLANNED = ("none", "ddp", "whole")
OURS = ("ours", "ours-block")
BY_HAND = ("block", "kept", "prefetch", "rest", "whole")
AIMED_AT = "per block"
RIVALS = {AIMED_AT: ("block",), "the fastest by hand": BY_HAND, "per block, kept": ("kept",)}
# What is aimed at: never so far behind, so far ahead in the mean, predicted so well.
BEHIND, AHEAD, OFF = 0.01, 0.03, 0.05
MODELS = {"bert": "hf:bert", "gpt2": "hf:gpt2", "tiny": "__main__:tiny"}
WARMUP, SETTLE = 2, 1
# How long ranks wait for what the others say of a way, and for their part in a message.
ANSWER_S, TIMEOUT_S = 30.0, 60.0
SILENT = "did not answer"
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert", help="bert, gpt2, tiny, or whatever `mgwfbp measure backward` takes")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", default=",".join(TITLES), help=f"any of {','.join(TITLES)}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90.0, help="no way and no turn begins that would end later")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--profile", type=Path, help="also write rank 0's torch.profiler export of two steps of ours")
    parser.add_argument("--show", type=Path, nargs="+", help="results: print one table of them, and run nothing")
    options = parser.parse_args()
    if options.show:
        overview({path.stem: json.loads(path.read_text()) for path in options.show})
        return
    ways = options.ways.split(",")
    if unknown := [name for name in ways if name not in TITLES]:
        parser.error(f"--ways: {unknown[0]!r} is none of {', '.join(TITLES)}")
    with process_group(options.device, None, timeout_s=TIMEOUT_S):
        found = compare(options, [name for name in TITLES if name in ways])
        if dist.get_rank() == 0:
            overview({options.model: found})


class Contest:
    """The ways that could be made, what is known of each, and a file that always holds all of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        is_cuda = options.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        self.started_s = time.perf_counter()
        self.making_s = 0.0  # what the last way took to be made
        self.steps: dict[str, Step] = {}
        self.found: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "first_s": {},  # a step of each, after warming up
            "turns_s": {},
            "predicted_s": {},
            "memory_bytes": {},
            "predicted_memory_bytes": {},
            "failed": {},
            "left_out": [],
        }

    def work(self) -> Workload:
        """Make the model anew, with the same weights."""
        torch.manual_seed(0)
        name, size = self.options.model, self.options.batch_size
        return build_workload(MODELS.get(name, name), batch_size=size, device=self.device)

    def plan(self, name: str) -> Any:
        if "plans" not in self.found:
            raise RuntimeError("there is no plan")
        kind = MergePlan if name in ("auto", "sharded") else FsdpPlan
        return kind.from_json(self.found["plans"][name])

    def add(self, name: str, make: Callable[[Workload], Step]) -> None:
        """Make a way, run it a little, and time a step of it."""
        started_s, before = time.perf_counter(), 0
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

        def run() -> tuple[Step, float]:
            step = make(self.work())
            for _ in range(WARMUP):
                step()
            return step, time_steps(step, 1, self.device)[0]

        made = self.attempt(name, run)
        if made is not None:
            self.steps[name], first_s = made
            (self.found["first_s"][name],) = slowest([first_s], self.device)
            if self.device.type == "cuda":
                self.found["memory_bytes"][name] = torch.cuda.max_memory_allocated() - before
            self.say(f"{name} is ready, a step of it {1e3 * self.found['first_s'][name]:.1f} ms")
        gc.collect()  # a model that could not be made is a cycle
        torch.cuda.empty_cache()
        self.making_s = time.perf_counter() - started_s

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """Do what may fail; note it where it fails on all ranks, and leave where it fails on some.

        Ranks compare in the group's store: where one failed alone, the others may be inside a collective, which they
        leave no more.
        """
        problem, result = "", None
        try:
            result = work()
        except Exception as error:
            problem = problem_of(error)
        rank, world, first = dist.get_rank(), dist.get_world_size(), f"fsdp/{name}"
        store, keys = dist.distributed_c10d._get_default_store(), [f"{first}/{one}" for one in range(world)]
        if problem:  # the first reason is kept: that the others fail may follow from it
            store.compare_set(first, "", f"rank {rank}: {problem}")
        store.set(keys[rank], problem)
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=ANSWER_S))
        said = [store.get(key).decode() if store.check([key]) else SILENT for key in keys]
        if not any(said):
            return result
        silent = f"rank {said.index(SILENT)} {SILENT}" if SILENT in said else ""
        self.found["failed"][name] = store.get(first).decode() if store.check([first]) else silent
        self.say(f"{name} failed: {self.found['failed'][name]}")
        if SILENT in said or "" in said:
            self.write(rank)
            print(f"rank {rank} ends: {name} failed on some ranks only", file=sys.stderr, flush=True)
            time.sleep(1)  # until the others have read, too
            os._exit(1)  # to leave the group would wait for them
        return None

    def fits(self, making_s: float = 0.0) -> bool:
        """Say on all ranks alike whether a turn of all ways still fits, behind one that is yet to be made."""
        (spent_s,) = reduce_values([time.perf_counter() - self.started_s + making_s], "max")
        turn_s: float = (SETTLE + self.options.steps) * sum(self.found["first_s"].values())
        return bool(spent_s + turn_s <= self.options.seconds)

    def say(self, text: str) -> None:
        tell(f"{time.perf_counter() - self.started_s:6.1f} s  {text}")
        self.write()

    def write(self, rank: int = 0) -> None:
        if self.options.output is not None and dist.get_rank() == rank:
            beside = self.options.output.with_suffix(f".part{rank}")
            beside.write_text(json.dumps(self.found, indent=1))
            beside.replace(self.options.output)


def compare(options: argparse.Namespace, ways: Sequence[str]) -> dict[str, Any]:
    contest = Contest(options)
    found = contest.found
    makers: dict[str, Callable[[Workload], Step]] = {
        "none": partial(updating, contest),
        "ddp": stock_ddp_step,
        **{name: partial(by_plan, contest, name, wrap_by_hand) for name in BY_HAND},
        **{name: partial(by_plan, contest, name, mgwfbp.fully_shard) for name in OURS},
        "whole": partial(fsdp_step, wrap=partial(wrap_by_hand, plan=FsdpPlan("by hand", (), ()))),
        "sharded": partial(sharded, contest),
        "auto": partial(exact_ddp, contest),
    }
    for place, name in enumerate(ways):
        if name not in UNPLANNED and "plans" not in found and "planning" not in found["failed"]:
            contest.attempt("planning", partial(planned, contest))
        if not contest.fits(contest.making_s):
            found["left_out"] += ways[place:]
            break
        contest.add(name, makers[name])
    for turn in range(options.turns):
        if not contest.fits():
            found["left_out"].append(f"{options.turns - turn} of {options.turns} turns")
            break
        take_turn(contest, turn)
    if options.profile is not None and "ours" in contest.steps:
        contest.attempt("profile", partial(profiled, contest.steps["ours"], contest.device, options.profile))
    contest.say("done")
    return found


def take_turn(contest: Contest, turn: int) -> None:
    # Every second turn in the opposite order, so that none always follows the same other.
    ways = {name: partial(contest.steps.__getitem__, name) for name in list(contest.steps)[:: (-1) ** turn]}
    schedule = Schedule(1, contest.options.steps, SETTLE)
    turns_s = contest.attempt(f"turn {turn + 1}", partial(take_turns, ways, schedule, contest.device)) or {}
    for name, (turn_s,) in turns_s.items():
        contest.found["turns_s"].setdefault(name, []).append(turn_s)
    contest.say(f"turn {turn + 1}, ms: {', '.join(f'{name} {1e3 * one:.1f}' for name, (one,) in turns_s.items())}")


def tiny(batch_size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that a host trains in milliseconds, and a batch."""
    blocks = {str(n): nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)) for n in range(4)}
    model = nn.Sequential(OrderedDict(embed=nn.Linear(64, 128), **blocks, head=nn.Linear(128, 512)))
    return model, torch.rand(batch_size, 64)


def planned(contest: Contest) -> None:
    """Measure once what all predictions are made of, and plan."""
    work, found = contest.work(), contest.found
    started_s = time.perf_counter()
    plan, trace, cost = mgwfbp.plan_fully_shard(work.model, batch=work.batch, loss_fn=work.loss_fn)
    found["planning_s"] = time.perf_counter() - started_s
    # Rank 0's, as in `mgwfbp.fully_shard`.
    plans = together(lambda: plans_of(trace, cost, plan) if dist.get_rank() == 0 else {})
    said = broadcast_text(json.dumps({name: one.to_json() for name, one in plans.items()}), 0)
    found["trace"], found["cost"] = trace.to_json(), cost.to_json()  # type: ignore[attr-defined]  # measured
    found["plans"], predicted_s = json.loads(said), found["predicted_s"]
    for name in found["plans"]:
        one = contest.plan(name)
        if isinstance(one, MergePlan):
            predicted_s[name] = predict(trace, cost, one).iteration_s
        else:
            step = predict_fsdp(trace, cost, one)
            predicted_s[name], found["predicted_memory_bytes"][name] = step.iteration_s, step.memory_bytes
    predicted_s["ddp"] = predict(trace, cost, plan_bucket(trace, cost)).iteration_s
    predicted_s["none"], predicted_s["bound"] = trace.compute_s, fsdp_lower_bound_s(trace, cost)
    contest.say(f"planned in {found['planning_s']:.1f} s: {plan!r}")


def plans_of(trace: ModelTrace, cost: Cost, plan: FsdpPlan) -> dict[str, FsdpPlan | MergePlan]:
    """Return the plan of each way, all with the modules in the root that must be."""
    root = at_root_of(plan)
    block = plan_by_block(trace, root)
    limit = predict_fsdp(trace, cost, block).memory_bytes
    units = [unit.name for unit in units_of(trace) if unit.name != ROOT]
    return {
        "block": block,
        "ours": plan,
        "ours-block": plan_fsdp(trace, cost, memory_limit=limit, root=root),
        "kept": replace(block, reshard=(False,) * len(block.groups)),
        "prefetch": replace(block, forward_prefetch=2, backward_prefetch=2),
        "rest": plan_blocks_alone(trace, root),
        "whole": FsdpPlan(trace.model, (), (), root=tuple(units)),
        "sharded": find_sharded_plan(trace, cost),
        "auto": find_plan(trace, cost),
    }


def by_plan(contest: Contest, name: str, wrap: Callable[..., object], work: Workload) -> Step:
    return fsdp_step(work, partial(wrap, plan=contest.plan(name)))


def exact_ddp(contest: Contest, work: Workload) -> Step:
    model = mgwfbp.DistributedDataParallel(work.model, plan=contest.plan("auto"), tune=False)
    return whole_step(work, model, torch.optim.SGD(work.model.parameters(), **SGD))


def sharded(contest: Contest, work: Workload) -> Step:
    plan, model = contest.plan("sharded"), mgwfbp.DistributedDataParallel(work.model, tune=False)
    return whole_step(work, model, mgwfbp.ShardedOptimizer(model, torch.optim.SGD, plan=plan, **SGD))


def wrap_by_hand(model: nn.Module, plan: FsdpPlan) -> None:
    """Call torch's FSDP2 as people do: prefetching is set only where it goes further than torch does by itself."""
    from torch.distributed.fsdp import fully_shard

    groups: list[list[Any]] = [[model.get_submodule(name) for name in group] for group in plan.groups]
    for group, reshard in zip(groups, plan.reshard, strict=True):
        fully_shard(group if len(group) > 1 else group[0], reshard_after_forward=reshard)
    fully_shard(model)
    firsts = [group[0] for group in groups]
    for place, first in enumerate(firsts):
        if plan.forward_prefetch > 1:
            first.set_modules_to_forward_prefetch(firsts[place + 1 : place + 1 + plan.forward_prefetch])
        if plan.backward_prefetch > 1:
            first.set_modules_to_backward_prefetch(firsts[max(0, place - plan.backward_prefetch) : place][::-1])


def updating(contest: Contest, work: Workload) -> Step:
    """Return a step without communication, and note what its update takes: ranks of FSDP2 update a share of it."""
    step = plain_step(work)
    run_to_loss(work.model, work.batch, work.loss_fn).backward()
    optimizer = torch.optim.SGD(work.model.parameters(), **SGD)
    contest.found["update_s"] = median(time_steps(optimizer.step, 5, contest.device))
    return step


def predicted_with_update(found: Mapping[str, Any], name: str) -> float | None:
    """Return what a way is predicted to take, the update of a rank included."""
    predicted_s, share = found["predicted_s"].get(name), 1 if name in ("none", "ddp", "auto") else found["ranks"]
    return None if predicted_s is None else float(predicted_s + found.get("update_s", 0.0) / share)


def sharded_bound_s(found: Mapping[str, Any]) -> float:
    """Return below what no step with our sharded optimizer is predicted to be, its update included."""
    trace, cost = ModelTrace.from_json(found["trace"]), ShardedCost.from_json(found["cost"])
    return sharded_lower_bound_s(trace, cost) + float(found.get("update_s", 0.0)) / int(found["ranks"])


def profiled(step: Step, device: torch.device, path: Path) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        time_steps(step, 2, device)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


def overview(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print steps, those predicted in brackets and those before any turn with a star; memory, aims, what is missing."""
    ways = [name for name in TITLES if any(name in found["first_s"] for found in results.values())]
    heading = f"{' | '.join(results)} |\n|---{'|--:' * len(results)}|"
    print(f"| step, ms | {heading}")
    for name in ways:
        print(f"| {TITLES[name]} | {' | '.join(_step_cell(found, name) for found in results.values())} |")
    print(f"\n| peak of a rank, GB | {heading}")
    for name in ways:
        held = [found["memory_bytes"].get(name) for found in results.values()]
        print(f"| {TITLES[name]} | {' | '.join('' if one is None else f'{one / 1e9:.2f}' for one in held)} |")
    print("", *(f"- {one}" for one in verdicts(results)), sep="\n")
    for title, found in results.items():
        if "trace" in found:
            bound_ms = 1e3 * sharded_bound_s(found)
            print(f"- {title}: no step with our sharded optimizer is predicted to be below {bound_ms:.1f} ms")
        for name, why in (*found["failed"].items(), *((what, "there was no time left") for what in found["left_out"])):
            print(f"- {title}: {name}: {why}")


def _step_cell(found: Mapping[str, Any], name: str) -> str:
    predicted_s, turns_s = predicted_with_update(found, name), found["turns_s"].get(name)
    step_s = median(turns_s) if turns_s else found["first_s"].get(name)
    if step_s is None:
        return ""
    bracket = "" if predicted_s is None else f" ({1e3 * predicted_s:.1f})"
    return f"{1e3 * step_s:.1f}{'' if turns_s else '*'}{bracket}"


def verdicts(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say how ours compare with rivals and with what was predicted, and of each aim whether it was met."""
    said, aims, off = list[str](), dict[str, bool](), dict[str, float]()
    for name, (rival, ways) in product(OURS, RIVALS.items()):
        gains = {}
        for title, found in results.items():
            step_s = {way: median(turns_s) for way, turns_s in found["turns_s"].items()}
            if name in step_s and not step_s.keys().isdisjoint(ways):
                gains[title] = min(step_s[way] for way in ways if way in step_s) / step_s[name]
            if name in step_s and (predicted_s := predicted_with_update(found, name)) is not None:
                off[f"{title}, {TITLES[name]}"] = predicted_s / step_s[name] - 1
        if gains:
            worst, mean = min(gains, key=gains.__getitem__), geometric_mean(gains.values())
            beside = f"{TITLES[name]} beside {rival}"
            said.append(f"{beside}: {mean:.3f} times as fast in the mean, at least {gains[worst]:.3f} ({worst})")
            if rival == AIMED_AT:
                aims[f"{beside}: {AHEAD:.0%} ahead in the mean"] = mean >= 1 + AHEAD
                aims[f"{beside}: never more than {BEHIND:.0%} behind"] = gains[worst] >= 1 - BEHIND
    if off:
        worst = max(off, key=lambda title: abs(off[title]))
        said.append(f"predictions, the update included: {off[worst]:+.1%} at worst ({worst})")
        aims[f"predicted within {OFF:.0%}"] = abs(off[worst]) <= OFF
    return [*said, *(f"{aim}: {'met' if is_met else 'missed'}" for aim, is_met in aims.items())]


if __name__ == "__main__":
    main()
