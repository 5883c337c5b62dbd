"""A trace from a profile that was recorded anyway: the export of torch.profiler (Kineto), of one GPU or of DDP."""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from mgwfbp.errors import FormatError
from mgwfbp.measure.analytic import ready_order
from mgwfbp.measure.workload import Workload, trainable
from mgwfbp.record import Fields, naming, read_json
from mgwfbp.trace import LayerTrace, ModelTrace
from mgwfbp.units import quote

__all__ = ["trace_from_profile"]

# Profiles are far larger than our own files.
MAX_PROFILE_BYTES = 2**30

RECORD = (
    "record one with `with torch.profiler.profile(record_shapes=True) as prof: ...` around a few whole training steps "
    'and `prof.export_chrome_trace("profile.json")`'
)

_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_BETWEEN_STEPS = ("Optimizer.step", "Optimizer.zero_grad")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class _Event:
    """One thing the profiler saw, in seconds."""

    name: str
    start_s: float
    end_s: float
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Profile:
    """What is needed of a profile, each in order of time."""

    operations: list[_Event]  # on the host, outside autograd
    engine: list[_Event]  # autograd evaluating a function
    gradients: list[_Event]  # autograd accumulating a gradient
    between: list[_Event]  # the optimizer
    launches: list[tuple[float, float, float]]  # GPU work: launched, started, ended


def trace_from_profile(path: str | os.PathLike[str], workload: Workload) -> ModelTrace:
    """Make a trace of the steps in a profile; gradients are matched to the model's parameters by order and shape.

    On a GPU a gradient is ready when the work that was launched before autograd accumulated it has ended (all-reduces
    apart); on a CPU when it was accumulated. The first step is dropped if there are others, medians make the trace.
    ``workload`` holds the model the profile is of, on the meta device. A profile that does not hold enough is refused.
    """
    data = read_json(path, max_bytes=MAX_PROFILE_BYTES)
    with naming(path):
        profile = _parse(Fields(data))
        order = ready_order(workload)
        shapes = {name: tuple(parameter.shape) for name, parameter in trainable(workload.model)}
        steps = _whole_steps(profile, Counter(shapes[name] for name in order))
        seen = [_step(profile, steps, index) for index in range(len(steps))]
        used = seen[1:] if len(seen) > 1 else seen
        names = _match(steps[-1], order, shapes)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in trainable(workload.model)}
    ready_s = [median(ready[place] for _, ready in used) for place in range(len(names))]
    layers, previous_s = [LayerTrace(name, 0.0, size) for name, size in sizes.items() if name not in names], 0.0
    for name, moment_s in zip(names, accumulate(ready_s, max), strict=True):
        layers.append(LayerTrace(name, moment_s - previous_s, sizes[name]))
        previous_s = moment_s
    source = {
        "measured": "profile",
        "file": os.path.basename(path),  # noqa: PTH119 - a name, not a file
        "device": "gpu" if profile.launches else "cpu",
        "steps": len(used),
    }
    return ModelTrace(workload.name, median(forward_s for forward_s, _ in used), tuple(layers), source)


def _parse(fields: Fields) -> _Profile:
    operations, engine, gradients, between = [], [], [], []
    launched: dict[int, float] = {}
    on_gpu: list[tuple[int, float, float]] = []
    for raw in fields.items("traceEvents"):
        if not isinstance(raw, dict) or raw.get("ph") != "X":
            continue
        name, category, details = str(raw.get("name")), raw.get("cat"), raw.get("args") or {}
        start_s, end_s = _moment(raw, "ts"), _moment(raw, "ts") + _moment(raw, "dur")
        if category in _ON_GPU:
            if "nccl" not in name.lower():
                on_gpu.append((details.get("correlation", -1), start_s, end_s))
        elif category in ("cuda_runtime", "cuda_driver"):
            launched[details.get("correlation", -1)] = start_s
        elif name.startswith(_BETWEEN_STEPS):
            between.append(_Event(name, start_s, end_s))
        elif name == _ACCUMULATE:
            gradients.append(_Event(name, start_s, end_s, _shape(details)))
        elif name.startswith(_ENGINE):
            engine.append(_Event(name, start_s, end_s))
        elif category == "cpu_op":
            operations.append(_Event(name, start_s, end_s))
    launches = [(launched[work], start_s, end_s) for work, start_s, end_s in on_gpu if work in launched]
    if not launches and any("cudnn" in event.name or "cuda" in event.name for event in operations):
        raise FormatError(f"the model ran on a GPU but the profile holds no kernels (CUDA activity was off); {RECORD}")
    for events in (operations, engine, gradients, between):
        events.sort(key=lambda event: event.start_s)
    return _Profile(operations, engine, gradients, between, sorted(launches))


def _moment(raw: dict[str, Any], field: str) -> float:
    value = raw.get(field, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"traceEvents: {field} of {quote(raw.get('name'))} is {quote(value)}, expected a number")
    return value * 1e-6


def _shape(details: dict[str, Any]) -> tuple[int, ...] | None:
    shapes = details.get("Input Dims")
    return tuple(shapes[0]) if isinstance(shapes, list) and shapes and isinstance(shapes[0], list) else None


def _whole_steps(profile: _Profile, wanted: Counter[tuple[int, ...]]) -> list[list[_Event]]:
    """Cut the gradients into whole backward passes: runs of as many as the model has, of the same shapes."""
    gradients, count = profile.gradients, sum(wanted.values())
    if not gradients:
        raise FormatError(f"the profile holds no backward pass (no {_ACCUMULATE}); {RECORD}")
    if any(event.shape is None for event in gradients):
        raise FormatError(f"the profile holds no shapes; {RECORD}")
    steps, place = [], 0
    while place + count <= len(gradients):
        run = gradients[place : place + count]
        if Counter(event.shape for event in run) == wanted:
            steps.append(run)
            place += count
        else:
            place += 1  # the profile starts within a step
    if not steps:
        found = Counter(event.shape for event in gradients)
        odd = next((shape for shape in found if shape not in wanted), None)
        hint = f"a gradient of shape {list(odd)} is not the model's" if odd is not None else f"the model has {count}"
        raise FormatError(f"no whole backward pass among {len(gradients)} gradients ({hint}): another model? {RECORD}")
    return steps


def _step(profile: _Profile, steps: Sequence[Sequence[_Event]], index: int) -> tuple[float, list[float]]:
    """Return the forward time of a step and when, after it, each gradient was ready."""
    gradients = steps[index]
    previous_s = steps[index - 1][-1].end_s if index else float("-inf")
    backward_s = next(event.start_s for event in profile.engine if event.start_s >= previous_s)
    since_s = max(
        (event.end_s for event in profile.between if previous_s < event.end_s <= backward_s), default=previous_s
    )
    forward = [event.start_s for event in profile.operations if since_s <= event.start_s <= backward_s]
    forward_start_s = forward[0] if forward else backward_s
    if not profile.launches:
        return backward_s - forward_start_s, [event.end_s - backward_s for event in gradients]
    # The same three moments, as the GPU reached them.
    launch_s = [launched for launched, _, _ in profile.launches]
    done_s = list(accumulate((end for _, _, end in profile.launches), max))
    first = bisect_right(launch_s, forward_start_s)
    before = bisect_right(launch_s, backward_s)
    gpu_start_s = profile.launches[first][1] if first < len(launch_s) else forward_start_s
    gpu_backward_s = max(gpu_start_s, done_s[before - 1]) if before else gpu_start_s
    ready_s = [done_s[max(0, bisect_right(launch_s, event.end_s) - 1)] for event in gradients]
    return gpu_backward_s - gpu_start_s, [max(0.0, moment_s - gpu_backward_s) for moment_s in ready_s]


def _match(gradients: Sequence[_Event], order: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Name the gradients: where shapes repeat, in the order in which autograd would make them ready."""
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name in reversed(order):
        waiting.setdefault(shapes[name], []).append(name)
    return [waiting[event.shape or ()].pop() for event in gradients]
