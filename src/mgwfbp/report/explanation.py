"""Why a step takes as long as it does: `Explanation`, what it says in one line, and what to do about it.

Every time is marked as measured or predicted, and only likes are compared.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from mgwfbp.errors import FormatError, ResultError
from mgwfbp.record import Fields, Record, check_count, check_items, check_real, check_text
from mgwfbp.report.words import TRUSTED
from mgwfbp.timeline import Timeline
from mgwfbp.units import format_seconds, plural, quote

__all__ = ["OWN", "PARTS", "TRUSTED", "Choice", "Explanation", "RankParts", "Wrapper", "advise"]

# The parts of a step, in the order in which they come: what they are called, and what they contain.
PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "between": (
            "between steps",
            "from the end of the optimizer's step to the next forward pass: loading data, and whatever else the loop "
            "does there. On a GPU: until it got there, so what the host does while the GPU is busy is not in it.",
        ),
        "forward": (
            "forward pass",
            "all forward passes of the step that compute gradients; what SyncBatchNorm sends is in it.",
        ),
        "backward": ("backward pass", "from the end of a forward pass to the last gradient, the loss included."),
        "waiting": ("waiting for slower ranks", "after the own backward pass, until the last rank had ended its own."),
        "communication": (
            "exposed communication",
            "from the last rank's last gradient to the last message, and buffers that are sent before a forward pass.",
        ),
        "other": ("before the update", "from averaged gradients to the optimizer's step: clipping, logging."),
        "optimizer": ("optimizer", "the optimizer's step."),
    }
)
OWN = ("between", "forward", "backward", "other", "optimizer")  # what a rank does itself
# Parts of the step from which on something is said of them.
MUCH, BEHIND, EXPOSED = 0.10, 0.05, 0.02
# What other buckets must be predicted to gain to be worth a change.
WORTH = 0.01

Wrapper = Literal["torch", "mgwfbp", "tuned"]


@dataclass(frozen=True, slots=True)
class RankParts:
    """The step of one rank and its parts: means over steps, so that they add up. Measured."""

    between_s: float
    forward_s: float
    backward_s: float
    waiting_s: float
    communication_s: float
    other_s: float
    optimizer_s: float
    median_s: float  # of whole steps
    longest_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, check_real(getattr(self, name), name, ResultError))

    def __getitem__(self, part: str) -> float:
        """Return the seconds of one of `PARTS`."""
        return float(getattr(self, f"{part}_s"))

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self[part] for part in PARTS)

    @property
    def own_s(self) -> float:
        """What the rank does itself: all but communication and waiting."""
        return sum(self[part] for part in OWN)


@dataclass(frozen=True, slots=True)
class Choice:
    """Buckets that might be used, and the step that is predicted with them."""

    bucket_cap_mb: int | None  # None where they are no buckets of one size
    name: str  # "as it is", "bucket_cap_mb=5", "bucket_cap_mb=5 without wire=", "optimal", "optimal+bf16"
    num_messages: int
    step_s: float  # predicted
    exposed_s: float  # predicted

    def __post_init__(self) -> None:
        check_text(self.name, "name", ResultError)
        check_count(self.num_messages, "num_messages", ResultError, minimum=1)
        for name in ("step_s", "exposed_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, ResultError))


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Record):
    """Where the time of a step goes on every rank, and what other buckets are predicted to give."""

    FORMAT: ClassVar[str] = "mgwfbp.explanation/1"

    model: str
    wrapper: Wrapper  # torch's class, ours, or ours after its tuner has settled
    has_optimizer: bool  # whether its step was told apart from what lies between steps
    steps: int  # so many steps are in the means
    ranks: tuple[RankParts, ...]
    unknown: str = ""  # why messages were not observed; then nothing below is known
    messages_s: float | None = None  # how long a step's messages take together, measured
    hidden_s: float | None = None  # so much of that is hidden behind the backward pass, measured
    last_backward_s: float | None = None  # the backward pass in which they are sent, of several the last, measured
    choices: tuple[Choice, ...] = ()  # what is in force first, the best plan last; empty where there is one rank
    bound_s: float | None = None  # no buckets give a shorter step, predicted
    error: float | None = None  # how far the prediction for what is in force is off, relative to the measured step
    timeline: Timeline | None = None  # an observed step of the slowest rank, from its last forward pass on

    def __post_init__(self) -> None:
        check_text(self.model, "model", ResultError)
        object.__setattr__(self, "steps", check_count(self.steps, "steps", ResultError, minimum=1))
        object.__setattr__(self, "ranks", check_items(self.ranks, RankParts, "ranks", ResultError))
        object.__setattr__(self, "choices", check_items(self.choices, Choice, "choices", ResultError))
        if not self.ranks:
            raise ResultError("ranks: empty, expected at least one")
        if self.wrapper not in ("torch", "mgwfbp", "tuned"):
            raise ResultError(f"wrapper is {quote(self.wrapper)}, expected torch, mgwfbp or tuned")

    @property
    def slowest(self) -> int:
        """The rank that the others wait for: it does most itself."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].own_s)

    @property
    def step_s(self) -> float:
        """The step of the slowest rank, measured."""
        return self.ranks[self.slowest].step_s

    @property
    def wire(self) -> str:
        """The low precision in which messages travelled, all or some; empty where none did, or that is not known."""
        messages = () if self.timeline is None else self.timeline.messages
        return next((one.wire for one in messages if one.wire), "")

    @property
    def behind_s(self) -> float:
        """How much longer the slowest rank works than the others do."""
        return self.excess_s(*OWN)

    @property
    def behind_part(self) -> str:
        """The part in which it is slower, one of `PARTS`."""
        return max(OWN, key=self.excess_s)

    def excess_s(self, *parts: str) -> float:
        """Return how much longer some parts are on the slowest rank than on the others, the median of them."""
        times_s = [sum(rank[part] for part in parts) for rank in self.ranks]
        own_s = times_s.pop(self.slowest)
        return own_s - median(times_s) if times_s else 0.0

    def share(self, seconds: float) -> float:
        """Return a part of the slowest rank's step."""
        return seconds / self.step_s if self.step_s else 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether predictions are near enough to what was measured to be repeated."""
        return self.error is not None and abs(self.error) <= TRUSTED

    @property
    def best_bucket(self) -> Choice | None:
        """The bucket size to set; None where what is in force is predicted to be as good, or nothing is predicted."""
        sizes = [choice for choice in self.choices if choice.bucket_cap_mb is not None]
        best = min(sizes, key=lambda choice: (choice.step_s, -(choice.bucket_cap_mb or 0)), default=None)
        return best if best is not None and self._is_worth(best) else None

    @property
    def best_plan(self) -> Choice | None:
        """What our class would hold; None as with `best_bucket`, or where its tuner has chosen what is in force."""
        return self.choices[-1] if self.choices and self._is_worth(self.choices[-1]) else None

    def _is_worth(self, choice: Choice) -> bool:
        exposed = self.share(self.ranks[self.slowest].communication_s) >= EXPOSED
        gains = choice.step_s * (1 + WORTH) < self.choices[0].step_s
        return self.wrapper != "tuned" and exposed and self.is_trusted and gains

    def _gain(self, choice: Choice) -> str:
        """Say what a choice is predicted to gain over what is in force, both without what held up single steps."""
        now_s = self.choices[0].step_s
        times = f"{now_s / choice.step_s:.2f} times as fast"
        return f"predicted {times}: {format_seconds(choice.step_s)} where it is {format_seconds(now_s)}"

    def __str__(self) -> str:
        mine = self.ranks[self.slowest]
        parts = sorted((part for part in PARTS if self.share(mine[part]) >= 0.005), key=lambda part: -mine[part])
        shares = ", ".join(f"{self.share(mine[part]):.0%} {_named(part)}" for part in parts)
        told = [f"a step takes {format_seconds(self.step_s)} ({self.how_measured}): {shares}"]
        if self.share(self.behind_s) >= BEHIND:
            told.append(f"slowest rank {self.slowest} ({self.share(self.behind_s):.0%} of the step behind the others)")
        plans = []
        if self.best_bucket is not None:
            plans.append(f"set {self.best_bucket.name} ({self._gain(self.best_bucket)})")
        if self.best_plan is not None:
            plans.append(f"{_ours(self.wrapper)} ({self._gain(self.best_plan)})")
        if plans:
            told.append(", or ".join(plans))
        return "; ".join(told)

    __repr__ = __str__

    @property
    def how_measured(self) -> str:
        """What the measured times are."""
        return f"measured, {plural(len(self.ranks), 'rank')}, mean of {plural(self.steps, 'step')}"

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready data."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "wrapper": self.wrapper,
            "has_optimizer": self.has_optimizer,
            "steps": self.steps,
            "ranks": [asdict(rank) for rank in self.ranks],
            "unknown": self.unknown,
            "messages_s": self.messages_s,
            "hidden_s": self.hidden_s,
            "last_backward_s": self.last_backward_s,
            "choices": [asdict(choice) for choice in self.choices],
            "bound_s": self.bound_s,
            "error": self.error,
            "timeline": None if self.timeline is None else self.timeline.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make the record from parsed JSON; the opposite of `to_json`."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        timeline = fields["timeline"]
        try:
            return cls(
                **{name: fields[name] for name in ("model", "wrapper", "has_optimizer", "steps", "unknown")},
                ranks=tuple(RankParts(*(one[name] for name in RankParts.__slots__)) for one in fields.objects("ranks")),
                choices=tuple(Choice(*(one[name] for name in Choice.__slots__)) for one in fields.objects("choices")),
                **{name: fields[name] for name in ("messages_s", "hidden_s", "last_backward_s", "bound_s", "error")},
                timeline=None if timeline is None else Timeline.from_json(timeline),
            )
        except ResultError as error:
            raise FormatError(str(error)) from None


def _named(part: str) -> str:
    return f"{PARTS[part][0]}{' (loading data)' if part == 'between' else ''}"


def _ours(wrapper: Wrapper) -> str:
    return "use mgwfbp.DistributedDataParallel" if wrapper == "torch" else "let mgwfbp.DistributedDataParallel tune"


def advise(found: Explanation) -> list[str]:
    """Say in plain words what makes the step long and what to do about each, with its number."""
    mine = found.ranks[found.slowest]

    def much(seconds: float) -> str:
        return f"{format_seconds(seconds)} ({found.share(seconds):.0%} of a step, measured)"

    told = []
    if found.share(found.behind_s) >= BEHIND:
        part = found.behind_part
        others_s = mine[part] - found.excess_s(part)
        told.append(
            f"Rank {found.slowest} holds the others up: it is {much(found.behind_s)} behind them. Where it loses "
            f"most: {_named(part)}, {format_seconds(mine[part])}, the others {format_seconds(others_s)} (measured). "
            "Look at what is different there: its share of the data, its processor, other programs on the machine."
        )
    elif found.share(mine.waiting_s) >= BEHIND:
        told.append(
            f"Ranks take turns at being late: even rank {found.slowest} waits {much(mine.waiting_s)}. "
            "Batches that take unequal time, or other programs on the machines, do that."
        )
    if found.share(mine.between_s) >= MUCH:
        told.append(
            f"{much(mine.between_s)} go by between steps, before the forward pass, most likely waiting for data: "
            "give the DataLoader more workers (num_workers=), pin_memory=True and a larger prefetch_factor="
            f".{'' if found.has_optimizer else ' The optimizer is in it too, as none was given.'}"
        )
    if found.share(mine.optimizer_s) >= MUCH:
        told.append(
            f"The optimizer takes {much(mine.optimizer_s)}: give it fused=True, or foreach=True where it "
            "has no fused form."
        )
    if len(found.ranks) > 1:
        told += _about_messages(found)
    if mine.longest_s > 2 * mine.median_s:
        told.append(
            f"Steps are uneven: half of them take at most {format_seconds(mine.median_s)}, the longest "
            f"{format_seconds(mine.longest_s)} (measured)."
        )
    if not any(found.share(mine[part]) >= MUCH for part in PARTS if part not in ("forward", "backward")):
        compute_s = mine.forward_s + mine.backward_s
        told.append(f"Computation is {much(compute_s)}: there is little else to win.")
    return told


def _about_messages(found: Explanation) -> list[str]:
    mine = found.ranks[found.slowest]
    exposed_s = mine.communication_s
    share = found.share(exposed_s)
    told = [f"Exposed communication is {format_seconds(exposed_s)} ({share:.0%} of a step, measured)."]
    if found.messages_s is not None and found.hidden_s is not None:
        told[0] += (
            f" Messages take {format_seconds(found.messages_s)} a step, {format_seconds(found.hidden_s)} of it hidden "
            "behind the backward pass (both measured)."
        )
    if share < EXPOSED:
        return [f"{told[0]} There is nothing to gain from other buckets."]
    if found.unknown:
        return [*told, f"Messages were not observed one by one, so no buckets are predicted: {found.unknown}."]
    if not found.is_trusted:
        return [*told, f"Predictions are off by {found.error or 0.0:+.0%}: too far to advise bucket sizes by them."]
    now = found.choices[0]
    as_it_is = f"{format_seconds(now.step_s)} as it is"
    better = [choice for choice in (found.best_bucket, found.best_plan) if choice is not None]
    if better:
        names = [choice.name if choice.bucket_cap_mb else _ours(found.wrapper) for choice in better]
        steps = ", ".join(
            f"{name}: {format_seconds(choice.step_s)}" for name, choice in zip(names, better, strict=True)
        )
        told.append(f"Other buckets help. A step, all predicted: {steps}; {as_it_is}.")
    elif found.wrapper == "tuned":
        told.append("The tuner has chosen the buckets in force by measuring them against others.")
    else:
        told.append(f"No buckets are predicted to be better than those in force ({as_it_is}, predicted).")
    messages_s, backward_s = found.messages_s or 0.0, found.last_backward_s or 0.0
    if messages_s > backward_s and found.bound_s is not None:
        # Where some travel in low precision already, the bound is that of both.
        whose, hook = (" in either precision", "") if found.wire else ("", "torch's bf16_compress_hook, ")
        told.append(
            f"Buckets alone cannot hide the messages: these take {format_seconds(messages_s)}, the backward pass in "
            f"which they are sent {format_seconds(backward_s)} (both measured). No buckets{whose} give a step below "
            f"{format_seconds(found.bound_s)} (predicted). Send fewer bytes ({hook}several batches a step with "
            "no_sync), or use a faster network."
        )
    return told
