"""What ranks see of bad and odd use of a sharded optimizer."""

import copy
import gc
import inspect
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn, optim
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, ShardedOptimizer
from tests.runtime.models import Mlp, Shared, Sparse, make_plan
from tests.runtime.shard_ways import OPTIMIZERS, Empty, Recurrent, beside_torchs, difference, error_of, gathering, sums


def refused() -> dict[str, Any]:
    """Bad use is one line on all ranks, before any step."""
    rank = dist.get_rank()

    def model(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module or Mlp(), **options)

    stranger = [nn.Parameter(torch.zeros(3))]
    twice = model()
    first = ShardedOptimizer(twice, optim.SGD, lr=0.1)
    hooked = model()
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    some = model()
    odd: Any = 3
    skips: Any = model()
    skips.skip_all_reduce_unused_params = True  # an argument of newer torchs
    thawed = model(Empty())
    thawed.module.requires_grad_(True)
    wide = nn.Linear(4, 4)
    wide.weight = nn.Parameter(torch.randn(4, 8)[:, :4])
    cases = {
        "not ours": lambda: ShardedOptimizer(StockDdp(Mlp()), optim.SGD, lr=0.1),  # type: ignore[arg-type]
        "LBFGS": lambda: ShardedOptimizer(model(), optim.LBFGS),
        "unknown": lambda: ShardedOptimizer(model(), type("Mine", (optim.SGD,), {}), lr=0.1),
        "another model's": lambda: ShardedOptimizer(
            some, optim.SGD, [*some.module.parameters(), *(stranger if rank == 1 else [])], lr=0.1
        ),
        "not all": lambda: ShardedOptimizer(some, optim.SGD, list(some.module.parameters())[1:], lr=0.1),
        "twice": lambda: (first, ShardedOptimizer(twice, optim.SGD, lr=0.1)),
        "wrapped twice": lambda: (first, ShardedOptimizer(model(twice.module), optim.SGD, lr=0.1)),
        "wire": lambda: ShardedOptimizer(model(wire="bfloat16"), optim.SGD, lr=0.1),
        "hook": lambda: ShardedOptimizer(hooked, optim.SGD, lr=0.1),
        "skips": lambda: ShardedOptimizer(skips, optim.SGD, lr=0.1),
        "sparse": lambda: ShardedOptimizer(model(Sparse()), optim.SGD, lr=0.1),
        "strides": lambda: ShardedOptimizer(model(wide), optim.SGD, lr=0.1),
        "elsewhere": lambda: ShardedOptimizer(
            model(nn.Linear(3, 3, device="meta"), tune=False, init_sync=False), optim.SGD, lr=0.1
        ),
        "thawed": lambda: ShardedOptimizer(thawed, optim.SGD, lr=0.1),
        "a set": lambda: ShardedOptimizer(some, optim.SGD, [{"params": set(some.module.parameters())}], lr=0.1),
        "no rate": lambda: ShardedOptimizer(some, optim.SGD, lr=-1.0 if rank == 1 else 0.1),
        "an odd list": lambda: ShardedOptimizer(some, optim.SGD, None if rank == 0 else [odd], lr=0.1),
        "another rate": lambda: ShardedOptimizer(some, optim.SGD, lr=0.1 * (rank + 1)),
        "another class": lambda: ShardedOptimizer(some, optim.AdamW if rank else optim.Adam),
        "another order": lambda: ShardedOptimizer(
            some, optim.SGD, list(some.module.parameters())[:: -1 if rank else 1], lr=0.1
        ),
        "other groups": lambda: ShardedOptimizer(
            some, optim.SGD, [{"params": one} for one in some.module.parameters()] if rank else None, lr=0.1
        ),
    }
    if "init_sync" not in inspect.signature(StockDdp).parameters:
        del cases["elsewhere"]  # an older torch wraps no model without a device
    return {name: error_of(case) for name, case in cases.items()}


class Scalars(nn.Module):
    """Parameters of one number, some frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.hidden, self.head = nn.Linear(6, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)) * self.scale) * self.frozen  # type: ignore[no-any-return]


def some_are_set_to_none(model: Any, *_: Any) -> None:
    for parameter in model.module.head.parameters():
        parameter.grad = None


def step_again(model: Any, optimizer: Any, step: int) -> None:
    """Steps without a backward pass, some with no gradients; a state that is saved and loaded on the way."""
    some_are_set_to_none(model)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if isinstance(optimizer, ShardedOptimizer) and step % 2 and hasattr(torch.distributed.tensor, "DTensor"):
        optimizer.sharded_state_dict()
        optimizer.sharded_state_dict(to_load=True)
    model.zero_grad()
    optimizer.step()


def odd() -> dict[str, Any]:
    """Gradients that are set to None, states in between, parameters of one number."""
    return {
        name: beside_torchs(replace(OPTIMIZERS[name], model=Scalars, between=step_again), steps=6)
        for name in ("SGD", "momentum", "AdamW", "NAdam", "Rprop", "ASGD", "Adagrad")
    }


def ended() -> dict[str, Any]:
    """Models and optimizers end with their last names, threads with them."""
    found = []
    module = Recurrent()
    model: Any = None
    optimizer: Any = None
    for _ in range(3):
        del model, optimizer
        model = DistributedDataParallel(module, tune=False)
        optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
        optimizer.zero_grad()  # what the one before has left
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        model.synchronize()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    hooks = len(module.lstm._forward_pre_hooks)
    plain = all(type(one._parameters) is dict for one in module.modules())
    held = weakref.ref(module.head.weight)
    copied = error_of(partial(copy.deepcopy, optimizer))
    del module, model, optimizer
    for _ in range(100):  # the thread of messages may still be on its way out of the last one
        gc.collect()
        if held() is None:
            break
        time.sleep(0.05)
    return {"threads": found, "hooks": hooks, "plain dicts": plain, "is held": held() is not None, "copied": copied}


def skipped() -> dict[str, Any]:
    """One rank leaves a step out: learning rates are 0, so that whatever changes a parameter is wrong."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    module = Mlp()
    model = DistributedDataParallel(module, tune=False, process_group=group, broadcast_buffers=False)
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.0)
    held = [one.detach() for one in module.parameters()]
    before = [one.clone() for one in held]

    def steps() -> None:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).sum().backward()
            if dist.get_rank() or step != 1:
                optimizer.step()

    return {
        "error": error_of(steps),
        "changed": max((a - b).abs().max().item() for a, b in zip(held, before, strict=True)),
    }


def again() -> dict[str, Any]:
    """A second optimizer for a model, which all-reduces half, beside torch's class with two plain ones."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    torch.manual_seed(3)
    module = Mlp()
    plain = copy.deepcopy(module)
    stock, model = StockDdp(plain), DistributedDataParallel(module, tune=False)
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)  # which holds it, and is held by it
    steps(model, optimizer)
    steps(stock, optim.SGD(plain.parameters(), lr=0.1))
    plan = gathering(make_plan(module, 4), 0.5)
    both = error_of(lambda: ShardedOptimizer(model, optim.Adam, plan=plan, lr=0.01))
    del optimizer
    second = ShardedOptimizer(model, optim.Adam, plan=plan, lr=0.01)
    steps(model, second)
    steps(stock, optim.Adam(plain.parameters(), lr=0.01))
    got, expected = ([one.detach() for one in some.parameters()] for some in (module, plain))
    return {"both": both, "shared": second.gathers == plan.gathers, "after": difference(got, expected)}


def error_when_captured(model: Any, x: Tensor) -> str:
    """What a forward pass says of a capture, as far as it can be told there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(model._shards, "_device", torch.device("cuda"))
        return error_of(lambda: model(x))


def loud() -> dict[str, Any]:
    """What would use a part of a gradient as if it were all of it."""
    module = Mlp()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
    x = torch.ones(4, 6)
    model(x).sum().backward()
    found: dict[str, Any] = {
        "torch's clipping": error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "a plain optimizer": error_of(optim.SGD(module.parameters(), lr=0.1).step),
        "reading": error_of(lambda: sums(one.grad for one in module.parameters() if one.grad is not None)),
    }
    found["hook"] = error_of(lambda: model.register_comm_hook(None, lambda _, bucket: bucket.buffer()))
    optimizer.step()
    model.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
    found["not averaged"] = error_of(optimizer.step)
    model.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    found["no zero_grad"] = error_of(lambda: model(x).sum().backward())
    found["other group"] = error_of(lambda: model._update_process_group(dist.group.WORLD))
    found["join"] = error_of(lambda: model.join().__enter__())
    model.zero_grad()
    found["captured"] = error_when_captured(model, x)
    found["add"] = error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}))
    model(x).sum().backward()
    optimizer.step()
    found["travels"] = len(model._shards.pending)  # type: ignore[union-attr]
    model.zero_grad()
    model.zero_grad(set_to_none=False)
    found["after zero_grad"] = [len(model._shards.pending)]  # type: ignore[union-attr]
    optimizer.zero_grad()
    found["after zero_grad"].append(len(model._shards.pending))  # type: ignore[union-attr]
    found["without gradients"] = all(one.grad is None for one in module.parameters())
    kept = module.head.weight
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    model(x).sum().backward()
    found["assigned"] = error_of(optimizer.step)
    module.head.weight = kept
    module.head.weight.data = module.head.weight.data.double()
    found["moved"] = error_of(optimizer.step)
    return found


class Raises(torch.autograd.Function):
    """Hands x on; a backward pass through it raises when all else has ended but what was queued at its end."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        def fail() -> None:
            raise ValueError("a callback of the user's")

        # The Reducer queues its end when it has sent its last message, and what is queued then comes after.
        Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(fail))
        return grads[0]


def raised() -> dict[str, Any]:
    """Backward passes that raise after gradients were averaged, and what the steps after them do, beside torch's."""

    def run(*, sharded: bool, goes_on: str) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(3)
        module = Mlp()
        model: Any = DistributedDataParallel(module, tune=False) if sharded else StockDdp(module)
        optimizer: Any = (
            ShardedOptimizer(model, optim.AdamW, lr=0.01) if sharded else optim.AdamW(module.parameters(), lr=0.01)
        )
        data, said = torch.Generator().manual_seed(dist.get_rank()), []
        for step in range(6):
            loss = model(torch.randn(4, 6, generator=data)).square().mean()
            said.append(error_of((Raises.apply(loss) if step == 2 else loss).backward))
            if goes_on == "steps" or not said[-1]:
                optimizer.step()
            optimizer.zero_grad()
        return [one.detach() for one in module.parameters()], said

    found: dict[str, Any] = {}
    for goes_on in ("steps", "forgets"):
        (expected, said_there), (got, said_here) = (run(sharded=one, goes_on=goes_on) for one in (False, True))
        found[goes_on] = [difference(got, expected), said_here == said_there, len(list(filter(None, said_here)))]
    return found


def static_later() -> dict[str, Any]:
    """A graph that is called static once the optimizer is there, of a model with parameters that are never used."""
    ends = []
    for sharded in (False, True):
        torch.manual_seed(3)
        module = Shared(unused=True)
        model: Any = DistributedDataParallel(module, plan=make_plan(module, 4)) if sharded else StockDdp(module)
        kind: Any = partial(ShardedOptimizer, model, optim.AdamW) if sharded else optim.AdamW
        optimizer = kind(module.parameters(), lr=0.01)
        model._set_static_graph()
        data = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=data)).square().mean().backward()
            optimizer.step()
            model._set_static_graph()  # once more, which torch only warns of
        ends.append([one.detach() for one in module.parameters()])
    return {"difference": difference(ends[1], ends[0])}


def thawed() -> dict[str, Any]:
    """A parameter that was frozen when the model was wrapped, and is trained later."""
    model = DistributedDataParallel(Empty(), tune=False)
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
    frozen: Any = model.module.layers
    found: dict[str, Any] = {}
    for is_thawed in (False, True):
        frozen[1].requires_grad_(is_thawed)
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        found[f"clipping {is_thawed}"] = error_of(lambda: optimizer.clip_grad_norm_(1.0))
        found[f"step {is_thawed}"] = error_of(optimizer.step)
    return found


SCENARIOS = (refused, odd, ended, again, skipped, loud, thawed, raised, static_later)
