"""What one rank does in the tests of what `fully_shard` refuses or keeps apart, run with ``python -m``."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import mgwfbp
from mgwfbp import FsdpPlan
from tests.runtime.fsdp_odd_ranks import SLOW, learn, loss_of
from tests.runtime.fsdp_planning_ranks import COST, trace_of
from tests.runtime.fsdp_ranks import Block, Blocks, difference, heard, plan_of, told
from tests.runtime.launch import be_rank


class Cast(Blocks):
    """Blocks in 16 bits; the stem, the head and what is in no module have 32."""

    def __init__(self) -> None:
        super().__init__()
        self.h.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = (self.stem(x) * self.scale).bfloat16()
        for block in self.h:
            x = block(x)
        return self.head(x.float())  # type: ignore[no-any-return]


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if hasattr(one, "reshard")]


def dtypes() -> dict[str, Any]:
    """What is planned of such a model and learnt with it beside torch's; what is said of plans and models that mix."""
    torch.manual_seed(3)
    model = Cast()
    for block in model.h:
        torch.distributed.fsdp.fully_shard(block)
    expected = learn(torch.distributed.fsdp.fully_shard(model), loss_of)
    found: dict[str, Any] = {"differences": []}
    batch = torch.rand(6, 4)
    for given in ({"batch": batch, "loss_fn": loss_of}, {"trace": trace_of(Cast())}):
        torch.manual_seed(3)
        model = Cast()
        planned = mgwfbp.plan_fully_shard(model, **given, cost=SLOW, memory_limit="1 GiB")
        ours = mgwfbp.fully_shard(model, **given, cost=SLOW, memory_limit="1 GiB")
        found["groups"] = [*found.get("groups", []), planned.plan.groups]
        found["differences"].append(difference(learn(ours, loss_of), expected))
    inside, model = Cast(), Cast()
    inside.h[1].wide.float()
    found["by hand"] = told(lambda: mgwfbp.fully_shard(model, plan_of(Cast, 2, 5)))
    rest = FsdpPlan("toy", (("stem",),), (True,), root=Cast.units[1:])
    found["root"] = told(lambda: mgwfbp.fully_shard(model, rest))
    found["inside"] = told(lambda: mgwfbp.fully_shard(inside, batch=torch.rand(6, 3), cost=COST))  # not measured
    return {**found, "wrapped": wrapped(model) + wrapped(inside)}


class Scaled(Blocks):
    """Has a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def arguments() -> dict[str, str]:
    """What is one line before anything is measured, and what goes."""
    model, scaled, batch = Blocks(), Scaled(), torch.rand(6, 3)  # of a wrong size: to measure would fail
    limit: Any = [1] if dist.get_rank() == 0 else 10
    rank, strange = dist.get_rank(), {"a": 1}
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16 if rank else torch.float32)
    kept = {model.head.bias} if rank else set[Any]()
    found = {
        "typo": told(lambda: mgwfbp.plan_fully_shard(model, batch=batch, memorylimit="1kB")),
        "typo, wrapping": told(lambda: mgwfbp.fully_shard(model, plan_of(Blocks, 7), mixed_precision=True)),
        "name": told(lambda: mgwfbp.fully_shard(model, plan_of(Blocks, 7), ignored_params=["h.0"])),
        "limit": told(lambda: mgwfbp.fully_shard(model, batch=batch, memory_limit=limit)),
        "scalar": told(lambda: mgwfbp.fully_shard(scaled, batch=batch)),
        "plan": told(lambda: mgwfbp.fully_shard(model, strange)),  # type: ignore[arg-type]
        "trace": told(lambda: mgwfbp.fully_shard(model, trace=strange)),  # type: ignore[arg-type]
        "cost": told(lambda: mgwfbp.fully_shard(model, batch=batch, cost=strange)),  # type: ignore[arg-type]
        "policy": told(lambda: mgwfbp.fully_shard(model, plan_of(Blocks, 7), mp_policy=policy)),
        "ignored": told(lambda: mgwfbp.fully_shard(model, plan_of(Blocks, 7), ignored_params=kept)),
    }
    found["wrapped"] = str(wrapped(model) + wrapped(scaled))
    ignored = (one for one in (scaled.temperature, scaled.head.bias))
    mgwfbp.fully_shard(scaled, trace=trace_of(scaled), cost=COST, ignored_params=ignored)
    found["whole"] = str([name for name, one in scaled.named_parameters() if not hasattr(one, "to_local")])
    return found


class Alone(nn.Module):
    """Parameters that are in no other module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4, 6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def rootless() -> dict[str, Any]:
    """What is learnt where all parameters are the root's."""
    found = {}
    for name, kind in (("Linear", partial(nn.Linear, 4, 6)), ("Alone", Alone)):
        torch.manual_seed(3)
        expected = learn(torch.distributed.fsdp.fully_shard(kind()), loss_of)
        torch.manual_seed(3)
        ours = mgwfbp.fully_shard(kind(), batch=torch.rand(6, 4), loss_fn=loss_of, cost=COST)
        found[name] = difference(learn(ours, loss_of), expected)
    return found


def parts() -> dict[str, Any]:
    """What each rank logs that is a mesh by itself."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))["shard"]
    model = nn.Sequential(nn.Linear(4, 6), Block())
    trace, cost = trace_of(model), mgwfbp.LinearCost(1, 0.0, 0.0)
    lines, _ = heard(lambda: mgwfbp.fully_shard(model, mesh=mesh, trace=trace, cost=cost))
    plan = FsdpPlan("toy", (("0",),), (True,), root=("1",))
    more, _ = heard(lambda: mgwfbp.fully_shard(nn.Sequential(nn.Linear(4, 6), Block()), plan, mesh=mesh))
    return {"said": [*lines, *more]}


SCENARIOS = {one.__name__: one for one in (dtypes, arguments, rootless, parts)}

if __name__ == "__main__":
    be_rank(SCENARIOS)
