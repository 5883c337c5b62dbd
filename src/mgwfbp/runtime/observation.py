"""What ``with model.observe() as seen:`` saw: `Observation`."""

from collections.abc import Sequence

import torch.distributed as dist

from mgwfbp.cost import Cost
from mgwfbp.errors import MeasureError
from mgwfbp.measure.agreement import agree_on_trace
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.learn import Gradients, Note, PackedSteps, Seen, sends, timeline_of, trace_of, without_lags
from mgwfbp.runtime.observe import ObservedStep
from mgwfbp.timeline import Timeline, predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Observation"]


class Observation:
    """What was observed of some steps, on this rank; to be read after the block."""

    def __init__(self) -> None:
        self._steps: tuple[ObservedStep, ...] = ()
        self._notes: tuple[Note, ...] = ()
        self._plan: MergePlan | None = None
        self._timelines: tuple[Timeline, ...] = ()
        self._trace: ModelTrace | None = None
        self._predicted: Timeline | None = None
        self._gradients: Gradients | None = None
        self._group: dist.ProcessGroup | None = None

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
            MeasureError: where nothing was observed, or messages that the plan does not have.
        """
        if self._gradients is None or self._plan is None or not self._steps:
            raise MeasureError("nothing was observed: no step whose gradients were averaged ran inside the block")
        by_note: dict[Note, list[ObservedStep]] = {}
        for step, note in zip(self._steps, self._notes, strict=False):
            by_note.setdefault(note, []).append(step)
        sizes = self._gradients.sizes_of(self._plan.groups)
        packed = {note: PackedSteps.of(some, self._gradients, sizes, note) for note, some in by_note.items()}
        return Seen(**{note: packed[note].agreed(self._group) for note in sorted(packed)})

    def agreed_trace(self) -> ModelTrace:
        """Return when each gradient was ready on the slowest rank. All ranks must call it, and get the same.

        Raises:
            MeasureError: on every rank, where one of them observed nothing, or another model.
        """
        return agree_on_trace(self.trace, self._group)

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
        gradients: Gradients,
        plan: MergePlan,
        group: dist.ProcessGroup,
        predict_with: tuple[ModelTrace | None, Cost] | None,
        notes: Sequence[Note] | None = None,
    ) -> None:
        """Take over what was observed while this plan was in force; ``notes`` says it of each step, if not all of all.

        Of a step of which not all was noted there is no timeline.
        """
        sizes = gradients.sizes_of(plan.groups)
        self._gradients, self._group, self._plan = gradients, group, plan
        if notes is not None:
            self._steps, self._notes = tuple(steps), tuple(notes)
            return
        self._steps = tuple(step for step in steps if sends(step, sizes))
        if not self._steps:
            return
        workers = dist.get_world_size(group)
        self._timelines = tuple(timeline_of(step, gradients, plan, workers) for step in self._steps)
        self._trace = trace_of(self._steps, gradients)
        if predict_with is not None:
            trace, cost = predict_with
            self._predicted = predict(trace or without_lags(self._trace, plan, cost), cost, plan)
