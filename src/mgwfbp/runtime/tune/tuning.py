"""What the tuner is doing or has found: `Tuning`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mgwfbp.cost import PiecewiseCost, taken_by
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.fitting import padding_words
from mgwfbp.plan import MergePlan
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_range, format_seconds, plural

__all__ = ["Candidate", "Comparison", "Gathering", "Tuning"]

AS_THEY_ARE = "as they are"  # how messages travel whose gradients are not converted
_PRECISIONS = ((AS_THEY_ARE, False), ("in low precision", True))
# Less than this is not worth a word.
NEGLIGIBLE_S, NEGLIGIBLE = 1e-6, 0.005  # the second is a part of the step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that took part in the comparison."""

    name: str  # "ddp", "optimal 1", "mgwfbp", "bucket-5", ...
    plan: MergePlan
    predicted_s: float  # of a step, with what was learnt of messages
    steps_s: tuple[float, ...] = ()  # measured steps, of the slowest rank each
    step_s: float = float("inf")  # their median
    between_s: tuple[float, float] | None = None  # predicted with messages as much faster, and slower, as may be

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "name": self.name,
            "num_messages": self.plan.num_groups,
            "predicted_s": self.predicted_s,
            "between_s": self.between_s,
            "step_s": self.step_s if self.steps_s else None,
            "steps_s": list(self.steps_s),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """How sure it is which plan is faster; gains are parts of the step with the plan in force before."""

    turns: int
    confidence: float  # that no bound was wrong of all that were looked at, one-sided; see `race`
    rival: str  # the fastest of the others
    gain: float
    gain_low: float
    gain_high: float
    # Whether the rival was chosen: faster beyond doubt; or, with fewer bytes in low precision than the plan in force,
    # beyond doubt not slower by more than these are worth.
    is_sure: bool

    def __str__(self) -> str:
        if not self.turns:
            return "there was nothing to compare with"
        words = f"{self.gain:+.1%}"
        if self.gain_low > float("-inf"):
            words += (
                f" (between {self.gain_low:+.1%} and {self.gain_high:+.1%} with {self.confidence:.1%} confidence each)"
            )
        gained = f"{self.rival!r} gained {words} in {plural(self.turns, 'turn')}"
        if self.is_sure:
            return gained if self.gain_low > 0 else f"{gained}, and sends less in low precision"
        why = "too little to give precision up for" if self.gain_low > 0 else "no gain beyond doubt"
        return f"{gained}, which is {why}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        bounds = {"gain_low": self.gain_low, "gain_high": self.gain_high}
        return {
            "turns": self.turns,
            "confidence": self.confidence,
            "rival": self.rival,
            "gain": self.gain,
            **{name: bound if abs(bound) < float("inf") else None for name, bound in bounds.items()},
            "is_sure": self.is_sure,
        }


@dataclass(frozen=True, slots=True)
class Gathering:
    """What was found of the gathers of a sharded optimizer."""

    comparison: Comparison  # of groups that were planned with those before
    cost: PiecewiseCost  # of a gather, by the bytes of parameters, as learnt in training
    # Of steps that waited for all gathers first and all-reduced their messages with those of the chosen plan: what a
    # plain optimizer's take, but for its update and for copying averages back into gradients that are no views.
    all_reduced: Comparison
    all_reduced_s: float  # such a step, measured
    all_reduce_cost: PiecewiseCost  # as learnt from their messages
    # All-reduces some messages, with a step that is predicted to be shorter by more than 1 %, if there is such a plan:
    # for a new optimizer's ``plan=``.
    per_group: MergePlan | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "comparison": self.comparison.to_json(),
            "cost": self.cost.to_json(),
            "all_reduced": self.all_reduced.to_json(),
            "all_reduced_s": self.all_reduced_s,
            "all_reduce_cost": self.all_reduce_cost.to_json(),
            "per_group": None if self.per_group is None else self.per_group.to_json(),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Tuning:
    """What the tuner is doing or has found. Steps are from the start of the forward pass to averaged gradients."""

    state: Literal["working", "settled", "off"]
    reason: str  # what is being done now, or why nothing is
    steps: int = 0  # steps it has observed
    candidates: tuple[Candidate, ...] = ()  # what was compared, the chosen one first
    comparison: Comparison | None = None
    messages_before: int = 0  # a step, with DDP's own buckets, or where it looked again with the plan before
    before_s: float | None = None  # measured, with these
    exposed_s: float | None = None  # communication that nothing hides, measured, with the chosen plan
    spent_s: float = 0.0  # on everything but training
    retuned: int = 0  # how often it has looked again because steps had changed
    problem: str = ""  # why it cannot look again, though steps have changed
    trace: ModelTrace | None = field(default=None, compare=False)  # as observed, of the slowest rank
    cost: PiecewiseCost | None = field(default=None, compare=False)  # of a message, as learnt in training
    low_cost: PiecewiseCost | None = field(default=None, compare=False)  # in low precision, by bytes of gradients
    gathering: Gathering | None = field(default=None, compare=False)  # where a sharded optimizer gathers parameters
    torchs: MergePlan | None = field(default=None, compare=False)  # torch's own buckets, for when it looks again

    @property
    def costs(self) -> PiecewiseCost | WireCost | ShardedCost | None:
        """The cost of all kinds of messages that were observed."""
        if self.cost is None or (self.low_cost is None and self.gathering is None):
            return self.cost
        if self.gathering is not None:
            return ShardedCost(self.gathering.all_reduce_cost, self.cost, self.gathering.cost)
        assert self.low_cost is not None  # noqa: S101 - one of the two is there
        return WireCost(self.cost, self.low_cost)

    @property
    def plan(self) -> MergePlan | None:
        """The chosen plan."""
        return self.candidates[0].plan if self.state == "settled" else None

    @property
    def after_s(self) -> float | None:
        """The measured step of the chosen plan."""
        return self.candidates[0].step_s if self.state == "settled" and self.candidates[0].steps_s else None

    @property
    def predicted_s(self) -> float | None:
        """The predicted step of the chosen plan."""
        return self.candidates[0].predicted_s if self.state == "settled" else None

    @property
    def low_bytes(self) -> dict[str, int]:
        """The bytes of gradients that travel in low precision, by precision."""
        found: dict[str, int] = {}
        if self.plan is not None and self.trace is not None:
            size_of = {layer.name: layer.grad_bytes for layer in self.trace.layers}
            for group, wire in zip(self.plan.groups, self.plan.wires, strict=True):
                if wire:
                    found[wire] = found.get(wire, 0) + sum(size_of[name] for name in group)
        return found

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that a rank gives to messages in a step, by precision; "as they are" for the others."""
        if self.trace is None:
            return {}
        low = self.low_bytes
        return {AS_THEY_ARE: self.trace.grad_bytes - sum(low.values()), **{one: low[one] // 2 for one in low}}

    def fastest(self, *, is_low: bool) -> Candidate | None:
        """Return the plan with the shortest measured step that sends some messages in low precision, or none so."""
        measured = [one for one in self.candidates if one.steps_s and any(one.plan.wire) == is_low]
        return min(measured, key=lambda one: one.step_s, default=None)

    @property
    def _precision(self) -> str:
        """How gradients travel where some may in low precision, in words."""
        if self.low_cost is None:
            return ""
        return f" ({', '.join(f'{format_bytes(size)} {_how(one)}' for one, size in self.sent_bytes.items() if size)})"

    @property
    def _bought(self) -> str:
        """What a step takes at best with the precision that the chosen plan does not have, in words."""
        is_low = bool(self.low_bytes)
        other = self.fastest(is_low=not is_low) if self.low_cost is not None else None
        if other is None:
            return ""
        how = "with all messages as they are" if is_low else "with messages in low precision"
        return f"; {how} at best {format_seconds(other.step_s)}, measured ({other.name!r})"

    def __repr__(self) -> str:
        if self.state != "settled":
            return f"Tuning({self.state}, step {self.steps}: {self.reason})"
        chosen = self.candidates[0]
        times, before, buckets = "", *(("before", "") if self.retuned else ("DDP's own", " buckets"))
        if self.after_s is not None and self.before_s is not None:
            times = f"measured {format_seconds(self.after_s)} a step, {before} {format_seconds(self.before_s)}; "
        again = f"; looked again {plural(self.retuned, 'time')}" if self.retuned else ""
        again += f"; {self.problem}" if self.problem else ""
        padded = f"; {words}" if (words := padding_words(self.cost)) else ""
        between = f" ({format_range(*chosen.between_s)})" if chosen.between_s else ""
        return (
            f"Tuning(settled after {plural(self.steps, 'step')} on {chosen.name!r}: "
            f"{plural(chosen.plan.num_groups, 'message')} a step{self._precision}, {before}{buckets} "
            f"{self.messages_before}; {times}"
            f"{self.comparison}{self._bought}; exposed communication, measured, "
            f"{format_seconds(self.exposed_s or 0.0)}; predicted step {format_seconds(chosen.predicted_s)}{between}"
            f"{self._taken}{padded}{self._gathered}; tuning took "
            f"{format_seconds(self.spent_s)}{again})"
        )

    @property
    def _taken(self) -> str:
        """What messages were found to take from the computation, in words."""
        if self.cost is None or not taken_by(self.cost, 1):
            return ""
        launch_s = taken_by(self.cost, 0)
        bytes_s = taken_by(self.cost, self.trace.grad_bytes) - launch_s if self.trace else 0.0
        parts = (("a message takes", launch_s), ("all bytes together", bytes_s))
        said = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in parts if seconds > NEGLIGIBLE_S)
        return f"; {said} from the computation (learnt)" if said else ""

    @property
    def _gathered(self) -> str:
        """How parameters are gathered, and whether plain all-reduces would be faster, in words."""
        if self.gathering is None or self.plan is None:
            return ""
        among, plain = self.gathering.comparison, self.gathering.all_reduced
        compared = f", where {among}" if among.turns else ""
        is_ahead = plain.is_sure or plain.gain > NEGLIGIBLE
        advice = f": a plain optimizer {'is' if plain.is_sure else 'may be'} faster" if is_ahead else ""
        return (
            f"; parameters in {plural(len(self.plan.gathers), 'gather')}{compared}; with plain all-reduces a step took "
            f"{format_seconds(self.gathering.all_reduced_s)}, measured; {plain}{advice}{self._per_group}"
        )

    @property
    def _per_group(self) -> str:
        """What a plan would gain that shards some messages and all-reduces others, in words."""
        plan = self.gathering.per_group if self.gathering is not None else None
        if plan is None:
            return ""
        return (
            f"; with {plan.sharded.count(False)} of {plural(plan.num_groups, 'message')} all-reduced and the others "
            f"sharded it is predicted to take {format_seconds(plan.predicted['iteration_s'])}: give a new optimizer "
            "plan=model.tuning.gathering.per_group"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "format": "mgwfbp.tuning/1",
            "state": self.state,
            "reason": self.reason,
            "steps": self.steps,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "comparison": self.comparison.to_json() if self.comparison else None,
            "messages_before": self.messages_before,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "predicted_s": self.predicted_s,
            "exposed_s": self.exposed_s,
            "spent_s": self.spent_s,
            "retuned": self.retuned,
            "problem": self.problem,
            "plan": self.plan.to_json() if self.plan else None,
            "trace": self.trace.to_json() if self.trace else None,
            "cost": self.cost.to_json() if self.cost else None,
            **(self._low_json(self.low_cost) if self.low_cost else {}),
            **({"gathering": self.gathering.to_json()} if self.gathering else {}),
        }

    def _low_json(self, low_cost: PiecewiseCost) -> dict[str, Any]:
        """Return what is known of low precision, and what it bought."""
        fastest = {name: self.fastest(is_low=low) for name, low in _PRECISIONS}
        step_s = {name: one.step_s if one else None for name, one in fastest.items()}
        found = {"low_cost": low_cost.to_json(), "low_bytes": self.low_bytes, "sent_bytes": self.sent_bytes}
        return {**found, "fastest_s": step_s}


def _how(precision: str) -> str:
    return precision if precision == AS_THEY_ARE else f"in {precision}"
