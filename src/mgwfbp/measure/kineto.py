"""What a profile of torch.profiler (a Kineto export) holds that a trace can be made of: `read_profile`."""

import json
import os
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mgwfbp.errors import FormatError
from mgwfbp.files import MAX_VALUES, count_values, naming, read_text
from mgwfbp.units import quote

__all__ = ["RECORD", "Event", "GpuWork", "Profile", "make_event", "read_events", "read_profile"]

# Profiles are far larger than our own files, and have some 10 bytes for each value.
MAX_PROFILE_BYTES, BYTES_OF_A_VALUE = 2**30, 5
# Times count from the start of the machine or of an epoch: no profile is 30,000 years from either.
FARTHEST_US = 1e18

RECORD = (
    "record one with `with torch.profiler.profile(record_shapes=True) as prof: ...` around a few whole training steps "
    'and `prof.export_chrome_trace("profile.json")`'
)

_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# What comes between two steps. A step of the optimizer may also hold a whole step (a closure), so its end counts.
_BETWEEN_STEPS = ("Optimizer.step", "enumerate(DataLoader)")
_ZERO_GRAD = "Optimizer.zero_grad"  # before the forward pass, or after it
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Parts of names that operations have on a GPU alone.
_GPU_OPERATIONS = ("cudnn", "cuda", "nccl", "miopen")

_Thread = tuple[Hashable, Hashable]  # process, thread


@dataclass(frozen=True, slots=True)
class Event:
    """One thing the profiler saw, in seconds."""

    start_s: float
    end_s: float
    thread: _Thread
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class GpuWork:
    """One kernel or copy, in seconds."""

    launched_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _OnGpu:
    """One kernel or copy, before it is known what launched it."""

    event: Event
    is_kernel: bool
    correlation: int  # the number of its launch
    stream: str

    @property
    def place(self) -> tuple[Hashable, str]:
        return self.event.thread[0], self.stream


@dataclass(frozen=True, slots=True)
class Profile:
    """What is needed of a profile, each in order of time."""

    outside_s: list[float]  # starts of operations outside autograd, on the thread that runs the model
    forward_s: list[float]  # those of them that no optimizer made
    engine_s: list[float]  # starts of the functions that autograd evaluated
    gradients: list[Event]  # autograd accumulating a gradient
    between_s: list[float]  # ends of what comes between two steps
    gpu: list[GpuWork]  # by launch


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile; one that does not hold enough is refused with the line of code that records a good one."""
    events = read_events(path)
    with naming(path):
        return _parse(events)


def read_events(path: str | os.PathLike[str]) -> list[Any]:
    """Return the events of a profile as they stand in its file."""
    text = read_text(path, max_bytes=MAX_PROFILE_BYTES)
    with naming(path):
        return _events(text)


def _events(text: str) -> list[Any]:
    """Return the events of a profile; others write it, so NaN and repeated fields, which it may hold, pass."""
    if count_values(text) > max(MAX_VALUES, len(text) // BYTES_OF_A_VALUE):
        raise FormatError(f"more values than a profile of this size has; {RECORD}")
    try:
        data = json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"not JSON ({error}): was the export cut short? {RECORD}") from None
    except ValueError:  # an integer of more digits than Python converts
        raise FormatError(f"not JSON that can be read: a number of thousands of digits; {RECORD}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise FormatError(f"not a profile (no list 'traceEvents'); {RECORD}")
    return events


def _parse(events: list[Any]) -> Profile:
    operations: list[Event] = []
    engine: list[Event] = []
    gradients: list[Event] = []
    between: list[Event] = []
    zero_grad: list[Event] = []
    gpu_only = False
    launched_s: dict[int, list[float]] = {}
    on_gpu: list[_OnGpu] = []
    for raw in events:
        if not isinstance(raw, dict) or raw.get("ph") != "X":
            continue
        name, category = _word(raw.get("name")), raw.get("cat")
        details = raw["args"] if isinstance(raw.get("args"), dict) else {}
        correlation = details.get("correlation")
        if category in _ON_GPU:
            if "nccl" not in name.lower():
                launch = correlation if isinstance(correlation, int) else -1
                on_gpu.append(_OnGpu(make_event(raw), category == "kernel", launch, _word(details.get("stream"))))
        elif category in _LAUNCHES:
            if isinstance(correlation, int):
                launched_s.setdefault(correlation, []).append(make_event(raw).start_s)
        elif name.startswith(_BETWEEN_STEPS):
            between.append(make_event(raw))
        elif name.startswith(_ZERO_GRAD):
            zero_grad.append(make_event(raw))
        elif name == _ACCUMULATE:
            gradients.append(make_event(raw, _shape(details)))
        elif name.startswith(_ENGINE):
            engine.append(make_event(raw))
        elif category == "cpu_op":
            operations.append(make_event(raw))
            gpu_only = gpu_only or any(part in name for part in _GPU_OPERATIONS)
    _check_enough(gradients, gpu_only=gpu_only, has_kernels=any(work.is_kernel for work in on_gpu))
    outside = _outside(operations, engine)
    return Profile(
        outside_s=[event.start_s for event in outside],
        forward_s=[event.start_s for event in _not_within(outside, zero_grad)],
        engine_s=sorted(event.start_s for event in engine),
        gradients=sorted(gradients, key=lambda event: event.start_s),
        between_s=sorted(event.end_s for event in between),
        gpu=_gpu_work(on_gpu, launched_s),
    )


def make_event(raw: dict[str, Any], shape: tuple[int, ...] | None = None) -> Event:
    """Return an event in seconds."""
    # The clocks of host and GPU are not quite one: what seems to end before it starts lasts no time.
    start_s, duration_s = _seconds(raw, "ts"), max(0.0, _seconds(raw, "dur"))
    return Event(start_s, start_s + duration_s, (_word(raw.get("pid")), _word(raw.get("tid"))), shape)


def _seconds(raw: dict[str, Any], field: str) -> float:
    value = raw.get(field, 0.0)  # what lasts no time may come without "dur"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -FARTHEST_US <= value <= FARTHEST_US:
        expected = "a number" if not is_number else f"microseconds within {FARTHEST_US:g} of 0"
        raise FormatError(f"traceEvents: {field} of {quote(raw.get('name'))} is {quote(value)}, expected {expected}")
    return float(value) * 1e-6


def _word(value: object) -> str:
    """Return a name or a number as it stands in the profile, and whatever else there is as something."""
    return value if isinstance(value, str) else quote(value)


def _shape(details: dict[str, Any]) -> tuple[int, ...] | None:
    shapes = details.get("Input Dims")
    if not isinstance(shapes, list) or not shapes or not isinstance(shapes[0], list):
        return None
    return tuple(shapes[0]) if all(isinstance(size, int) for size in shapes[0]) else None


def _check_enough(gradients: Sequence[Event], *, gpu_only: bool, has_kernels: bool) -> None:
    if not gradients:
        raise FormatError(f"the profile holds no backward pass (no {_ACCUMULATE}); {RECORD}")
    if any(event.shape is None for event in gradients):
        raise FormatError(f"the profile holds no shapes; {RECORD}")
    if gpu_only and not has_kernels:
        raise FormatError(f"the model ran on a GPU but the profile holds no kernels (CUDA activity was off); {RECORD}")
    processes = {event.thread[0] for event in gradients}
    if len(processes) > 1:
        raise FormatError(f"the profile holds the gradients of {len(processes)} processes, expected those of one rank")


def _outside(operations: Sequence[Event], engine: Sequence[Event]) -> list[Event]:
    """Return the operations outside autograd's engine, in order, of the thread that has most of them.

    That thread runs the model. On a GPU the engine has a thread of its own; others carry messages.
    """
    threads: dict[_Thread, list[Event]] = {}
    for event in operations:
        threads.setdefault(event.thread, []).append(event)
    outside = [
        _not_within(own, [event for event in engine if event.thread == thread]) for thread, own in threads.items()
    ]
    return max(outside, key=len, default=[])


def _not_within(events: Sequence[Event], spans: Sequence[Event]) -> list[Event]:
    """Return the events, in order, that start in none of the spans."""
    spans = sorted(spans, key=lambda span: span.start_s)
    starts_s = [span.start_s for span in spans]
    # Spans may nest, so the last one to start need not be the last to end.
    ends_s = list(accumulate((span.end_s for span in spans), max))

    def within(event: Event) -> bool:
        before = bisect_right(starts_s, event.start_s)
        return before > 0 and event.start_s < ends_s[before - 1]

    return sorted((event for event in events if not within(event)), key=lambda event: event.start_s)


def _gpu_work(on_gpu: Sequence[_OnGpu], launched_s: dict[int, list[float]]) -> list[GpuWork]:
    """Join what ran on the GPU with what launched it; streams that only copy, such as the next batch, are left out."""
    computing = {one.place for one in on_gpu if one.is_kernel}
    work = []
    for one in on_gpu:
        launches, event = launched_s.get(one.correlation), one.event
        if launches and one.place in computing:
            # Numbers of launches may come again: the last one before the work began launched it.
            launch_s = max((moment for moment in launches if moment <= event.start_s), default=min(launches))
            work.append(GpuWork(launch_s, event.start_s, event.end_s))
    return sorted(work, key=lambda work: work.launched_s)
