"""What one rank does in the tests of unusual models: ``python -m tests.runtime.guard_ranks FOLDER SCENARIO ...``."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.nn.utils import prune

from mgwfbp import DistributedDataParallel
from tests.runtime.launch import be_rank
from tests.runtime.models import make_plan
from tests.runtime.odd_ranks import Deep
from tests.runtime.tuner_ranks import left_on, tuned, vectors

STEPS = 40


def loss_of(model: Any, number: int) -> Tensor:
    loss: Tensor = model(vectors(number)[0]).square().mean()
    return loss


Way = Callable[[Any, int], None]


def beside(way: Way, make: Callable[[], nn.Module] = Deep, steps: int = STEPS, **arguments: Any) -> dict[str, Any]:
    """Train with torch's class and with ours while it tunes."""
    models: list[Any] = []
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        model: Any = wrapper(make(), **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(steps):
            optimizer.zero_grad()
            way(model, number)
            optimizer.step()
        models.append(model)
    stock, ours = ([parameter.detach() for parameter in model.parameters()] for model in models)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True)),
        "state": models[1].tuning.state,
        "reason": models[1].tuning.reason,
        "steps": models[1].tuning.steps,
        "left": left_on(models[1]) if models[1].tuning.state != "working" else [],
    }


def renamed(model: Any, number: int) -> None:
    """Names change after the model was wrapped: a pruned weight, a layer that is wrapped."""
    if number == 5:
        prune.l1_unstructured(model.module[2], "weight", amount=0.3)
        model.module[4] = nn.Sequential(model.module[4])
    loss_of(model, number).backward()


def by_forward(model: Any, number: int) -> None:
    model.forward(vectors(number)[0]).square().mean().backward()


def accumulated(model: Any, number: int) -> None:
    with model.no_sync():
        loss_of(model, number).backward()
    loss_of(model, number + 1000).backward()


def accumulated_static(model: Any, number: int) -> None:
    """Torch itself needs a whole step first."""
    if number:
        accumulated(model, number)
    else:
        loss_of(model, number).backward()


def never_synchronised(model: Any, number: int) -> None:
    with model.no_sync():
        loss_of(model, number).backward()


def in_join(model: Any, number: int) -> None:
    """Train wholly inside of join()."""
    with model.join():
        loss_of(model, number).backward()
    if isinstance(model, StockDdp) and not isinstance(model, DistributedDataParallel):
        model._join_config = type(model._join_config).construct_disabled_join_config()  # torch leaves it set


class Inside(Deep):
    """Runs the backward pass inside of the forward pass, as manual optimisation does."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if torch.is_grad_enabled():
            owner = self.__dict__["owner"]()
            owner.reducer.prepare_for_backward([])
            output.square().mean().backward()
        return output.detach()  # type: ignore[no-any-return]


def inside_forward(model: Any, number: int) -> None:
    model.module.__dict__["owner"] = weakref.ref(model)
    model.require_backward_grad_sync = False
    model(vectors(number)[0])
    model.require_backward_grad_sync = True


def ways() -> dict[str, Any]:
    return {
        "renamed": beside(renamed),
        "by forward": beside(by_forward),
        "static accumulated": beside(accumulated_static, static_graph=True),
        "unused accumulated": beside(accumulated, find_unused_parameters=True),
        "views accumulated": beside(accumulated, gradient_as_bucket_view=True),
        "never synchronised": beside(never_synchronised, steps=60),
        "in join": beside(in_join),
        "inside forward": beside(inside_forward, Inside),
    }


def replanned_static() -> dict[str, Any]:
    """A static graph whose plan changes in the middle, and whose next pass is under no_sync."""
    results: list[list[Tensor]] = []
    for wrapper in (StockDdp, DistributedDataParallel):
        torch.manual_seed(1)
        module = Deep()
        given: dict[str, Any] = {} if wrapper is StockDdp else {"plan": make_plan(module, 3)}
        model: Any = wrapper(module, static_graph=True, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(8):
            if number in (0, 2, 5) and given:
                model.replan(make_plan(module, 4 + number))
            optimizer.zero_grad()
            accumulated_static(model, number)
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    return {"same": all(torch.equal(a, b) for a, b in zip(*results, strict=True))}


def generic_join() -> dict[str, Any]:
    """Joined by torch's own context, whose end nobody can see."""
    model = tuned(Deep())
    for number in range(12):
        loss_of(model, number).backward()
    with Join([model]):
        for number in range(3 + dist.get_rank()):
            loss_of(model, number).backward()
    return {"state": model.tuning.state, "reason": model.tuning.reason, "left": left_on(model)}


def deleted() -> dict[str, Any]:
    """What lives on when a model that is being tuned, or was settled, is deleted."""
    found = {}
    gc.collect()
    gc.disable()
    try:
        for name, arguments, steps in (
            ("tuning", {}, 25),
            ("settled", {}, 160),
            ("planned", {"plan": make_plan(Deep(), 3)}, 3),
        ):
            model = tuned(Deep(), **arguments)
            for number in range(steps):
                loss_of(model, number).backward()
            state = model.tuning.state
            alive = [weakref.ref(model), weakref.ref(model.module), weakref.ref(next(model.parameters()))]
            del model
            found[name] = [state, [reference() is None for reference in alive]]
    finally:
        gc.enable()
    return found


def two_models() -> dict[str, Any]:
    """Two tuned models that end their reductions in one backward pass, in another order on each rank."""
    results: list[list[Tensor]] = []
    tunings: list[str] = []
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        # In one group, messages of one model would meet those of the other, which may have another size.
        models: list[Any] = [wrapper(Deep(), process_group=dist.new_group()) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for number in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # Not while torch rebuilds its buckets: in each forward pass it waits for the other rank.
            order = models[::-1] if dist.get_rank() == 1 and number > 3 else models
            # The loss of the last comes first in the backward pass.
            losses = [loss_of(model, number) * (1 + place) for place, model in enumerate(order)]
            (losses[0] + losses[1]).backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append([parameter.detach() for model in models for parameter in model.parameters()])
        tunings = [model.tuning.state for model in models] if wrapper is tuned else []
    return {"same": all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "states": tunings}


class OwnForward(Deep):
    """Torch compiles no forward of its own classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


def compiled_meanwhile() -> dict[str, Any]:
    """A model that is compiled while it is being tuned."""
    torch.manual_seed(1)
    model = tuned(OwnForward())
    whole: Any = model
    for number in range(STEPS):
        if number == 25:
            whole = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(whole, number).backward()
    planner = model.plan.planner if model.plan else ""
    return {"state": model.tuning.state, "reason": model.tuning.reason, "planner": planner, "left": left_on(model)}


def subgroup() -> dict[str, Any]:
    """Ranks of a part of the group tune by themselves, here in reverse order of ranks."""
    group = dist.new_group([1, 0])
    assert isinstance(group, dist.ProcessGroup)
    model = tuned(Deep(), process_group=group)
    for number in range(160):
        loss_of(model, number).backward()
    plan = model.plan
    return {"state": model.tuning.state, "plan": plan.to_json()["groups"] if plan else None}


def not_tuned() -> dict[str, Any]:
    """A model with tune=False, beside torch's class: no hook, no patch, nothing observed."""
    from torch._dynamo.backends import distributed

    stock = distributed.DDPOptimizer
    model = DistributedDataParallel(Deep(), tune=False)
    left = left_on(model)
    loss_of(model, 0).backward()
    return {
        "left": left + left_on(model),
        "handle": model._handle is None,
        "optimizer": stock.__module__ == distributed.DDPOptimizer.__module__ == "torch._dynamo.backends.distributed",
    }


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def tensor_parallel() -> dict[str, Any]:
    """Two ranks share each model, two models are averaged: parameters leave the module between passes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results: list[list[Tensor]] = []
    model: Any = None
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        module = parallelize_module(TwoLayers(), mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        _pre_dp_module_transform(module)
        model = wrapper(module, device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(STEPS):
            optimizer.zero_grad()
            model(vectors(number + 7 * (dist.get_rank() // 2))[0]).square().mean().backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))
    return {"same": same, "state": model.tuning.state, "reason": model.tuning.reason, "steps": model.tuning.steps}


SCENARIOS = {
    "ways": ways,
    "replanned_static": replanned_static,
    "generic_join": generic_join,
    "deleted": deleted,
    "two_models": two_models,
    "compiled_meanwhile": compiled_meanwhile,
    "subgroup": subgroup,
    "not_tuned": not_tuned,
    "tensor_parallel": tensor_parallel,
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
