"""What one rank does in the tests of `fully_shard` without a plan: ``python -m tests.runtime.fsdp_planning_ranks``."""

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

import mgwfbp
from mgwfbp import FsdpPlan, LayerTrace, LinearCost, ModelTrace
from mgwfbp.costs import ShardedCost
from mgwfbp.fsdp import predict_fsdp
from mgwfbp.measure.backward import measure_backward
from mgwfbp.measure.beside import Load
from mgwfbp.runtime.fsdp import planning
from mgwfbp.runtime.fsdp.planning import FsdpInputs, Place, cost_beside, make_plan
from tests.runtime.fsdp_ranks import (
    Block,
    Blocks,
    Partly,
    Transformer,
    Way,
    difference,
    events_of,
    heard,
    plan_of,
    told,
    train,
    whole,
)
from tests.runtime.fsdp_ranks import make as make_by_block
from tests.runtime.launch import be_rank

planning.BUDGET_S = 0.5  # here only that it was measured counts, not how exactly
COST = LinearCost(workers=2, startup_s=1e-4, per_byte_s=1e-6)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def trace_of(model: nn.Module) -> ModelTrace:
    """A trace in which every layer takes a millisecond in both passes, and modules run as they do in our models."""
    sizes = [(name, parameter.nbytes) for name, parameter in model.named_parameters()]
    sizes.sort(key=lambda pair: pair[0].startswith(("head", "norm")))
    layers = [LayerTrace(name, 1e-3, size, 1e-3) for name, size in reversed(sizes)]
    return ModelTrace("toy", 1e-3 * len(layers), tuple(layers))


def measured() -> dict[str, Any]:
    """What training comes to where all is measured, or one of both, beside torch's; and what is said."""
    found: dict[str, Any] = {}
    for kind in (Blocks, Transformer):
        way = Way(kind)
        model, optimizer = make_by_block(way, None)
        expected = train(way, model, optimizer), whole(model)
        torch.manual_seed(3)
        trace = trace_of(kind())
        ways: dict[str, dict[str, Any]] = {
            "both": {"batch": torch.rand(5, 4), "loss_fn": loss},
            "network": {"trace": trace},
            "model": {"batch": (torch.rand(5, 4),), "cost": COST},
            "neither": {"trace": trace, "cost": COST, "memory_limit": "1 GiB"},
        }
        for title, given in ways.items():
            torch.manual_seed(3)
            model = kind()
            lines, _ = heard(partial(mgwfbp.fully_shard, model, **given))
            optimizer = torch.optim.SGD(model.parameters(), **way.options)
            error = difference((train(way, model, optimizer), whole(model)), expected)
            found[f"{kind.__name__}, {title}"] = {"difference": error, "said": lines}
    return found


def untouched() -> dict[str, Any]:
    """The model and random numbers around measuring."""

    class Counting(Blocks):
        """Also has a buffer, and uses random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            random.random(), np.random.rand()
            return super().forward(nn.functional.dropout(self.norm(x), 0.5))

    torch.manual_seed(3)
    model = Counting()
    loss(model(torch.rand(5, 4))).backward()

    def state() -> list[Tensor]:
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        numbers = torch.tensor([random.getstate()[1][-1], np.random.get_state()[2]])  # type: ignore[index]
        return [*model.state_dict().values(), *gradients, torch.get_rng_state(), numbers]

    place, inputs = Place.of(None, {}), FsdpInputs(torch.rand(5, 4), loss)
    before = [one.clone() for one in state()]
    plan, trace, cost = make_plan(model, inputs, place, lambda: ["head"])
    after = state()
    return {
        "same": len(before) == len(after) and all(map(torch.equal, before, after)),
        "hooks": sum(len(one._forward_pre_hooks) for one in model.modules()),
        "plan": plan.to_json(),
        "trace": trace.to_json(),
        "cost": type(cost).__name__,
        "predicted": predict_fsdp(trace, cost, plan).iteration_s,
    }


class Failing(Blocks):
    """Fails in a pass on the last rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no luck")
        return super().forward(x)


def beside() -> dict[str, Any]:
    """What is known of messages beside passes, of models that run and that do not; and what is said."""
    half = LinearCost(dist.get_world_size(), 1e-4, 1e-9)
    cost, found = ShardedCost(half, half, half), {}
    inputs, place = FsdpInputs(torch.rand(5, 4), loss), Place.of(None, {})
    for kind in (Blocks, Failing):
        lines, costs = heard(lambda: cost_beside(kind(), inputs, place, cost, Load(4000, 3)))  # noqa: B023 - called here
        found[kind.__name__] = {"same": costs == cost, "taken": costs.taken_per_byte_s, "said": lines}
    return found


def precision() -> dict[str, Any]:
    """What is gathered and sent for each byte of a parameter."""
    policy_of = torch.distributed.fsdp.MixedPrecisionPolicy
    policies = {
        "gathers": (torch.float32, policy_of(torch.bfloat16, torch.float32)),
        "both": (torch.float32, policy_of(torch.bfloat16)),
        "none": (torch.float32, policy_of(output_dtype=torch.bfloat16)),
        "sent wider": (torch.bfloat16, policy_of(reduce_dtype=torch.float32)),
    }
    found = {}
    for name, (dtype, policy) in policies.items():
        model = Blocks().to(dtype)
        planned = mgwfbp.plan_fully_shard(model, trace=trace_of(model), cost=COST, mp_policy=policy)
        said = planned.plan.predicted["precision"]
        found[name] = [said["gather"], said["reduce"]]
    return found


def limits() -> dict[str, Any]:
    """What is logged of memory without a limit, and with one."""
    model, slow = Blocks(), LinearCost(workers=2, startup_s=1e-4, per_byte_s=1e-4)
    plan, found = partial(mgwfbp.plan_fully_shard, model, trace=trace_of(model), cost=slow), {}
    for name, limit in (("none", None), ("enough", "1 GiB")):
        lines, planned = heard(partial(plan, memory_limit=limit))
        found[name] = [line for line in lines if line.startswith("WARNING")]
        found[f"{name}, kept"] = planned.plan.reshard.count(False) == len(planned.plan.groups)
    return found


class Tower(nn.Module):
    """Frozen blocks before others, modules that nothing runs, and such as are read without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block(4) for _ in range(2)).requires_grad_(False)
        self.stem, self.head, self.extra = nn.Linear(4, 6), nn.Linear(6, 3, bias=False), nn.Linear(6, 6)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.h[1].narrow.requires_grad_(False)
        self.read, self.spare = (nn.Linear(6, 6).requires_grad_(False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.tower, self.stem, *self.h):
            x = block(x)
        return nn.functional.linear(nn.functional.linear(x, self.read.weight), self.head.weight)


def odd() -> dict[str, Any]:
    """What is planned of such a model, what it does in a step, and what it learns beside torch's."""
    found: dict[str, Any] = {}
    way, batch = Way(Tower), torch.rand(5, 4)
    torch.manual_seed(3)
    stock = Tower()
    for block in (*stock.tower, *stock.h):
        torch.distributed.fsdp.fully_shard(block)
    torch.distributed.fsdp.fully_shard(stock)
    expected = train(way, stock, torch.optim.SGD(stock.parameters(), **way.options)), whole(stock)
    torch.manual_seed(3)
    least = told(lambda: mgwfbp.plan_fully_shard(Tower(), batch=batch, loss_fn=loss, cost=COST, memory_limit=1))
    torch.manual_seed(3)
    planned = mgwfbp.plan_fully_shard(Tower(), batch=batch, loss_fn=loss, cost=COST)
    # As planned, and with all that may be resharded.
    names = [name for group in planned.plan.groups for name in group]
    each = FsdpPlan(
        "toy", tuple((name,) for name in names), (True,) * len(names), root=planned.plan.root, idle=planned.plan.idle
    )
    for title, plan in (("planned", planned.plan), ("resharded", each)):
        torch.manual_seed(3)
        lines, model = heard(partial(mgwfbp.fully_shard, Tower(), plan))
        error = difference(
            (train(way, model, torch.optim.SGD(model.parameters(), **way.options)), whole(model)), expected
        )
        found[title] = {"difference": error, "events": events_of(model), "said": lines}
    return {
        **found,
        "plan": planned.plan.to_json(),
        "least": least,
        "frozen": [one["name"] for one in planned.trace.source["frozen"]],
    }


def profiled() -> dict[str, Any]:
    """Two steps of each model under torch's profiler; the export of each rank is in the folder."""
    names = ("tower.0", "tower.1", "stem", "h.0", "h.1", "h.2")
    plans = {
        Blocks: plan_of(Blocks, 2, 2, 2, 1, reshard=(True, True, False, True)),
        Tower: FsdpPlan(
            "toy", tuple((name,) for name in names), (True,) * 6, root=("head", "read"), idle=("extra", "spare")
        ),
    }
    for kind, plan in plans.items():
        model, x = mgwfbp.fully_shard(kind(), plan), torch.rand(5, 4)
        loss(model(x)).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                loss(model(x)).backward()
        profile.export_chrome_trace(str(Path(sys.argv[1]) / f"{kind.__name__}{dist.get_rank()}.json"))
    trace_of(Blocks()).save(Path(sys.argv[1]) / f"trace{dist.get_rank()}.json")
    return {kind.__name__: plan.to_json() for kind, plan in plans.items()}


def refused() -> dict[str, Any]:
    """What is one line on all ranks; afterwards the model can still be wrapped."""
    rank, folder, model = dist.get_rank(), Path(sys.argv[1]), Blocks()
    trace, batch = trace_of(model), torch.rand(5, 4)
    COST.save(folder / f"cost{rank}.json")
    trace.save(folder / f"trace{rank}.json")
    tower = measure_backward(Tower(), batch, loss, steps=1, warmup=0)
    wider = Blocks()
    wider.head = nn.Linear(6, 5)
    other = ModelTrace("other", 1.0, (LayerTrace("alone.w", 1.0, 4),))

    def give(**given: Any) -> str:
        return told(lambda: mgwfbp.fully_shard(model, **given))

    found = {
        "nothing": give(),
        "cost alone": give(cost=COST),
        "one rank's trace": give(trace=trace, cost=COST) if rank else give(batch=batch, cost=COST),
        "one rank's plan": give(plan=plan_of(Blocks, 7)) if rank else give(trace=trace, cost=COST),
        "batch": give(batch=batch if rank == 0 else torch.rand(5, 3), cost=COST),
        "limit": give(trace=trace, cost=COST, memory_limit=10),
        "size": give(trace=trace, cost=COST, memory_limit="much"),
        "workers": give(trace=trace, cost=LinearCost(4, 1.0, 1.0)),
        "other": give(trace=other, cost=COST),
        "larger": give(trace=trace_of(wider), cost=COST),
        "in 16 bits": give(trace=trace_of(Blocks().bfloat16()), cost=COST),
        "thawed": told(lambda: mgwfbp.fully_shard(Tower().requires_grad_(), trace=tower, cost=COST)),
        "no file": give(trace=trace, cost=folder / ("cost0.json" if rank == 0 else "none.json")),
        "plan too": give(plan=FsdpPlan("toy", (Blocks.units,), (True,)), batch=batch, cost=COST),
        "reshard_after_forward": give(batch=batch, cost=COST, reshard_after_forward=False),
        "frozen": told(lambda: mgwfbp.fully_shard(Partly(), trace=trace_of(Partly()), cost=COST)),
        "dp_mesh_dims": give(batch=batch, cost=COST, dp_mesh_dims=("x",)),
        "meta": told(lambda: mgwfbp.fully_shard(Blocks().to("meta"), batch=batch, cost=COST)),
    }
    found["wrapped"] = str([name for name, one in model.named_modules() if hasattr(one, "reshard")])
    found["paths"] = give(trace=folder / f"trace{rank}.json", cost=str(folder / f"cost{rank}.json"))
    found["twice"] = give(trace=trace, cost=COST)
    return found


SCENARIOS = {one.__name__: one for one in (measured, untouched, beside, precision, limits, odd, profiled, refused)}

if __name__ == "__main__":
    be_rank(SCENARIOS)
