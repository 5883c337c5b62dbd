"""Observes steps for ``with model.observe() as seen:``; what was seen is an `Observation`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp.cost import Cost
from mgwfbp.errors import MeasureError
from mgwfbp.measure.agreement import agree_on_trace, on_device, together
from mgwfbp.measure.clock import clock_for
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.observe.learn import timeline_of, trace_of, with_forward, without_lags, without_waits
from mgwfbp.runtime.observe.observer import ObservedStep, Observer
from mgwfbp.runtime.observe.steps import Gradients, Note, PackedSteps, Seen, sends
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.support import cannot_hold, missing
from mgwfbp.timeline import Timeline, predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Observation", "observing"]


class Observation:
    """What was observed of some steps, on this rank; to be read after the block."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._steps: tuple[ObservedStep, ...] = ()
        self._notes: tuple[Note, ...] = ()
        self._plan: MergePlan | None = None
        self._timelines: tuple[Timeline, ...] = ()
        self._trace: ModelTrace | None = None
        self._predicted: Timeline | None = None
        self._gradients: Gradients | None = None

    def __repr__(self) -> str:
        if not self._timelines:
            return "Observation(nothing yet)"
        steps = plural(len(self._timelines), "step")
        said = self.not_predicted or f"predicted {self._predicted!r}"
        return f"Observation({steps} on this rank, measured {self.timeline!r}; {said})"

    @property
    def steps(self) -> tuple[ObservedStep, ...]:
        """Every step as it was noted."""
        return self._steps

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The measured timeline of every step, on this rank."""
        return self._timelines

    @property
    def timeline(self) -> Timeline:
        """That of the step of median length."""
        self._check()
        return sorted(self._timelines, key=lambda one: one.iteration_s)[(len(self._timelines) - 1) // 2]

    @property
    def trace(self) -> ModelTrace:
        """When each gradient was ready on this rank, beside the plan's messages, the median over the steps."""
        self._check()
        assert self._trace is not None  # noqa: S101 - set with the timelines
        return self._trace

    @property
    def gradients(self) -> Gradients:
        """What a step sends."""
        if self._gradients is None:
            raise MeasureError("nothing is known of gradients: the block is not over, or the model has no plan")
        return self._gradients

    @property
    def sizes(self) -> list[int]:
        """The bytes of each message of a step."""
        return [message.num_bytes for message in self.timeline.messages]

    def agreed(self) -> Seen:
        """Return what all ranks observed of the same steps, by what was noted of each. All ranks must call it.

        Raises:
            MeasureError: on every rank, where one of them observed nothing, or messages that the plan does not have.
        """
        with on_device(self._device):
            packed = together(self._packed, self._group)
            return Seen(**{note: packed[note].agreed(self._group) for note in sorted(packed)})

    def _packed(self) -> dict[Note, PackedSteps]:
        if self._gradients is None or self._plan is None or not self._steps:
            raise MeasureError("nothing was observed: no step whose gradients were averaged ran inside the block")
        by_note: dict[Note, list[ObservedStep]] = {}
        for step, note in zip(self._steps, self._notes, strict=False):
            by_note.setdefault(note, []).append(step)
        sizes = self._gradients.sizes_of(self._plan.groups)
        return {note: PackedSteps.of(some, self._gradients, sizes, note) for note, some in by_note.items()}

    def agreed_trace(self) -> ModelTrace:
        """Return when each gradient was ready on the slowest rank. All ranks must call it, and get the same.

        Raises:
            MeasureError: on every rank, where one of them observed nothing, or another model.
        """
        with on_device(self._device):
            return agree_on_trace(together(lambda: self.trace, self._group), self._group)

    @property
    def predicted(self) -> Timeline | None:
        """What the model of this package says about the same plan; None where `not_predicted` says why not."""
        self._check()
        return self._predicted

    @property
    def not_predicted(self) -> str:
        """Why nothing was predicted; empty where something was."""
        if self._predicted is not None:
            return ""
        return "not predicted: no cost is known; give observe(predict_with=(None, cost)), or let the tuner settle"

    def _check(self) -> None:
        if not self._timelines:
            raise MeasureError(
                "nothing was observed: no step whose gradients were averaged ran inside the block, or it is not over"
            )

    def fill(
        self,
        steps: Sequence[ObservedStep],
        reducer: ReducerHandle,
        plan: MergePlan,
        predict_with: tuple[ModelTrace | None, Cost] | None,
        notes: Sequence[Note] | None,
    ) -> None:
        """Take over what was observed while this plan was in force; ``notes`` says it of each step, if not all of all.

        Of a step of which not all was noted there is no timeline.
        """
        gradients = Gradients(type(reducer.ddp.module).__name__, reducer.names, reducer.sizes)
        sizes = gradients.sizes_of(plan.groups)
        self._gradients, self._plan = gradients, plan
        if notes is not None:
            self._steps, self._notes = tuple(steps), tuple(notes)
            return
        # The gathers of the first step of all had begun before anything was noted.
        gathered = gradients.sizes_of(plan.gathers)
        self._steps = tuple(
            step for step in steps if sends(step, sizes) and [gather.num_bytes for gather in step.gathers] == gathered
        )
        if not self._steps:
            return
        workers = dist.get_world_size(self._group)
        self._timelines = tuple(timeline_of(step, gradients, plan, workers) for step in self._steps)
        self._trace = trace_of([without_waits(step) for step in self._steps] if gathered else self._steps, gradients)
        if gathered:
            pieces_s = [median(of_steps) for of_steps in zip(*(step.pieces_s for step in self._steps), strict=True)]
            self._trace = with_forward(self._trace, dict(zip(plan.gathers, pieces_s, strict=True)), sum(pieces_s))
        if predict_with is not None:
            trace, cost = predict_with
            self._predicted = predict(trace or without_lags(self._trace, plan, cost), cost, plan)


@contextmanager
def observing(
    model: Any, steps: int, predict_with: tuple[ModelTrace | None, Cost] | None, notes: Sequence[Note] | None
) -> Iterator[Observation]:
    """Observe steps of a model of our class, whose ``observe`` says how."""
    steps = steps if notes is None else len(notes)
    if steps < 1:
        raise MeasureError(f"steps is {steps}, expected 1 or more")
    handle = _observable(model)
    steps += notes is None and bool(handle.groups_to_gather)  # the first one's gathers have begun by now
    had_settled: list[bool] = []  # of every step: the first one of a Reducer is unlike the others

    def note_next() -> None:
        note = None if notes is None else notes[sum(had_settled)]
        observer.note(gradients=note in (None, "gradients"), messages=note in (None, "messages"), gathers=note is None)

    def step_has_ended() -> None:
        had_settled.append(handle.has_settled)
        if sum(had_settled) < steps:
            note_next()
        else:
            stop()

    def stop() -> None:
        if model._observer is observer:  # else it was stopped before
            observer.stop()
            model._observer = None

    observer = model._observer = Observer(handle, clock_for(model.device), step_has_ended)
    note_next()
    seen = Observation(model.process_group, model.device)
    try:
        yield seen
    finally:
        stop()
    # Only now: reading a step waits for the GPU, and the host would no longer run ahead of it.
    taken = [step for step, settled in zip(observer.take(), had_settled, strict=True) if settled]
    if predict_with is None and (costs := model.tuning.costs) is not None:
        predict_with = (model.tuning.trace, costs)
    if (plan := model.plan) is not None:
        seen.fill(taken, handle, plan, predict_with, notes)


def _observable(model: Any) -> ReducerHandle:
    """Return the handle on the Reducer of a model that can be observed now; raise where it cannot."""
    if model.tuning.state == "working":
        raise MeasureError(f"the tuner is at work ({model.tuning.reason}): observe when it has ended, or tune=False")
    if model._observer is not None:
        raise MeasureError("the model is being observed already: leave that block first")
    if cannot := ", ".join(missing()) or cannot_hold(model):
        raise MeasureError(f"cannot observe: {cannot}")
    handle: ReducerHandle = model._handle or ReducerHandle(model)
    if any(handle.sparse):
        raise MeasureError("cannot observe: gradients are sparse, and as large as each batch makes them")
    if handle.has_hooks and handle.cannot_change:  # a Reducer is told its hooks only once
        raise MeasureError(f"cannot observe a model with a communication hook: {handle.cannot_change}")
    return handle
