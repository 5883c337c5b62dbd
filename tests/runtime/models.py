"""Small models with the oddities that DDP meets, and plans for them that torch itself would never choose."""

import random
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from mgwfbp import MergePlan


class Mlp(nn.Module):
    """Layers of different sizes, with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in ((6, 10), (10, 7), (7, 12))])
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Frozen and shared parameters; with ``unused`` also some that take no part."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        if unused:
            self.unused = nn.Linear(6, 4)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(self.frozen(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]


class Dtypes(nn.Module):
    """Dtypes in turns."""

    def __init__(self, *, half: bool = False) -> None:
        super().__init__()
        middle = torch.bfloat16 if half else torch.float64
        dtypes = (torch.float32, torch.float64, torch.float32, middle, torch.float64, torch.float32)
        self.layers = nn.ModuleList([nn.Linear(6, 6, dtype=dtype) for dtype in dtypes])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 20
        return self.head(torch.tanh(self.hidden(self.embedding(tokens).sum(1))))  # type: ignore[no-any-return]


class ByChannel(torch.autograd.Function):
    """A 4x4 convolution of 1x1 that gives its weight a gradient by channel, as cuDNN does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight[:, :, 0, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight[:, :, 0, 0].t(), (x.t() @ gradient).as_strided((4, 4, 1, 1), (4, 1, 4, 4))


class Strided(nn.Module):
    """A weight like any other, one that gets a gradient column after column, and one by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.odd = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.channels = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return ByChannel.apply(x @ self.plain @ self.odd, self.channels)  # type: ignore[no-any-return]


def make_plan(model: nn.Module, seed: int, *, leave_out: tuple[str, ...] = ()) -> MergePlan:
    """Shuffle the gradients and cut them at random, with one kind in each message."""
    chance = random.Random(seed)
    sparse = {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.sparse
    }
    named = [
        (name, "sparse " + name if name in sparse else str(parameter.dtype))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in leave_out
    ]
    chance.shuffle(named)
    groups: list[tuple[str, ...]] = []
    for _, same_kind in groupby(named, key=lambda item: item[1]):
        names = [name for name, _ in same_kind]
        while names:
            size = chance.randint(1, 3)
            groups.append(tuple(names[:size]))
            names = names[size:]
    return MergePlan(type(model).__name__, f"seed {seed}", tuple(groups))
