"""Ways to train in the tests of sharding, each twice: by torch's DDP with a plain optimizer, and by ours."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MergePlan, MgwfbpError, ShardedOptimizer
from tests.runtime.models import Dtypes, Mlp, Shared, Strided, make_plan

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


class Empty(Mlp):
    """One parameter is frozen, another has no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(3, 0))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


class Undefined(torch.autograd.Function):
    """Hands x on and gives the weight no gradient, not even zeros, on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        return grads[0], None if dist.get_rank() == 1 else (grads[0] * x).sum(0)


class SometimesUndefined(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Undefined.apply(x, self.weight))


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
    dtype: torch.dtype = torch.float32
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
    norm = torch.linalg.vector_norm(norms, way.norm_type).to(grads[0].dtype)
    assert way.clip is not None
    factor = (way.clip / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


def train(way: Way, *, sharded: bool, tune: bool = False, steps: int = STEPS) -> tuple[list[Tensor], list[Any], Any]:
    torch.manual_seed(3)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    module = way.model().to(device)
    if way.dtype is not torch.float32:
        module = module.to(way.dtype)
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
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10) if way.scaler else None
    scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.9) if way.schedule else None
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(way.accumulate):
            x = torch.randn(way.rows, way.width, generator=data).to(device, way.dtype)
            with model.no_sync() if micro + 1 < way.accumulate else nullcontext():
                with torch.autocast(device, dtype=torch.bfloat16, enabled=way.autocast):
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
    "undefined on one rank": Way(model=SometimesUndefined),
    "dtypes": Way(model=Dtypes),
    "16 bits": Way(model=lambda: Dtypes(half=True)),
    "strides": Way(model=Strided, options={"lr": 1e-4, "momentum": 0.9}, width=4),
    "channels last": Way(model=Channels),
    "no numbers": Way(optim.Adagrad, {"lr": 0.01}, model=Empty),
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


def sums(tensors: Any) -> list[float]:
    return [one.detach().double().sum().item() for one in tensors]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (MgwfbpError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
