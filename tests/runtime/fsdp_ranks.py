"""What one rank does in the tests of `fully_shard`: ``python -m tests.runtime.fsdp_ranks FOLDER SCENARIO ...``.

Everything is trained twice from one start: torch's FSDP2 wrapped block by block, and ours by a plan.
"""

import copy
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh

import mgwfbp
from mgwfbp import FsdpPlan, MgwfbpError
from mgwfbp.fsdp_units import ROOT, units_of_names
from tests.runtime.launch import be_rank

STEPS = 3


class Block(nn.Module):
    """Two layers and a way around them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """A perceptron of blocks, with a parameter of its own."""

    units = ("stem", "h.0", "h.1", "h.2", "h.3", "h.4", "head")

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.h = nn.ModuleList(Block() for _ in range(5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.h:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Torch's layers between an embedding and a head with the same weight."""

    units = ("embed", "layers.0", "layers.1", "layers.2", "norm")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed((x * 5).long() % 7)
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))  # type: ignore[no-any-return]


class Containers(nn.Module):
    """Blocks that are lists of modules, and a list of parameters."""

    units = ("stem", "h.0", "h.1", "extra")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.h = nn.ModuleList(
            nn.ModuleList([nn.Linear(6, 9), nn.ModuleDict({"narrow": nn.Linear(9, 6), "act": nn.Tanh()})])
            for _ in range(2)
        )
        self.extra = nn.ParameterList([torch.ones(6), torch.zeros(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        blocks: Any = self.h
        for wide, rest in blocks:
            x = x + rest["narrow"](rest["act"](wide(x)))
        return x * self.extra[0] + self.extra[1]  # type: ignore[no-any-return]


class Partly(nn.Module):
    """A frozen module, and an attention of which only a part is trained that is never called."""

    units: tuple[str, ...] = ("stem", "attention", "head")

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 3)
        self.attention = nn.MultiheadAttention(6, 2).requires_grad_(False)
        self.attention.out_proj.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.attention(x, x, x)[0])  # type: ignore[no-any-return]


class PartlyPlanned(Partly):
    """The same, by a plan of a trace that has no frozen parameters."""

    units = ("attention.out_proj", "head")


class Shared(nn.Module):
    """One module inside of two blocks, and a block that runs twice under two names."""

    units = ("stem", "h.0", "h.1.wide", "h.2")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.h[1].narrow = self.h[0].narrow
        self.h.append(self.h[2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.h:
            x = block(x)
        return x


@dataclass(frozen=True)
class Way:
    """One way to train."""

    model: Callable[[], nn.Module] = Blocks
    optimizer: type[optim.Optimizer] = optim.SGD
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    clip: float | None = None
    accumulate: int = 1
    syncs: bool = False  # gradients are averaged in every backward pass, not in the last only
    arguments: Mapping[str, Any] = field(default_factory=dict)


def plan_of(
    model: Any, *sizes: int, reshard: Sequence[bool] | bool = True, forward: int = 1, backward: int = 1
) -> FsdpPlan:
    """A plan of groups of these sizes."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    groups = tuple(model.units[end - size : end] for end, size in zip(ends, sizes, strict=True))
    assert ends[-1] == len(model.units)
    every = (reshard,) * len(sizes) if isinstance(reshard, bool) else tuple(reshard)
    return FsdpPlan("toy", groups, every, forward, backward)


def stock(model: Any, **arguments: Any) -> Any:
    """Wrapped block by block, as torch's pages do it; `Shared` and the like by one call."""
    for block in getattr(model, "h", getattr(model, "layers", ())) if type(model) in (Blocks, Transformer) else ():
        torch.distributed.fsdp.fully_shard(block, **arguments)
    return torch.distributed.fsdp.fully_shard(model, **arguments)


def make(way: Way, plan: FsdpPlan | None) -> tuple[Any, optim.Optimizer]:
    torch.manual_seed(3)
    model = way.model()
    if plan is None:
        stock(model, **way.arguments)
    else:
        assert mgwfbp.fully_shard(model, plan, **way.arguments) is model
    return model, way.optimizer([one for one in model.parameters() if one.requires_grad], **way.options)


def train(way: Way, model: Any, optimizer: optim.Optimizer, steps: range = range(STEPS)) -> list[float]:
    """Train and return the losses; data is that of the step and the rank."""
    losses = []
    for step in steps:
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        for micro in range(way.accumulate):
            model.set_requires_gradient_sync(way.syncs or micro + 1 == way.accumulate)
            loss = model(torch.rand(5, 4, generator=data)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if way.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        optimizer.step()
    return losses


def whole(model: nn.Module) -> list[Tensor]:
    """Return all parameters, as they are without sharding."""
    found: list[Any] = [one.detach() for one in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.clone() for one in found]


def difference(got: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]) -> float:
    """The largest difference of losses and parameters; 0 only where all are bitwise equal."""
    if got[0] == expected[0] and all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True)):
        return 0.0
    of_losses = max(abs(a - b) for a, b in zip(got[0], expected[0], strict=True))
    of_parameters = max((a - b).abs().max().item() for a, b in zip(got[1], expected[1], strict=True))
    return max(of_losses, of_parameters) or float("inf")


_policy: Any = getattr(torch.distributed.fsdp, "MixedPrecisionPolicy", None)  # older torch has no FSDP2 to be tested
IN_16_BITS = None if _policy is None else _policy(torch.bfloat16, torch.float32)
WAYS = {
    "SGD": Way(),
    "AdamW": Way(optimizer=optim.AdamW, options={"lr": 0.01, "weight_decay": 0.1}),
    "clipped": Way(clip=0.1),
    "accumulated": Way(accumulate=2, clip=0.1, optimizer=optim.AdamW, options={"lr": 0.01}),
    "accumulated and averaged each time": Way(accumulate=2, syncs=True),
    "bfloat16": Way(arguments={"mp_policy": IN_16_BITS}),
}
PLANS: dict[type[nn.Module], dict[str, FsdpPlan]] = {
    Blocks: {
        "one": plan_of(Blocks, 7),
        "one kept": plan_of(Blocks, 7, reshard=False),
        "each": plan_of(Blocks, *[1] * 7),
        "each far ahead": plan_of(Blocks, *[1] * 7, forward=2, backward=2),
        "mixed": plan_of(Blocks, 3, 1, 3, reshard=(True, False, True), backward=2),
        "mixed kept": plan_of(Blocks, 1, 4, 2, reshard=False, forward=2),
    },
    Transformer: {
        "one": plan_of(Transformer, 5),
        "each": plan_of(Transformer, *[1] * 5, forward=2, backward=2),
        "mixed": plan_of(Transformer, 2, 1, 2, reshard=(True, False, True)),
    },
}


def mixed() -> dict[str, Any]:
    """Some of it."""
    return trained(("AdamW", "accumulated", "bfloat16"), ("mixed",))


def trained(ways: Sequence[str] = tuple(WAYS), titles: Sequence[str] = ()) -> dict[str, Any]:
    """Every plan of every model in every way, beside torch's."""
    found = {}
    for kind, plans in PLANS.items():
        for name in ways:
            way = WAYS[name]
            mine = replace(way, model=kind)
            model, optimizer = make(mine, None)
            expected = train(mine, model, optimizer), whole(model)
            for title, plan in plans.items():
                if titles and title not in titles:
                    continue
                model, optimizer = make(mine, plan)
                found[f"{kind.__name__}, {name}, {title}"] = difference(
                    (train(mine, model, optimizer), whole(model)), expected
                )
    return found


def heard(work: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return what the logger was told meanwhile, and what came of it."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("mgwfbp")
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return lines, work()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def odd() -> dict[str, Any]:
    """Models with what cannot be wrapped by itself, what is said of it, and what they learn, beside torch's."""
    found = {}
    kinds: tuple[Any, ...] = (Blocks, Transformer, Containers, Partly, PartlyPlanned, Shared)
    for kind in kinds:
        every = kind is not PartlyPlanned
        names = [name for name, one in kind().named_parameters() if every or one.requires_grad]
        units = list(dict.fromkeys(units_of_names(names).values()))
        way = Way(kind, optim.AdamW, {"lr": 0.01})
        model, optimizer = make(way, None)
        expected = train(way, model, optimizer), whole(model)
        for reshard in (True, False):
            plan = plan_of(kind, (len(kind.units) + 1) // 2, len(kind.units) // 2, reshard=reshard)
            lines, (model, optimizer) = heard(partial(make, way, plan))
            error = difference((train(way, model, optimizer), whole(model)), expected)
        wrapped = [name for name, one in model.named_modules() if isinstance(one, torch.distributed.fsdp.FSDPModule)]
        found[kind.__name__] = {
            "units": sorted(set(units) - {ROOT}) == sorted(kind.units),
            "said": lines,
            "wrapped": sorted(wrapped),
            "difference": error,
        }
    return found


def ignored() -> dict[str, Any]:
    """A block, and a parameter of another module, that FSDP2 leaves to each rank."""

    def run(plan: FsdpPlan | None) -> tuple[list[float], list[Tensor], list[str]]:
        torch.manual_seed(3)
        model: Any = Blocks()
        left = {*model.h[0].parameters(), model.head.bias}
        if plan is None:
            stock(model, ignored_params=left)
        else:
            mgwfbp.fully_shard(model, plan, ignored_params=left)
        losses = train(Way(), model, optim.SGD(model.parameters(), lr=0.05))
        return losses, whole(model), [name for name, one in model.named_parameters() if not hasattr(one, "to_local")]

    expected = run(None)
    found = [run(plan) for plan in PLANS[Blocks].values()]
    return {
        "differences": [difference(one[:2], expected[:2]) for one in found],
        "left": sorted({name for one in found for name in one[2]}),
    }


def events_of(model: Any) -> list[str]:
    """What FSDP2 does in a step: gathers, passes and messages, each with its group."""
    x = torch.rand(5, 4)
    model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x).sum().backward()
    found = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if what := re.fullmatch(
            r"FSDP::(all_gather|pre_forward|pre_backward|post_backward_reduce)(?: \((.*)\))?", event.name
        ):
            group = (what[2] or "root").replace(", ", "+")
            found.append(f"{what[1].removeprefix('post_backward_')} {group}")
    return found


def scheduled() -> dict[str, Any]:
    """In which order groups are asked for."""
    plans = {
        "near": plan_of(Blocks, 2, 2, 2, 1, reshard=(True, True, False, True)),
        "far": plan_of(Blocks, 2, 2, 2, 1, forward=2, backward=2),
    }
    return {name: events_of(mgwfbp.fully_shard(Blocks(), plan)) for name, plan in plans.items()}


def saved() -> dict[str, Any]:
    """States of ours go on in torch's block by block, and the other way round."""
    found, folder = {}, Path(sys.argv[1])
    way, plan = Way(Transformer, optim.AdamW, {"lr": 0.01}), PLANS[Transformer]["mixed"]
    for title, (first, then) in {"ours in torch's": (plan, None), "torch's in ours": (None, plan)}.items():
        model, optimizer = make(way, first)
        train(way, model, optimizer, range(2))
        kept = copy.deepcopy(state_of(model, optimizer, full=True))
        sharded = state_of(model, optimizer, full=False)
        state_dict_saver.save(sharded, checkpoint_id=folder / title)
        found[f"{title}, share"] = count(sharded["model"]) / count(kept["model"])
        expected = train(way, model, optimizer, range(2, 4)), whole(model)
        for name in ("full", "sharded"):
            model, optimizer = make(way, then)
            state = kept
            if name == "sharded":
                state = state_of(model, optimizer, full=False)
                state_dict_loader.load(state, checkpoint_id=folder / title)
            options = states.StateDictOptions(full_state_dict=name == "full")
            states.set_model_state_dict(model, state["model"], options=options)
            states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            got = train(way, model, optimizer, range(2, 4)), whole(model)
            found[f"{title}, {name}"] = difference(got, expected)
    return found


def state_of(model: nn.Module, optimizer: optim.Optimizer, *, full: bool) -> dict[str, Any]:
    options = states.StateDictOptions(full_state_dict=full)
    return {
        "model": states.get_model_state_dict(model, options=options),
        "optimizer": states.get_optimizer_state_dict(model, optimizer, options=options),
    }


def count(state: dict[str, Any]) -> int:
    """How many numbers of a state this rank has."""
    return sum((one.to_local() if hasattr(one, "to_local") else one).numel() for one in state.values())


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except MgwfbpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused() -> dict[str, Any]:
    """What is one line on all ranks; afterwards the model can still be wrapped."""
    rank, folder, model = dist.get_rank(), Path(sys.argv[1]), Blocks()
    good = plan_of(Blocks, 3, 4)
    good.save(folder / f"plan{rank}.json")
    whole_plan, *_ = PLANS[Blocks].values()

    def give(plan: Any, **arguments: Any) -> str:
        return told(lambda: mgwfbp.fully_shard(model, plan, **arguments))

    found = {
        "unknown": give(FsdpPlan("toy", (("nothing",),), (True,))),
        "too few": give(FsdpPlan("toy", (Blocks.units[1:],), (True,))),
        "one rank's": give(FsdpPlan("toy", ((*Blocks.units, "more"),), (True,)) if rank == 1 else good),
        "no file": give(folder / ("plan0.json" if rank == 0 else "none.json")),
        "groups": give(good if rank == 0 else whole_plan),
        "reshard": give(good if rank == 0 else replace(good, reshard=(True, False))),
        "prefetch": give(good if rank == 0 else replace(good, backward_prefetch=2)),
        "reshard_after_forward": give(good, reshard_after_forward=False),
    }
    found["wrapped"] = str([name for name, one in model.named_modules() if hasattr(one, "reshard")])
    found["path"] = give(str(folder / f"plan{rank}.json"))
    found["twice"] = give(good)
    return found


def without() -> dict[str, Any]:
    """A torch that has no public fully_shard."""
    del torch.distributed.fsdp.fully_shard
    return {"told": told(lambda: mgwfbp.fully_shard(Blocks(), plan_of(Blocks, 7)))}


def meshes() -> dict[str, Any]:
    """Replicas of shards, and a mesh of some ranks with a plan of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    way = Way(arguments={"mesh": mesh})
    model, optimizer = make(way, None)
    expected = train(way, model, optimizer), whole(model)
    model, optimizer = make(way, PLANS[Blocks]["mixed"])
    found = {"replicas": difference((train(way, model, optimizer), whole(model)), expected)}
    way = Way(arguments={"mesh": mesh["shard"]})
    model, optimizer = make(way, None)
    expected = train(way, model, optimizer), whole(model)
    model, optimizer = make(way, list(PLANS[Blocks].values())[mesh.get_local_rank(0)])
    return {**found, "parts": difference((train(way, model, optimizer), whole(model)), expected)}


SCENARIOS = {one.__name__: one for one in (trained, mixed, odd, ignored, scheduled, saved, refused, meshes, without)}

if __name__ == "__main__":
    be_rank(SCENARIOS)
