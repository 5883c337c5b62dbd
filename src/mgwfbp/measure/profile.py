"""A trace from a profile that was recorded anyway: the export of torch.profiler (Kineto), of one GPU or of DDP."""

import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from mgwfbp.errors import FormatError
from mgwfbp.files import naming
from mgwfbp.measure.analytic import ready_order
from mgwfbp.measure.kineto import RECORD, Event, Profile, read_profile
from mgwfbp.measure.workload import Workload, trainable
from mgwfbp.trace import ModelTrace, layers_of
from mgwfbp.units import plural, printable, quote

__all__ = ["trace_from_profile"]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One backward pass, and the forward pass before it."""

    forward_s: float  # when it started
    backward_s: float  # when it started
    gradients: tuple[Event, ...]


def trace_from_profile(path: str | os.PathLike[str], workload: Workload) -> ModelTrace:
    """Make a trace of the steps in a profile; gradients are matched to the model's parameters by order and shape.

    On a GPU a gradient is ready when the work that was launched before autograd accumulated it has ended (all-reduces,
    and streams that only copy, apart); on a CPU when it was accumulated. The first step is dropped if there are others,
    medians make the trace. Gradients of no parameter (an input that asks for one) are left out and counted in
    ``source``.

    Args:
        path: what ``export_chrome_trace`` wrote, of at least one whole step, with ``record_shapes=True``.
        workload: the model that the profile is of, on the meta device.

    Raises:
        FileError: where the file cannot be read.
        FormatError: where it is no profile, does not hold enough, or is of another model.
        MeasureError: where the model cannot be run without values.
    """
    order = ready_order(workload)
    parameters = dict(trainable(workload.model))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    profile = read_profile(path)
    with naming(path):
        passes = _whole_passes(profile, Counter(shapes[name] for name in order))
        used = passes[1:] if len(passes) > 1 else passes
        seen = [_moments(profile, one) for one in used]
        names = _match(passes[-1].gradients, order, shapes)
        sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
        unused = [name for name in sizes if name not in order]
        ready_s = {name: median(ready[place] for _, ready in seen) for place, name in enumerate(names)}
        layers = layers_of((name, ready_s.get(name, 0.0), sizes[name]) for name in [*unused, *names])
        known = set(shapes.values())
        source = {
            "measured": "profile",
            "file": printable(os.path.basename(path)),  # noqa: PTH119 - a name, not a file
            "device": "gpu" if profile.gpu else "cpu",
            "steps": len(used),
            "unused": unused,
            "foreign_gradients": sum(event.shape not in known for event in profile.gradients),
        }
        return ModelTrace(workload.name, median(forward_s for forward_s, _ in seen), tuple(layers), source)


def _whole_passes(profile: Profile, wanted: Counter[tuple[int, ...]]) -> list[_Pass]:
    """Cut the gradients into backward passes and return those that hold one for every parameter that gets one.

    Within a backward pass no operation runs outside autograd's engine; between two there always is one.
    """
    passes = []
    for num_before, run in groupby(profile.gradients, key=lambda event: bisect_right(profile.outside_s, event.start_s)):
        gradients = tuple(event for event in run if event.shape in wanted)
        if num_before and Counter(event.shape for event in gradients) == wanted:
            passes.append(_begin(profile, profile.outside_s[num_before - 1], gradients))
    if not passes:
        found = Counter(event.shape for event in profile.gradients)
        odd = next((shape for shape in found if shape not in wanted), None)
        hint = f"the model has {wanted.total()}"
        if odd is not None:
            hint = f"a gradient of shape {quote(list(odd))} is not the model's"
        raise FormatError(
            f"no whole backward pass among {plural(found.total(), 'gradient')} ({hint}): another model, or less than "
            f"a step? {RECORD}"
        )
    return passes


def _begin(profile: Profile, last_outside_s: float, gradients: tuple[Event, ...]) -> _Pass:
    """Find where a step began: after the gradients before it, the optimizer and the loading of data."""
    first_s = gradients[0].start_s
    engine = bisect_right(profile.engine_s, last_outside_s)
    backward_s = min(profile.engine_s[engine], first_s) if engine < len(profile.engine_s) else first_s
    earlier = bisect_left(profile.gradients, first_s, key=lambda event: event.start_s)
    since_s = profile.gradients[earlier - 1].end_s if earlier else -math.inf
    between = bisect_right(profile.between_s, backward_s)
    if between:
        since_s = max(since_s, profile.between_s[between - 1])
    forward = bisect_left(profile.forward_s, since_s)
    if forward < len(profile.forward_s):
        return _Pass(min(profile.forward_s[forward], backward_s), backward_s, gradients)
    return _Pass(backward_s, backward_s, gradients)


def _moments(profile: Profile, one: _Pass) -> tuple[float, list[float]]:
    """Return the forward time of a step and when, after it, each gradient was ready."""
    if not profile.gpu:
        return one.backward_s - one.forward_s, [event.end_s - one.backward_s for event in one.gradients]
    # The same moments, as the GPU reached them.
    first = bisect_left(profile.gpu, one.forward_s, key=lambda work: work.launched_s)
    last = bisect_right(profile.gpu, one.gradients[-1].end_s, key=lambda work: work.launched_s)
    step = profile.gpu[first:last]
    launched_s = [work.launched_s for work in step]
    start_s = step[0].start_s if step else one.forward_s
    done_s = [start_s, *accumulate((work.end_s for work in step), max)]
    backward_s = done_s[bisect_right(launched_s, one.backward_s)]
    ready_s = [done_s[bisect_right(launched_s, event.end_s)] for event in one.gradients]
    return backward_s - start_s, [max(0.0, moment_s - backward_s) for moment_s in ready_s]


def _match(gradients: Sequence[Event], order: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Name the gradients: where shapes repeat, in the order in which autograd would make them ready."""
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name in reversed(order):
        waiting.setdefault(shapes[name], []).append(name)
    return [waiting[event.shape or ()].pop() for event in gradients]
