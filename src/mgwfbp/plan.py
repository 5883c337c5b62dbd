"""Which gradients travel together: `MergePlan`."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Self

from mgwfbp.errors import PlanError
from mgwfbp.record import Fields, Record, check_free_form, check_items, check_text, first_repeated
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural, quote

__all__ = ["MergePlan"]


@dataclass(frozen=True, slots=True, repr=False)
class MergePlan(Record):
    """A partition of a model's gradients into messages, in the order in which the messages are sent.

    >>> MergePlan("toy", "by hand", (("d", "c"), ("b", "a")))
    MergePlan('toy' by 'by hand': 4 gradients in 2 messages, 2+2)
    """

    FORMAT: ClassVar[str] = "mgwfbp.plan/1"

    model: str
    planner: str
    groups: tuple[tuple[str, ...], ...]  # names of the gradients of each message
    predicted: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what the planner expects; free-form

    def __post_init__(self) -> None:
        check_text(self.model, "model", PlanError)
        check_text(self.planner, "planner", PlanError)
        listed = check_items(self.groups, object, "groups", PlanError)
        groups = tuple(_check_group(index, group) for index, group in enumerate(listed))
        if not groups:
            raise PlanError("groups: empty, expected at least one message")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "predicted", check_free_form(self.predicted, "predicted", PlanError))
        repeated = first_repeated(self.layer_names)
        if repeated is not None:
            raise PlanError(f"groups: {quote(repeated)} stands twice, expected every gradient once")

    def __repr__(self) -> str:
        sizes = [str(size) for size in self.group_sizes]
        shown = "+".join(sizes if len(sizes) <= 12 else [*sizes[:11], "…"])
        return (
            f"MergePlan({quote(self.model)} by {quote(self.planner)}: {plural(len(self.layer_names), 'gradient')} in "
            f"{plural(self.num_groups, 'message')}, {shown})"
        )

    def __str__(self) -> str:
        """Return the plan as text: a line for each message, in the order in which they are sent. `parse` reads it.

        >>> print(MergePlan("toy", "by hand", (("d", "c"), ("b", "the last"))))
        plan of toy by "by hand"
        message 1: d c
        message 2: b "the last"
        """
        lines = [f"plan of {_word(self.model)} by {_word(self.planner)}"]
        lines += [
            f"message {number}: {' '.join(_word(name) for name in group)}"
            for number, group in enumerate(self.groups, 1)
        ]
        if self.predicted:
            lines.append(f"predicted: {json.dumps(dict(self.predicted), allow_nan=False, default=dict)}")
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Make a plan of the text that ``str(plan)`` gives.

        Raises:
            PlanError: where the text is none; it names the line.
        """
        head, *lines = text.strip().splitlines() or [""]
        words = _words(head, 1)
        if len(words) != 5 or (words[0], words[1], words[3]) != ("plan", "of", "by"):
            raise PlanError(f"line 1 is {quote(head)}, expected 'plan of MODEL by PLANNER'")
        groups: list[tuple[str, ...]] = []
        predicted: dict[str, Any] = {}
        for number, line in enumerate(lines, 2):
            start, _, rest = line.partition(": ")
            if start == f"message {len(groups) + 1}":
                groups.append(tuple(_words(rest, number)))
            elif start == "predicted" and number == len(lines) + 1:
                predicted = _json(rest, number)
            else:
                raise PlanError(f"line {number} is {quote(line)}, expected 'message {len(groups) + 1}: NAMES'")
        return cls(words[2], words[4], tuple(groups), predicted)

    @classmethod
    def of_sizes(cls, trace: ModelTrace, sizes: Iterable[int], *, planner: str = "by hand") -> Self:
        """Cut the ready order into groups of these sizes.

        >>> from mgwfbp.trace import LayerTrace
        >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 4) for name in "cba"))
        >>> MergePlan.of_sizes(trace, [1, 2]).groups
        (('c',), ('b', 'a'))
        """
        names = [layer.name for layer in trace.layers]
        groups, taken = [], 0
        for size in sizes:
            groups.append(tuple(names[taken : taken + size]))
            taken += size
        if taken != len(names):
            there = plural(len(names), "gradient")
            raise PlanError(f"sizes add up to {taken}, the model {quote(trace.model)} has {there}")
        return cls(trace.model, planner, tuple(groups))

    @property
    def num_groups(self) -> int:
        """How many messages a step sends."""
        return len(self.groups)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """How many gradients each message carries."""
        return tuple(len(group) for group in self.groups)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """All gradients, in the order in which they are sent."""
        return tuple(chain.from_iterable(self.groups))

    def check_covers(self, names: Sequence[str], *, what: str = "the trace") -> None:
        """Raise unless the plan holds exactly these gradients, in whatever order."""
        mine, theirs = set(self.layer_names), set(names)
        if mine == theirs:
            return
        differences = []
        for label, some in (("missing", theirs - mine), ("unknown", mine - theirs)):
            if some:
                shown = ", ".join(quote(name) for name in sorted(some)[:3])
                differences.append(f"{label}: {shown}{', …' if len(some) > 3 else ''}")
        raise PlanError(
            f"the plan for {quote(self.model)} covers {plural(len(mine), 'gradient')}, {what} has {len(theirs)} "
            f"({'; '.join(differences)}); it was made for another model: make a new one with `mgwfbp plan`"
        )

    def bucket_cap_mb_list(self, trace: ModelTrace) -> list[float]:
        """Return the sizes in MiB with which torch's own DDP, from 2.11 on, sends these messages.

        ``torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb_list=...)`` fills buckets in the order in which
        gradients were ready in the first step, and closes the n-th bucket when it has reached the n-th size. So the
        plan is in force from the second step on (``static_graph=True``: from the third), without this package, where
        gradients become ready as in the trace.

        Not expressed: gradients of several dtypes or devices (torch counts the sizes for each anew), sparse ones, and
        ``find_unused_parameters=True``, where torch keeps the order of definition.

        >>> from mgwfbp.trace import LayerTrace
        >>> trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 1.0, 2**19) for name in "cba"))
        >>> MergePlan.of_sizes(trace, [1, 2]).bucket_cap_mb_list(trace)
        [0.5, 1.0]

        Args:
            trace: the ready order and the bytes of the gradients; that of a tuned model is ``model.tuning.trace``.

        Returns:
            One size for each message, in the order in which they are sent.

        Raises:
            PlanError: where the plan is for other gradients, or torch cannot be told these messages.
        """
        self.check_covers([layer.name for layer in trace.layers])
        caps, taken = [], 0
        for number, group in enumerate(self.groups, 1):
            layers = trace.layers[taken : taken + len(group)]
            taken += len(group)
            if {layer.name for layer in layers} != set(group):
                raise PlanError(
                    f"message {number} of the plan does not hold the gradients that are ready next in the trace of "
                    f"{quote(trace.model)}, and torch's DDP fills buckets in ready order: give this plan to "
                    "mgwfbp.DistributedDataParallel instead"
                )
            if len(layers) > 1 and not layers[-1].grad_bytes:
                raise PlanError(
                    f"message {number} of the plan ends with {quote(layers[-1].name)} of 0 bytes, and torch's DDP "
                    "closes a bucket before it: give this plan to mgwfbp.DistributedDataParallel instead"
                )
            caps.append(sum(layer.grad_bytes for layer in layers) / 2**20)  # exact: torch multiplies by 2**20 again
        return caps

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``plan.json``."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "planner": self.planner,
            "groups": [list(group) for group in self.groups],
            "predicted": dict(self.predicted),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a plan from the content of ``plan.json``."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        return cls(fields["model"], fields["planner"], tuple(fields.items("groups")), fields.get("predicted", {}))


_PLAIN = re.compile(r"[\w.\-+/:]+", re.ASCII)


def _word(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _words(line: str, number: int) -> list[str]:
    """Split a line into words, some of which are strings as JSON writes them."""
    words, rest = [], line.strip()
    while rest:
        if rest[0] == '"':
            try:
                word, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                raise PlanError(f"line {number}: {quote(rest)} is no name in quotation marks") from None
            words.append(word)
            rest = rest[end:].lstrip()
        else:
            word, _, rest = rest.partition(" ")
            words.append(word)
            rest = rest.lstrip()
    return words


def _json(text: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PlanError(f"line {number}: what is predicted is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"line {number}: what is predicted is {quote(found)}, expected an object")
    return found


def _check_group(index: int, group: object) -> tuple[str, ...]:
    if not isinstance(group, (list, tuple)) or not group:
        raise PlanError(f"groups[{index}] is {quote(group)}, expected a non-empty list of gradient names")
    return tuple(check_text(name, f"groups[{index}][{place}]", PlanError) for place, name in enumerate(group))
