"""What one rank does in the tests of sharding: ``python -m tests.runtime.shard_ranks FOLDER SCENARIO ...``.

Everything is trained twice from one start: torch's DDP with a plain optimizer, and ours.
"""

import copy
import gc
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mgwfbp.runtime.rows
from mgwfbp import DistributedDataParallel, MergePlan, MgwfbpError, ShardedOptimizer
from mgwfbp.measure.clock import clock_for
from mgwfbp.runtime.observe import Observer
from tests.runtime.launch import be_rank
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse, Strided, make_plan

STEPS = 30


class Attention(nn.Module):
    """Uses the weights of a module whose own forward pass never runs, a module twice, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.branches = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x)[0]
        x = self.branches[0](torch.tanh(self.branches[0](x))) * self.scale
        return self.head(x if x[0, 0] > 0 else self.branches[1](x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Modules that hold their parameters in lists and dicts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)
        self.cache = {"weights": [self.head.weight]}

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x[:, None])[0][:, 0]
        return y @ self.cache["weights"][0].t() + self.head.bias  # type: ignore[no-any-return]


class Channels(nn.Module):
    """Weights that lie in memory channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 6, 1).expand(-1, 2, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Way:
    """One way to train."""

    optimizer: type[optim.Optimizer] = optim.SGD
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    model: Callable[[], nn.Module] = Mlp
    ddp: Mapping[str, Any] = field(default_factory=dict)
    width: int = 6
    rows: int = 5
    groups: bool = False  # two groups of parameters
    accumulate: int = 1
    clip: float | None = None
    norm_type: float = 2.0
    autocast: bool = False
    scaler: bool = False
    plain: bool = False  # without a plan or tuning
    gathered: float = 1.0  # the share of messages whose parameters a plan gathers; the others are all-reduced
    schedule: bool = False
    between: Callable[[nn.Module, Any, int], Any] = lambda *_: None  # what is done after a step, and what it found


def gathering(plan: MergePlan, share: float) -> MergePlan:
    """The plan with so large a share of its messages sharded, at equal distances."""
    places = range(plan.num_groups)
    return replace(plan, gathers=tuple(plan.groups[n] for n in places if int((n + 1) * share) > int(n * share))[::-1])


def params_of(module: nn.Module, way: Way) -> Any:
    if not way.groups:
        return list(module.parameters())
    named = list(module.named_parameters())
    return [
        {"params": [one for name, one in named if "bias" in name], "lr": 0.02},
        {"params": [one for name, one in named if "bias" not in name], "weight_decay": 0.1},
    ]


def clip_in_double(parameters: list[nn.Parameter], way: Way) -> None:
    """Clip as ours does: torch's sums the norm in fp32, in an order that only a whole gradient has."""
    grads = [one.grad for one in parameters if one.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(one, way.norm_type, dtype=torch.float64) for one in grads])
    norm = torch.linalg.vector_norm(norms, way.norm_type).float()
    assert way.clip is not None
    factor = (way.clip / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


def train(way: Way, *, sharded: bool, tune: bool = False, steps: int = STEPS) -> tuple[list[Tensor], list[Any], Any]:
    torch.manual_seed(3)
    module = way.model()
    model: Any
    if sharded:
        given: dict[str, Any] = {"tune_steps": 60} if tune else {"plan": make_plan(module, 4)}
        given = {"tune": False} if way.plain or way.gathered < 1 else given
        model = DistributedDataParallel(module, **given, **way.ddp)
        plan = gathering(make_plan(module, 4), way.gathered) if way.gathered < 1 else None
        optimizer: Any = ShardedOptimizer(model, way.optimizer, params_of(module, way), plan=plan, **way.options)
    else:
        model = StockDdp(module, **way.ddp)
        optimizer = way.optimizer(params_of(module, way), **way.options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if way.scaler else None
    scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.9) if way.schedule else None
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(way.accumulate):
            x = torch.randn(way.rows, way.width, generator=data)
            with model.no_sync() if micro + 1 < way.accumulate else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.autocast):
                    loss = model(x).square().mean()
                if way.scaler and step == 5 and dist.get_rank() == 0:
                    loss = loss * float("inf")
                (loss if scaler is None else scaler.scale(loss)).backward()
        if way.clip is not None:
            if sharded:
                optimizer.clip_grad_norm_(way.clip, way.norm_type)
            else:
                clip_in_double(list(module.parameters()), way)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        if scheduler is not None:
            scheduler.step()
        found.append(way.between(model, optimizer, step))
    return [one.detach().clone() for one in module.parameters()], found, (model, optimizer)


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number; 0 only where all are bitwise equal."""
    if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        return 0.0
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True) if b.numel()
    ) or float("inf")


def beside_torchs(way: Way, steps: int = STEPS) -> float:
    expected, found_there, _ = train(way, sharded=False, steps=steps)
    got, found_here, _ = train(way, sharded=True, steps=steps)
    assert found_here == found_there, (found_here, found_there)
    return difference(got, expected)


FUSES = not torch.__version__.startswith("2.3.")  # on a CPU
OPTIMIZERS: dict[str, Way] = {
    "SGD": Way(options={"lr": 0.05}),
    "momentum": Way(),
    "Nesterov": Way(options={"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": Way(optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": Way(optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": Way(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW foreach": Way(optim.AdamW, {"lr": 0.01, "foreach": True}),
    **({"AdamW fused": Way(optim.AdamW, {"lr": 0.01, "fused": True})} if FUSES else {}),
    "RMSprop": Way(optim.RMSprop, {"lr": 0.001}),
    "Adagrad": Way(optim.Adagrad, {"lr": 0.01}),
    "Adamax": Way(optim.Adamax, {}),
    "NAdam": Way(optim.NAdam, {}),
    "RAdam": Way(optim.RAdam, {}),
    "Rprop": Way(optim.Rprop, {}),
    "Adadelta": Way(optim.Adadelta, {}),
    "ASGD": Way(optim.ASGD, {}),
}

MODES: dict[str, Way] = {
    "two groups": Way(optim.AdamW, {"lr": 0.01}, groups=True),
    "scheduler": Way(schedule=True, groups=True),
    "accumulation": Way(optim.Adam, {"lr": 0.01}, accumulate=3),
    "clipping": Way(optim.Adam, {"lr": 0.01}, clip=0.1),
    "clipping by the largest": Way(clip=0.01, norm_type=float("inf")),
    "nothing to clip": Way(clip=1000.0),
    "views": Way(ddp={"gradient_as_bucket_view": True}),
    "static graph": Way(ddp={"static_graph": True}),
    "unused": Way(model=lambda: Shared(unused=True), ddp={"find_unused_parameters": True}),
    "frozen and shared": Way(model=Shared),
    "dtypes": Way(model=Dtypes),
    "16 bits": Way(model=lambda: Dtypes(half=True)),
    "strides": Way(model=Strided, options={"lr": 1e-4, "momentum": 0.9}, width=4),
    "channels last": Way(model=Channels),
    "attention": Way(model=Attention, ddp={"find_unused_parameters": True}),
    "autocast": Way(autocast=True),
    "scaler": Way(scaler=True),
    "not tuned": Way(plain=True),
    "no buffers sent": Way(ddp={"broadcast_buffers": False}),
    "half all-reduced": Way(optim.AdamW, {"lr": 0.01}, gathered=0.5, groups=True, schedule=True),
    "half all-reduced, clipping": Way(optim.Adam, {"lr": 0.01}, gathered=0.5, clip=0.1, accumulate=2),
    "half all-reduced, views": Way(gathered=0.5, clip=0.01, norm_type=1.0, ddp={"gradient_as_bucket_view": True}),
    "half all-reduced, scaler": Way(gathered=0.5, scaler=True),
    "half all-reduced, unused": Way(
        gathered=0.5, model=lambda: Shared(unused=True), ddp={"find_unused_parameters": True}
    ),
    "half all-reduced, channels last": Way(model=Channels, gathered=0.5),
    "half all-reduced, strides and clipping": Way(
        model=Strided, options={"lr": 1e-2}, width=4, gathered=0.5, clip=0.05
    ),
    "half all-reduced, strides": Way(model=Strided, options={"lr": 1e-4, "momentum": 0.9}, width=4, gathered=0.5),
    "all all-reduced": Way(gathered=0.0),
}


def optimizers() -> dict[str, Any]:
    return {name: beside_torchs(way) for name, way in OPTIMIZERS.items()}


def published() -> dict[str, Any]:
    """The optimizers that people use most."""
    names = ("SGD", "momentum", "Nesterov", "Adam", "AdamW", "RMSprop", "Adagrad")
    return {name: beside_torchs(OPTIMIZERS[name]) for name in names}


def modes() -> dict[str, Any]:
    return {name: beside_torchs(way, steps=12) for name, way in MODES.items()}


def tuned() -> dict[str, Any]:
    """Buckets change while it tunes, and no state moves."""
    way = Way(optim.AdamW, {"lr": 0.001})
    expected, _, _ = train(way, sharded=False, steps=150)
    got, _, (model, optimizer) = train(way, sharded=True, tune=True, steps=150)
    tried = {candidate.plan.groups for candidate in model.tuning.candidates}
    states = [value.numel() for state in optimizer._inner.state.values() for value in state.values() if value.dim()]
    return {
        "difference": difference(got, expected),
        "tuning": (model.tuning.state, model.tuning.reason),
        "tried": len(tried),
        "gathering": model.tuning.gathering is not None and model.tuning.gathering.to_json(),
        "words": str(model.tuning),
        "forward": [layer.forward_s for layer in model.tuning.trace.layers] if model.tuning.trace else [],
        "planned": model.plan.gathers == optimizer.gathers,
        "same": sorted(name for group in optimizer.gathers for name in group)
        == sorted(name for name, _ in model.module.named_parameters()),
        "state": sum(states) / sum(one.numel() for one in model.parameters()),
    }


def planned() -> dict[str, Any]:
    """Messages and gathers of a plan, in groups that have nothing to do with one another."""

    def gathers_of(module: nn.Module, seed: int) -> tuple[tuple[str, ...], ...]:
        return make_plan(module, seed).groups

    torch.manual_seed(3)
    module = Mlp()
    plan = replace(make_plan(module, 4), gathers=gathers_of(module, 8))
    model = DistributedDataParallel(module)
    optimizer = ShardedOptimizer(model, optim.AdamW, plan=plan, lr=0.01)
    expected, _, _ = train(Way(optim.AdamW, {"lr": 0.01}), sharded=False, steps=5)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=data)).square().mean().backward()
        optimizer.step()
    other = replace(plan, gathers=gathers_of(module, 8 + dist.get_rank()))
    some = DistributedDataParallel(Mlp())
    kept = ShardedOptimizer(some, optim.SGD, plan=gathering(plan, 0.5), lr=0.1)
    whole = {one.name for one in kept._owned.values() if one.row.numel() == one.parameter.numel()}
    return {
        "difference": difference([one.detach() for one in module.parameters()], expected),
        "gathers": optimizer.gathers == plan.gathers,
        "groups": model.plan is not None and model.plan.groups == plan.groups,
        "tuning": model.tuning.reason,
        "differ": told(lambda: ShardedOptimizer(DistributedDataParallel(Mlp()), optim.SGD, plan=other, lr=0.1)),
        "whole": whole == set(plan.layer_names).difference(*kept.gathers) and 0 < len(whole) < len(plan.layer_names),
        "mixed": told(lambda: some.replan(make_plan(module, 1))),
        "torch's": told(lambda: some.replan(None)),
        "alone": told(lambda: DistributedDataParallel(Mlp(), plan=plan)),
    }


def told_plans() -> dict[str, Any]:
    """What `model.plan` says of gathers: what is gathered now, however that came to be."""
    plan = make_plan(Mlp(), 4)

    def make(given: Any = None, **options: Any) -> tuple[Any, Any]:
        model = DistributedDataParallel(Mlp(), **(options or {"tune": False}))
        return model, ShardedOptimizer(model, optim.SGD, plan=given, lr=0.1)

    model, optimizer = make()
    again, _ = make(model.plan)
    half, halves = make(gathering(plan, 0.5))
    before = half.plan
    half.replan(plan)  # which says nothing of gathers
    copied = copy.deepcopy(half)
    none, nothing = make(plan)
    compiled = replace(
        plan,
        groups=tuple(tuple(f"_orig_mod.{name}" for name in group) for group in plan.groups),
        gathers=tuple(tuple(f"_orig_mod.{name}" for name in group) for group in plan.groups),
    )
    mid: Any = DistributedDataParallel(Mlp())
    plans = []
    for _ in range(12):  # by then the tuner has begun
        mid(torch.ones(4, 6)).sum().backward()
        mid.zero_grad()
        plans.append(mid.plan)
    mid._handle.set_buckets(mid._handle.buckets_of(plan.groups))  # on trial
    ShardedOptimizer(mid, optim.SGD, lr=0.1)
    refused = DistributedDataParallel(Mlp(), tune=False)
    wired = replace(plan, wire=("bfloat16",) * plan.num_groups)
    names = set(plan.layer_names)
    return {
        "all": model.plan.gathers == optimizer.gathers and set().union(*optimizer.gathers) == names,
        "again": again.plan.messages == model.plan.messages,
        "half": before.gathers == gathering(plan, 0.5).gathers,
        "mirrored": half.plan.gathers == halves.gathers == tuple(one[::-1] for one in before.gathers),
        "copied": (copied.plan.groups, copied.plan.gathers) == (plan.groups, ()),
        "none": (none.plan.gathers, nothing.gathers) == ((), ()),
        "given": make(None, plan=plan)[0].plan.gathers == tuple(group[::-1] for group in plan.groups[::-1]),
        "compiled": make(compiled)[0].plan.gathers == plan.groups,
        "on trial": mid.plan.groups == plans[5].groups != plan.groups,
        "wire": told(lambda: ShardedOptimizer(refused, optim.SGD, plan=wired, lr=0.1)),
        "then": told(lambda: ShardedOptimizer(refused, optim.SGD, lr=0.1)),
    }


def viewed() -> dict[str, Any]:
    """Buckets change while gradients, of which ranks have rows, would be views of them."""

    def between(model: Any, optimizer: Any, step: int) -> None:
        if isinstance(optimizer, ShardedOptimizer):
            model.replan(replace(make_plan(model.module, step), gathers=make_plan(model.module, 8).groups))

    def unused() -> nn.Module:
        return Shared(unused=True)

    views = {"gradient_as_bucket_view": True}
    found = {
        "replanned": beside_torchs(Way(ddp=views, between=between), steps=6),
        "unused": beside_torchs(
            Way(model=unused, ddp={**views, "find_unused_parameters": True}, between=between), steps=6
        ),
        "static graph": beside_torchs(Way(ddp={**views, "static_graph": True}, between=between), steps=6),
    }
    expected, _, _ = train(Way(ddp=views), sharded=False, steps=200)
    got, _, (model, _) = train(Way(ddp=views), sharded=True, tune=True, steps=200)
    return {**found, "tuned": difference(got, expected), "state": (model.tuning.state, model.tuning.reason)}


def noted() -> dict[str, Any]:
    """Pieces of forward passes before which somebody reads all parameters, and takes his time."""
    model = DistributedDataParallel(Mlp(), tune=False)
    optimizer = ShardedOptimizer(model, optim.SGD, plan=gathering(make_plan(Mlp(), 4), 1.0), lr=0.1)
    handle: Any = model._handle
    observer = model._observer = Observer(handle, clock_for(torch.device("cpu")))
    observer.note(gathers=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        sums(model.parameters())
        time.sleep(0.05)
    steps = observer.take()[1:]
    observer.stop()
    model._observer = None
    return {
        "gathers": [len(step.gathers) for step in steps],
        "of": len(optimizer.gathers),
        "beyond": max(sum(step.pieces_s) - step.forward_s for step in steps),
    }


def sums(tensors: Any) -> list[float]:
    return [one.detach().double().sum().item() for one in tensors]


def read_everything(model: Any, optimizer: Any, step: int) -> Any:
    """Read parameters in all the ways people have, a few of them after each step."""
    module = model.module
    x = torch.ones(4, 6)
    readers: list[Callable[[], Any]] = [
        lambda: sums(model.parameters()),
        lambda: sums(model.state_dict().values()),
        lambda: sums(module.head.state_dict().values()),
        lambda: sums(copy.deepcopy(module).parameters()),
        lambda: sums(pickle.loads(pickle.dumps(module)).parameters()),  # noqa: S301 - our own
        lambda: sums([module.head(torch.ones(2, module.head.in_features))]),
        lambda: sums([module.head.weight, module.head.bias]),
        lambda: sums(dict(module.named_parameters()).values()),
        lambda: sums(nn.utils.parameters_to_vector(module.parameters()).unbind()),
        lambda: sums([torch.func.functional_call(module.eval(), dict(module.named_parameters()), (x,))]),
        lambda: sums(value for value in optimizer.state_dict()["state"][0].values() if isinstance(value, Tensor)),
        lambda: None,
    ]
    seen = readers[step % len(readers)]()
    module.train()
    if step % 3 == 1:
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            seen = [seen, sums([model(x)])]
        model.train()
    return seen


def readers() -> dict[str, Any]:
    """What is read between steps, and an average of the model that is kept beside it."""
    found = {}
    for name, model in (("mlp", Mlp), ("attention", Attention), ("recurrent", Recurrent)):
        averages: list[AveragedModel] = []

        def between(model: Any, optimizer: Any, step: int, averages: list[AveragedModel] = averages) -> Any:
            if step == 0:
                averages.append(AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
            averages[-1].update_parameters(model.module)
            seen = read_everything(model, optimizer, step)
            if step == 10 and isinstance(model, DistributedDataParallel):
                model.replan(make_plan(model.module, 5))
            return seen, sums(averages[-1].parameters())

        ddp = {"find_unused_parameters": True} if name == "attention" else {}
        found[name] = beside_torchs(Way(optim.AdamW, {"lr": 0.01}, model=model, ddp=ddp, between=between))
    return found


@contextmanager
def late_gathers() -> Iterator[None]:
    """Let parameters come later than anybody would read them who does not wait."""
    rows: Any = mgwfbp.runtime.rows
    stock = rows.all_gather

    def late(*args: Any) -> None:
        time.sleep(0.01)
        stock(*args)

    rows.all_gather = late
    try:
        yield
    finally:
        rows.all_gather = stock


def compiled() -> dict[str, Any]:
    """Compiled graphs do not ask modules for parameters, which come late."""

    def compiled_mlp() -> nn.Module:
        module = Mlp()
        module.compile(backend="aot_eager")
        return module

    def with_a_compiled_part() -> nn.Module:
        module = Mlp()
        module.head.compile(backend="aot_eager")
        return module

    found = {}
    for name, make in (("all", compiled_mlp), ("a part", with_a_compiled_part)):
        expected, _, _ = train(Way(model=make), sharded=False, steps=4)
        with late_gathers():
            got, _, _ = train(Way(model=make), sharded=True, steps=4)
        found[name] = difference(got, expected)
    return found


def delays() -> dict[str, Any]:
    """Late gathers change nothing but what somebody reads who holds parameters and does not wait."""
    too_early = []

    def between(model: Any, optimizer: Any, step: int) -> Any:
        if isinstance(optimizer, ShardedOptimizer):
            held = [one.parameter for one in optimizer._shards.owned]
            before = sums(held)
            model.synchronize()
            too_early.append(before != sums(held))
        return read_everything(model, optimizer, step)

    with late_gathers():
        differences = {
            "read": beside_torchs(Way(optim.AdamW, {"lr": 0.01}, between=read_everything)),
            "only trained": beside_torchs(Way(model=Attention, ddp={"find_unused_parameters": True})),
            "held": beside_torchs(Way(between=between)),
            "recurrent": beside_torchs(Way(model=Recurrent, between=read_everything)),
        }
    return {"differences": differences, "too early": sum(too_early)}


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


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except (MgwfbpError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def refused() -> dict[str, Any]:
    """Bad use is one line on all ranks, before any step."""
    rank = dist.get_rank()

    def model(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module or Mlp(), **options)

    stranger = [nn.Parameter(torch.zeros(3))]
    twice = model()
    ShardedOptimizer(twice, optim.SGD, lr=0.1)
    hooked = model()
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    some = model()
    skips: Any = model()
    skips.skip_all_reduce_unused_params = True  # an argument of newer torchs
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
        "twice": lambda: ShardedOptimizer(twice, optim.SGD, lr=0.1),
        "wire": lambda: ShardedOptimizer(model(wire="bfloat16"), optim.SGD, lr=0.1),
        "hook": lambda: ShardedOptimizer(hooked, optim.SGD, lr=0.1),
        "skips": lambda: ShardedOptimizer(skips, optim.SGD, lr=0.1),
        "sparse": lambda: ShardedOptimizer(model(Sparse()), optim.SGD, lr=0.1),
        "strides": lambda: ShardedOptimizer(model(wide), optim.SGD, lr=0.1),
    }
    return {name: told(case) for name, case in cases.items()}


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
    for _ in range(3):
        model = DistributedDataParallel(module, tune=False)
        optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
        optimizer.zero_grad()  # what the one before has left
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        model.synchronize()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    hooks = len(module.lstm._forward_pre_hooks)
    held = weakref.ref(module.head.weight)
    copied = told(partial(copy.deepcopy, optimizer))
    del module, model, optimizer
    for _ in range(100):  # the thread of messages may still be on its way out of the last one
        gc.collect()
        if held() is None:
            break
        time.sleep(0.05)
    return {"threads": found, "hooks": hooks, "is held": held() is not None, "copied": copied}


def loud() -> dict[str, Any]:
    """What would use a part of a gradient as if it were all of it."""
    module = Mlp()
    model = DistributedDataParallel(module, plan=make_plan(module, 2))
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
    x = torch.ones(4, 6)
    model(x).sum().backward()
    found = {
        "torch's clipping": told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "a plain optimizer": told(optim.SGD(module.parameters(), lr=0.1).step),
        "reading": told(lambda: sums(one.grad for one in module.parameters() if one.grad is not None)),
    }
    found["hook"] = told(lambda: model.register_comm_hook(None, lambda _, bucket: bucket.buffer()))
    optimizer.step()
    model.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
    found["not averaged"] = told(optimizer.step)
    model.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    found["no zero_grad"] = told(lambda: model(x).sum().backward())
    found["join"] = told(lambda: model.join().__enter__())
    model.zero_grad()
    found["add"] = told(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}))
    module.head.weight.data = module.head.weight.data.clone()
    found["moved"] = told(optimizer.step)
    return found


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


SCENARIOS = {
    one.__name__: one
    for one in (
        optimizers,
        published,
        modes,
        tuned,
        planned,
        told_plans,
        viewed,
        noted,
        checkpointed,
        readers,
        delays,
        compiled,
        states,
        refused,
        loud,
        odd,
        ended,
        resumed,
    )
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
