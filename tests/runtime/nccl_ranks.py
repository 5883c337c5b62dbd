"""What one nccl rank does: ``mgwfbp lab --hosts 2 --rate 1gbit -- python -m tests.runtime.nccl_ranks FOLDER``."""

import json
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

import mgwfbp
import mgwfbp.runtime.rows.shards
from mgwfbp import DistributedDataParallel, FsdpPlan, MergePlan, ShardedOptimizer
from mgwfbp.runtime.messages.wire import WireGroup
from mgwfbp.runtime.strategies import parallel
from tests.runtime.models import make_plan
from tests.runtime.wire_ways import BITS, by_hand, gathered, low_names, mixed_plan

WIDTH, DEPTH, STEPS = 1024, 3, 4  # gradients of 4 MiB: a message takes long enough to be missed


def build() -> nn.Module:
    torch.manual_seed(3)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def train(model: nn.Module, steps: int) -> list[Tensor]:
    """Train and return the gradients of the last step and all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean().backward()
        optimizer.step()
    return [tensor for one in model.parameters() if one.grad is not None for tensor in (one.grad, one.detach())]


def distance(wrap: Callable[[nn.Module], nn.Module], steps: int = STEPS) -> float:
    """Return how far training ends from that with torch's class, relative to the largest number."""
    expected, got = train(StockDdp(build()), steps), train(wrap(build()), steps)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True))


def compiled(model: nn.Module, plan: MergePlan) -> nn.Module:
    ddp = parallel(model, plan)
    ddp.compile()
    return ddp


def observed(strategy: str) -> dict[str, Any]:
    """Return what the messages of a step are seen to take, as a rate."""
    model = parallel(build(), strategy)
    train(model, 2)
    with model.observe(2) as seen:
        train(model, 2)
    timeline = seen.timeline
    seconds = max(message.end_s for message in timeline.messages) - timeline.messages[0].ready_s
    return {"messages": len(timeline.messages), "seconds": seconds}


class Partly(nn.Module):
    """Layers, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8).cuda()
        self.used = build()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


# Ways in which models are trained: what DDP is told, and how many backward passes a step has.
WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "plain": (build, {}, 1),
    "views": (build, {"gradient_as_bucket_view": True}, 1),
    "static": (build, {"static_graph": True}, 1),
    "unused": (Partly, {"find_unused_parameters": True}, 1),
    "accumulated": (build, {}, 2),
    "accumulated, views": (build, {"gradient_as_bucket_view": True}, 2),
}


def low_precision(wire: str, way: str) -> dict[str, Any]:
    """Gradients of messages of which every second travels in low precision, beside those worked out by hand.

    Also whether ranks had exchanged something, so that nccl was connected, before the first backward pass.
    """
    make, arguments, passes = WAYS[way]
    alone, module = make(), make()
    plan = mixed_plan(module, wire)
    low, wrong = low_names(plan), list[str]()
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        model = DistributedDataParallel(module, plan=plan, wire=wire, **arguments)
        has_met = exchange.call_count > 0
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        alone.zero_grad()
        model.zero_grad()
        # A static graph, and which buckets there are, is learnt in a step that sends.
        batches = [torch.randn(16, WIDTH, generator=data).cuda() for _ in range(passes if step else 1)]
        for place, x in enumerate(batches):
            alone(x).square().mean().backward()
            with nullcontext() if place == len(batches) - 1 else model.no_sync():
                model(x).square().mean().backward()
        mine = {name: None if one.grad is None else one.grad.cpu() for name, one in alone.named_parameters()}
        for name, theirs in gathered(mine).items():
            grad = module.get_parameter(name).grad
            if grad is None or theirs[0] is None:
                wrong += [] if grad is theirs[0] else [name]
            elif name in low:
                wrong += [] if torch.equal(grad.cpu(), by_hand(theirs, wire)) else [name]
    return {"low": len(low), "wrong": wrong, "has met": has_met}


def scaled(wire: str) -> dict[str, Any]:
    """A GradScaler, and a loss that is infinite on the last rank in the third step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = build()
    model = DistributedDataParallel(module, plan=mixed_plan(module, wire), wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=1000)
    data = torch.Generator().manual_seed(rank)
    scales, moved = [], []
    for step in range(STEPS):
        before = torch.cat([one.detach().flatten() for one in module.parameters()])
        optimizer.zero_grad()
        value = model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean()
        scaler.scale(value * (float("inf") if step == 2 and rank == world - 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = torch.cat([one.detach().flatten() for one in module.parameters()])
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, after))
    everybody = [torch.empty_like(after) for _ in range(world)]
    dist.all_gather(everybody, after)
    alike = all(torch.equal(one, after) for one in everybody)
    return {"scales": scales, "moved": moved, "alike": alike, "finite": bool(after.isfinite().all())}


def tuned() -> dict[str, Any]:
    """A model that tunes itself, precision included."""
    model = DistributedDataParallel(build(), wire="bfloat16", tune_steps=60)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(400):
        if model.tuning.state == "working":
            model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean().backward()
    told = model.tuning
    plans: list[Any] = [None] * dist.get_world_size()
    assert model.plan is not None
    dist.all_gather_object(plans, model.plan.messages)
    return {
        "state": [told.state, told.reason],
        "tried": [one.plan.wire != () for one in told.candidates],
        "knows": told.low_cost is not None,
        "alike": all(one == plans[0] for one in plans),
    }


def freed() -> list[float]:
    """What is in memory that was a bucket's, freed while its message is late, and is taken by another tensor then."""
    numbers, device = 2**22, torch.device("cuda", 0)
    group = WireGroup(dist.group.WORLD, device)
    group.take(("bfloat16",))
    group.allreduce([torch.zeros(8, device=device)]).wait()
    assert group._channel is not None
    assert group._channel._stream is not None
    with torch.cuda.stream(group._channel._stream):
        torch.cuda._sleep(200_000_000)
    group.allreduce([torch.ones(numbers, device=device)])  # whose work, and bucket, nobody keeps
    others = [torch.full((numbers,), 7.0, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    return [extreme.item() for other in others for extreme in other.aminmax()]


def sharded(late: str) -> float:
    """Return how far training with a sharded optimizer ends from torch's class, with messages that come late.

    By about 30 ms of the GPU, or, at random, by another time on each rank, before and after both kinds are sent. Then
    parameters are also read, and the model run, between steps.
    """
    shards: Any = mgwfbp.runtime.rows.shards
    stock = {name: getattr(shards, name) for name in ("all_gather", "reduce_scatter")}
    draw = random.Random(dist.get_rank())

    def delay(most: int) -> None:
        torch.cuda._sleep(most if late == "late" else draw.randrange(most))

    def slow(send: Callable[..., None], *arguments: Any) -> None:
        delay(50_000_000)
        send(*arguments)
        if late == "at random":
            delay(50_000_000)

    expected = train(StockDdp(build()), STEPS)[1::2]
    module = build()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    for name in {"in time": (), "late": ("all_gather",), "at random": tuple(stock)}[late]:
        setattr(shards, name, partial(slow, stock[name]))
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean().backward()
        optimizer.step()
        if late == "at random":
            copied = [value.clone() for value in module.state_dict().values()]
            with torch.no_grad():
                model(torch.ones(1, WIDTH).cuda())
            assert all(torch.equal(a, b) for a, b in zip(copied, module.state_dict().values(), strict=True))
    got = [one.detach() for one in module.parameters()]
    for name, send in stock.items():
        setattr(shards, name, send)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True))


def two_streams() -> list[bool]:
    """Read a late parameter on a side stream first, then on the one that the optimizer ran on.

    Both wait for the gather and for what writes the parameter, whichever asks first: they see the same, and what is
    there once everything has ended.
    """
    shards: Any = mgwfbp.runtime.rows.shards
    stock = shards.all_gather

    def slow(*arguments: Any) -> None:
        torch.cuda._sleep(50_000_000)
        stock(*arguments)

    module = build()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    side, found = torch.cuda.Stream(), []
    shards.all_gather = slow
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).square().mean().backward()
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = [one.detach().clone() for one in module.parameters()]
        here = [one.detach().clone() for one in module.parameters()]
        torch.cuda.synchronize()
        ended = list(module.parameters())
        found += [all(torch.equal(a, b) for a, b in zip(some, ended, strict=True)) for some in (there, here)]
    shards.all_gather = stock
    return found


def fully_sharded(wrap: Callable[[nn.Module], object]) -> list[float]:
    """Return the losses of a model under FSDP2."""
    model = build()
    wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp() -> dict[str, Any]:
    """Losses of FSDP2 wrapped by block, by a plan that is made on the spot, and by one that has most in one group."""
    from torch.distributed.fsdp import fully_shard

    def by_block(model: nn.Module) -> None:
        for block in model:  # type: ignore[attr-defined]
            if isinstance(block, nn.Linear):
                fully_shard(block)
        fully_shard(model)

    batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(9)).cuda()
    plan = FsdpPlan("toy", (("0", "2"), ("4",)), (True, False), 2, 1)
    return {
        "by block": fully_sharded(by_block),
        "measured": fully_sharded(
            partial(mgwfbp.fully_shard, batch=batch, loss_fn=lambda output: output.square().mean())
        ),
        "planned": fully_sharded(partial(mgwfbp.fully_shard, plan=plan)),
    }


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0), timeout=timedelta(seconds=60))
    names = ("naive", "ps", "wfbp", "single", "bucket-5")
    found: dict[str, Any] = {name: distance(partial(parallel, strategy=name)) for name in names}
    found["auto"] = distance(partial(parallel, strategy="auto"), steps=120)
    plan = make_plan(build(), 2)
    found["compiled"] = distance(partial(compiled, plan=plan))
    found["low precision"] = {f"{wire}, {way}": low_precision(wire, way) for wire in BITS for way in WAYS}
    found["scaled"] = {wire: scaled(wire) for wire in BITS}
    found["tuned"] = tuned()
    found["freed"] = freed()
    found["sharded"] = {name: sharded(name) for name in ("in time", "late", "at random")}
    found["two streams"] = two_streams()
    found["fsdp"] = fsdp() if hasattr(torch.distributed.fsdp, "fully_shard") else None
    found["observed"] = {name: observed(name) for name in ("naive", "ps", "wfbp")}
    found["bytes"] = sum(parameter.nbytes for parameter in build().parameters())
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
