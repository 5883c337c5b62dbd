"""What the tuner is doing or has found: `Tuning`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mgwfbp.cost import PiecewiseCost
from mgwfbp.plan import MergePlan
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural

__all__ = ["Candidate", "Tuning"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that took part in the last comparison."""

    name: str  # "ddp", "optimal 1", "mgwfbp", "bucket 5 MiB", ...
    plan: MergePlan
    predicted_s: float  # of a step, with the cost under load
    steps_s: tuple[float, ...] = ()  # measured steps, of the slowest rank each
    step_s: float = float("inf")  # their median

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "name": self.name,
            "num_messages": self.plan.num_groups,
            "predicted_s": self.predicted_s,
            "step_s": self.step_s,
            "steps_s": list(self.steps_s),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Tuning:
    """What the tuner is doing or has found. Steps are from the start of the forward pass to averaged gradients."""

    state: Literal["working", "settled", "off"]
    reason: str  # what is being done now, or why nothing is
    steps: int = 0  # synchronised steps it has seen
    candidates: tuple[Candidate, ...] = ()  # what was compared, fastest first
    messages_before: int = 0  # a step, with DDP's own buckets
    before_s: float | None = None  # measured, with these
    predicted_s: float | None = None  # of the chosen plan
    exposed_s: float | None = None  # communication that nothing hides, with the chosen plan
    spent_s: float = 0.0  # on everything but training
    trace: ModelTrace | None = field(default=None, compare=False)  # as observed, of the slowest rank
    cost: PiecewiseCost | None = field(default=None, compare=False)  # of a message under load

    @property
    def plan(self) -> MergePlan | None:
        """The chosen plan."""
        return self.candidates[0].plan if self.state == "settled" else None

    @property
    def after_s(self) -> float | None:
        """The measured step of the chosen plan."""
        return self.candidates[0].step_s if self.state == "settled" else None

    def __repr__(self) -> str:
        if self.state != "settled":
            return f"Tuning({self.state}, step {self.steps}: {self.reason})"
        chosen = self.candidates[0]
        ms = {
            name: format_seconds(value or 0.0)
            for name, value in (
                ("after", chosen.step_s),
                ("before", self.before_s),
                ("predicted", self.predicted_s),
                ("exposed", self.exposed_s),
                ("spent", self.spent_s),
            )
        }
        return (
            f"Tuning(settled after {plural(self.steps, 'step')} on {chosen.name!r}: "
            f"{plural(chosen.plan.num_groups, 'message')} a step, DDP's own buckets {self.messages_before}; "
            f"{ms['after']} a step, was {ms['before']}, predicted {ms['predicted']}; "
            f"{ms['exposed']} of communication exposed; tuning took {ms['spent']})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "format": "mgwfbp.tuning/1",
            "state": self.state,
            "reason": self.reason,
            "steps": self.steps,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "messages_before": self.messages_before,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "predicted_s": self.predicted_s,
            "exposed_s": self.exposed_s,
            "spent_s": self.spent_s,
            "plan": self.plan.to_json() if self.plan else None,
            "trace": self.trace.to_json() if self.trace else None,
            "cost": self.cost.to_json() if self.cost else None,
        }
