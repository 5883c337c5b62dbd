"""When each gradient of a model is ready: `measure_backward`."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mgwfbp.errors import MeasureError
from mgwfbp.measure.clock import Moment, clock_for
from mgwfbp.measure.forward import FirstUses, resting_parts, split_forward
from mgwfbp.measure.hooks import GradientHooks
from mgwfbp.measure.modules import trained_dtypes
from mgwfbp.measure.reads import Reads, find_reads
from mgwfbp.measure.workload import LossFn, default_loss, frozen, run_to_loss, trainable
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import format_dtype, quote

__all__ = ["Passes", "measure_backward", "plain_passes"]

# Does a forward and a backward pass; what it is given is called just before, what that returns when they have ended.
# Returns what the passes took, and what they took with both calls.
Passes = Callable[[Callable[[], Callable[[], object]]], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step showed."""

    forward_s: float
    backward_s: float  # the whole of it, hooks included
    ready_s: dict[int, float]  # by parameter, from the start of the backward pass
    order: tuple[int, ...]  # parameters in the order in which their gradients were ready
    grad_bytes: dict[int, int]
    sparse: frozenset[int]  # parameters whose gradients are as large as the batch makes them


def measure_backward(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn = default_loss,
    *,
    name: str | None = None,
    steps: int = 10,
    warmup: int = 3,
    accumulation_steps: int = 1,
    autocast_dtype: torch.dtype | None = None,
    on_step: Callable[[], object] | None = None,
) -> ModelTrace:
    """Run a model's forward and backward pass and note when each gradient is ready, and what layers take before.

    A gradient is ready when autograd has computed it. A parameter that takes no part (unused) has nothing to wait
    for: it stands first, ready at the start of the backward pass, as DDP treats it, and is named in ``source``. Frozen
    parameters are no layers; ``source`` has what they take of the layer that runs around them (``frozen``), and which
    modules were not called (``not_called``), run again (``repeated``), share parameters with others (``shared``), are
    read while they do not run (``read_elsewhere``), return parameters of theirs (``returned``), or run and return
    nothing that gets a gradient (``no_gradient``). Unused parameters that a step calls or reads, without a gradient,
    are ``not_reached``; that and frozen ones that nothing does are ``unread``.
    Shared parameters appear once. What each layer takes in the forward pass, from its first use to that of the layer
    begun next, is measured afterwards, in forward passes of their own. The model's parameters, buffers and gradients
    and all random generators are afterwards as they were, and no hook is left on the model; no optimizer is involved.
    Needs no process group.

    Args:
        model: on the device where it is to be measured.
        batch: what the model is called with; a dict becomes keyword arguments, a tuple positional ones.
        loss_fn: turns the model's output into one number.
        name: of the model in the trace; its class's if not given.
        steps: how many are measured; their medians make the trace, their spread is in ``source``. As many forward
            passes follow.
        warmup: how many steps before those are dropped.
        accumulation_steps: with k only the last of k backward passes is taken apart, since only there gradients
            travel; what comes before it counts as forward, and there as the last layer's.
        autocast_dtype: where given, the forward pass runs under autocast with it.
        on_step: called after every step, and after every forward pass that follows.

    Returns:
        The trace, gradients in the order in which they are ready.

    Raises:
        MeasureError: where nothing can be measured: no parameter requires a gradient, parameters are on several
            devices, the loss is not one number, or a count cannot be.
    """
    if steps < 1 or warmup < 0 or accumulation_steps < 1:
        raise MeasureError(
            f"steps is {steps}, warmup {warmup}, accumulation_steps {accumulation_steps}: expected 1, 0 and 1 or more"
        )
    parameters = list(trainable(model))
    if not parameters:
        raise MeasureError("the model has no parameter that requires a gradient: nothing to measure")
    device = _only_device(parameters)
    runs = _Runs(model, batch, loss_fn, parameters, device, accumulation_steps, autocast_dtype)
    seen: list[tuple[_Step, float]] = []
    with _as_it_was(model, batch, parameters, device):
        for index in range(warmup + steps):
            step = runs.observed_step()
            # Hooks delay a host that is busy launching kernels: see how long it takes without them, in turns.
            plain_s = runs.plain_step() if device.type == "cuda" else step.backward_s
            if index >= warmup:
                seen.append((step, plain_s))
            if on_step is not None:
                on_step()
        # Not between the steps above: hooks on modules, or a model that counts its calls, would change what they show.
        forwards = []
        for _ in range(steps):
            forwards.append(runs.observed_forward())
            if on_step is not None:
                on_step()
        reads = runs.reads()
    ready = {slot for step, _ in seen for slot in step.ready_s}
    unused = [name for slot, (name, _) in enumerate(parameters) if slot not in ready]
    source = {
        "measured": "backward",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "autocast": format_dtype(autocast_dtype) if autocast_dtype else None,
        "accumulation_steps": accumulation_steps,
        "steps": steps,
        "unused": unused,
        "unread": reads.unread(model, forwards[0].modules["not_called"], unused),
        **forwards[0].modules,
        **reads.modules(),
        "dtypes": trained_dtypes(model),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    return _combine(name or type(model).__name__, [*parameters, *frozen(model)], seen, forwards, source)


@contextlib.contextmanager
def plain_passes(
    model: nn.Module, batch: Any, loss_fn: LossFn = default_loss, *, autocast_dtype: torch.dtype | None = None
) -> Iterator[Passes]:
    """Run a model as `measure_backward` does, without hooks on it: yield what does one forward and backward pass.

    On the way out the model and the random generators are as they were.
    """
    parameters = list(trainable(model))
    device = _only_device(parameters)
    runs = _Runs(model, batch, loss_fn, parameters, device, 1, autocast_dtype)
    with _as_it_was(model, batch, parameters, device):
        yield runs.both_passes


@dataclass(frozen=True, slots=True)
class _Forward:
    """What a forward pass showed."""

    forward_s: float  # the whole of it, hooks included
    first_use_s: dict[int, float]  # by parameter, trained ones and then frozen ones
    modules: dict[str, list[str]]  # what it showed of modules, see `FirstUses.modules`


class _Runs:
    """Runs steps, with a hook on every parameter that notes when its gradient is ready, or without; forward passes."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFn,
        parameters: list[tuple[str, nn.Parameter]],
        device: torch.device,
        accumulation_steps: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._model, self._batch, self._loss_fn = model, batch, loss_fn
        self._parameters = [parameter for _, parameter in parameters]
        self._frozen = [parameter for _, parameter in frozen(model)]
        self._device, self._accumulation_steps, self._autocast_dtype = device, accumulation_steps, autocast_dtype
        self._clock = clock_for(device)

    def observed_step(self) -> _Step:
        ready: dict[int, Moment] = {}

        def note(slot: int, _: Tensor) -> None:
            # Reentrant checkpointing computes a shared parameter's gradient in parts: the last one counts.
            ready.pop(slot, None)
            ready[slot] = self._clock.now()

        hooks = GradientHooks(self._parameters, note)
        try:
            start, forward_end, end = self._run(ready.clear)
        finally:
            hooks.remove()
        if not ready:
            raise MeasureError("the backward pass gave no parameter a gradient; does the loss depend on the model?")
        forward_s = self._clock.between_s(start, forward_end)
        ready_s = {slot: max(0.0, self._clock.between_s(forward_end, moment)) for slot, moment in ready.items()}
        backward_s = self._clock.between_s(forward_end, end)
        self._clock.forget()
        sizes = {slot: _wire_bytes(parameter) for slot, parameter in enumerate(self._parameters)}
        sparse = frozenset(slot for slot, parameter in enumerate(self._parameters) if _is_sparse(parameter.grad))
        return _Step(forward_s, backward_s, ready_s, tuple(ready), sizes, sparse)

    def plain_step(self) -> float:
        _, forward_end, end = self._run(lambda: None)
        backward_s = self._clock.between_s(forward_end, end)
        self._clock.forget()
        return backward_s

    def both_passes(self, begin: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        """As `Passes` says."""
        self._clear()
        called = self._clock.now()
        finish = begin()
        start = self._clock.now()
        self._forward().backward()
        end = self._clock.now()
        finish()
        finished = self._clock.now()
        self._clock.wait()
        found = self._clock.between_s(start, end), self._clock.between_s(called, finished)
        self._clock.forget()
        return found

    def observed_forward(self) -> _Forward:
        """Do a step up to its last backward pass; a parameter that no module uses is used from the start."""
        parameters = [*self._parameters, *self._frozen]
        with FirstUses(self._model, parameters, self._clock.now) as uses:
            start, _ = self._to_loss()
            end = self._clock.now()
        self._clock.wait()
        moments = uses.moments()
        first_use_s = {
            place: max(0.0, self._clock.between_s(start, moments[place])) if place in moments else 0.0
            for place in range(len(parameters))
        }
        forward_s = self._clock.between_s(start, end)
        self._clock.forget()
        return _Forward(forward_s, first_use_s, uses.modules())

    def reads(self) -> Reads:
        """Do a step, perhaps a forward pass besides, and return what it read."""

        def forward() -> Tensor:
            self._clear()
            return self._forward()

        return find_reads(self._model, forward)

    def _run(self, before_last_backward: Callable[[], object]) -> tuple[Moment, Moment, Moment]:
        """Do one step; return when it began, when the last forward pass had ended, and when all had."""
        start, loss = self._to_loss()
        before_last_backward()
        forward_end = self._clock.now()
        loss.backward()
        end = self._clock.now()
        self._clock.wait()
        return start, forward_end, end

    def _to_loss(self) -> tuple[Moment, Tensor]:
        """Do all of a step before its last backward pass; return when it began, and its loss."""
        self._clear()
        start = self._clock.now()
        for _ in range(self._accumulation_steps - 1):
            self._forward().backward()
        return start, self._forward()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._clock.wait()

    def _forward(self) -> Tensor:
        autocast = (
            torch.autocast(self._device.type, self._autocast_dtype)
            if self._autocast_dtype
            else contextlib.nullcontext()
        )
        with autocast:
            return run_to_loss(self._model, self._batch, self._loss_fn)


def _wire_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter's gradient as it travels; one that is not there travels as zeros."""
    gradient = parameter.grad if parameter.grad is not None else parameter
    # Of a parameter that tensor parallelism has cut only this rank's part travels.
    gradient = getattr(gradient, "to_local", lambda: gradient)()
    if _is_sparse(gradient):
        gradient = gradient.coalesce()
        parts = (gradient.indices(), gradient.values())
        return sum(part.numel() * part.element_size() for part in parts)
    return gradient.numel() * gradient.element_size()


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.sparse_coo


def _only_device(parameters: list[tuple[str, nn.Parameter]]) -> torch.device:
    first_name, first = parameters[0]
    for name, parameter in parameters:
        if parameter.device != first.device:
            raise MeasureError(
                f"parameter {quote(name)} is on {parameter.device}, {quote(first_name)} on {first.device}; "
                "one clock cannot time several devices"
            )
    return first.device


@contextlib.contextmanager
def _as_it_was(
    model: nn.Module, batch: Any, parameters: list[tuple[str, nn.Parameter]], device: torch.device
) -> Iterator[None]:
    """Put gradients, buffers and random generators back on the way out."""
    inputs = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_leaf]
    gradients = [(tensor, tensor.grad) for tensor in [*(parameter for _, parameter in parameters), *inputs]]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # A model may also put another tensor in a buffer's place.
    places = [(module, dict(module._buffers)) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, held in places:
            module._buffers.update(held)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for tensor, gradient in gradients:
            tensor.grad = gradient


def _combine(
    name: str,
    parameters: list[tuple[str, nn.Parameter]],
    seen: list[tuple[_Step, float]],
    forwards: list[_Forward],
    source: dict[str, Any],
) -> ModelTrace:
    """Make one trace of the medians of all steps, scaled to what the backward pass takes without hooks."""
    steps = [step for step, _ in seen]
    hooked_s = median(step.backward_s for step in steps)
    plain_s = median(plain_s for _, plain_s in seen)
    factor = plain_s / hooked_s
    used = {slot for step in steps for slot in step.order}
    # In a step in which a gradient did not come it was ready from the start.
    ready_s = {slot: median(step.ready_s.get(slot, 0.0) for step in steps) * factor for slot in used}
    orders = {step.order for step in steps}
    order = list(steps[-1].order) if len(orders) == 1 else sorted(ready_s, key=lambda slot: ready_s[slot])
    unused = [slot for slot in steps[0].grad_bytes if slot not in used]
    forward_s = median(step.forward_s for step in steps)
    parts_s = _split(forwards, used, [*unused, *order], forward_s)
    # Medians of steps with one order never fall; those of changing orders are sorted above.
    layers = layers_of(
        (
            (parameters[slot][0], ready_s.get(slot, 0.0), int(median(step.grad_bytes[slot] for step in steps)))
            for slot in [*unused, *order]
        ),
        forward_s={parameters[slot][0]: part_s for slot, part_s in parts_s.items()},
    )
    not_reached = set(source["unused"]).difference(source["unread"])
    resting = resting_parts(
        {name: _wire_bytes(one) for name, one in parameters if not one.requires_grad or name in not_reached},
        {parameters[slot][0]: part_s for slot, part_s in parts_s.items()},
        [parameters[slot][0] for slot in order],
        {name: median(one.first_use_s[slot] for one in forwards) for slot, (name, _) in enumerate(parameters)},
        median(one.forward_s for one in forwards),
    )
    source = {
        **source,
        "spread": {
            "forward_s": _quartiles([step.forward_s for step in steps]),
            "backward_s": _quartiles([plain_s for _, plain_s in seen]),
        },
        "hooks_cost": 1 / factor - 1,
        "sparse": [parameters[slot][0] for slot in sorted(frozenset().union(*(step.sparse for step in steps)))],
        "num_orders": len(orders),
        "frozen": [part for part in resting if part["name"] not in not_reached],
        "not_reached": [part for part in resting if part["name"] in not_reached],
    }
    return ModelTrace(name, forward_s, layers, source)


def _split(forwards: list[_Forward], used: set[int], order: list[int], forward_s: float) -> dict[int, float]:
    """Return what each layer takes of the forward pass, by the medians of first uses, scaled to one without hooks."""
    hooked_s = median(forward.forward_s for forward in forwards)
    factor = forward_s / hooked_s if hooked_s else 0.0
    first_use_s = {slot: median(forward.first_use_s[slot] for forward in forwards) * factor for slot in used}
    return split_forward(first_use_s, order, forward_s)


def _quartiles(values: list[float]) -> list[float]:
    return quantiles(values, n=4) if len(values) > 1 else values * 3
