"""Tunes a model while it trains: runs the script of `decide` on all ranks, and ends where anything goes wrong.

[Note: how ranks work together]
Rank 0 runs the script; it alone plans, since processors and maths libraries differ and two ranks might plan
differently. What it asks for (a plan, and what to note of the next steps) it broadcasts; all ranks take the plan, train
so many steps, and reduce what they observed. All of this happens at the end of a reduction, which is the one moment at
which every rank is known to be at the same place ([Note: a step] in ``observer.py``).

Whatever fails on a rank, be it in a step (the observer keeps it) or between two, the others know at the next such
moment, before anybody waits: then all ranks go back to the buckets that were in force when tuning began, tuning is off
and says why, and training goes on ([Note: how ranks go back] in ``changes.py``). A plan counts as taken only when every
rank has said that it has taken it.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MgwfbpError
from mgwfbp.measure.agreement import broadcast_text, on_device, problem_of, reduce_values, try_together
from mgwfbp.measure.clock import clock_for
from mgwfbp.measure.group_buffer import reserve
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.messages.wire import check_wire
from mgwfbp.runtime.observe.observer import ObservedStep, Observer, weakly
from mgwfbp.runtime.observe.steps import Gradients, Note, PackedSteps, Seen
from mgwfbp.runtime.reducer.changes import give_together, take_back
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.kinds import Kind, check_kinds, kinds_of, split_by_kind
from mgwfbp.runtime.reducer.parameters import Buckets
from mgwfbp.runtime.tune.decide import Situation, Verdict, decide
from mgwfbp.runtime.tune.race import Limits, Turn
from mgwfbp.runtime.tune.refusals import unfit_for_tuning
from mgwfbp.runtime.tune.room import check_room, most_message_bytes
from mgwfbp.runtime.tune.tuning import Candidate, Comparison, Gathering, Tuning
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Tuner"]

WARMUP_STEPS = 10
# Where no step has averaged gradients after so many forward passes, tuning says that it waits.
SILENT_FORWARDS = 50

_log = logging.getLogger("mgwfbp")
T = TypeVar("T")
_Leader = Generator[Turn, Seen, Verdict]


class _EndError(MgwfbpError):
    """Tuning cannot go on; raised on all ranks alike."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What was in force when tuning began: torch's own buckets, or an earlier plan's."""

    buckets: Buckets
    wires: tuple[str, ...]
    gathers: Buckets | None  # that were given
    plan: MergePlan  # what it is called


@dataclass(slots=True)
class _Progress:
    """What the tuner says of itself while it works."""

    doing: str = "warming up"
    start: _Start | None = None  # once all ranks have begun; before that none has changed anything
    on_trial: MergePlan | None = None  # in force now


class Tuner:
    """Tunes a model during some of its steps; see [Note: how ranks work together]."""

    def __init__(
        self, reducer: ReducerHandle, on_end: Callable[[Tuning], object], limits: Limits, before: Tuning | None
    ) -> None:
        self._reducer, self._on_end = reducer, on_end
        self.device = reducer.parameters[0].device
        self._progress = _Progress()
        self._steps, self._spent_s = (before.steps, before.spent_s) if before else (0, 0.0)
        self._retuned, self._torchs = (before.retuned + 1, before.torchs) if before else (0, None)
        self._silent_forwards = 0
        with on_device(self.device):
            reserve(reducer.ddp.process_group)
        self.observer = Observer(reducer, clock_for(self.device), weakly(self._step_has_ended))
        self._script = _tune(_Subject.of(reducer, self.observer), self._progress, limits, before)
        next(self._script)  # to where it waits for the first step

    @property
    def tuning(self) -> Tuning:
        """What it is doing."""
        doing = self._progress.doing
        if self._silent_forwards > SILENT_FORWARDS:
            doing += f"; none of {self._silent_forwards} forward passes was followed by a step that averages gradients"
        return Tuning("working", doing, steps=self._steps, spent_s=self._spent_s, retuned=self._retuned)

    def before_forward(self) -> None:
        """Note that a forward pass of training begins."""
        self._silent_forwards += 1
        self.observer.before_forward()

    def after_forward(self) -> None:
        """Note that it has ended."""
        self.observer.after_forward()

    @property
    def on_trial(self) -> MergePlan | None:
        """The plan that is being tried, and in force; None where there are the buckets that it began with."""
        return self._progress.on_trial

    def stop(self, reason: str, *, restore: bool = False) -> Tuning:
        """End without a result and leave nothing behind; with ``restore`` with the buckets that it began with."""
        self._script.close()
        self.observer.stop()
        if restore:
            self._restore(self._reducer.set_buckets)
        return replace(self.tuning, state="off", reason=reason)

    def _restore(self, give: Callable[..., object]) -> None:
        """Let the Reducer have, by this function, what was in force."""
        start = self._progress.start
        if start is not None:
            give(start.buckets, start.wires)
            self._reducer.gathers = start.gathers
            self._progress.on_trial = None

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
            ended = replace(self._settled(*end.value), problem=self.observer.problem)
        except _EndError as error:
            with on_device(self.device):
                self._restore(partial(take_back, self._reducer))
            ended = self.stop(str(error))
        self._spent_s += time.perf_counter() - started_s
        if ended is not None:
            ended = replace(ended, spent_s=self._spent_s)
            if dist.get_rank(self._reducer.ddp.process_group) == 0:
                _log.info("%s", ended)
            self._on_end(ended)

    def _settled(self, verdict: Verdict, default: MergePlan) -> Tuning:
        chosen = verdict.candidates[0]
        return replace(
            self.tuning,
            state="settled",
            reason=f"{chosen.name} was kept",
            candidates=verdict.candidates,
            comparison=verdict.comparison,
            messages_before=default.num_groups,
            before_s=verdict.before_s,
            exposed_s=verdict.exposed_s,
            trace=verdict.trace,
            cost=verdict.cost,
            low_cost=verdict.low_cost,
            gathering=verdict.gathering,
            torchs=self._torchs or default,
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
    all_reduces: bool = False
    verdict: Verdict | None = None  # where it is over, and this is the plan that was chosen


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is tuned: a model on this rank, and who observes it."""

    reducer: ReducerHandle
    observer: Observer
    gradients: Gradients
    kinds: Mapping[str, Kind]
    wire: str | None  # the precision in which messages may travel
    group: dist.ProcessGroup

    @classmethod
    def of(cls, reducer: ReducerHandle, observer: Observer) -> Self:
        """Return the model of a Reducer, with names and sizes as they are now."""
        ddp = reducer.ddp
        gradients = Gradients(type(ddp.module).__name__, reducer.names, reducer.sizes)
        return cls(reducer, observer, gradients, kinds_of(reducer), ddp._wire, ddp.process_group)


def _tune(
    subject: _Subject, progress: _Progress, limits: Limits, before: Tuning | None
) -> Generator[None, None, tuple[Verdict, MergePlan]]:
    """Tune on this rank, together with the others: where it says ``yield``, a step of training goes by.

    All that a rank does on its own is done by `_together`: what fails there, fails on all.
    """
    steps = 0
    while steps < WARMUP_STEPS or not subject.reducer.has_settled:
        yield
        steps += 1
    start, room = _together(lambda: _begin(subject, before), subject.group)
    most_bytes = reduce_values(room, "min", subject.group)
    leader = _together(lambda: _lead(subject, start, limits, before, most_bytes), subject.group)
    # Not before all ranks have begun: a rank that failed has nothing to go back to, and going back takes all ranks.
    progress.start = start
    reduced: dict[str, PackedSteps] | None = None
    while True:
        order = _next_order(subject, leader, reduced)
        if order.verdict is not None:
            return order.verdict, start.plan
        progress.doing, progress.on_trial = order.doing, order.plan
        reduced = yield from _observe(subject, order)


def _begin(subject: _Subject, before: Tuning | None) -> tuple[_Start, tuple[float, float]]:
    """Return what is in force, and how large messages may be for which this rank has room."""
    reducer, model = subject.reducer, subject.gradients.model
    subject.observer.take()
    if reason := unfit_for_tuning(reducer):
        raise _EndError(reason)
    held = reducer.buckets()
    groups = reducer.groups_of(held)
    in_force = before.plan if before else None
    default = in_force if in_force and in_force.groups == groups else MergePlan(model, "ddp", groups)
    torchs = reducer.buckets_of(before.torchs.groups) if before and before.torchs else []  # which are tried again
    room = most_message_bytes(reducer, [*held, *torchs], subject.wire)
    return _Start(held, reducer.wires, reducer.gathers, default), room


def _lead(
    subject: _Subject, start: _Start, limits: Limits, before: Tuning | None, room: Sequence[float]
) -> _Leader | None:
    """Return the script that decides, on rank 0."""
    reducer = subject.reducer
    if dist.get_rank(subject.group) != 0:
        return None
    situation = Situation(
        subject.gradients,
        dist.get_world_size(subject.group),
        start.plan,
        torchs=before.torchs if before else None,
        wire=subject.wire,
        tolerance=reducer.ddp._wire_tolerance,
        gathers=reducer.groups_of(reducer.gathers or []) if reducer.is_sharded else None,
        most_bytes=room[0],
        most_low_bytes=room[1],
    )
    return decide(situation, partial(split_by_kind, kinds=subject.kinds), limits)


def _next_order(subject: _Subject, leader: _Leader | None, reduced: Mapping[str, PackedSteps] | None) -> _Order:
    """Return what rank 0 asks for next, once all ranks have its plan."""
    group = subject.group
    said = "" if leader is None else _ask(leader, reduced, dist.get_world_size(group))
    text = broadcast_text(said, 0, group)
    order = _together(lambda: _read(text, subject), group)
    _install(subject.reducer, order, group)
    return order


def _observe(subject: _Subject, order: _Order) -> Generator[None, None, dict[str, PackedSteps]]:
    """Observe the steps that are asked for; return what all ranks saw."""
    for note in order.notes:
        noted = {what: note == what for what in ("gradients", "messages", "gathers", "alone")}
        subject.observer.note(**noted, all_reduces=order.all_reduces)
        yield
    packed = _together(lambda: _pack(subject, order), subject.group)
    return {note: some.reduced(subject.group) for note, some in packed.items()}


def _together(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do local work on every rank; where it fails on one, tuning ends on all."""
    result, failed, _ = try_together(work, group)
    if failed is not None:
        raise _EndError(failed[1])
    return result


def _ask(leader: _Leader, reduced: Mapping[str, PackedSteps] | None, world: int) -> str:
    """Give the script what ranks saw, ask it what to do next, and put that into words.

    Only rank 0 runs this, so its error is broadcast as text.
    """
    try:
        if reduced is None:
            turn = next(leader)
        else:
            turn = leader.send(Seen(**{note: packed.unpacked(world) for note, packed in reduced.items()}))
        said = {"notes": turn.notes, "doing": turn.doing, "all_reduces": turn.all_reduces}
        return json.dumps({**_write_plan(turn.plan), **said})
    except StopIteration as end:
        verdict = end.value
    except Exception as error:  # of a planner, say: tuning ends, training does not
        return json.dumps({"problem": problem_of(error)})
    try:
        return json.dumps({"verdict": _write_verdict(verdict)})
    except Exception as error:
        return json.dumps({"problem": problem_of(error)})


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
        "before_s": verdict.before_s,
        "low_cost": verdict.low_cost.to_json() if verdict.low_cost else None,
        "gathering": None if verdict.gathering is None else _write_gathering(verdict.gathering),
    }


def _write_gathering(found: Gathering) -> dict[str, Any]:
    # Comparisons may hold infinities.
    return {**found.to_json(), "comparison": asdict(found.comparison), "all_reduced": asdict(found.all_reduced)}


def _read_gathering(said: Mapping[str, Any]) -> Gathering:
    per_group = None if said["per_group"] is None else MergePlan.from_json(said["per_group"])
    comparison, all_reduced = (Comparison(**said[what]) for what in ("comparison", "all_reduced"))
    cost, all_reduce_cost = (PiecewiseCost.from_json(said[what]) for what in ("cost", "all_reduce_cost"))
    return Gathering(comparison, cost, all_reduced, said["all_reduced_s"], all_reduce_cost, per_group)


def _read(text: str, subject: _Subject) -> _Order:
    """Read what rank 0 asks for, and check that this rank can do it."""
    said, gradients = json.loads(text), subject.gradients
    if "problem" in said:
        raise _EndError(said["problem"])
    verdict = _read_verdict(said["verdict"], gradients.model) if "verdict" in said else None
    plan = _read_plan(said, gradients.model) if verdict is None else verdict.candidates[0].plan
    check_wire(plan.wire, subject.wire)
    check_kinds(plan, subject.kinds)
    buckets = subject.reducer.buckets_of(plan.groups)
    sizes, gathered = gradients.sizes_of(plan.groups), gradients.sizes_of(plan.gathers)
    if verdict is not None:
        return _Order(plan, buckets, sizes, gathered, verdict=verdict)
    return _Order(plan, buckets, sizes, gathered, tuple(said["notes"]), said["doing"], said["all_reduces"])


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
    timed_s = said["exposed_s"], said["before_s"]
    return Verdict(candidates, comparison, trace, cost, *timed_s, low_cost, gathering)


def _install(reducer: ReducerHandle, order: _Order, group: dist.ProcessGroup) -> None:
    """Give the Reducers of all ranks a plan; where one cannot be given it, tuning ends."""
    wires = order.plan.wire

    def prepare() -> tuple[Buckets, tuple[str, ...]]:
        if reason := unfit_for_tuning(reducer):  # it may have been compiled since the last plan
            raise _EndError(reason)
        before = reducer.buckets(), reducer.wires
        if before != (order.buckets, wires):  # else nothing is allocated
            check_room(reducer, before[0], order.buckets, wires)
        if order.plan.gathers:
            reducer.gathers = reducer.buckets_of(order.plan.gathers)
        return before

    if _together(prepare, group) == (order.buckets, wires):
        return
    failed = give_together(reducer, order.buckets, wires)
    if failed is not None:
        raise _EndError(failed.problem)  # and all ranks go back


def _pack(subject: _Subject, order: _Order) -> dict[str, PackedSteps]:
    """Return what this rank observed, by what was noted."""
    subject.observer.note()
    steps = subject.observer.take()
    if len(steps) != len(order.notes):
        raise _EndError(f"{plural(len(steps), 'step')} of {len(order.notes)} could be observed")
    by_note: dict[str, list[ObservedStep]] = {}
    for step, note in zip(steps, order.notes, strict=True):
        if note != "settle":
            by_note.setdefault(note, []).append(step)
    return {
        note: PackedSteps.of(some, subject.gradients, order.gathered if note == "gathers" else order.sizes, note)
        for note, some in by_note.items()
    }
