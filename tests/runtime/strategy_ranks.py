"""What one rank does in the tests of strategies: ``python -m tests.runtime.strategy_ranks FOLDER SCENARIO ...``."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import LayerTrace, LinearCost, ModelTrace
from mgwfbp.runtime.strategies import parallel
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp, Sparse
from tests.runtime.modes import MODES, norm_distance, train, wrap

STRATEGIES = ("naive", "single", "bucket-0.0001", "ps")  # the others are plans of the same kinds
# Ways to use DDP that change when or with what a hook is called.
USED = (
    "plain",
    "dtypes with half",
    "join",
    "views",
    "dtypes static",
    "static",
    "unused views",
    "frozen and shared",
    "no_sync",
    "sparse",
    "ignored",
    "delayed",
)


def averages() -> dict[str, Any]:
    """How far gradients and parameters end from those of torch's class."""
    found = {}
    few = dist.get_world_size() > 2  # each step takes longer there
    for name in USED[:3] if few else USED:
        mode = MODES[name]
        expected = train(mode, wrap(mode, StockDdp), [])
        for strategy in ("naive", "ps") if few else STRATEGIES:
            if strategy == "ps" and mode.model is Sparse:
                continue
            ddp = wrap(mode, partial(parallel, strategy=strategy))
            got = train(mode, ddp, [])
            found[f"{name}: {strategy}"] = {
                "bitwise": got.keys() == expected.keys()
                and all(torch.equal(got[key], value) for key, value in expected.items()),
                "distance": max(norm_distance(got, expected, kind) for kind in ("gradient", "value")),
                "allowed": 1e-6 if mode.wire is torch.float32 else torch.finfo(mode.wire).eps,
            }
    return found


class Watch:
    """Writes down, in one list, which gradients are ready and which messages are sent."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[list[Any]] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name))

    def _ready(self, name: str, _: Tensor) -> None:
        self.events.append(["ready", name])

    @contextmanager
    def spy(self, function: str, describe: Callable[..., list[Any]]) -> Iterator[None]:
        """Have every call of a function of torch.distributed written down once it has returned."""
        original = getattr(dist, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.events.append([function, *describe(*args, **kwargs)])
            return result

        setattr(dist, function, watched)
        try:
            yield
        finally:
            setattr(dist, function, original)


def naive_order() -> dict[str, Any]:
    """What happens in which order in two steps of naive S-SGD, with one dtype and with several."""
    seen = {}
    for name in ("plain", "dtypes"):
        model = MODES[name].model()
        watch = Watch(model)
        ddp = parallel(model, "naive")
        with watch.spy("all_reduce", lambda tensor, **_: [tensor.numel()]):
            for _step in range(2):
                ddp(torch.randn(8, 6)).float().sum().backward()
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        seen[name] = {"events": watch.events, "sizes": sizes, "messages": ddp.plan.num_groups if ddp.plan else 0}
    return seen


class WaitsInBackward(torch.autograd.Function):
    """Ends its backward step only when the message of a later layer has been averaged."""

    arrived = threading.Event()
    in_time = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        WaitsInBackward.in_time = WaitsInBackward.arrived.wait(timeout=20)
        return gradient


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 50)
        self.second = nn.Linear(50, 20)
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = WaitsInBackward.apply(self.first(x))
        return self.last(self.second(x))  # type: ignore[no-any-return]


def server_traffic() -> dict[str, Any]:
    """Who gets what in a step through parameter servers, and whether it comes during the backward pass."""
    model = Waiting()
    watch = Watch(model)
    ddp = parallel(model, "ps")

    def pulled(tensor: Tensor, _: object, *, src: int, **__: object) -> list[int]:
        if tensor.numel() == model.last.weight.numel():
            WaitsInBackward.arrived.set()
        return [tensor.numel(), src]

    def pushed(tensor: Tensor, _: object, *, dst: int, **__: object) -> list[int]:
        return [tensor.numel(), dst]

    with watch.spy("gather", pushed), watch.spy("scatter", pulled):
        ddp(torch.randn(8, 6)).sum().backward()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return {"events": watch.events, "sizes": sizes, "overlapped": WaitsInBackward.in_time}


def timed_plans() -> dict[str, Any]:
    """The plans of the strategies that need a trace and a cost, and one that is given."""
    names = [name for name, _ in Mlp().named_parameters()][::-1]
    trace = ModelTrace("mlp", 0.1, tuple(LayerTrace(name, 1.0, 40 * place) for place, name in enumerate(names)))
    cost = LinearCost(workers=2, startup_s=1.5, per_byte_s=0.01)
    made = {name: parallel(Mlp(), name, trace=trace, cost=cost).plan for name in ("mgwfbp", "optimal", "naive", "ps")}
    optimal = made["optimal"]
    assert optimal is not None
    made["given"] = parallel(Mlp(), optimal).plan
    return {
        "trace": trace.to_json(),
        "cost": cost.to_json(),
        "plans": {name: plan.to_json() for name, plan in made.items() if plan is not None},
    }


SCENARIOS = {
    "averages": averages,
    "naive_order": naive_order,
    "server_traffic": server_traffic,
    "timed_plans": timed_plans,
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
