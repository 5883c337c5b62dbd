"""What one rank does in the tests of the tuner: ``python -m tests.runtime.tuner_ranks SCENARIO FOLDER``."""

import copy
import functools
import logging
import operator
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.nn.parallel.distributed import _MixedPrecision

from mgwfbp import DistributedDataParallel, MergePlan, MgwfbpError
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.support import missing
from mgwfbp.runtime.tune import drift
from tests.runtime.launch import be_rank
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse, make_plan

# Steps that plans are compared in, and steps in which tuning has then ended.
TUNE_STEPS, ENOUGH_STEPS = 60, 160
# Steps in which it has ended, noticed that steps have changed, and ended again.
AGAIN_STEPS = 3 * ENOUGH_STEPS


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)))  # type: ignore[no-any-return]


class Wide(nn.Sequential):
    """3 MB of gradients, which torch sends as two messages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 256), *(nn.Linear(256, 256) for _ in range(11)), nn.Linear(256, 3))


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)  # type: ignore[no-any-return]


def images(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(2, 3, 32, 32, generator=chance), torch.randint(10, (2,), generator=chance)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    text = torch.randint(50, (2, 9), generator=chance)
    return text[:, :-1], text[:, 1:]


def vectors(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(4, 6, generator=chance), torch.randint(3, (4,), generator=chance)


def train(
    model: nn.Module, batches: Callable[[int], tuple[Tensor, Tensor]], steps: int, *, first: int = 0
) -> list[float]:
    """Train for some steps and return their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        inputs, labels = batches(step)
        output = model(inputs)
        loss = nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tuned(module: nn.Module, **arguments: Any) -> DistributedDataParallel:
    """Our class, in a hurry."""
    return DistributedDataParallel(module, tune_steps=TUNE_STEPS, **arguments)


def curves() -> dict[str, Any]:
    """Losses of 30 steps with torch's class and with ours while it tunes."""
    result: dict[str, Any] = {}
    for name, make, batches in (("resnet18", resnet18, images), ("transformer", Transformer, tokens)):
        losses = []
        for wrapper in (StockDdp, tuned):
            torch.manual_seed(1)
            model = wrapper(make())
            losses.append(train(model, batches, 30))
        result[name] = {"stock": losses[0], "ours": losses[1], "tuning": repr(model.tuning), "plan": repr(model.plan)}
    return result


def whole() -> dict[str, Any]:
    """Tune to the end in several ways, beside stock DDP, and look at what is left on the model."""
    ways: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any]] = {
        "plain": (Mlp, {}, None),
        "wide": (Wide, {}, None),
        "views": (Mlp, {"gradient_as_bucket_view": True}, None),
        "static": (Mlp, {"static_graph": True}, None),
        "unused": (lambda: Shared(unused=True), {"find_unused_parameters": True}, None),
        "dtypes": (Dtypes, {}, None),
        "hook": (Mlp, {}, default_hooks.fp16_compress_hook),
    }
    return {name: _tuned(*way) for name, way in ways.items()}


def _tuned(make: Callable[[], nn.Module], arguments: dict[str, Any], hook: Any) -> dict[str, Any]:
    models: list[Any] = []
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        model: Any = wrapper(make(), **arguments)
        if hook is not None:
            model.register_comm_hook(None, hook)
        models.append(model)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mgwfbp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    losses = [train(model, vectors, ENOUGH_STEPS) for model in models]
    logger.removeHandler(handler)
    stock, ours = models
    tuning = ours.tuning
    theirs, mine = (count_calls(model) for model in models)
    return {
        "more calls": dict(mine - theirs),
        "fewer calls": dict(theirs - mine),
        "same losses": losses[0] == losses[1],
        "same parameters": all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True)),
        "state": tuning.state,
        "steps": tuning.steps,
        "reason": tuning.reason,
        "plan": [list(group) for group in ours.plan.groups],
        "chosen": [list(group) for group in tuning.plan.groups] if tuning.plan else None,
        "candidates": [(one.name, one.step_s) for one in tuning.candidates],
        "comparison": tuning.to_json()["comparison"],
        "held": _held(ours),
        "sizes": [sum(ours._handle.sizes[place] for place in bucket) for bucket in ours._handle.buckets()]
        == ours._handle.held_sizes(),
        "records": records,
        "json": tuning.to_json()["format"],
        "left": left_on(ours),
    }


def _held(model: DistributedDataParallel) -> list[list[str]]:
    """The buckets that the Reducer was given."""
    handle = model._handle
    assert handle is not None
    return [[handle.names[place] for place in bucket] for bucket in handle.buckets()]


def count_calls(model: nn.Module) -> Counter[str]:
    """Count what a usual step calls, in Python and from it: one in 64 asks the store, another compares lengths."""
    inputs, labels = vectors(0)
    steps: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for calls in steps:

        def count(frame: FrameType, event: str, called: Any, calls: Counter[str] = calls) -> None:
            if event in ("call", "c_call"):
                calls[frame.f_code.co_qualname if event == "call" else called.__qualname__] += 1

        sys.setprofile(count)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        sys.setprofile(None)
    return functools.reduce(operator.and_, steps)


def left_on(model: Any) -> list[str]:
    """Name everything that a watch could have left behind."""
    left = [name for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(model, name)]
    left += [f"module {name}" for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(model.module, name)]
    left += [name for name, one in model.named_parameters() if one._backward_hooks is not None]
    left += [name for name, one in model.named_parameters() if one._post_accumulate_grad_hooks]
    left += ["observer"] * (model._observer is not None or model._self_tuning.tuner is not None)
    left += ["messages"] * (model._handle is not None and model._handle.is_observed)
    return left


def odd_steps() -> dict[str, Any]:
    """Steps that must not count, some of them on one rank only, among those that do."""
    torch.manual_seed(1)
    stock, ours = StockDdp(Mlp()), tuned(Mlp())
    ours.load_state_dict(stock.state_dict())
    rank = dist.get_rank()
    under_join = None
    for step in range(ENOUGH_STEPS):
        for model in (stock, ours):
            inputs, _labels = vectors(step)
            if step % 3 == 0:
                with model.no_sync():
                    model(inputs).square().sum().backward()
            if step % 4 == 1:
                model.eval()
                with torch.no_grad():
                    model(inputs)
                model.train()
            if step % 5 == 2:
                model(inputs)  # and no backward pass
            if step % 7 == 3 and rank == 0:
                with torch.no_grad():
                    model.module(inputs)
            model(inputs).square().sum().backward()
            if step == 20:
                with model.join():
                    for _again in range(1 + rank):
                        model(inputs).square().sum().backward()
                    under_join = ours.tuning.reason
                if model is stock:  # torch leaves it set
                    model._join_config = type(model._join_config).construct_disabled_join_config()
    return {
        "same": all(torch.equal(a.grad, b.grad) for a, b in zip(stock.parameters(), ours.parameters(), strict=True)),  # type: ignore[arg-type]
        "under join": under_join,
        "state": ours.tuning.state,
        "steps": ours.tuning.steps,
        "plan": [list(group) for group in ours.plan.groups] if ours.plan else None,
    }


def _mixed() -> list[Any]:
    """A model with mixed_precision, for which torch registers a communication hook, and the Reducers made for it."""
    missing()  # makes Reducers, once
    made: list[str] = []
    make: Any = StockDdp._ddp_init_helper

    def counted(*arguments: Any) -> Any:
        made.append("a Reducer")
        return make(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (torch, torch.cuda):  # older torch asks the latter
            patch.setattr(module, "Stream", lambda: None)  # there is none without a GPU, and it is not trained
        patch.setattr(StockDdp, "_ddp_init_helper", counted)
        precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = DistributedDataParallel(Mlp(), mixed_precision=precision)
    return [model.tuning.state, model.tuning.reason, made]


def refusals() -> dict[str, Any]:
    """Models that are not tuned, and what they say."""
    rank = dist.get_rank()
    result: dict[str, Any] = {}
    powered = DistributedDataParallel(Mlp())
    powered.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    train(powered, vectors, 12)
    result["stateful hook"] = [powered.tuning.state, powered.tuning.reason, left_on(powered)]
    result["mixed"] = _mixed()
    result["sparse"] = [(tuning := DistributedDataParallel(Sparse()).tuning).state, tuning.reason]
    result["off"] = [(tuning := DistributedDataParallel(Mlp(), tune=False).tuning).state, tuning.reason]
    plan = make_plan(Mlp(), 3)
    result["given"] = [(tuning := DistributedDataParallel(Mlp(), plan=plan).tuning).state, tuning.reason]
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    result["alone"] = [(tuning := DistributedDataParallel(Mlp(), process_group=alone).tuning).state, tuning.reason]
    by_hand = DistributedDataParallel(Mlp())
    train(by_hand, vectors, 14)
    by_hand.replan(plan)
    train(by_hand, vectors, 3)
    result["by hand"] = [by_hand.tuning.state, by_hand.tuning.reason, by_hand.plan == plan, left_on(by_hand)]
    return result


def copies() -> dict[str, Any]:
    """A copy of a model that is being tuned, made on one rank alone, disturbs nobody."""
    torch.manual_seed(1)
    model = tuned(Mlp())
    train(model, vectors, 13)
    before = model.tuning.steps
    copied = copy.deepcopy(model) if dist.get_rank() == 0 else None
    train(model, vectors, ENOUGH_STEPS)
    found: dict[str, Any] = {"before": before, "state": model.tuning.state}
    settled = copy.deepcopy(model)
    found["settled copy"] = [settled.plan == model.plan, settled.tuning.state, left_on(settled)[:1]]
    if copied is not None:
        found["copy"] = [copied.tuning.state, copied.tuning.steps, copied.plan is not None]
    return found


def observed() -> dict[str, Any]:
    """What the observer sees, in several ways to use DDP."""
    hooks: dict[str, Any] = {"python hook": default_hooks.fp16_compress_hook}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "python hook": {},
        "builtin hook": {},
    }
    result: dict[str, Any] = {}
    for name, arguments in ways.items():
        module = Shared(unused=True) if name == "unused" else Mlp()
        plan = make_plan(module, 3)
        model = DistributedDataParallel(module, plan=plan, **arguments)
        if name in hooks:
            model.register_comm_hook(None, hooks[name])
        if name == "builtin hook":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
        result[name] = _seen(model, plan)
    stock = DistributedDataParallel(Mlp(), tune=False)
    train(stock, vectors, 2)
    result["torch's own"] = _seen(stock, None)
    model = DistributedDataParallel(Mlp(), plan=make_plan(Mlp(), 3))
    with model.observe(notes=("plain", "gradients", "messages", "plain")) as noted:
        train(model, vectors, 5)
    agreed = noted.agreed()
    result["notes"] = {
        note: [len(steps.length_s), [len(one) for one in steps.ready_s], [len(one) for one in steps.message_s]]
        for note, steps in (("plain", agreed.plain), ("gradients", agreed.gradients), ("messages", agreed.messages))
        if steps is not None
    } | {"timelines": len(noted.timelines)}
    result["gradients"] = [len(list(model.parameters())), len(make_plan(Mlp(), 3).groups)]
    with model.observe() as nothing, torch.no_grad():
        model(torch.ones(4, 6))
    result["nothing"] = _told(lambda: nothing.timeline)
    tuned = DistributedDataParallel(Mlp())
    result["while tuning"] = _told(lambda: tuned.observe().__enter__())
    return result


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except MgwfbpError as error:
        return str(error)
    return ""


def _seen(model: DistributedDataParallel, plan: MergePlan | None) -> dict[str, Any]:
    from mgwfbp import LinearCost

    cost = LinearCost(dist.get_world_size(), 1e-4, 1e-9)
    with model.observe(steps=3, predict_with=(None, cost)) as seen:
        train(model, vectors, 1)
        with torch.no_grad():
            model(torch.ones(4, 6))
        with model.no_sync():
            model(torch.ones(4, 6)).sum().backward()
        train(model, vectors, 6)
    groups = plan.groups if plan is not None else None
    sizes = {name: parameter.nbytes for name, parameter in model.module.named_parameters()}
    found = [
        all(
            message.layers == group and message.num_bytes == sum(sizes[name] for name in group)
            for message, group in zip(timeline.messages, groups or (m.layers for m in timeline.messages), strict=True)
        )
        for timeline in seen.timelines
    ]
    ready = [
        message.ready_s >= max(span.end_s for span in timeline.backward if span.layers[0] in message.layers)
        for timeline in seen.timelines
        for message in timeline.messages
    ]
    in_turn = [
        second.start_s >= first.end_s
        for timeline in seen.timelines
        for first, second in zip(timeline.messages, timeline.messages[1:], strict=False)
    ]
    return {
        "steps": len(seen.timelines),
        "messages": all(found),
        "after their gradients": all(ready),
        "in turn": all(in_turn),
        "layers": len(seen.trace.layers) == sum(len(message.layers) for message in seen.timeline.messages),
        "predicted messages": len(seen.predicted.messages) if seen.predicted else 0,
        "measured messages": len(seen.timeline.messages),
        "left": left_on(model),
    }


def killed() -> dict[str, Any]:
    """Rank 1 dies while the tuner works: before, in the middle and late, as the environment says."""
    model = tuned(Mlp())
    last = int(os.environ["TEST_LAST_STEP"])
    try:
        for step in range(ENOUGH_STEPS):
            if dist.get_rank() == 1 and step == last:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, vectors, 1, first=step)
    except (RuntimeError, dist.DistError) as error:
        return {"state": model.tuning.state, "told": type(error).__name__}
    return {"state": model.tuning.state, "told": ""}


def looks_again() -> dict[str, Any]:
    """A settled model that is joined, and whose steps then become longer, on one rank alone, as they do for all.

    Beside stock DDP.
    """
    drift.WINDOW, drift.ASK_EVERY = 4, 4  # in a hurry
    torch.manual_seed(1)
    stock, ours = StockDdp(Wide()), tuned(Wide())
    ours.load_state_dict(stock.state_dict())
    first, in_join = 0, ""
    seen: list[tuple[str, int]] = []
    while first < AGAIN_STEPS:
        state = (ours.tuning.state, ours.tuning.retuned)
        if state not in seen:
            seen.append(state)
        if state == ("settled", 1):
            break
        if state == ("settled", 0) and not in_join:
            for model in (ours, stock):
                with model.join():
                    train(model, vectors, 1 + dist.get_rank(), first=first)
                    in_join = in_join or repr(ours.tuning)
            stock._join_config = type(stock._join_config).construct_disabled_join_config()  # torch leaves it set
        is_slow = state == ("settled", 0) and first - ours.tuning.steps > 20 and dist.get_rank() == 1
        time.sleep(0.05 if is_slow else 0.0)
        for model in (ours, stock):
            train(model, vectors, 1, first=first)
        first += 1
    names, torchs = [candidate.name for candidate in ours.tuning.candidates], ReducerHandle(stock)
    return {
        "seen": seen,
        "in join": in_join,
        "problem": ours.tuning.problem,
        "steps": first,
        "names": names,
        "torchs": ours.tuning.torchs is not None and ours.tuning.torchs.groups == torchs.groups_of(torchs.buckets()),
        "plan": ours.plan.to_json()["groups"] if ours.plan else None,
        "same": all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True)),
        "left": left_on(ours),
    }


SCENARIOS = {
    "copies": copies,
    "curves": curves,
    "looks_again": looks_again,
    "killed": killed,
    "observed": observed,
    "odd_steps": odd_steps,
    "refusals": refusals,
    "whole": whole,
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
