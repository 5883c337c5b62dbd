"""What one rank does in the tests of unusual models: ``python -m tests.runtime.guard_ranks FOLDER SCENARIO ...``."""

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.nn.utils import prune

from mgwfbp import DistributedDataParallel
from mgwfbp.runtime.reducer.handle import ReducerHandle, collectives_of
from mgwfbp.runtime.tune.drift import Drift
from mgwfbp.runtime.tune.refusals import unfit_for_tuning
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp, make_plan
from tests.runtime.odd_ranks import Deep
from tests.runtime.tuner_ranks import left_on, tuned, vectors

STEPS = 40
SETTLED_STEPS = 160  # by then the tuner has settled


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
    """Joined by torch's own context; then a block of `join` that ends with an exception on all ranks."""
    model = tuned(Deep())
    for number in range(12):
        loss_of(model, number).backward()
    with Join([model]):
        for number in range(3 + dist.get_rank()):
            loss_of(model, number).backward()
        inside = model.tuning.reason
    found: dict[str, Any] = {"inside": inside, "state": model.tuning.state}
    before = collectives_of(dist.group.WORLD) or (lambda: 0)
    counts = []
    for wrapped in (model, StockDdp(Deep())):
        for number in range(3):  # torch makes its final buckets in one of them
            loss_of(wrapped, number).backward()
        count = before()
        loss_of(wrapped, 1)
        counts.append(before() - count)  # nobody is asked whether it has run out of data
    found["asks"] = counts
    model.replan(plan := make_plan(model.module, 3))
    found["replanned"] = model.plan == plan
    model.replan(None)
    with pytest.raises(ZeroDivisionError), model.join(throw_on_early_termination=False):
        raise ZeroDivisionError
    model.replan(plan)
    return {**found, "after exception": [model.plan == plan, model.tuning.reason], "left": left_on(model)}


def by_hand(model: Any, number: int) -> None:
    """Gradients are averaged though the forward pass does not know it, as in Lightning's manual optimisation."""
    model.require_backward_grad_sync = False
    output = model(vectors(number)[0])
    model.require_backward_grad_sync = True
    model.reducer.prepare_for_backward([])
    output.square().mean().backward()


def evaluated(model: Any, number: int) -> None:
    """A model that is trained in eval(), for its statistics; and looked at in between."""
    model.eval()
    loss_of(model, number).backward()
    with torch.no_grad():
        loss_of(model, number)


def towers(model: Any, number: int) -> None:
    sum(loss_of(model, number + tower) for tower in range(3)).backward()  # type: ignore[union-attr]


def counted() -> dict[str, Any]:
    """How many steps of 6 a watch for change counts that begins after the first, in several ways to train."""
    found = {}
    for way in (by_hand, evaluated, towers, accumulated, by_forward):
        model = DistributedDataParallel(Mlp(), plan=make_plan(Mlp(), 3))
        way(model, 0)
        assert model._handle is not None
        count = model._handle.collectives
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if count is None:  # older torch
            return {}
        drift = model._self_tuning.drift = Drift(store, 1, 2, count, lambda: None)
        for number in range(6):
            way(model, number)
        found[way.__name__] = drift._steps
    return found


def on_trial() -> tuple[DistributedDataParallel, Any]:
    """Return a model whose tuner is trying other buckets than torch's, and torch's."""
    torch.manual_seed(1)
    model, torchs = tuned(Deep()), None
    for number in range(STEPS):
        loss_of(model, number).backward()
        assert model.plan is not None
        if model.plan.planner == "ddp":
            torchs = model.plan.groups
        elif model.plan.groups != torchs:
            break
    return model, torchs


def captured() -> dict[str, Any]:
    """Models that are captured in a CUDA graph, as far as they can be told they are: on trial, and settled."""
    model, settled = on_trial()[0], tuned(Deep())
    for number in range(SETTLED_STEPS):
        loss_of(settled, number).backward()
    groups, watched = model.plan.groups if model.plan else None, settled._self_tuning.drift is not None
    for one in (model, settled):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one, "device", torch.device("cuda"))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            loss_of(one, 0).backward()
    plan = model.plan
    return {
        "reason": model.tuning.reason,
        "planner": plan.planner if plan else None,
        "same": plan is not None and plan.groups == groups,
        "left": left_on(model),
        "watched": [watched, settled._self_tuning.drift is not None],
        "problem": settled.tuning.problem,
    }


def remembering(state: dict[int, Tensor], bucket):  # type: ignore[no-untyped-def]  # torch looks at types
    """Add what was sent of a bucket last, as a hook does that makes up for what it left out."""
    if bucket.index() in state:
        bucket.buffer().add_(state[bucket.index()])
    state[bucket.index()] = bucket.buffer().clone()
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # it takes None, too


def hooked() -> dict[str, Any]:
    """A hook that keeps state per bucket, registered while other buckets than torch's are tried."""
    ours, torchs = on_trial()
    tried = ours.plan.groups if ours.plan else None
    torch.manual_seed(1)
    stock = StockDdp(Deep())
    for number in range(3):  # torch makes its final buckets in one of them
        loss_of(stock, number).backward()
    gradients: list[list[Any]] = []
    for model in (stock, ours):
        model.register_comm_hook({}, remembering)
        for number in range(6):
            model.zero_grad()
            loss_of(model, number).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    return {
        "groups": [tried != torchs, ours.plan is not None and ours.plan.groups == torchs],
        "tuning": [ours.tuning.state, ours.tuning.reason],
        "same": all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)),
        "left": left_on(ours),
    }


def deleted() -> dict[str, Any]:
    """What lives on when a model that is being tuned, or was settled, is deleted."""
    found = {}
    gc.collect()
    gc.disable()
    try:
        for name, arguments, steps in (
            ("tuning", {}, 25),
            ("settled", {}, SETTLED_STEPS),
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
    """Two tuned models, each with a group of its own, that end in one backward pass, in another order on each rank."""
    results: list[list[Tensor]] = []
    tunings: list[str] = []
    # In one group all ranks must send in one order.
    groups = [dist.new_group() for _ in range(2)]
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        models: list[Any] = [wrapper(Deep(), process_group=group) for group in groups]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for number in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # At first torch's own forward passes wait for the other ranks.
            order = models if dist.get_rank() == 0 or number < 3 else models[::-1]
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
    for number in range(SETTLED_STEPS):
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


def beside_stock() -> dict[str, Any]:
    """Collectives of a construction with tune=False and with torch's class; then a job with both, a rank each."""
    calls = collectives_of(dist.group.WORLD) or (lambda: 0)  # older torch does not count ours
    made = []
    for wrapper in (StockDdp, untuned):
        before = calls()
        wrapper(Deep())
        made.append(calls() - before)
    mixed: list[Callable[..., Any]] = [untuned, StockDdp]
    ways: list[list[Callable[..., Any]]] = [[StockDdp, StockDdp], mixed[::-1], mixed, mixed]
    results: list[list[Tensor]] = []
    for way in ways:
        torch.manual_seed(1)
        model = way[dist.get_rank()](Deep())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    same = [all(torch.equal(a, b) for a, b in zip(results[0], some, strict=True)) for some in results[1:]]
    return {"collectives": made, "same": same, "number": tuned(Deep())._number}


def untuned(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, tune=False)


def profiled() -> dict[str, Any]:
    """The marks of tuning in anybody's profile."""
    model = tuned(Deep())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(STEPS):
            loss_of(model, number).backward()
        model.replan(make_plan(model.module, 3))
    return {"marks": sorted({event.key for event in profile.key_averages() if event.key.startswith("mgwfbp")})}


def elsewhere() -> dict[str, Any]:
    """Torch's class takes models on several devices on GPUs only; here a handle is shown one parameter elsewhere."""
    model = untuned(Deep())
    handle = ReducerHandle(model)
    before = unfit_for_tuning(handle)
    handle.parameters[0] = nn.Parameter(handle.parameters[0].to("meta"))
    found = {"before": before, "after": unfit_for_tuning(handle)}
    if "init_sync" in inspect.signature(StockDdp.__init__).parameters:  # gloo sends nothing of this device
        found["untimed"] = DistributedDataParallel(Deep().to("meta"), init_sync=False).tuning.reason
    return found


def several_devices() -> dict[str, Any]:
    """A model whose halves are on two GPUs."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8).to("cuda:0"), nn.Linear(8, 6).to("cuda:1")

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x.to("cuda:0"))).to("cuda:1"))  # type: ignore[no-any-return]

    return beside(lambda model, number: loss_of(model, number).backward(), Halves)


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
    "captured": captured,
    "hooked": hooked,
    "counted": counted,
    "deleted": deleted,
    "two_models": two_models,
    "compiled_meanwhile": compiled_meanwhile,
    "subgroup": subgroup,
    "not_tuned": not_tuned,
    "beside_stock": beside_stock,
    "profiled": profiled,
    "elsewhere": elsewhere,
    "several_devices": several_devices,
    "tensor_parallel": tensor_parallel,
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
