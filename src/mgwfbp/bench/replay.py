"""A stand-in for a model: layers that only wait, as long as a trace says, and gradients of the recorded sizes."""

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mgwfbp.errors import TraceError
from mgwfbp.trace import LayerTrace, ModelTrace
from mgwfbp.units import quote

__all__ = ["Replay", "replayable"]

# Gradients are of float32, as those of most recorded models.
ELEMENT_BYTES = 4


def replayable(trace: ModelTrace) -> ModelTrace:
    """Return the trace that a replay really is: sizes rounded up to whole numbers of float32, at least one."""
    layers = tuple(replace(layer, grad_bytes=ELEMENT_BYTES * _num_elements(layer)) for layer in trace.layers)
    return replace(trace, layers=layers)


def _num_elements(layer: LayerTrace) -> int:
    return max(1, -(-layer.grad_bytes // ELEMENT_BYTES))


class Replay(nn.Module):
    """Waits where a model computes, so that a few cores can stand for many GPUs.

    Everything around the waiting is real: autograd walks over one node per layer in the trace's ready order, each
    parameter bears its name in the trace, and whatever wraps the module (DDP's Reducer) gets gradients as from any
    model. The processor is free while a layer waits, as it is while a GPU computes.

    A layer waits until a moment counted from the start of its pass, not for a time of its own: sleeping too long, or
    the Reducer's work between two layers, shortens the next wait and does not add up. In the forward pass a layer asks
    its module for its parameter when the layer before has ended, and all that it waits for it delays what follows.
    """

    def __init__(self, trace: ModelTrace) -> None:
        super().__init__()
        self._forward_s = trace.layer_forward_s
        self._due_s = [ready_s - trace.forward_s for ready_s in trace.ready_s]  # from the start of the backward pass
        self._started_s = 0.0
        self._counts = [_num_elements(layer) for layer in trace.layers]
        # All gradients are views of one buffer: nothing is computed, so nothing need be held.
        self._gradients = torch.ones(max(self._counts))
        # No list of parameters: a sharded optimizer would wait for all that this module holds before it runs.
        pairs = zip(reversed(trace.layers), reversed(self._counts), strict=True)
        self._homes = [_put(self, layer.name, nn.Parameter(torch.zeros(count))) for layer, count in pairs][::-1]

    def forward(self, start: Tensor) -> Tensor:
        """Wait for as long as the forward pass takes; the result leads autograd back through all layers."""
        ends_s = time.perf_counter()
        result = start
        for index in reversed(range(len(self._homes))):
            module, name = self._homes[index]
            asked_s = time.perf_counter()
            parameter = getattr(module(), name)
            ends_s += time.perf_counter() - asked_s + self._forward_s[index]
            result = _Layer.apply(result, parameter, self, index)
            _sleep_until(ends_s)
        return result

    def gradient(self, index: int) -> Tensor:
        """Wait until a gradient is due and return it."""
        if index == 0:
            self._started_s = time.perf_counter()
        _sleep_until(self._started_s + self._due_s[index])
        # A tensor of its own, which autograd takes as it is; one that somebody else holds it would copy.
        return self._gradients[: self._counts[index]]


class _Layer(torch.autograd.Function):
    """A node of autograd whose backward step is a wait."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, parameter: Tensor, replay: Replay, index: int) -> Tensor:  # noqa: ARG004
        ctx.replay, ctx.index = replay, index
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradients[0], ctx.replay.gradient(ctx.index), None, None


def _sleep_until(moment_s: float) -> None:
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[Callable[[], Any], str]:
    """Register a parameter under a dotted name, with the modules in between; return its module and its name there."""
    *path, last = name.split(".")
    try:
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)
    except (KeyError, AttributeError) as error:
        raise TraceError(f"layer {quote(name)} is no name a parameter can have beside the others: {error}") from error
    return weakref.ref(module), last  # weakly: a module that held itself would not end with its last name
