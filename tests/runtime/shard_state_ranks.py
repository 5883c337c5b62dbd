"""What ranks see of the state of a sharded optimizer."""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, optim
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mgwfbp import DistributedDataParallel, ShardedOptimizer
from tests.runtime.models import Mlp, Shared, make_plan
from tests.runtime.shard_ways import (
    OPTIMIZERS,
    STEPS,
    Channels,
    Way,
    beside_torchs,
    difference,
    error_of,
    params_of,
    sums,
    train,
)


def states() -> dict[str, Any]:
    """The whole state is the plain optimizer's, and either can go on with the other's."""
    return {"all": states_of(1.0), "half": states_of(0.5)}


def states_of(gathered: float) -> dict[str, Any]:
    way = Way(optim.AdamW, {"lr": 0.01}, groups=True, model=Channels, gathered=gathered)
    half, rest = STEPS // 2, 5
    _, _, (_, plain) = train(way, sharded=False, steps=half)
    _, _, (model, ours) = train(way, sharded=True, steps=half)
    # A state dict holds the counts of steps themselves, with torch as with us.
    expected, got = copy.deepcopy(plain.state_dict()), copy.deepcopy(ours.state_dict())
    wrong = [
        (number, key)
        for number, state in expected["state"].items()
        for key, value in state.items()
        if not torch.equal(value, got["state"][number][key]) or value.stride() != got["state"][number][key].stride()
    ]

    def go_on(model: Any, optimizer: Any) -> list[Tensor]:
        data = torch.Generator().manual_seed(7 + dist.get_rank())
        for _ in range(rest):
            optimizer.zero_grad()
            model(torch.randn(5, 6, generator=data)).square().mean().backward()
            optimizer.step()
        return [one.detach().clone() for one in model.parameters()]

    module = copy.deepcopy(model.module)
    other = copy.deepcopy(module)
    after_ours = go_on(model, ours)
    taken = optim.AdamW(params_of(module, way), lr=1.0)
    taken.load_state_dict(got)
    with_plain = go_on(StockDdp(module), taken)
    fresh_model = DistributedDataParallel(other, plan=make_plan(other, 9))
    fresh = ShardedOptimizer(fresh_model, optim.AdamW, params_of(other, way), lr=1.0)
    fresh.load_state_dict(expected)
    if dist.get_rank() == 0:
        folder = Path(sys.argv[1])
        torch.save({"optimizer": got, "model": model.state_dict()}, folder / "state.pt")
    return {
        "groups": got["param_groups"] == expected["param_groups"],
        "wrong": wrong,
        "plain with ours": difference(with_plain, after_ours),
        "ours with plain": difference(go_on(fresh_model, fresh), after_ours),
    }


def scheduled() -> dict[str, Any]:
    """A state that is saved right after a scheduler has set learning rates, and a run that goes on from it."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def steps(model: Any, optimizer: Any, count: int, scheduler: Any) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()

    def start(*, sharded: bool, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(3)
        module = Mlp()
        if not sharded:
            return StockDdp(module), optim.SGD(module.parameters(), **options)
        model = DistributedDataParallel(module, tune=False)
        return model, ShardedOptimizer(model, optim.SGD, **options)

    def half(model: Any, optimizer: Any) -> Any:
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        steps(model, optimizer, 2, scheduler)
        return copy.deepcopy((optimizer.state_dict(), scheduler.state_dict(), model.module.state_dict()))

    plain, ours = (start(sharded=sharded, lr=1.0, momentum=0.9) for sharded in (False, True))
    expected, got = half(*plain), half(*ours)
    other, optimizer = start(sharded=True, lr=7.0)  # whose options are those that it loads
    other.module.load_state_dict(got[2])
    optimizer.load_state_dict(got[0])
    schedulers = [optim.lr_scheduler.StepLR(one, 1, 0.1) for one in (plain[1], optimizer)]
    for scheduler, state in zip(schedulers, (expected, got), strict=True):
        scheduler.load_state_dict(state[1])
        scheduler.optimizer.load_state_dict(state[0])
    steps(*plain, 2, schedulers[0])
    steps(other, optimizer, 2, schedulers[1])
    ends = [[one.detach() for one in model.parameters()] for model in (other, plain[0])]
    return {"groups": got[0]["param_groups"] == expected[0]["param_groups"], "resumed": difference(*ends)}


def misfit() -> dict[str, Any]:
    """What ours and torch's say of states that have other groups, or groups of another size."""
    way = OPTIMIZERS["AdamW"]
    ours, plain = (train(way, sharded=sharded, steps=2)[2][1] for sharded in (True, False))
    other = train(replace(way, groups=True), sharded=False, steps=2)[2][1].state_dict()
    fewer = copy.deepcopy(plain.state_dict())
    fewer["param_groups"][0]["params"].pop()
    before = copy.deepcopy(ours.state_dict())
    said = [[error_of(partial(one.load_state_dict, state)) for state in (other, fewer)] for one in (ours, plain)]
    shapes = {}
    for name, shape in (("one row", (1, 12)), ("one number", ()), ("turned", (12, 3))):
        wrong = copy.deepcopy(plain.state_dict())
        wrong["state"][8]["exp_avg_sq"] = torch.ones(shape)
        wrong["state"][0]["exp_avg"] += 1
        shapes[name] = error_of(partial(ours.load_state_dict, wrong))
    return {"ours": said[0], "torch's": said[1], "shapes": shapes, "unchanged": alike(ours.state_dict(), before)}


def edited() -> dict[str, Any]:
    """What people do to an optimizer's state while they train, beside torch's."""

    def edit(model: Any, optimizer: Any, step: int) -> Any:
        first = optimizer.param_groups[0]["params"][0]
        if step == 2:
            optimizer.state.clear()
        elif step == 4:
            optimizer.state = defaultdict(dict)
        elif step == 6:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        elif step == 8:
            del optimizer.state[first]
        elif step == 10:
            optimizer.state[first] = {key: value * 2 for key, value in optimizer.state[first].items()}
        return len(optimizer.state), first in optimizer.state, len(copy.deepcopy(optimizer.state))

    _, _, (_, ours) = train(OPTIMIZERS["AdamW"], sharded=True, steps=2)
    state = dict(ours.state)
    return {
        "difference": beside_torchs(replace(OPTIMIZERS["AdamW"], between=edit), steps=14),
        "set": error_of(lambda: setattr(ours, "state", state)),
        "repr": repr(ours.state) == repr(state),
        "got": [ours.state.get(torch.zeros(1), "none"), 3 in ours.state],
    }


def by_torchs_functions() -> dict[str, Any]:
    """What `torch.distributed.checkpoint.state_dict` gets and sets, before the first step and after some."""
    return {name: by_torchs_functions_of(OPTIMIZERS[name]) for name in ("SGD", "AdamW")}


def by_torchs_functions_of(way: Way) -> dict[str, Any]:
    _, _, ours = train(way, sharded=True, steps=3)
    _, _, theirs = train(way, sharded=False, steps=3)
    ours[1].zero_grad()
    theirs[1].zero_grad()
    fresh, plain = (train(way, sharded=sharded, steps=0)[2] for sharded in (True, False))
    held = [one.detach().clone() for one in fresh[0].module.parameters()]
    before = alike(get_optimizer_state_dict(*fresh), get_optimizer_state_dict(*plain))
    same = all(torch.equal(a, b) for a, b in zip(held, fresh[0].module.parameters(), strict=True))
    state = copy.deepcopy(get_optimizer_state_dict(*ours))
    after = alike(state, get_optimizer_state_dict(*theirs))
    set_optimizer_state_dict(fresh[0], fresh[1], optim_state_dict=state)
    fresh[0].load_state_dict(ours[0].state_dict())
    ends = []
    for model, optimizer in (fresh, ours):
        optimizer.zero_grad()
        model(torch.ones(5, 6)).square().mean().backward()
        optimizer.step()
        ends.append([one.detach().clone() for one in model.parameters()])
    return {"before": before and same, "after": after, "loaded": difference(*ends)}


def alike(got: Any, expected: Any) -> bool:
    """Whether two nested dicts hold the same."""
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(alike(got[key], expected[key]) for key in expected)
    return torch.equal(got, expected) if isinstance(expected, Tensor) else bool(got == expected)


def hooked() -> dict[str, Any]:
    """Hooks of a state dict, and of steps: what they are called with and what they change, beside torch's."""
    seen: dict[bool, list[Any]] = {True: [], False: []}
    for is_ours, calls in seen.items():
        _, _, (_, optimizer) = train(Way(optim.AdamW, {"lr": 0.01}), sharded=is_ours, steps=2)

        def note(what: str, calls: list[Any] = calls, optimizer: Any = optimizer) -> Callable[..., None]:
            return lambda of, *rest: calls.append((what, of is optimizer, len(rest)))

        def shortened(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "state": {0: state["state"][0]}}

        def faster(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "param_groups": [{**one, "lr": 0.5} for one in state["param_groups"]]}

        optimizer.register_state_dict_pre_hook(note("before"))
        optimizer.register_state_dict_post_hook(shortened)
        optimizer.register_state_dict_post_hook(note("after"))
        optimizer.register_load_state_dict_pre_hook(faster)
        optimizer.register_load_state_dict_pre_hook(note("before loading"))
        optimizer.register_load_state_dict_post_hook(note("after loading"))
        optimizer.register_step_pre_hook(note("before a step"))
        of_all = [
            register_optimizer_step_pre_hook(note("before any step")),
            register_optimizer_step_post_hook(note("after any step")),
        ]
        optimizer.register_step_post_hook(note("after a step"))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        optimizer.step()
        for handle in of_all:
            handle.remove()
        calls.append((sorted(state["state"]), state["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"]))
    return {"ours": seen[True], "torch's": seen[False]}


def named() -> dict[str, Any]:
    """Parameters with their names, as torch takes them."""
    module = Mlp()
    model = DistributedDataParallel(module, tune=False)
    try:
        plain = optim.SGD(module.named_parameters(), lr=0.1)
    except TypeError:  # a torch before 2.6
        return {}
    ours = ShardedOptimizer(model, optim.SGD, module.named_parameters(), lr=0.1)
    return {"groups": ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]}


CHECKPOINTED = {
    **{name: OPTIMIZERS[name] for name in ("momentum", "AdamW", "Rprop")},
    "half": Way(optim.AdamW, {"lr": 0.01}, gathered=0.5),
}


def checkpointed() -> dict[str, Any]:
    """Save rows, and go on from them; nothing where torch has no public DTensor."""
    if not hasattr(torch.distributed.tensor, "DTensor"):
        return {}
    found = {}
    for name, way in CHECKPOINTED.items():
        _, _, (model, optimizer) = train(way, sharded=True, steps=6)
        folder = Path(sys.argv[1]) / f"checkpoint {name}"
        saved = {"optimizer": optimizer.sharded_state_dict(), "model": model.module.state_dict()}
        state_dict_saver.save(saved, checkpoint_id=str(folder))
        rows = sum(
            value.to_local().numel()
            for state in saved["optimizer"]["state"].values()
            for value in state.values()
            if hasattr(value, "to_local")
        )
        found[name] = {**load_checkpoint(name, folder), "rows": rows}
        expected = optimizer.state_dict()["state"]
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}.pt")
        found[name]["wrong"] = differing(expected, found[name].pop("state"))
    return found


def differing(expected: dict[int, Any], found: dict[int, Any]) -> list[tuple[int, str]]:
    """Which entries of a state are not those of another."""
    return [
        (number, key)
        for number, state in expected.items()
        for key, value in state.items()
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(found[number][key]))
    ]


class Contiguous(Channels):
    """The same whose weights lie in memory as torch makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.to(memory_format=torch.contiguous_format)


class Uses(Shared):
    """Uses what the model that it is like leaves out."""

    def __init__(self) -> None:
        super().__init__(unused=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.unused(x).sum()  # type: ignore[no-any-return]


def load_otherwise() -> dict[str, Any]:
    """Save rows of a model and load them into one that lies otherwise in memory, is cut otherwise, or used others."""
    if not hasattr(torch.distributed.tensor, "DTensor"):
        return {}
    channels = [Way(optim.AdamW, {"lr": 0.01}, model=model) for model in (Channels, Contiguous)]
    damped = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
    half = [channels[0], replace(channels[1], gathered=0.5)]
    cases = {"to contiguous": channels, "from contiguous": channels[::-1]}
    cases |= {"to half all-reduced": half, "from half all-reduced": half[::-1]}
    for kind, options in ((optim.NAdam, {}), (optim.SGD, damped)):
        some = Way(kind, options, model=partial(Shared, unused=True), ddp={"find_unused_parameters": True})
        cases[kind.__name__] = [some, replace(some, model=Uses)]
    found: dict[str, Any] = {}
    for name, ways in cases.items():
        (_, _, (_, saved)), (_, _, (_, optimizer)) = (train(way, sharded=True, steps=4) for way in ways)
        folder = str(Path(sys.argv[1]) / f"otherwise {name}")
        state_dict_saver.save({"optimizer": saved.sharded_state_dict()}, checkpoint_id=folder)
        target = {"optimizer": optimizer.sharded_state_dict(to_load=True)}
        state_dict_loader.load(target, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        optimizer.load_sharded_state_dict(target["optimizer"])
        expected, got = (one.state_dict()["state"] for one in (saved, optimizer))
        found[name] = [sorted(got), differing(expected, got)] == [sorted(expected), []]
    kept = copy.deepcopy(target["optimizer"])
    kept["state"]["head.weight"]["layout"] = ((6, 3), (3, 1))
    found["another shape"] = error_of(lambda: optimizer.load_sharded_state_dict(kept))
    found["then"] = alike(optimizer.state_dict()["state"], got)
    return found


def load_checkpoint(name: str, folder: Path) -> dict[str, Any]:
    """Make a new model and optimizer, which shards all, go on from what was saved."""
    way = CHECKPOINTED[name]
    torch.manual_seed(99)
    module = way.model()
    model = DistributedDataParallel(module, plan=make_plan(module, 6))
    optimizer = ShardedOptimizer(model, way.optimizer, **way.options)
    before = sums(module.parameters())
    target = {"optimizer": optimizer.sharded_state_dict(to_load=True), "model": module.state_dict()}
    unchanged = before == sums(module.parameters()) and not optimizer._inner.state
    state_dict_loader.load(target, checkpoint_id=str(folder))
    optimizer.load_sharded_state_dict(target["optimizer"])
    return {"unchanged": unchanged, "state": optimizer.state_dict()["state"]}


def resumed() -> dict[str, Any]:
    """Take the state that other ranks, of another number, have written."""
    folder = Path(__import__("sys").argv[1])
    saved = torch.load(folder / "state.pt", weights_only=True)
    way = Way(optim.AdamW, {"lr": 0.01}, groups=True, model=Channels)
    torch.manual_seed(1)
    module = Channels()
    model = DistributedDataParallel(module, plan=make_plan(module, 1))
    model.load_state_dict(saved["model"])
    optimizer = ShardedOptimizer(model, optim.AdamW, params_of(module, way), lr=1.0)
    optimizer.load_state_dict(saved["optimizer"])
    again = optimizer.state_dict()["state"]
    found = {"wrong": differing(saved["optimizer"]["state"], again), "entries": len(again), "rows": []}
    if (folder / "checkpoint AdamW").exists():
        rows = load_checkpoint("AdamW", folder / "checkpoint AdamW")["state"]
        found["rows"] = differing(torch.load(folder / "checkpoint AdamW.pt", weights_only=True), rows)
    return found


SCENARIOS = (
    states,
    scheduled,
    misfit,
    by_torchs_functions,
    hooked,
    named,
    checkpointed,
    load_otherwise,
    edited,
    resumed,
)
