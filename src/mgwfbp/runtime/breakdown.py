"""Where the time of observed steps goes: what one rank noted in, the parts of a step and predicted buckets out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Self

from mgwfbp.bounds import lower_bound_s
from mgwfbp.cost import PiecewiseCost
from mgwfbp.costs import cheaper_cost
from mgwfbp.plan import MergePlan
from mgwfbp.planners import find_plan, find_wire_plan, planner_of
from mgwfbp.report.explanation import OWN, PARTS, Choice, Explanation
from mgwfbp.runtime.observe.learn import Learner, timeline_of
from mgwfbp.runtime.observe.observer import ObservedStep
from mgwfbp.runtime.observe.steps import Gradients, Note, PackedSteps, Seen
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.kinds import Kind, kinds_of, split_by_kind
from mgwfbp.runtime.tune.decide import BUCKET_MIB
from mgwfbp.timeline import Timeline, predict

__all__ = ["NotedMessages", "note_of", "parts_of_rank"]

# What is noted of the first observed steps, each in steps of its own; of the others only their parts.
NOTES: tuple[Note, ...] = ("plain", "gradients", "messages") * 5


def note_of(place: int) -> Note:
    """Return what is noted of an observed step."""
    return NOTES[place] if place < len(NOTES) else "plain"


def parts_of_rank(steps: Sequence[Mapping[str, float]], least_s: Sequence[float]) -> list[float]:
    """Return the fields of `RankParts`; of exposed time what exceeds that of the last rank, ``least_s``, is waiting."""
    parts_s = {part: fmean(step[part] for step in steps) for part in OWN}
    parts_s["communication"] = fmean(least_s)
    parts_s["waiting"] = max(0.0, fmean(step["exposed"] for step in steps) - parts_s["communication"])
    lengths_s = [sum(step.values()) for step in steps]
    return [*(parts_s[part] for part in PARTS), median(lengths_s), max(lengths_s)]


@dataclass(frozen=True, slots=True)
class NotedMessages:
    """What one rank noted of messages and gradients."""

    gradients: Gradients
    plan: MergePlan  # in force
    kinds: Mapping[str, Kind]
    steps: Mapping[Note, PackedSteps]  # by what was noted
    timeline: str  # the JSON form of a step

    @classmethod
    def of(
        cls,
        observed: Sequence[ObservedStep],
        lengths_s: Sequence[float],
        reducer: ReducerHandle,
        gradients: Gradients,
        workers: int,
    ) -> Self:
        """Pack what was observed so that ranks can agree on it; ``lengths_s`` are those of whole steps.

        Ranks begin their forward passes at different times, but leave a reduction together: so times count from there,
        and whatever comes before the backward pass is packed as the forward pass.
        """
        groups = reducer.groups_of(reducer.buckets())
        planner = "ddp" if reducer.given is None else "plan in force"
        plan = MergePlan(gradients.model, planner, groups, wire=reducer.wires)
        sizes = gradients.sizes_of(plan.groups)
        by_note = {note: [step for place, step in enumerate(observed) if note_of(place) == note] for note in NOTES[:3]}
        whole = [
            _shifted(step, max(0.0, length_s - step.end_s)) for step, length_s in zip(observed, lengths_s, strict=True)
        ]
        steps = {
            note: PackedSteps.of(
                [step for place, step in enumerate(whole) if note_of(place) == note], gradients, sizes, note
            )
            for note in by_note
        }
        step = _joined(_middle(by_note["messages"]), _middle(by_note["gradients"]))
        timeline = timeline_of(step, gradients, plan, workers).dumps()
        return cls(gradients, plan, kinds_of(reducer), steps, timeline)

    @property
    def largest_bytes(self) -> int:
        """The largest message, but no less than can be swept."""
        return max(8, *self.gradients.sizes_of(self.plan.groups))

    @property
    def wire(self) -> str | None:
        """The low precision in which messages travel, all or some; None where none does."""
        return next(filter(None, self.plan.wire), None)

    def predict(
        self,
        found: Explanation,
        seen: Seen,
        swept: PiecewiseCost,
        swept_low: PiecewiseCost | None,
        timeline: str,
    ) -> Explanation:
        """Add what other buckets would give; messages were ``swept`` on an idle network, in both precisions if needed.

        Buckets of one size are those of a model without ``wire=``; the best plan may use the precision in force.
        """
        known, wire = Learner(self.gradients, len(found.ranks), swept, swept_low=swept_low), self.wire
        known.learn(self.plan, seen)
        trace, cost = known.trace, known.both
        assert seen.messages is not None  # noqa: S101 - they too
        assert seen.plain is not None  # noqa: S101 - some steps are
        plans: list[tuple[str, int | None, MergePlan]] = [("as it is", None, self.plan)]
        for size in BUCKET_MIB:
            name = f"bucket_cap_mb={size}{' without wire=' if wire else ''}"
            plans.append((name, size, find_plan(trace, cost, planner_of(f"bucket-{size}"))))
        best = find_wire_plan(trace, cost, wire) if wire else find_plan(trace, cost)
        plans.append((best.planner, None, best))
        choices = []
        for name, bucket_cap_mb, plan in plans:
            step = predict(trace, cost, split_by_kind(plan, self.kinds))
            choices.append(Choice(bucket_cap_mb, name, len(step.messages), step.iteration_s, step.exposed_s))
        messages_s = [sum(taken_s) for taken_s in seen.messages.message_s]
        hidden_s = [max(0.0, a - b) for a, b in zip(messages_s, seen.messages.exposed_s, strict=True)]
        return replace(
            found,
            messages_s=median(messages_s),
            hidden_s=median(hidden_s),
            last_backward_s=trace.backward_s,
            choices=tuple(choices),
            bound_s=lower_bound_s(trace, cheaper_cost(cost) if wire else cost),
            error=choices[0].step_s / max(median(seen.plain.length_s), 1e-12) - 1,
            timeline=Timeline.from_json(json.loads(timeline)),
        )


def _middle(steps: Sequence[ObservedStep]) -> ObservedStep:
    return sorted(steps, key=lambda step: step.end_s)[(len(steps) - 1) // 2]


def _shifted(step: ObservedStep, by_s: float) -> ObservedStep:
    """Return the step with all times counted from an earlier moment."""
    return ObservedStep(
        step.forward_s + by_s,
        step.compute_s + by_s,
        step.end_s + by_s,
        {place: moment_s + by_s for place, moment_s in step.ready_s.items()},
        tuple(
            replace(one, ready_s=one.ready_s + by_s, start_s=one.start_s + by_s, end_s=one.end_s + by_s)
            for one in step.messages
        ),
    )


def _joined(messages: ObservedStep, gradients: ObservedStep) -> ObservedStep:
    """Return a step of which messages were noted with the gradients of another one, stretched to its backward pass."""
    ratio = (messages.compute_s - messages.forward_s) / max(gradients.compute_s - gradients.forward_s, 1e-12)
    ready_s = {
        place: messages.forward_s + max(0.0, moment_s - gradients.forward_s) * ratio
        for place, moment_s in gradients.ready_s.items()
    }
    return replace(messages, ready_s=ready_s)
