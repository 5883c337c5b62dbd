"""Small models with the oddities that real ones have."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Slow(torch.autograd.Function):
    """Passes its input through; its backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowMiddle(nn.Module):
    """Three layers; between the second and the first the backward pass sleeps."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        hidden = Slow.apply(self.first(x), self.seconds)
        return self.third(self.second(hidden))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Frozen, unused and shared parameters, batch statistics, dropout, a sparse embedding, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=True)
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        hidden = self.shared(self.embedding(tokens))
        hidden = self.frozen(self.shared(hidden))
        hidden = nn.functional.dropout(self.norm(hidden), 0.5)
        return {"logits": self.head(hidden), "hidden": (hidden,)}


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass; one weight serves both."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.shared = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: self.shared(torch.tanh(block(x))), x, use_reentrant=self.reentrant)
        return x


def tiny_transformer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), num_layers=2, enable_nested_tensor=False
    )


def factory(batch_size: int = 2) -> tuple[nn.Module, Tensor]:
    """What a user would name with ``--factory``."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(batch_size, 4)


class TinyNet(nn.Module):
    """A model of the user's own that computes its own shape, and reads it, when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0.0, 0.5, 2)]
        self.first, self.last = nn.Linear(4, int(torch.tensor(8))), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(x), self.rates[1]))  # type: ignore[no-any-return]


def four_samples() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A factory with a batch of its own, and a loss that holds labels."""
    labels = torch.tensor([0, 1, 0, 1])
    return TinyNet(), torch.ones(4, 4), lambda output: nn.functional.cross_entropy(output, labels)


class NamedNet(TinyNet):
    name = "tiny, two layers"


def named(**settings: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A factory that takes whatever it is given, and names its model."""
    return NamedNet(), {"x": torch.ones(settings["batch_size"], 4)}


def needs_batch_size(batch_size: int) -> tuple[nn.Module, Tensor]:
    return TinyNet(), torch.ones(batch_size, 4)


def needs_width(width: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, width), torch.ones(2, 4)


def model_alone(num_classes: int = 2) -> nn.Module:
    return TinyNet()


def no_tensor() -> tuple[nn.Module, list[int]]:
    return TinyNet(), [1, 2, 3]


def broken_factory() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 8)), torch.ones(2, 5)


def not_a_factory() -> int:
    return 3


class Raises(nn.Module):
    """A model with a mistake in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape:
            raise KeyError("no such\nlayer")
        return x


def raising_factory() -> tuple[nn.Module, Tensor]:
    return Raises(), torch.ones(2, 4)


class Looks(nn.Module):
    """A model whose way depends on what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def looking_factory() -> tuple[nn.Module, Tensor]:
    return Looks(), torch.ones(2, 4)
