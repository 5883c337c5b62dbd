"""What one rank does in the tests of low precision: ``python -m tests.runtime.wire_ranks FOLDER SCENARIO ...``."""

import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as StockDdp

import mgwfbp.measure.low
from mgwfbp import DistributedDataParallel, LinearCost, MergePlan, MgwfbpError
from mgwfbp.runtime.messages import gloo
from mgwfbp.runtime.reducer.kinds import kinds_of
from mgwfbp.runtime.reducer.parameters import Parameters
from mgwfbp.runtime.strategies import parallel
from tests.runtime.launch import be_rank
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse, make_plan
from tests.runtime.wire_ways import (
    BITS,
    batch,
    by_hand,
    compare,
    gathered,
    local_gradients,
    loss,
    low_names,
    mixed_plan,
    odd_numbers,
    own_gradients,
    wrong_names,
)

STEPS = 3


def modes() -> dict[str, Any]:
    """Gradients of models that DDP is used with in many ways, beside those worked out by hand."""
    rank = dist.get_rank()
    ways: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
        "plain": (Mlp, {}, "bfloat16"),
        "float16": (Mlp, {}, "float16"),
        "float16, small": (Mlp, {}, "float16"),  # far below what float16 has all bits for
        "float16, large": (Mlp, {}, "float16"),  # and beyond what it holds
        "float16, blocks": (Mlp, {}, "float16"),
        "blocks": (Mlp, {}, "bfloat16"),
        "views": (Mlp, {"gradient_as_bucket_view": True}, "bfloat16"),
        "static": (Mlp, {"static_graph": True}, "bfloat16"),
        "unused": (lambda: Shared(unused=True), {"find_unused_parameters": True}, "bfloat16"),
        "dtypes": (Dtypes, {}, "bfloat16"),
        "halves": (lambda: Dtypes(half=True), {}, "bfloat16"),
        "sparse": (Sparse, {}, "bfloat16"),
    }
    result: dict[str, Any] = {}
    for name, (make, arguments, wire) in ways.items():
        mgwfbp.measure.low.BLOCK = 10 if "blocks" in name else 2**19
        scale = {"float16, small": 1e-9, "float16, large": 1e7}.get(name, 1.0)
        torch.manual_seed(3)
        module = make()
        plan = mixed_plan(module, wire, 1 if name in ("dtypes", "halves", "sparse") else 2)
        model = DistributedDataParallel(module, plan=plan, wire=wire, broadcast_buffers=False, **arguments)
        if name in ("dtypes", "halves", "sparse"):
            kinds = {name: str(kind.dtype) * (not kind.is_sparse) for name, kind in kinds_of(Parameters(model)).items()}
            result[f"{name}, asked for"] = {one: kinds[one] for one in low_names(plan)}
            result[f"{name}, said"] = low_names(model.plan)
        found = []
        for step in range(STEPS):
            local = local_gradients(model.module, lambda of, step=step: batch(step, of), scale)  # type: ignore[misc]
            model.zero_grad()
            loss(model(batch(step, rank)), scale).backward()
            found.append(compare(model, local))
        result[name] = found
    return result


def blocks() -> dict[str, Any]:
    """Two messages of about twenty blocks each, one after the other, beside the same arithmetic by hand."""
    rank, stock = dist.get_rank(), mgwfbp.measure.low.BLOCK
    result: dict[str, Any] = {}
    for wire in BITS:
        torch.manual_seed(11)
        module = Mlp()
        names = [name for name, _ in module.named_parameters()][::-1]
        plan = MergePlan("Mlp", "by hand", (tuple(names[:6]), tuple(names[6:])), wire=(wire, wire))
        sizes = [sum(module.get_parameter(name).numel() for name in group) for group in plan.groups]
        mgwfbp.measure.low.BLOCK = block = sum(sizes) // 39  # so that neither blocks nor rows fill a message
        model = DistributedDataParallel(module, plan=plan, wire=wire, broadcast_buffers=False)
        found = []
        for step in range(STEPS):
            local = local_gradients(module, lambda of, step=step: batch(step, of))  # type: ignore[misc]
            model.zero_grad()
            loss(model(batch(step, rank))).backward()
            found.append(compare(model, local))
        result[wire] = {"blocks": [-(-size // block) for size in sizes], "steps": found}
    mgwfbp.measure.low.BLOCK = stock
    return result


def changes() -> dict[str, Any]:
    """Precision that changes between steps, accumulation, copies, collectives of others, and what is observed."""
    rank = dist.get_rank()
    torch.manual_seed(4)
    module = Mlp()
    plan = mixed_plan(module)
    model = DistributedDataParallel(module, plan=make_plan(module, 2), wire="bfloat16", broadcast_buffers=False)
    result: dict[str, Any] = {}

    def train(name: str, of: DistributedDataParallel, step: int) -> None:
        local = local_gradients(of.module, lambda one: batch(step, one))
        of.zero_grad()
        of(batch(step, rank)).square().sum().backward()
        result[name] = compare(of, local)

    train("none", model, 0)
    model.replan(plan)
    train("some", model, 1)
    everything = replace(plan, wire=("bfloat16",) * plan.num_groups)
    model.replan(everything)
    train("all", model, 2)
    one_message = MergePlan(plan.model, "by hand", (plan.layer_names,), wire=("bfloat16",))
    model.replan(one_message)
    train("one message", model, 3)
    model.replan(None)
    train("torch's own", model, 4)
    model.replan(plan)
    train("again", copy.deepcopy(model), 5)
    # Somebody else's collective in the same group, in the middle of the backward pass.
    weight = module.get_parameter("layers.1.weight")
    handle = weight.register_hook(lambda _: dist.all_reduce(torch.ones(1000)))
    for step in range(6, 9):
        model.zero_grad()
        model(batch(step, rank)).square().sum().backward()
    handle.remove()
    train("after others", model, 9)
    with model.observe(3, predict_with=(None, LinearCost(dist.get_world_size(), 1e-4, 1e-9))) as seen:
        for step in range(4):
            model(batch(step, rank)).square().sum().backward()
    result["observed"] = [len(seen.timeline.messages), len(seen.predicted.messages) if seen.predicted else 0]
    return result


def accumulated() -> dict[str, Any]:
    """Two backward passes a step, only the second of which sends, in many ways of DDP."""
    rank = dist.get_rank()
    result: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    }
    for name, arguments in ways.items():
        torch.manual_seed(8)
        alone = Mlp()
        module = copy.deepcopy(alone)
        plan = mixed_plan(module)
        model = DistributedDataParallel(module, plan=plan, wire="bfloat16", broadcast_buffers=False, **arguments)
        loss(model(batch(0, rank))).backward()  # a static graph is learnt in a step that sends
        found = []
        for step in range(1, 3):
            alone.zero_grad()
            model.zero_grad()
            for part in range(2):
                loss(alone(batch(10 * step + part, rank))).backward()
            with model.no_sync():
                loss(model(batch(10 * step, rank))).backward()
            loss(model(batch(10 * step + 1, rank))).backward()
            found.append(compare(model, gathered({key: one.grad for key, one in alone.named_parameters()})))
        result[name] = found
    return result


def scaled() -> dict[str, Any]:
    """Mixed precision with a GradScaler; the last rank's loss overflows in one step, which all must skip."""
    rank, world = dist.get_rank(), dist.get_world_size()
    result: dict[str, Any] = {}
    for wire in ("bfloat16", "float16"):
        torch.manual_seed(3)
        module = Mlp()
        plan = mixed_plan(module, wire)
        model = DistributedDataParallel(module, plan=plan, wire=wire, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
        scales, moved = [], []
        for step in range(6):
            before = torch.cat([one.detach().flatten() for one in model.parameters()])
            optimizer.zero_grad()
            x = batch(step, rank)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = model(x).square().mean() * (float("inf") if step == 2 and rank == world - 1 else 1.0)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            after = torch.cat([one.detach().flatten() for one in model.parameters()])
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before, after))
        everybody = [torch.empty_like(after) for _ in range(world)]
        dist.all_gather(everybody, after)
        alike = all(torch.equal(one, after) for one in everybody)
        result[wire] = {"scales": scales, "moved": moved, "alike": alike, "finite": bool(after.isfinite().all())}
    return result


class Branches(nn.Module):
    """One of two layers is used, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, *, left: bool) -> Tensor:
        return (self.left if left else self.right)(self.first(x))  # type: ignore[no-any-return]


def branches() -> dict[str, Any]:
    """Parameters that some ranks use and others do not, or nobody, beside stock DDP's."""
    rank = dist.get_rank()
    result: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "views": {"gradient_as_bucket_view": True}}
    for name, arguments in ways.items():
        torch.manual_seed(9)
        module = Branches()
        plan = make_plan(module, 2)
        plan = replace(plan, wire=("bfloat16",) * plan.num_groups)
        stock = StockDdp(copy.deepcopy(module), find_unused_parameters=True, **arguments)
        ours = DistributedDataParallel(module, plan=plan, wire="bfloat16", find_unused_parameters=True, **arguments)
        errors, unlike = [], []
        for step in range(4):
            left = step == 3 or (step + rank) % 2 == 0  # in the last step nobody goes right
            for model in (ours, stock):
                model.zero_grad()
                loss(model(batch(step, rank), left=left)).backward()
            pairs = zip(ours.module.named_parameters(), stock.module.named_parameters(), strict=True)
            for (key, mine), (_, theirs) in pairs:
                if (mine.grad is None) != (theirs.grad is None):
                    unlike.append(key)
                elif mine.grad is not None and theirs.grad is not None:
                    errors.append(float((mine.grad - theirs.grad).abs().max() / (theirs.grad.abs().max() + 1e-9)))
        result[name] = {"worst": max(errors), "count": len(errors), "unlike": unlike}
    return result


def nan_while_tuning() -> dict[str, Any]:
    """A gradient that is not a number on the last rank, every 17 steps, while plans are tried."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(Mlp(), wire="float16", tune_steps=30)
    hit, clean, steps = list[bool](), list[bool](), 0
    while model.tuning.state == "working" and steps < 250:
        model.zero_grad()
        is_bad = steps % 17 == 5
        x = batch(steps, rank) * (float("nan") if is_bad and rank == world - 1 else 1.0)
        loss(model(x)).backward()
        flat = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        (hit if is_bad else clean).append(bool(flat.isnan().all() if is_bad else flat.isfinite().all()))
        steps += 1
    return {"state": [model.tuning.state, model.tuning.reason], "hit": hit, "clean": all(clean)}


def tuned() -> dict[str, Any]:
    """A model that tunes itself, precision included, and what its gradients are when it has settled."""
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DistributedDataParallel(Mlp(), wire="bfloat16", tune_steps=60, broadcast_buffers=False)
    steps = 0
    while model.tuning.state == "working" and steps < 300:
        model.zero_grad()
        model(batch(steps, rank)).square().sum().backward()
        steps += 1
    assert model.plan is not None
    exact = parallel(Mlp(), "auto+bf16", wire_tolerance=1e6, tune_steps=20, broadcast_buffers=False)
    for step in range(200):
        if exact.tuning.state == "working":
            exact(batch(step, rank)).square().sum().backward()
    doubles = DistributedDataParallel(Mlp().double(), wire="bfloat16", tune_steps=20, broadcast_buffers=False)
    for step in range(200):
        if doubles.tuning.state == "working":
            doubles(batch(step, rank).double()).square().sum().backward()
    local = local_gradients(model.module, lambda of: batch(0, of))
    model.zero_grad()
    model(batch(0, rank)).square().sum().backward()
    told = model.tuning
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, model.plan.messages)
    return {
        "state": [told.state, told.reason],
        "tried": [one.plan.wire != () for one in told.candidates],
        "knows": told.low_cost is not None and "low_cost" in told.to_json(),
        "words": repr(told),
        "exact": [exact.tuning.state, exact.tuning.low_bytes],
        "doubles": [doubles.tuning.state, "low_cost" in doubles.tuning.to_json()],
        "plans": plans.count(plans[0]),
        "gradients": {**compare(model, local), "low": 0},
    }


def extremes() -> dict[str, Any]:
    """What is not finite on one rank, and what fp16 cannot hold as it is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    result: dict[str, Any] = {}
    for wire in ("bfloat16", "float16"):
        for name, value in (
            ("nan", float("nan") if last else 1.0),
            ("inf", float("inf") if last else 1.0),
            ("large", 6e4),
            ("cancels", {0: 1.5e5, 1: -1.5e5}.get(rank, 0.0)),
            ("too large", 2.0**120 if last else 0.0),
            ("tiny", 2.0**-100),
            ("tiniest", 2.0**-140),  # of fp32 itself, with fewer bits than others
            ("nothing", 0.0),
        ):
            module = nn.Linear(3, 2, bias=False)
            plan = MergePlan("Linear", "by hand", (("weight",),), wire=(wire,))
            model = DistributedDataParallel(module, plan=plan, wire=wire)
            x = torch.zeros(1, 3)
            x[0, 1] = value
            model(x).sum().backward()
            assert module.weight.grad is not None
            result[f"{wire} {name}"] = [repr(one) for one in module.weight.grad[0].tolist()]
    return result


def odd_numbers_apart() -> dict[str, Any]:
    """Messages of which some numbers are not finite, in one block and in several, beside the same sum by hand."""
    rank, world, stock = dist.get_rank(), dist.get_world_size(), mgwfbp.measure.low.BLOCK
    result: dict[str, Any] = {}
    for wire in BITS:
        for scale in (1e-30, 1.0, 1e36):
            for block in (7, stock):
                mgwfbp.measure.low.BLOCK = block
                module = nn.Linear(41, 1, bias=False)
                plan = MergePlan("Linear", "by hand", (("weight",),), wire=(wire,))
                model = DistributedDataParallel(module, plan=plan, wire=wire)
                model(odd_numbers(rank, scale)).sum().backward()
                assert module.weight.grad is not None
                found = module.weight.grad[0]
                expected = by_hand([odd_numbers(one, scale) for one in range(world)], wire)
                bits: list[Any] = [None] * world
                dist.all_gather_object(bits, found.view(torch.int32).tolist())
                result[f"{wire} {scale} {block}"] = {
                    "wrong": [place for place, pair in enumerate(zip(found, expected, strict=True)) if differ(*pair)],
                    "finite": int(found.isfinite().sum()),
                    "alike": all(one == bits[0] for one in bits),
                }
    mgwfbp.measure.low.BLOCK = stock
    return result


def differ(found: Tensor, expected: Tensor) -> bool:
    """Say whether a number is another than expected; what is not a number is as any other that is none."""
    return bool(found != expected) and not bool(found.isnan() & expected.isnan())


def refused() -> dict[str, Any]:
    """Wrong use: one line on every rank."""
    rank = dist.get_rank()
    plan = mixed_plan(Mlp())
    other = replace(plan, wire=plan.wire[1:] + plan.wire[:1])

    def told(work: Callable[[], object]) -> str:
        try:
            work()
        except (MgwfbpError, ValueError) as error:
            return str(error)
        return ""

    model = DistributedDataParallel(Mlp(), plan=plan, wire="bfloat16")
    in_backward = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    can_be_quiet = "init_sync" in inspect.signature(StockDdp.__init__).parameters
    quiet: dict[str, Any] = {"init_sync": False} if can_be_quiet else {}
    return {
        "without": told(lambda: DistributedDataParallel(Mlp(), plan=plan)),
        "another": told(lambda: DistributedDataParallel(Mlp(), plan=plan, wire="float16")),
        "unknown": told(lambda: DistributedDataParallel(Mlp(), wire="int8")),
        "differ": told(lambda: DistributedDataParallel(Mlp(), plan=(plan, other)[rank % 2], wire="bfloat16")),
        "one rank": told(lambda: DistributedDataParallel(Mlp(), plan=plan, wire="bfloat16" if rank == 0 else None)),
        "tuners": told(lambda: DistributedDataParallel(Mlp(), wire=None if rank else "bfloat16")),
        "unknown, without collectives": told(lambda: DistributedDataParallel(Mlp(), wire="int8", **quiet)),
        "in backward": told(lambda: DistributedDataParallel(in_backward, wire="bfloat16")),
        "hook": told(lambda: model.register_comm_hook(None, default_hooks.allreduce_hook)),
        "idle": told(lambda: DistributedDataParallel(Mlp(), wire="bfloat16", tune=False)),
        "replan": told(lambda: DistributedDataParallel(Mlp(), tune=False).replan(plan)),
        "tolerance": told(lambda: DistributedDataParallel(Mlp(), wire="bfloat16", wire_tolerance=-1)),
        "idle tolerance": told(lambda: DistributedDataParallel(Mlp(), wire_tolerance=0.05)),
    }


def joined() -> dict[str, Any]:
    """Uneven inputs: ranks that ran out of data answer with zeros for messages in low precision too."""
    torch.manual_seed(5)
    module = Mlp()
    model = DistributedDataParallel(module, plan=mixed_plan(module), wire="bfloat16", broadcast_buffers=False)
    steps = [2 + 3 * rank for rank in range(dist.get_world_size())]
    wrong = []
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model.zero_grad()
            loss(model(batch(step, dist.get_rank()))).backward()
            theirs = [own_gradients(module, batch(step, of)) for of in range(len(steps))]
            local = {
                name: [one[name] * (step < most) for one, most in zip(theirs, steps, strict=True)] for name in theirs[0]
            }
            wrong.append(wrong_names(model, local))
    return {"wrong": wrong}


def groups() -> dict[str, Any]:
    """Models of some ranks and of all, that come and go, and groups that are made between them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = dist.new_group([0])  # torch lists more groups on rank 0 than on the others
    if rank == 0:
        alone = Mlp()
        model = DistributedDataParallel(alone, plan=mixed_plan(alone), wire="bfloat16", process_group=first)
        model(batch(0, rank)).square().sum().backward()
    later = dist.new_group(list(range(world)))
    found = []
    for step in range(2):
        torch.manual_seed(7)
        module = Mlp()
        model = DistributedDataParallel(
            module, plan=mixed_plan(module), wire="bfloat16", broadcast_buffers=False, process_group=later
        )
        local = local_gradients(model.module, lambda of, step=step: batch(step, of))  # type: ignore[misc]
        model(batch(step, rank)).square().sum().backward()
        found.append(compare(model, local))
    assert model._handle is not None
    collectives = model._handle.collectives
    before = None if collectives is None else collectives()
    model(batch(2, rank)).square().sum().backward()
    counted = None if collectives is None or before is None else collectives() - before
    connected = num_threads()
    del model, collectives
    deadline = time.monotonic() + 20
    while connected - num_threads() < 3 and time.monotonic() < deadline:  # the one that sends, and those of gloo
        time.sleep(0.01)
    return {"gradients": found, "counted": counted, "ended": connected - num_threads()}


def num_threads() -> int:
    """Those of gloo included, which Python does not list."""
    return len(list(Path("/proc/self/task").iterdir()))


def alone() -> dict[str, Any]:
    """A plan in low precision for a rank by itself: what differs from gradients that nobody converted."""
    rank = dist.get_rank()
    own = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    found: dict[str, Any] = {}
    for wire in ("bfloat16", "float16"):
        module = Mlp()
        plan = mixed_plan(module, wire)
        expected = own_gradients(module, batch(0, rank))
        model = DistributedDataParallel(module, plan=plan, wire=wire, process_group=own)
        loss(model(batch(0, rank))).backward()
        unlike = [name for name, one in module.named_parameters() if not torch.equal(one.grad, expected[name])]  # type: ignore[arg-type]
        model.replan(plan)
        found[wire] = {"unlike": unlike, "said": low_names(model.plan)}
    return found


def late() -> dict[str, Any]:
    """A rank that comes to its first messages later than ranks wait that meet together: with a plan, and a copy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    module = Mlp()
    model = DistributedDataParallel(module, plan=mixed_plan(module), wire="bfloat16", broadcast_buffers=False)
    patience_s, gloo.MEET_S = gloo.MEET_S, 0.1
    found = []
    for step, one in enumerate((model, copy.deepcopy(model))):
        local = local_gradients(one.module, lambda of, step=step: batch(step, of))  # type: ignore[misc]
        if rank == world - 1:
            time.sleep(2.5)  # stores may count whole seconds
        one(batch(step, rank)).square().sum().backward()
        found.append(compare(one, local))
    gloo.MEET_S = patience_s
    return {"gradients": found}


def failed() -> dict[str, Any]:
    """A backward pass that fails on the last rank: the others must not wait longer than their group does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))
    module = Mlp()
    model = DistributedDataParallel(module, plan=mixed_plan(module), wire="bfloat16", process_group=group)
    model(batch(0, rank)).square().sum().backward()

    def fail(_: Tensor) -> None:
        raise ArithmeticError("on one rank")

    if rank == world - 1:
        module.get_parameter("layers.1.weight").register_hook(fail)
    try:
        model(batch(1, rank)).square().sum().backward()
        error = ""
    except (ArithmeticError, RuntimeError) as caught:
        error = type(caught).__name__
    dist.barrier()  # of another group; the rank that failed waits here until the others have given up
    return {"error": error}


if __name__ == "__main__":
    be_rank(
        {
            "modes": modes,
            "blocks": blocks,
            "changes": changes,
            "accumulated": accumulated,
            "scaled": scaled,
            "branches": branches,
            "nan_while_tuning": nan_while_tuning,
            "tuned": tuned,
            "extremes": extremes,
            "odd_numbers_apart": odd_numbers_apart,
            "refused": refused,
            "joined": joined,
            "groups": groups,
            "alone": alone,
            "late": late,
            "failed": failed,
        }
    )
