"""What one rank does in the tests of several."""

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp import LayerTrace, ModelTrace, PiecewiseCost
from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import make_contender
from mgwfbp.bench.contest import Case, contest
from mgwfbp.bench.replay import Replay
from mgwfbp.bench.servers import measure_servers
from mgwfbp.bench.turns import Schedule, slowest, take_turns
from mgwfbp.measure.workload import Workload, default_loss

STRATEGIES = ("naive", "wfbp", "single", "ps", "mgwfbp", "bucket", "bucket-1", "ddp", "optimal", "auto")
PLANNED = STRATEGIES[:-1]  # without asking the tuner


def make_case() -> Case:
    """Eight gradients of up to 1.2 MB, so that fixed buckets differ from everything else."""
    sizes = [400_000, 8, 1_200_000, 400, 400_000, 8, 1_000_000, 4]
    layers = tuple(LayerTrace(f"part{index}.weight", 1e-3, size) for index, size in enumerate(sizes))
    trace = ModelTrace("toy", 1e-3, layers)
    cost = PiecewiseCost(dist.get_world_size(), ((4, 5e-4), (2**20, 2e-3)))
    workload = Workload("toy", Replay(trace), torch.zeros(1), 1, default_loss)
    # A tuner that compares for long is no part of these tests: two of them, of three ranks each, would take a minute.
    return Case(workload, trace, cost, "files", None, {"gradient_as_bucket_view": True, "tune_steps": 40})


def sides() -> dict[str, Any]:
    """A whole contest: its result, which must be everybody's."""
    return {"result": contest(make_case(), STRATEGIES, Schedule(turns=2, steps=1)).to_json()}


LOW = ("ddp", "ddp+bf16", "bucket-1+fp16", "optimal+bf16", "auto+bf16", "bf16-hook-1")


def low() -> dict[str, Any]:
    """Strategies that send in low precision."""
    return {"result": contest(make_case(), LOW, Schedule(turns=1, steps=1)).to_json()}


def sent() -> dict[str, Any]:
    """What the Reducer really holds when a strategy is in force, and what a rank's gradients become."""
    case = make_case()
    module = case.workload.model
    assert isinstance(module, Replay)
    arena = Arena(case.workload, case.trace, **case.ddp_arguments)
    found: dict[str, Any] = {}
    for name in [*PLANNED, "ddp", "optimal"]:  # again: coming back must be the same as coming first
        contender = make_contender(name, module, case.trace, case.cost)
        step = arena.enter(contender)
        module._gradients.fill_(float(dist.get_rank()))
        step()
        handle = arena.model_for(contender)._handle
        assert handle is not None
        grads = [parameter.grad for parameter in module.parameters()]
        sizes = {layer.name: layer.grad_bytes for layer in case.trace.layers}
        found[name] = {
            "held": handle.held_sizes(),
            "plan": [sum(sizes[layer] for layer in group) for group in contender.plan.groups],
            "average": sorted({float(value) for grad in grads if grad is not None for value in grad.unique()}),
        }
    module._gradients.fill_(float(dist.get_rank()))
    arena.enter_alone()()
    grads = [parameter.grad for parameter in module.parameters()]
    found["alone"] = sorted({float(value) for grad in grads if grad is not None for value in grad.unique()})
    return found


def turns() -> dict[str, Any]:
    """The order in which ways are taken, and that the slowest rank counts."""
    calls: list[str] = []

    def way(name: str) -> Any:
        calls.append(f"enter {name}")
        return lambda: calls.append(name)

    ways = {name: (lambda name=name: way(name)) for name in "ab"}
    told: list[Any] = []
    times = take_turns(
        ways, Schedule(turns=3, steps=2, settle=1), torch.device("cpu"), on_turn=lambda turn, _: told.append(turn)
    )
    mine = [float(dist.get_rank()), -float(dist.get_rank())]
    return {"calls": calls, "times": times, "told": told, "slowest": slowest(mine, torch.device("cpu"))}


def servers() -> dict[str, Any]:
    costs = measure_servers(torch.device("cpu"), max_bytes=5000)
    return {name: getattr(costs, name).to_json() for name in ("alone", "shared")}


def all_scenarios(rank: int, folder: Path) -> None:
    """Do everything in one start; what came of it goes to ``rankN.json``."""
    result = {scenario.__name__: scenario() for scenario in (turns, servers, sent, sides, low)}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    # Reducers that wait for the garbage collector would outlive the group, whose threads must not outlive the process.
    gc.collect()
