"""Steps of FSDP2 in a profile that was recorded anyway: the export of torch.profiler (Kineto): `steps_from_profile`.

[Note: what FSDP2 leaves in a profile]
Torch marks what FSDP2 does with ranges on the host, each with the names of the modules of its group in brackets and
none for the root's: ``FSDP::root_pre_forward`` begins a forward pass, ``FSDP::pre_forward (h.0)`` and
``FSDP::pre_backward (h.0)`` begin a group, ``FSDP::all_gather (h.0)`` and ``FSDP::post_backward_reduce (h.0)`` start a
message. On a GPU the message is the kernel of nccl that was launched inside of the range; over gloo it is a range of
gloo's own thread (``gloo:all_gather``; a reduce-scatter of gloo is ``gloo:all_reduce``) that begins inside of it. What
a group computes is what was launched on the busiest stream, or on a host ran, from when it begins to when the next one
does; the root's parts between groups go with the group before them. Groups that come before all that is trained begin
no backward pass.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mgwfbp.errors import FormatError
from mgwfbp.files import naming
from mgwfbp.fsdp_step import FsdpStep
from mgwfbp.fsdp_units import ROOT
from mgwfbp.measure.kineto import Event, make_event, read_events

__all__ = ["steps_from_profile"]

RECORD = (
    "record one with `with torch.profiler.profile() as prof: ...` around a few whole steps of FSDP2 and "
    '`prof.export_chrome_trace("profile.json")`'
)
_RANGE = re.compile(
    r"FSDP::(root_pre_forward|pre_forward|pre_backward|all_gather|post_backward_reduce|post_backward_reshard|"
    r"root_post_backward_callback)(?: \((.*)\))?"
)
_PREFETCH = "FSDP::forward_prefetch"
_GLOO = ("gloo:all_gather", "gloo:all_reduce", "gloo:reduce_scatter")
_ON_GPU, _LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
Moments = tuple[float, float]  # start and end


@dataclass(frozen=True, slots=True)
class _Range:
    """What FSDP2 did on the host, for which group."""

    what: str
    group: tuple[str, ...]
    event: Event


@dataclass(frozen=True, slots=True)
class _OnGpu:
    """A kernel or a copy, and when it was launched."""

    launched_s: float
    event: Event
    stream: str
    is_message: bool  # of nccl


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is needed of a profile, each in order of time."""

    ranges: list[_Range]
    prefetches: list[Event]
    gloo: list[Event]  # messages, on gloo's threads
    nccl: list[_OnGpu]  # messages on a GPU
    work: list[_OnGpu]  # of the busiest stream of a GPU; none on a host


def steps_from_profile(path: str | os.PathLike[str]) -> list[FsdpStep]:
    """Return the whole steps of FSDP2 in a profile, each from the start of its first gather or computation.

    Args:
        path: what ``export_chrome_trace`` wrote, of one rank.

    Returns:
        The steps; sizes and memory, of which a profile says nothing, are 0.

    Raises:
        FileError: where the file cannot be read.
        FormatError: where it is no profile, or holds no whole step of FSDP2.
    """
    events = read_events(path)
    with naming(path):
        seen = _parse(events)
        begins = [one.event.start_s for one in seen.ranges if one.what == "root_pre_forward"]
        steps = [_step(seen, start_s, end_s) for start_s, end_s in pairwise([*begins, float("inf")])]
        whole = [step for step in steps if step is not None]
        if not whole:
            raise FormatError(f"the profile holds no whole step of FSDP2 (no FSDP::post_backward_reduce); {RECORD}")
        return whole


def _parse(events: Sequence[Any]) -> _Seen:
    ranges, prefetches, gloo = list[_Range](), list[Event](), list[Event]()
    launched_s: dict[int, float] = {}
    on_gpu: list[tuple[int, str, str, Event]] = []
    for raw in events:
        if not isinstance(raw, dict) or raw.get("ph") != "X" or not isinstance(raw.get("name"), str):
            continue
        name, category = raw["name"], raw.get("cat")
        details = raw["args"] if isinstance(raw.get("args"), dict) else {}
        correlation = details.get("correlation")
        if category in _ON_GPU and isinstance(correlation, int):
            on_gpu.append((correlation, name, str(details.get("stream")), make_event(raw)))
        elif category in _LAUNCHES and isinstance(correlation, int):
            launched_s[correlation] = make_event(raw).start_s
        elif category == "user_annotation":  # those that Kineto repeats for the GPU have another
            if found := _RANGE.fullmatch(name):
                group = tuple(found[2].split(", ")) if found[2] else (ROOT,)
                ranges.append(_Range(found[1], group, make_event(raw)))
            elif name.startswith(_PREFETCH):
                prefetches.append(make_event(raw))
            elif name in _GLOO:
                gloo.append(make_event(raw))
    gpu = [
        _OnGpu(launched_s[number], event, stream, "nccl" in name.lower())
        for number, name, stream, event in on_gpu
        if number in launched_s
    ]
    gpu.sort(key=lambda one: one.launched_s)
    busy_s: dict[str, float] = {}
    for one in gpu:
        if not one.is_message:
            busy_s[one.stream] = busy_s.get(one.stream, 0.0) + one.event.end_s - one.event.start_s
    busiest = max(busy_s, key=busy_s.__getitem__, default=None)
    return _Seen(
        sorted(ranges, key=lambda one: one.event.start_s),
        prefetches,
        sorted(gloo, key=lambda event: event.start_s),
        [one for one in gpu if one.is_message],
        [one for one in gpu if not one.is_message and one.stream == busiest],
    )


def _step(seen: _Seen, start_s: float, before_s: float) -> FsdpStep | None:
    """Lay out the step whose forward pass begins at a moment, unless it is not whole."""
    ranges = [one for one in seen.ranges if start_s <= one.event.start_s < before_s]
    by_kind: dict[str, list[_Range]] = {}
    for one in ranges:
        by_kind.setdefault(one.what, []).append(one)
    forward, backward = _first_of_each(by_kind.get("pre_forward", ())), _first_of_each(by_kind.get("pre_backward", ()))
    sends = _first_of_each(by_kind.get("post_backward_reduce", ()))
    last = by_kind.get("root_post_backward_callback")
    if not (last and sends and backward and set(backward) <= set(forward)):
        return None
    groups = list(forward)  # in the order in which they begin, which is the root's first
    gathers: dict[tuple[str, ...], list[Moments]] = {}
    for one in by_kind.get("all_gather", ()):
        gathers.setdefault(one.group, []).append(_message(seen, one.event))
    turn_s = min(one.event.start_s for one in backward.values())
    begins_s = [forward[group].event.start_s for group in groups]
    computed = [
        _computed(seen, begin_s, until_s, forward[group].event.end_s)
        for group, begin_s, until_s in zip(groups, begins_s, [*begins_s[1:], turn_s], strict=True)
    ]
    done_s = last[-1].event.start_s
    back = [group for group in backward if group != (ROOT,)]
    starts_s = [turn_s, *(backward[group].event.start_s for group in back[1:])]
    moved = {
        group: _computed(seen, begin_s, until_s, backward[group].event.end_s if begin_s > turn_s else turn_s)
        for group, begin_s, until_s in zip(back, starts_s, [*starts_s[1:], done_s], strict=False)
    }
    end_s = max(moments[1] for moments in (*moved.values(), computed[-1]))
    moved[ROOT,] = (end_s, end_s) if back else _computed(seen, turn_s, done_s, turn_s)
    again = [gathers.get(group, [])[1:2] for group in groups]
    first = [gathers.get(group) or [(start_s, start_s)] for group in groups]
    sent = {group: _message(seen, one.event) for group, one in sends.items()}
    zero_s = min(moments[0] for moments in (*computed, *(some[0] for some in first)))

    def shift(moments: Moments) -> Moments:
        return max(0.0, moments[0] - zero_s), max(0.0, moments[1] - zero_s)

    return FsdpStep(
        tuple(groups),
        (0,) * len(groups),
        (0,) * len(groups),
        tuple(shift(some[0]) for some in first),
        tuple(shift(moments) for moments in computed),
        tuple(shift(some[0]) if some else None for some in again),
        tuple(shift(moved.get(group, (end_s, end_s))) for group in groups),
        tuple(shift(sent.get(group, (end_s, end_s))) for group in groups),
        0,
    )


def _first_of_each(ranges: Sequence[_Range]) -> dict[tuple[str, ...], _Range]:
    """Return the first range of each group, in order: a group of several modules begins with each of them."""
    found: dict[tuple[str, ...], _Range] = {}
    for one in ranges:
        found.setdefault(one.group, one)
    return found


def _message(seen: _Seen, event: Event) -> Moments:
    """Return when the message travelled that a range started; the range itself where nothing says it."""
    first = bisect_left(seen.nccl, event.start_s, key=lambda one: one.launched_s)
    if first < len(seen.nccl) and seen.nccl[first].launched_s <= event.end_s:
        return seen.nccl[first].event.start_s, seen.nccl[first].event.end_s
    first = bisect_left(seen.gloo, event.start_s, key=lambda one: one.start_s)
    if first < len(seen.gloo) and seen.gloo[first].start_s <= event.end_s:
        return seen.gloo[first].start_s, seen.gloo[first].end_s
    return event.start_s, event.end_s


def _computed(seen: _Seen, begin_s: float, until_s: float, hooks_end_s: float) -> Moments:
    """Return when that was computed which the host began between two moments."""
    if seen.work:
        first, last = (bisect_left(seen.work, at_s, key=lambda one: one.launched_s) for at_s in (begin_s, until_s))
        work = [one.event for one in seen.work[first:last]]
        if work:
            return min(one.start_s for one in work), max(one.end_s for one in work)
    # On a host the hooks that gather come first, and it computes behind them.
    ahead_s = [one.end_s for one in seen.prefetches if begin_s <= one.start_s < until_s]
    start_s = min(until_s, max([hooks_end_s, *ahead_s]))
    sent_s = [one.event.start_s for one in seen.ranges if one.what == "post_backward_reduce"]
    ends_s = [at_s for at_s in sent_s if start_s <= at_s < until_s]  # sending holds the host up
    return start_s, min([until_s, *ends_s])
