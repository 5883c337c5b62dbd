"""What ranks see of the plans of a sharded optimizer, and of their tuner."""

import copy
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn, optim

from mgwfbp import DistributedDataParallel, LinearCost, ShardedOptimizer, explain
from mgwfbp.measure.clock import clock_for
from mgwfbp.runtime.observe.observer import Observer
from tests.runtime.models import Mlp, Shared, make_plan
from tests.runtime.shard_read_ranks import late_gathers
from tests.runtime.shard_ways import Way, beside_torchs, difference, error_of, gathering, sums, train


def tuned() -> dict[str, Any]:
    """Buckets change while it tunes, and no state moves."""
    way = Way(optim.AdamW, {"lr": 0.001})
    expected, _, _ = train(way, sharded=False, steps=150)
    got, _, (model, optimizer) = train(way, sharded=True, tune=True, steps=150)
    tried = {candidate.plan.groups for candidate in model.tuning.candidates}
    states = [value.numel() for state in optimizer._inner.state.values() for value in state.values() if value.dim()]
    return {
        "difference": difference(got, expected),
        "tuning": (model.tuning.state, model.tuning.reason),
        "tried": len(tried),
        "gathering": model.tuning.gathering is not None and model.tuning.gathering.to_json(),
        "words": str(model.tuning),
        "forward": [layer.forward_s for layer in model.tuning.trace.layers] if model.tuning.trace else [],
        "planned": model.plan.gathers == optimizer.gathers,
        "same": sorted(name for group in optimizer.gathers for name in group)
        == sorted(name for name, _ in model.module.named_parameters()),
        "state": sum(states) / sum(one.numel() for one in model.parameters()),
    }


def planned() -> dict[str, Any]:
    """Messages and gathers of a plan, in groups that have nothing to do with one another."""

    def gathers_of(module: nn.Module, seed: int) -> tuple[tuple[str, ...], ...]:
        return make_plan(module, seed).groups

    torch.manual_seed(3)
    module = Mlp()
    plan = replace(make_plan(module, 4), gathers=gathers_of(module, 8))
    model = DistributedDataParallel(module)
    optimizer = ShardedOptimizer(model, optim.AdamW, plan=plan, lr=0.01)
    expected, _, _ = train(Way(optim.AdamW, {"lr": 0.01}), sharded=False, steps=5)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=data)).square().mean().backward()
        optimizer.step()
    other = replace(plan, gathers=gathers_of(module, 8 + dist.get_rank()))
    some = DistributedDataParallel(Mlp())
    kept = ShardedOptimizer(some, optim.SGD, plan=gathering(plan, 0.5), lr=0.1)
    whole = {one.name for one in kept._owned.values() if one.row.numel() == one.parameter.numel()}
    return {
        "difference": difference([one.detach() for one in module.parameters()], expected),
        "gathers": optimizer.gathers == plan.gathers,
        "groups": model.plan is not None and model.plan.groups == plan.groups,
        "tuning": model.tuning.reason,
        "differ": error_of(lambda: ShardedOptimizer(DistributedDataParallel(Mlp()), optim.SGD, plan=other, lr=0.1)),
        "whole": whole == set(plan.layer_names).difference(*kept.gathers) and 0 < len(whole) < len(plan.layer_names),
        "mixed": error_of(lambda: some.replan(make_plan(module, 1))),
        "torch's": error_of(lambda: some.replan(None)),
        "alone": error_of(lambda: DistributedDataParallel(Mlp(), plan=plan)),
    }


def alone() -> dict[str, Any]:
    """One rank with a plan that others gather by: its groups are its messages, and there is nothing to gather."""
    plan = replace(make_plan(Mlp(), 4), gathers=make_plan(Mlp(), 8).groups)
    half = gathering(plan, 0.5)
    model = DistributedDataParallel(Mlp(), tune=False)
    optimizer = ShardedOptimizer(model, optim.AdamW, plan=plan, lr=0.01)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    model.replan(half)
    assert model.plan is not None
    return {
        "groups": model.plan.groups == plan.groups,
        "gathers": optimizer.gathers,
        "difference": beside_torchs(Way(optim.AdamW, {"lr": 0.01}, gathered=0.5), steps=3),
    }


def plans_in_force() -> dict[str, Any]:
    """What `model.plan` says of gathers: what is gathered now, however that came to be."""
    plan = make_plan(Mlp(), 4)

    def make(given: Any = None, **options: Any) -> tuple[Any, Any]:
        model = DistributedDataParallel(Mlp(), **(options or {"tune": False}))
        return model, ShardedOptimizer(model, optim.SGD, plan=given, lr=0.1)

    model, optimizer = make()
    again, _ = make(model.plan)
    half, halves = make(gathering(plan, 0.5))
    before = half.plan
    half.replan(plan)  # which says nothing of gathers
    copied = copy.deepcopy(half)
    none, nothing = make(plan)
    compiled = replace(
        plan,
        groups=tuple(tuple(f"_orig_mod.{name}" for name in group) for group in plan.groups),
        gathers=tuple(tuple(f"_orig_mod.{name}" for name in group) for group in plan.groups),
    )
    mid: Any = DistributedDataParallel(Mlp())
    plans = []
    for _ in range(12):  # by then the tuner has begun
        mid(torch.ones(4, 6)).sum().backward()
        mid.zero_grad()
        plans.append(mid.plan)
    mid._handle.set_buckets(mid._handle.buckets_of(plan.groups))  # on trial
    ShardedOptimizer(mid, optim.SGD, lr=0.1)
    refused = DistributedDataParallel(Mlp(), tune=False)
    wired = replace(plan, wire=("bfloat16",) * plan.num_groups)
    names = set(plan.layer_names)
    return {
        "all": model.plan.gathers == optimizer.gathers and set().union(*optimizer.gathers) == names,
        "again": again.plan.messages == model.plan.messages,
        "half": before.gathers == gathering(plan, 0.5).gathers,
        "mirrored": half.plan.gathers == halves.gathers == tuple(one[::-1] for one in before.gathers),
        "copied": (copied.plan.groups, copied.plan.gathers) == (plan.groups, ()),
        "none": (none.plan.gathers, nothing.gathers) == ((), ()),
        "given": make(None, plan=plan)[0].plan.gathers == tuple(group[::-1] for group in plan.groups[::-1]),
        "compiled": make(compiled)[0].plan.gathers == plan.groups,
        "on trial": mid.plan.groups == plans[5].groups != plan.groups,
        "wire": error_of(lambda: ShardedOptimizer(refused, optim.SGD, plan=wired, lr=0.1)),
        "then": error_of(lambda: ShardedOptimizer(refused, optim.SGD, lr=0.1)),
    }


def viewed() -> dict[str, Any]:
    """Buckets change while gradients, of which ranks have rows, would be views of them."""

    def between(model: Any, optimizer: Any, step: int) -> None:
        if isinstance(optimizer, ShardedOptimizer):
            model.replan(replace(make_plan(model.module, step), gathers=make_plan(model.module, 8).groups))

    def unused() -> nn.Module:
        return Shared(unused=True)

    views = {"gradient_as_bucket_view": True}
    found = {
        "replanned": beside_torchs(Way(ddp=views, between=between), steps=6),
        "unused": beside_torchs(
            Way(model=unused, ddp={**views, "find_unused_parameters": True}, between=between), steps=6
        ),
        "static graph": beside_torchs(Way(ddp={**views, "static_graph": True}, between=between), steps=6),
    }
    expected, _, _ = train(Way(ddp=views), sharded=False, steps=200)
    got, _, (model, _) = train(Way(ddp=views), sharded=True, tune=True, steps=200)
    return {**found, "tuned": difference(got, expected), "state": (model.tuning.state, model.tuning.reason)}


def noted() -> dict[str, Any]:
    """Pieces of forward passes before which somebody reads all parameters, and takes his time."""
    model = DistributedDataParallel(Mlp(), tune=False)
    optimizer = ShardedOptimizer(model, optim.SGD, plan=gathering(make_plan(Mlp(), 4), 1.0), lr=0.1)
    handle: Any = model._handle
    observer = model._observer = Observer(handle, clock_for(torch.device("cpu")))
    observer.note(gathers=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        sums(model.parameters())
        time.sleep(0.05)
    steps = observer.take()[1:]
    observer.stop()
    model._observer = None
    return {
        "gathers": [len(step.gathers) for step in steps],
        "of": len(optimizer.gathers),
        "beyond": max(sum(step.pieces_s) - step.forward_s for step in steps),
    }


def observed() -> dict[str, Any]:
    """What `observe` says of steps whose gathers come late, and what is predicted of them."""
    module = Mlp()
    model = DistributedDataParallel(module, tune=False)
    optimizer = ShardedOptimizer(model, optim.SGD, plan=gathering(make_plan(module, 4), 1.0), lr=0.1)

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()

    steps(3)
    with late_gathers(), model.observe(4, predict_with=(None, LinearCost(2, 0.01, 0.0))) as seen:
        steps(6)
    plan, predicted = model.plan, seen.predicted
    assert plan is not None
    assert predicted is not None
    lines = seen.timelines
    return {
        "steps": len(lines),
        "gathers": [[span.layers for span in line.gathers] == list(plan.gathers) for line in lines],
        "apart": max(
            abs(line.forward.end_s - line.waited_s - sum(step.pieces_s))
            for line, step in zip(lines, seen.steps, strict=True)
        ),
        "waited": max(line.waited_s for line in lines),
        "exposed": min(line.exposed_s - line.waited_s for line in lines),
        "forward": seen.trace.forward_s / max(line.forward.end_s for line in lines),
        "layers": sum(layer.forward_s or 0.0 for layer in seen.trace.layers) / seen.trace.forward_s,
        "predicted": (len(predicted.gathers), predicted.iteration_s >= 0.005 * (len(plan.gathers) + len(plan.groups))),
        "explained": error_of(lambda: explain(model, optimizer, steps=3)),
    }


def copied() -> dict[str, Any]:
    """How many gradients the Reducer copies out of its buckets in a step, of all."""
    found = {}
    unused: dict[str, Any] = {"find_unused_parameters": True}
    ways: tuple[tuple[str, dict[str, Any], float], ...] = (("all", {}, 1.0), ("half", {}, 0.5), ("unused", unused, 1.0))
    for name, options, share in ways:
        module = Mlp()
        model = DistributedDataParallel(module, tune=False, **options)
        optimizer = ShardedOptimizer(model, optim.SGD, plan=gathering(make_plan(module, 4), share), lr=0.1)
        for _ in range(2):  # in the first one torch may not have made its buckets yet
            optimizer.zero_grad()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
        copies = sum(event.count for event in profile.key_averages() if event.key.endswith("copy_bucket_to_grad"))
        found[name] = copies / len(list(module.parameters()))
    return found


SCENARIOS = (tuned, planned, alone, plans_in_force, viewed, noted, observed, copied)
