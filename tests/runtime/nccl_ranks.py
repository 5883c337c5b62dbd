"""What one nccl rank does: ``mgwfbp lab --hosts 2 --rate 1gbit -- python -m tests.runtime.nccl_ranks FOLDER``."""

import copy
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
from tests.runtime.shard_ways import MODES, OPTIMIZERS, Way, beside_torchs, difference, sums
from tests.runtime.shard_ways import train as train_way
from tests.runtime.wire_ways import BITS, by_hand, gathered, low_names, mixed_plan

CYCLES = 50_000_000  # about 30 ms of a GPU
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


@contextmanager
def late_messages(names: tuple[str, ...], most: int = CYCLES, *, at_random: bool = False) -> Iterator[None]:
    """Let these messages of a sharded optimizer come late: by so many cycles of the GPU before they are sent.

    Or, at random, by up to so many, another number on each rank, before and after.
    """
    shards: Any = mgwfbp.runtime.rows.shards
    stock = {name: getattr(shards, name) for name in names}
    draw = random.Random(dist.get_rank())

    def slow(send: Callable[..., None], *arguments: Any) -> None:
        torch.cuda._sleep(draw.randrange(most) if at_random else most)
        send(*arguments)
        if at_random:
            torch.cuda._sleep(draw.randrange(most))

    for name, send in stock.items():
        setattr(shards, name, partial(slow, send))
    try:
        yield
    finally:
        for name, send in stock.items():
            setattr(shards, name, send)


def sharded(*names: str, at_random: bool = False) -> float:
    """Return how far training with a sharded optimizer ends from torch's class, with messages that come late.

    At random, parameters are also read, and the model run, between steps.
    """
    expected = train(StockDdp(build()), STEPS)[1::2]
    module = build()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    with late_messages(names, at_random=at_random):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, WIDTH, generator=data).cuda()).square().mean().backward()
            optimizer.step()
            if at_random:
                copied = [value.clone() for value in module.state_dict().values()]
                with torch.no_grad():
                    model(torch.ones(1, WIDTH).cuda())
                assert all(torch.equal(a, b) for a, b in zip(copied, module.state_dict().values(), strict=True))
        got = [one.detach() for one in module.parameters()]
    return difference(got, expected)


def read_batch_statistics(model: Any, *_: Any) -> list[float]:
    return sums(model.buffers())


# Sizes of these models do not divide by the number of ranks, and rank 0 broadcasts batch statistics beside gathers.
SHARDED_WAYS = {
    **{name: OPTIMIZERS[name] for name in ("Adam", "AdamW foreach", "AdamW fused")},
    **{name: MODES[name] for name in ("accumulation", "autocast", "channels last", "dtypes", "static graph", "unused")},
    **{name: way for name, way in MODES.items() if "clip" in name or "scaler" in name or "half" in name},
    "AdamW fused, scaler": replace(OPTIMIZERS["AdamW fused"], scaler=True),
    "batch statistics": Way(between=read_batch_statistics),
}


def sharded_ways() -> dict[str, float]:
    """How far training in many ways ends from torch's class, with both kinds of messages late at random."""
    with late_messages(("all_gather", "reduce_scatter"), CYCLES // 10, at_random=True):
        return {name: beside_torchs(way, steps=8) for name, way in SHARDED_WAYS.items()}


def state_on_host() -> dict[str, Any]:
    """Where the whole state is, and where the plain optimizer and ours go on with it."""
    way = replace(OPTIMIZERS["AdamW"], gathered=0.5)
    expected, _, _ = train_way(way, sharded=True, steps=5)
    _, _, (model, ours) = train_way(way, sharded=True, steps=4)
    state, module = ours.state_dict(), copy.deepcopy(model.module)
    places = {value.device.type for one in state["state"].values() for value in one.values()}
    plain = torch.optim.AdamW(module.parameters(), lr=1.0)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    x = [torch.randn(way.rows, way.width, generator=data) for _ in range(5)][-1].cuda()
    ends = []
    for wrapped, optimizer in ((StockDdp(module), plain), (model, ours)):
        optimizer.load_state_dict(copy.deepcopy(state))  # which holds the counts of steps themselves
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
        ends.append([one.detach() for one in wrapped.module.parameters()])
    return {"places": sorted(places), "differences": [difference(end, expected) for end in ends]}


def dropped() -> bool:
    """Drop a model and its optimizer while parameters are gathered; nobody else's memory is written to."""
    model = DistributedDataParallel(build(), tune=False)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.05)
    model(torch.ones(4, WIDTH).cuda()).square().mean().backward()
    sizes = [one.numel() for one in model.parameters()]
    with late_messages(("all_gather",)):
        optimizer.step()
    del model, optimizer
    gc.collect()
    taken = [torch.full((size,), 7.0, device="cuda") for _ in range(3) for size in (*sizes, sum(sizes))]
    torch.cuda.synchronize()
    return all(bool((one == 7).all()) for one in taken)


def two_streams() -> list[bool]:
    """Read a late parameter on a side stream first, then on the one that the optimizer ran on.

    Both wait for the gather and for what writes the parameter, whichever asks first: they see the same, and what is
    there once everything has ended.
    """
    module = build()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    side, found = torch.cuda.Stream(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).square().mean().backward()
        with late_messages(("all_gather",)):
            optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = [one.detach().clone() for one in module.parameters()]
        here = [one.detach().clone() for one in module.parameters()]
        torch.cuda.synchronize()
        ended = list(module.parameters())
        found += [all(torch.equal(a, b) for a, b in zip(some, ended, strict=True)) for some in (there, here)]
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
    found["sharded"] = {
        "in time": sharded(),
        "late": sharded("all_gather"),
        "at random": sharded("all_gather", "reduce_scatter", at_random=True),
    }
    found["sharded ways"] = sharded_ways()
    found["state"], found["dropped"] = state_on_host(), dropped()
    found["two streams"] = two_streams()
    found["fsdp"] = fsdp() if hasattr(torch.distributed.fsdp, "fully_shard") else None
    found["observed"] = {name: observed(name) for name in ("naive", "ps", "wfbp")}
    found["bytes"] = sum(parameter.nbytes for parameter in build().parameters())
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
