"""What a processor we do not have would take: the paper's T_b(p, G, theta), Eq. (18), by counting operations."""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mgwfbp.errors import MeasureError
from mgwfbp.measure.autocast import autocast_as_cuda
from mgwfbp.measure.devices import Device
from mgwfbp.measure.forward import FirstUses, resting_parts, split_forward
from mgwfbp.measure.meta import call
from mgwfbp.measure.modules import trained_dtypes
from mgwfbp.measure.operations import flops_of, takes_no_time
from mgwfbp.measure.reads import find_reads
from mgwfbp.measure.workload import Workload, frozen, trainable
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import format_dtype

__all__ = ["OperationCount", "count_operations", "measure_analytic", "ready_order"]


_COUNTER = Device("counter", 1.0, 1.0, 0.0, "counts only", 1.0, ("float16", "bfloat16"))


@dataclass(frozen=True, slots=True)
class OperationCount:
    """Floating-point operations of one step (a multiply and an add are two), and kernels."""

    forward_flops: int
    backward_flops: int
    kernels: int


class _VirtualClock(TorchDispatchMode):
    """Lets time pass for every operation as it is dispatched, without computing anything.

    An operation takes the longer of its arithmetic at the device's rate for the type of its operands and its traffic at
    the device's bandwidth, and at least one empty kernel. Views take nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.now_s = 0.0
        self.flops = 0
        self.kernels = 0
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = call(func, args, kwargs)
        if takes_no_time(func):
            return out
        flops = flops_of(func, args, kwargs, out)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if num_bytes:
            device = self._device
            rate = device.matrix_flops_per_s(format_dtype(tensors[0].dtype)) if flops else 1.0
            self.flops += flops
            self.kernels += 1
            self.now_s += max(flops / rate, num_bytes / device.bytes_per_s, device.kernel_s)
        return out


def measure_analytic(
    workload: Workload,
    device: Device,
    *,
    images_per_second: float | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> ModelTrace:
    """Count a step of a model on the meta device and say when each gradient would be ready on ``device``.

    Needs no weights, no data and no such processor. The order of gradients is autograd's own.

    Ignored: kernels that run beside one another or are fused (attention is its products and a softmax), caches, how
    well a shape suits the processor.

    Args:
        workload: the model and its batch, on the meta device.
        device: the processor, one of `DEVICES` or one of your own.
        images_per_second: the speed of one worker that was measured or published; all times are scaled to meet it.
        autocast_dtype: where given, the forward pass runs under autocast as CUDA's: matrices in 16 bits go at the
            device's rate for them, traffic has the size that it has then, gradients are the parameters' own.

    Returns:
        The trace; ``source`` says how it was made, and of frozen parameters and modules what `measure_backward` says.

    Raises:
        MeasureError: where the model cannot be counted without values, is not on the meta device, or the device has no
            rate for ``autocast_dtype``.
    """
    if autocast_dtype is not None:
        device.matrix_flops_per_s(format_dtype(autocast_dtype))  # or an error, before anything is counted
    trace, count = _run(workload, device, autocast_dtype)
    factor = 1.0
    if images_per_second is not None:
        if not 0 < images_per_second < math.inf:
            raise MeasureError(f"images_per_second is {images_per_second}, expected above 0 and finite")
        factor = workload.batch_size / images_per_second / trace.compute_s
    source = {
        **trace.source,
        "measured": "analytic",
        "device": device.name,
        "device_source": f"{device.source}; {device.half_source}" if autocast_dtype else device.source,
        "autocast": format_dtype(autocast_dtype) if autocast_dtype else None,
        "batch_size": workload.batch_size,
        "forward_flops": count.forward_flops,
        "backward_flops": count.backward_flops,
        "images_per_second": images_per_second,
        "scaled_by": factor,
        "torch": torch.__version__,
    }
    return replace(trace.scaled(factor), source=source)


def count_operations(workload: Workload) -> OperationCount:
    """Count the floating-point operations of one step with torch's own counter.

    Args:
        workload: the model and its batch, on the meta device.

    Raises:
        MeasureError: where the model cannot be counted without values.
    """
    return _run(workload, _COUNTER)[1]


def ready_order(workload: Workload) -> list[str]:
    """Return the parameters that get a gradient, in the order in which autograd makes them ready.

    Args:
        workload: the model and its batch, on the meta device.

    Raises:
        MeasureError: where the model cannot be run without values.
    """
    trace, _ = _run(workload, _COUNTER)
    unused = set(trace.source["unused"])
    return [layer.name for layer in trace.layers if layer.name not in unused]


def _run(
    workload: Workload, device: Device, autocast_dtype: torch.dtype | None = None
) -> tuple[ModelTrace, OperationCount]:
    parameters = list(trainable(workload.model))
    if not parameters:
        raise MeasureError("the model has no parameter that requires a gradient: nothing to count")
    if any(parameter.device.type != "meta" for _, parameter in parameters):
        raise MeasureError("the model is not on the meta device: build it with device='meta'")
    ready_s: dict[str, float] = {}
    clock = _VirtualClock(device)
    rest = dict(frozen(workload.model))
    every = [*parameters, *rest.items()]
    uses = FirstUses(workload.model, [parameter for _, parameter in every], lambda: clock.now_s)

    def note(name: str) -> Any:
        def ready(_: Tensor) -> None:
            ready_s.pop(name, None)
            ready_s[name] = clock.now_s

        return ready

    def forward() -> Tensor:
        with autocast_as_cuda(autocast_dtype) if autocast_dtype else nullcontext():
            return workload.loss()

    before = [parameter.grad for _, parameter in parameters]
    hooks = [parameter.register_post_accumulate_grad_hook(note(name)) for name, parameter in parameters]
    try:
        for _, parameter in parameters:
            parameter.grad = None  # one that is there is added to, which would count
        try:
            with clock:
                with uses:
                    loss = forward()
                forward_s, forward_flops = clock.now_s, clock.flops
                loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        with _VirtualClock(device):
            reads = find_reads(workload.model, forward)
    finally:
        for (_, parameter), gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    if not ready_s:
        raise MeasureError("the backward pass gave no parameter a gradient; does the loss depend on the model?")
    sizes = {name: parameter.nbytes for name, parameter in every}
    unused = [name for name, _ in parameters if name not in ready_s]
    moments = {**dict.fromkeys(unused, forward_s), **ready_s}
    began_s = {every[place][0]: moment_s for place, moment_s in uses.moments().items()}
    first_use_s = {name: began_s.get(name, 0.0) for name in sizes}
    parts_s = split_forward({name: first_use_s[name] for name in ready_s}, list(moments), forward_s)
    layers = layers_of([(name, moment_s, sizes[name]) for name, moment_s in moments.items()], forward_s, parts_s)
    modules = uses.modules()
    unread = reads.unread(workload.model, modules["not_called"], unused)
    not_reached = set(unused).difference(unread)
    resting_bytes = {name: sizes[name] for name in sizes if name in rest or name in not_reached}
    resting = resting_parts(resting_bytes, parts_s, list(ready_s), first_use_s, forward_s)
    source = {
        "unused": unused,
        "unread": unread,
        **modules,
        **reads.modules(),
        "dtypes": trained_dtypes(workload.model),
        "frozen": [part for part in resting if part["name"] in rest],
        "not_reached": [part for part in resting if part["name"] in not_reached],
    }
    trace = ModelTrace(workload.name, forward_s, layers, source)
    return trace, OperationCount(forward_flops, clock.flops - forward_flops, clock.kernels)
