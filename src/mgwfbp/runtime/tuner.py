"""Tunes a model while it trains: runs the script of `decide` on all ranks, and ends where anything goes wrong.

[Note: how ranks work together]
Rank 0 runs the script; it alone plans, since processors and maths libraries differ and two ranks might plan
differently. What it asks for (a plan, and what to note of the next steps) it broadcasts; all ranks take the plan, train
so many steps, and reduce what they observed. All of this happens at the end of a reduction, which is the one moment at
which every rank is known to be at the same place ([Note: a step] in ``observe.py``).

Whatever fails on a rank, the others are told at the next such moment, before anybody waits: then all ranks go back to
the buckets that were in force when tuning began, tuning is off and says why, and training goes on. A plan counts as
taken only when every rank has said that it has taken it.
"""

import json
import logging
import resource
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MgwfbpError
from mgwfbp.measure.agreement import broadcast_text, on_device, problem_of, try_together
from mgwfbp.measure.clock import clock_for
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.decide import Limits, Turn, Verdict, decide
from mgwfbp.runtime.fitness import unfit_for_tuning
from mgwfbp.runtime.kinds import Kind, check_kinds, kinds_of, split_by_kind
from mgwfbp.runtime.observe import ObservedStep, Observer, weakly
from mgwfbp.runtime.reducer import Buckets, ReducerHandle
from mgwfbp.runtime.steps import Gradients, Note, PackedSteps, Seen
from mgwfbp.runtime.tuning import Candidate, Comparison, Gathering, Tuning
from mgwfbp.runtime.wire import check_wire
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, plural

__all__ = ["Tuner"]

WARMUP_STEPS = 10
# A change of buckets may need this part of the gradients, or so many bytes, more than training needed so far.
SPARE, SPARE_BYTES = 0.02, 32 * 2**20
# Where no step has averaged gradients after so many forward passes, tuning says that it waits.
SILENT_FORWARDS = 50

_log = logging.getLogger("mgwfbp")
T = TypeVar("T")


class _EndError(MgwfbpError):
    """Tuning cannot go on; raised on all ranks alike."""


@dataclass(slots=True)
class _Progress:
    """What the tuner says of itself while it works."""

    doing: str = "warming up"
    in_force: Buckets | None = None  # when it began, once they are known: torch's own, or an earlier plan's
    wires: tuple[str, ...] = ()  # and how these travelled
    gathers: Buckets | None = None  # that were given then


class Tuner:
    """Tunes a model during some of its steps; see [Note: how ranks work together]."""

    def __init__(
        self, reducer: ReducerHandle, on_end: Callable[[Tuning], object], limits: Limits, before: Tuning | None
    ) -> None:
        self._reducer, self._on_end = reducer, on_end
        self.device = reducer.parameters[0].device
        self._progress = _Progress()
        self._steps, self._spent_s = (before.steps, before.spent_s) if before else (0, 0.0)
        self._retuned = before.retuned + 1 if before else 0
        self._silent_forwards = 0
        self.observer = Observer(reducer, clock_for(self.device), weakly(self._step_has_ended))
        self._script = _tune(reducer, self.observer, self._progress, limits, before)
        next(self._script)  # to where it waits for the first step

    @property
    def tuning(self) -> Tuning:
        """What it is doing."""
        doing = self._progress.doing
        if self._silent_forwards > SILENT_FORWARDS:
            doing += f"; none of {self._silent_forwards} forward passes was followed by a step that averages gradients"
        return Tuning("working", doing, steps=self._steps, spent_s=self._spent_s, retuned=self._retuned)

    def before_forward(self) -> None:
        """Note that a forward pass of training begins; end where it is captured in a CUDA graph."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._on_end(self.stop("the model was captured in a CUDA graph, whose buckets cannot change"))
            return
        self._silent_forwards += 1
        self.observer.before_forward()

    def after_forward(self) -> None:
        """Note that it has ended."""
        self.observer.after_forward()

    def stop(self, reason: str, *, restore: bool = False) -> Tuning:
        """End without a result and leave nothing behind; with ``restore`` with the buckets that it began with."""
        self._script.close()
        self.observer.stop()
        if restore and self._progress.in_force is not None:
            self._reducer.set_buckets(self._progress.in_force, self._progress.wires)
            self._reducer.gathers = self._progress.gathers
        return replace(self.tuning, state="off", reason=reason)

    def _step_has_ended(self) -> None:
        started_s = time.perf_counter()
        self._steps += 1
        self._silent_forwards = 0
        ended: Tuning | None = None
        try:
            with torch.profiler.record_function("mgwfbp: tuning"), on_device(self.device):
                next(self._script)
        except StopIteration as end:
            self.observer.stop()
            ended = self._settled(*end.value)
        except _EndError as error:
            ended = self.stop(str(error), restore=True)
        self._spent_s += time.perf_counter() - started_s
        if ended is not None:
            ended = replace(ended, spent_s=self._spent_s)
            if dist.get_rank(self._reducer.ddp.process_group) == 0:
                _log.info("%s", ended)
            self._on_end(ended)

    def _settled(self, verdict: Verdict, default: MergePlan) -> Tuning:
        chosen = verdict.candidates[0]
        sent = default.groups, default.wire
        before = next(one for one in verdict.candidates if (one.plan.groups, one.plan.wire) == sent)
        return replace(
            self.tuning,
            state="settled",
            reason=f"{chosen.name} was kept",
            candidates=verdict.candidates,
            comparison=verdict.comparison,
            messages_before=default.num_groups,
            before_s=before.step_s if before.steps_s else None,
            exposed_s=verdict.exposed_s,
            trace=verdict.trace,
            cost=verdict.cost,
            low_cost=verdict.low_cost,
            gathering=verdict.gathering,
        )


@dataclass(frozen=True, slots=True)
class _Order:
    """What rank 0 asks for: steps with a plan, or the end."""

    plan: MergePlan
    buckets: Buckets
    sizes: list[int]  # bytes of each message
    gathered: list[int]  # and of each gather, where there are any
    notes: tuple[Note, ...] = ()
    doing: str = ""
    verdict: Verdict | None = None  # where it is over, and this is the plan that was chosen


def _tune(
    reducer: ReducerHandle, observer: Observer, progress: _Progress, limits: Limits, before: Tuning | None
) -> Generator[None, None, tuple[Verdict, MergePlan]]:
    """Tune on this rank, together with the others: where it says ``yield``, a step of training goes by.

    All that a rank does on its own is done by `_together`: what fails there, fails on all.
    """
    group, wire, kinds, steps = reducer.ddp.process_group, reducer.ddp._wire, kinds_of(reducer), 0
    while steps < WARMUP_STEPS or not reducer.has_settled:
        yield
        steps += 1
    model = type(reducer.ddp.module).__name__
    gradients = Gradients(model, reducer.names, reducer.sizes)
    leader: Generator[Turn, Seen, Verdict] | None = None

    def begin() -> MergePlan:
        nonlocal leader
        observer.take()
        if reason := unfit_for_tuning(reducer):
            raise _EndError(reason)
        held = progress.in_force = reducer.buckets()
        progress.wires, progress.gathers = reducer.wires, reducer.gathers
        groups = reducer.groups_of(held)
        in_force = before.plan if before else None
        default = in_force if in_force and in_force.groups == groups else MergePlan(model, "ddp", groups)
        if dist.get_rank(group) == 0:
            workers = dist.get_world_size(group)
            torchs = next((one.plan for one in before.candidates if one.name == "ddp"), None) if before else None
            torchs = torchs and replace(torchs, gathers=())
            gathers = reducer.groups_of(reducer.gathers or []) if reducer.is_sharded else None
            leader = decide(
                gradients, workers, default, lambda plan: split_by_kind(plan, kinds), limits, torchs, wire, gathers
            )
        return default

    default = _together(begin, group)
    seen: Seen | None = None
    while True:
        text = broadcast_text("" if leader is None else _ask(leader, seen), 0, group)
        order = _together(lambda: _read(text, gradients, reducer, kinds, wire), group)  # noqa: B023
        _install(reducer, order, group)
        if order.verdict is not None:
            return order.verdict, default
        progress.doing = order.doing
        for note in order.notes:
            observer.note(**{what: note == what for what in ("gradients", "messages", "gathers", "alone")})
            yield
        packed = _together(lambda: _pack(observer, order, gradients), group)  # noqa: B023
        seen = Seen(**{kind: steps.agreed(group) for kind, steps in packed.items()})


def _together(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do local work on every rank; where it fails on one, tuning ends on all."""
    result, failed, _ = try_together(work, group)
    if failed is not None:
        raise _EndError(failed[1])
    return result


def _ask(leader: Generator[Turn, Seen, Verdict], seen: Seen | None) -> str:
    """Ask the script what to do next, and put it into words; an error of its own too."""
    try:
        turn = next(leader) if seen is None else leader.send(seen)
    except StopIteration as end:
        return json.dumps({"verdict": _write_verdict(end.value)})
    except Exception as error:  # of a planner, say: tuning ends, training does not
        return json.dumps({"problem": problem_of(error)})
    return json.dumps({**_write_plan(turn.plan), "notes": turn.notes, "doing": turn.doing})


def _write_plan(plan: MergePlan) -> dict[str, Any]:
    return {"planner": plan.planner, "groups": plan.groups, "wire": plan.wire, "gathers": plan.gathers}


def _read_plan(said: Mapping[str, Any], model: str) -> MergePlan:
    groups, gathers = (tuple(tuple(names) for names in said[what]) for what in ("groups", "gathers"))
    return MergePlan(model, said["planner"], groups, wire=tuple(said["wire"]), gathers=gathers)


def _write_verdict(verdict: Verdict) -> dict[str, Any]:
    candidates = [{**candidate.to_json(), **_write_plan(candidate.plan)} for candidate in verdict.candidates]
    return {
        "candidates": candidates,
        "comparison": asdict(verdict.comparison),
        "trace": verdict.trace.to_json(),
        "cost": verdict.cost.to_json(),
        "exposed_s": verdict.exposed_s,
        "low_cost": verdict.low_cost.to_json() if verdict.low_cost else None,
        "gathering": None if verdict.gathering is None else _write_gathering(verdict.gathering),
    }


def _write_gathering(found: Gathering) -> dict[str, Any]:
    return {**found.to_json(), "comparison": asdict(found.comparison)}  # which may hold infinities


def _read_gathering(said: Mapping[str, Any]) -> Gathering:
    return Gathering(Comparison(**said["comparison"]), PiecewiseCost.from_json(said["cost"]), said["all_reduced_s"])


def _read(
    text: str, gradients: Gradients, reducer: ReducerHandle, kinds: Mapping[str, Kind], wire: str | None
) -> _Order:
    """Read what rank 0 asks for, and check that this rank can do it."""
    said = json.loads(text)
    if "problem" in said:
        raise _EndError(said["problem"])
    verdict = _read_verdict(said["verdict"], gradients.model) if "verdict" in said else None
    plan = _read_plan(said, gradients.model) if verdict is None else verdict.candidates[0].plan
    check_wire(plan.wire, wire)
    check_kinds(plan, kinds)
    buckets = reducer.buckets_of(plan.groups)
    notes, doing = tuple(said.get("notes", ())), said.get("doing", "")
    gathered = gradients.sizes_of(plan.gathers)
    return _Order(plan, buckets, gradients.sizes_of(plan.groups), gathered, notes, doing, verdict)


def _read_verdict(said: Mapping[str, Any], model: str) -> Verdict:
    candidates = tuple(
        Candidate(
            one["name"],
            _read_plan(one, model),
            one["predicted_s"],
            tuple(one["steps_s"]),
            float("inf") if one["step_s"] is None else one["step_s"],
            None if one["between_s"] is None else tuple(one["between_s"]),
        )
        for one in said["candidates"]
    )
    cost = PiecewiseCost.from_json(said["cost"])  # learnt costs are curves
    low_cost = None if said["low_cost"] is None else PiecewiseCost.from_json(said["low_cost"])
    trace = ModelTrace.from_json(said["trace"])
    gathering = None if said["gathering"] is None else _read_gathering(said["gathering"])
    comparison = Comparison(**said["comparison"])
    return Verdict(candidates, comparison, trace, cost, said["exposed_s"], low_cost, gathering)


def _install(reducer: ReducerHandle, order: _Order, group: dist.ProcessGroup) -> None:
    """Give the Reducer a plan on all ranks, or on none: then tuning ends."""
    wires = order.plan.wire
    if order.plan.gathers:
        reducer.gathers = reducer.buckets_of(order.plan.gathers)

    def prepare() -> tuple[Buckets, tuple[str, ...]]:
        if reason := unfit_for_tuning(reducer):  # it may have been compiled, or been given a hook, since the last plan
            raise _EndError(reason)
        before = reducer.buckets()
        _check_room(reducer, before, order.buckets)
        return before, reducer.wires

    before = _together(prepare, group)
    if before == (order.buckets, wires):
        return
    try:
        _together(lambda: reducer.set_buckets(order.buckets, wires), group)
    except _EndError:
        if (reducer.buckets(), reducer.wires) != before:  # where it failed, the Reducer has what it had
            reducer.set_buckets(*before)
        raise


def _pack(observer: Observer, order: _Order, gradients: Gradients) -> dict[str, PackedSteps]:
    """Return what this rank observed, by what was noted."""
    observer.note()
    steps = observer.take()
    if len(steps) != len(order.notes):
        raise _EndError(f"{plural(len(steps), 'step')} of {len(order.notes)} could be observed")
    by_note: dict[str, list[ObservedStep]] = {}
    for step, note in zip(steps, order.notes, strict=True):
        if note != "settle":
            by_note.setdefault(note, []).append(step)
    return {
        note: PackedSteps.of(some, gradients, order.gathered if note == "gathers" else order.sizes, note)
        for note, some in by_note.items()
    }


def _check_room(reducer: ReducerHandle, before: Buckets, after: Buckets) -> None:
    """Raise where a change of buckets would need more memory at once than training has needed so far.

    Old buckets are freed before new ones are made. But gradients that are views of buckets keep these until they have
    been moved, bucket by bucket: the largest old and the largest new one are there at the same time.
    """
    if not reducer.ddp.gradient_as_bucket_view:
        return
    largest = [max(sum(reducer.sizes[place] for place in bucket) for bucket in some) for some in (before, after)]
    spare = _headroom_bytes(reducer.parameters[0].device) + max(SPARE_BYTES, SPARE * sum(reducer.sizes))
    if sum(largest) > spare:
        raise _EndError(
            f"gradients are views of buckets, and to change these would take {format_bytes(sum(largest))} more memory "
            f"for a moment, where {format_bytes(max(0.0, spare))} are to spare"
        )


def _headroom_bytes(device: torch.device) -> float:
    """Return how much more memory this process has used at some time than it uses now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(most - now)
