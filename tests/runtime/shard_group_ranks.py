"""What ranks see of a sharded optimizer whose groups, states and modules others handle while it trains."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mgwfbp import ShardedOptimizer
from mgwfbp.errors import ShardError
from tests.runtime.models import Shared
from tests.runtime.shard_ways import OPTIMIZERS, Way, beside_torchs, difference, error_of, sums, train


def take_out_and_add_later(optimizer: Any, model: Any, step: int) -> None:
    if step == 2:
        optimizer.param_groups[0]["params"].pop(0)
    if step == 4:
        for one in model.parameters():
            one.grad = None  # torch's of what is in no group has all that was averaged since
    if step == 5:
        optimizer.add_param_group({"params": [model.module.layers[0].bias], "lr": 0.01})


def exchange(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def once(edit: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Any, Any, int], None]:
    return lambda optimizer, _, step: edit(optimizer.param_groups) if step == 2 else None


# What people do to a list of two groups while they train.
EDITS: dict[str, Callable[[Any, Any, int], None]] = {
    "taken out": once(lambda groups: groups[0]["params"].pop(0)),
    "all taken out": once(lambda groups: groups[1].update(params=[])),
    "left by a condition": once(
        lambda groups: groups[1].update(params=[p for p in groups[1]["params"] if p.shape[0] > 3])
    ),
    "moved": once(lambda groups: groups[1]["params"].append(groups[0]["params"].pop(1))),
    "exchanged": once(exchange),
    "reversed": once(lambda groups: groups.reverse()),
    "a group taken out": once(lambda groups: groups.pop()),
    "no group is left": once(lambda groups: groups.clear()),
    "a group in another's place": once(lambda groups: groups.__setitem__(0, {**groups[0], "lr": 0.001})),
    "added later": take_out_and_add_later,
}


def regrouped() -> dict[str, Any]:
    """Groups that are edited while parameters travel, and the states that are saved and loaded then."""

    def follow(edit: Callable[[Any, Any, int], None], model: Any, optimizer: Any, step: int) -> Any:
        edit(optimizer, model, step)
        if step < 4:  # steps follow edits, too
            return None
        try:
            state = copy.deepcopy(optimizer.state_dict())
        except (KeyError, ShardError):  # of what is in no group any more
            return "refused"
        optimizer.load_state_dict(state)
        return [(number, sums(map(torch.as_tensor, one.values()))) for number, one in sorted(state["state"].items())]

    ways = {"all": Way(groups=True), "half": Way(groups=True, gathered=0.5), "AdamW": Way(optim.AdamW, {}, groups=True)}
    return {
        f"{name}, {kind}": beside_torchs(replace(way, between=partial(follow, edit)), 8)
        for name, edit in EDITS.items()
        for kind, way in ways.items()
    }


def misgrouped() -> dict[str, Any]:
    """Groups that cannot be are refused by all that would use them, and nothing changes."""
    said: dict[str, Any] = {}

    def spoil(_: Any, optimizer: Any, step: int) -> None:
        if step != 2 or not isinstance(optimizer, ShardedOptimizer):
            return
        first, second = optimizer.param_groups
        held = [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]
        first["params"].append(nn.Parameter(torch.zeros(3)))
        said["a stranger"] = error_of(optimizer.step)
        said["to save"] = error_of(optimizer.state_dict)
        said["to clip"] = error_of(lambda: optimizer.clip_grad_norm_(1.0))
        first["params"].pop()
        first["params"].append(second["params"][0])
        said["twice"] = error_of(optimizer.step)
        first["params"][-1] = "a name"
        said["no tensor"] = error_of(optimizer.step)
        kept, first["params"] = first["params"][:-1], set(second["params"])
        said["a set"] = error_of(optimizer.step)
        first["params"] = kept
        momentum = first.pop("momentum")
        said["no option"] = error_of(optimizer.step)
        first["momentum"] = momentum
        said["added twice"] = error_of(lambda: optimizer.add_param_group({"params": kept[:1]}))
        said["added"] = error_of(lambda: optimizer.add_param_group({"params": nn.Parameter(torch.zeros(3))}))
        taken = kept.pop(0)
        first["params"] = kept
        said["unlisted"] = error_of(optimizer.state_dict)
        first["params"].insert(0, taken)
        said["then"] = error_of(optimizer.state_dict)
        now = [one.detach() for group in optimizer.param_groups for one in group["params"]]
        said["unchanged"] = difference(now, held) == 0.0

    return {"said": said, "difference": beside_torchs(Way(groups=True, between=spoil), 6)}


class Noting(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.noted.append(str(func))
        return func(*args, **(kwargs or {}))


def under_modes() -> dict[str, Any]:
    """Modules that are run while parameters travel, under modes that pretend to compute or note what is computed."""

    def pretend(model: Any, *_: Any) -> list[int]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return list(model.module(torch.ones(4, 6)).shape)

    def note(model: Any, *_: Any) -> list[str]:
        mode = Noting()
        with mode:
            model.module(torch.ones(4, 6))
        return mode.noted

    ways: dict[str, Callable[..., Any]] = {"pretending": pretend, "noting": note}
    return {name: beside_torchs(Way(model=Shared, between=between), steps=6) for name, between in ways.items()}


def inferred() -> dict[str, Any]:
    """States that are saved and loaded in inference mode, and steps after that, beside torch's."""

    def save_and_load(_: Any, optimizer: Any, step: int) -> None:
        with torch.inference_mode():
            optimizer.load_state_dict(optimizer.state_dict())
            if step % 2 and isinstance(optimizer, ShardedOptimizer) and hasattr(torch.distributed.tensor, "DTensor"):
                optimizer.load_sharded_state_dict(optimizer.sharded_state_dict())

    names = ("momentum", "AdamW", "ASGD")
    found = {name: beside_torchs(replace(OPTIMIZERS[name], between=save_and_load), steps=6) for name in names}
    _, _, (_, ours) = train(OPTIMIZERS["AdamW"], sharded=True, steps=2)
    with torch.inference_mode():
        state = ours.state_dict()["state"]
    return {**found, "inference": sum(value.is_inference() for one in state.values() for value in one.values())}


SCENARIOS = (regrouped, misgrouped, under_modes, inferred)
