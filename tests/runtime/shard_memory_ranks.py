"""What ranks see whose parameters get other memory, another dtype or another device once the optimizer is there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from mgwfbp import DistributedDataParallel, ShardedOptimizer
from mgwfbp.runtime.rows.spread import SpreadGradient
from tests.runtime.models import Mlp
from tests.runtime.shard_read_ranks import late_gathers, read_everything
from tests.runtime.shard_ways import Recurrent, Way, beside_torchs, error_of, sums


def flatten(rnn: Any) -> None:
    """Do what `flatten_parameters` does on CUDA: copy what is there into a new buffer, unseen by autograd."""
    held = rnn._flat_weights
    buffer = torch.cat([one.detach().flatten() for one in held])
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for one, part in zip(held, buffer.split([one.numel() for one in held]), strict=True):
            one.set_(part.view_as(one))


class Flattening(Recurrent):
    """Flattens its LSTM in every forward pass, before that asks for anything."""

    def forward(self, x: Tensor) -> Tensor:
        flatten(self.lstm)
        return super().forward(x)


def flatten_after_steps(model: Any, optimizer: Any, step: int) -> Any:
    """Flatten while parameters travel, and read them in other ways."""
    flatten(model.module.lstm)
    if step % 3 == 2:
        flatten(model.module.lstm)
    return read_everything(model, optimizer, step)


def give_other_memory(model: Any, *_: Any) -> None:
    model.module.head.weight.data = model.module.head.weight.data.clone()


def share(model: Any, *_: Any) -> None:
    """Share, without forgetting gradients; torch makes a file of each parameter that has other memory since."""
    give_other_memory(model)
    model.module.share_memory()


def moved() -> dict[str, float]:
    ways = {
        "in the forward pass": Way(model=Flattening, between=read_everything),
        "after steps": Way(optim.AdamW, {"lr": 0.01}, model=Recurrent, between=flatten_after_steps),
        "half all-reduced": Way(model=Flattening, gathered=0.5, between=flatten_after_steps),
        "two groups": Way(model=Flattening, groups=True, schedule=True, accumulate=2),
        "by hand": Way(between=give_other_memory),
        "shared": Way(optim.AdamW, {"lr": 0.01}, between=share),
    }
    with late_gathers():
        return {name: beside_torchs(way, steps=8) for name, way in ways.items()}


def kind(parameter: nn.Parameter) -> tuple[str, str, bool]:
    """Return the dtype and the device of a parameter, and whether its gradient has none of its numbers and fits it."""
    grad = parameter.grad
    fits = isinstance(grad, SpreadGradient) and (grad.shape, grad.dtype) == (parameter.shape, parameter.dtype)
    return str(parameter.dtype), parameter.device.type, fits and grad is not None and grad.device == parameter.device


def converted() -> dict[str, Any]:
    """What is left of modules that are converted after a step, with gradients of which ranks have rows."""

    def after(convert: Callable[[nn.Module], Any]) -> dict[str, Any]:
        module = Mlp()
        model = DistributedDataParallel(module, tune=False)
        optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1)
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        found: dict[str, Any] = {"error": error_of(lambda: convert(module))}
        found["kinds"] = sorted({kind(one) for one in module.parameters()})
        found["reading"] = error_of(lambda: sums(one.grad for one in module.parameters() if one.grad is not None))
        found["step"] = error_of(optimizer.step)
        return found

    return {
        "half": after(lambda module: module.half()),
        "double": after(lambda module: module.double()),
        "and back": after(lambda module: module.double().float()),
        "to": after(lambda module: module.to(torch.bfloat16)),
        "elsewhere": after(lambda module: module.to("meta")),
        "empty": after(lambda module: module.to_empty(device="meta")),
        "shared": after(nn.Module.share_memory),
    }


SCENARIOS = (moved, converted)
