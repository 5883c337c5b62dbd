"""What the steps of a run looked like: `Observation`, and how it is made of what a `StepWatch` saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mgwfbp.cost import Cost
from mgwfbp.errors import MeasureError
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.watch import SeenStep
from mgwfbp.timeline import Span, Timeline, predict
from mgwfbp.trace import ModelTrace, layers_of

__all__ = ["Gradients", "Observation", "sends", "timeline_of", "trace_of"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that a Reducer sends, by the place that a `SeenStep` knows them by."""

    model: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes

    @property
    def size_of(self) -> dict[str, int]:
        """Bytes by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    def ready_s(self, step: SeenStep) -> dict[str, float]:
        """Return when each gradient was ready, in that order; one that never came had nothing to wait for."""
        found = {name: max(step.forward_s, step.ready_s.get(i, step.forward_s)) for i, name in enumerate(self.names)}
        return dict(sorted(found.items(), key=lambda item: item[1]))


class Observation:
    """What ``with model.observe() as seen:`` saw; to be read after the block."""

    def __init__(self) -> None:
        self._timelines: tuple[Timeline, ...] = ()
        self._trace: ModelTrace | None = None
        self._predicted: Timeline | None = None

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
        """When each gradient was ready, the median over the steps."""
        self._check()
        assert self._trace is not None  # noqa: S101 - set with the timelines
        return self._trace

    @property
    def predicted(self) -> Timeline | None:
        """What the model of this package says about the same plan; None where no cost was known."""
        self._check()
        return self._predicted

    def _check(self) -> None:
        if not self._timelines:
            raise MeasureError(
                "nothing was observed: no step whose gradients were averaged ran inside the block, or it is not over"
            )

    def fill(
        self,
        steps: Sequence[SeenStep],
        gradients: Gradients,
        plan: MergePlan,
        workers: int,
        predict_with: tuple[ModelTrace | None, Cost] | None,
    ) -> None:
        """Take over what was seen while this plan was in force."""
        sizes = [sum(gradients.size_of[name] for name in group) for group in plan.groups]
        whole = [step for step in steps if sends(step, sizes)]
        if not whole:
            return
        self._timelines = tuple(timeline_of(step, gradients, plan, workers) for step in whole)
        self._trace = trace_of(whole, gradients, {"measured": "observed in training", "steps": len(whole)})
        if predict_with is not None:
            self._predicted = predict(predict_with[0] or self._trace, predict_with[1], plan)


def sends(step: SeenStep, sizes: Sequence[int]) -> bool:
    """Say whether a step's messages are these; the Reducer may add one that says which parameters were used."""
    found = [message.num_bytes for message in step.messages]
    return found[: len(sizes)] == list(sizes)


def timeline_of(step: SeenStep, gradients: Gradients, plan: MergePlan, workers: int) -> Timeline:
    """Lay out what was seen of one step, as `predict` lays out what is expected."""
    ready_s, size_of = gradients.ready_s(step), gradients.size_of
    backward, start_s = [], step.forward_s
    for name, end_s in ready_s.items():
        backward.append(Span((name,), size_of[name], start_s, start_s, end_s))
        start_s = end_s
    messages = [
        Span(group, message.num_bytes, message.ready_s, message.start_s, message.end_s)
        for group, message in zip(plan.groups, step.messages, strict=False)
    ]
    forward = Span((), 0, 0.0, 0.0, step.forward_s)
    return Timeline(plan.model, plan.planner, workers, forward, tuple(backward), tuple(messages))


def trace_of(steps: Sequence[SeenStep], gradients: Gradients, source: Mapping[str, Any]) -> ModelTrace:
    """Return when each gradient was ready, the median over steps."""
    forward_s = median(step.forward_s for step in steps)
    by_step = [gradients.ready_s(step) for step in steps]
    ready_s = {name: median(one[name] for one in by_step) for name in gradients.names}
    # Equal moments keep the order of the first step.
    order = sorted(by_step[0], key=lambda name: ready_s[name])
    moments = [(name, ready_s[name], gradients.size_of[name]) for name in order]
    return ModelTrace(gradients.model, forward_s, layers_of(moments, forward_s), source)
