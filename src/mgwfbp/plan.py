"""Which gradients travel together, how, and which parameters are gathered together: `MergePlan`."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Self

from mgwfbp.errors import PlanError
from mgwfbp.record import Fields, Record, check_free_form, check_items, check_text, first_repeated
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural, quote

__all__ = ["SHORT_WIRES", "WIRES", "MergePlan"]

# Precisions that a message may travel in, besides that of its gradients, and how strategies' names end with them.
SHORT_WIRES = {"bfloat16": "bf16", "float16": "fp16"}
WIRES = tuple(SHORT_WIRES)


@dataclass(frozen=True, slots=True, repr=False)
class MergePlan(Record):
    """A partition of a model's gradients into messages, in the order in which the messages are sent.

    A plan that says more than its groups has format ``mgwfbp.plan/2``: with ``wire`` messages may travel in a lower
    precision than that of their gradients. With ``gathers`` it is for a sharded optimizer: a message whose gradients
    stand there is a reduce-scatter, each rank updates its share, and the parameters are all-gathered during the next
    forward pass, in these groups. Other messages are all-reduced, and all ranks update their parameters.

    >>> MergePlan("toy", "by hand", (("d", "c"), ("b", "a")))
    MergePlan('toy' by 'by hand': 4 gradients in 2 messages, 2+2)
    >>> MergePlan("toy", "by hand", (("d", "c"), ("b", "a")), wire=("", "bfloat16"))
    MergePlan('toy' by 'by hand': 4 gradients in 2 messages, 2+2, 1 of them in bfloat16)
    >>> MergePlan("toy", "by hand", (("d", "c"), ("b", "a")), gathers=(("a",), ("b",)))
    MergePlan('toy' by 'by hand': 4 gradients in 2 messages, 2+2, 1 of them reduce-scattered, 2 gathers, 1+1)
    """

    FORMAT: ClassVar[str] = "mgwfbp.plan/1"
    LATER_FORMAT: ClassVar[str] = "mgwfbp.plan/2"  # with ``wire`` or ``gathers``

    model: str
    planner: str
    groups: tuple[tuple[str, ...], ...]  # names of the gradients of each message
    predicted: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what the planner expects; free-form
    # The precision of each message, "" for that of its gradients; empty where all are such.
    wire: tuple[str, ...] = ()
    # Names of the parameters of each all-gather in the next forward pass, in the order in which they are gathered.
    gathers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        check_text(self.model, "model", PlanError)
        check_text(self.planner, "planner", PlanError)
        listed = check_items(self.groups, object, "groups", PlanError)
        groups = tuple(_check_group(f"groups[{index}]", group) for index, group in enumerate(listed))
        if not groups:
            raise PlanError("groups: empty, expected at least one message")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "predicted", check_free_form(self.predicted, "predicted", PlanError))
        object.__setattr__(self, "wire", _check_wire(self.wire, len(groups)))
        repeated = first_repeated(self.layer_names)
        if repeated is not None:
            raise PlanError(f"groups: {quote(repeated)} stands twice, expected every gradient once")
        gathers = check_items(self.gathers, object, "gathers", PlanError)
        gathers = tuple(_check_group(f"gathers[{index}]", group) for index, group in enumerate(gathers))
        object.__setattr__(self, "gathers", gathers)
        self._check_gathers()

    def _check_gathers(self) -> None:
        if not self.gathers:
            return
        listed = tuple(chain.from_iterable(self.gathers))
        repeated = first_repeated(listed)
        if repeated is not None:
            raise PlanError(f"gathers: {quote(repeated)} stands twice, expected every parameter once at most")
        if self.wire:
            raise PlanError("the plan has both gathers and messages in low precision (wire), expected one of them")
        gathered = set(listed)
        unknown = gathered.difference(self.layer_names)
        if unknown:
            raise PlanError(f"gathers: {quote(min(unknown))} is no gradient of the plan's groups")
        for index, group in enumerate(self.groups):
            missing = [name for name in group if name not in gathered]
            if 0 < len(missing) < len(group):
                raise PlanError(
                    f"gathers: {quote(missing[0])} of groups[{index}] is not gathered and others of that message are, "
                    "expected all of them or none"
                )

    def __repr__(self) -> str:
        shown = _sizes_words(self.groups)
        return (
            f"MergePlan({quote(self.model)} by {quote(self.planner)}: {plural(len(self.layer_names), 'gradient')} in "
            f"{plural(self.num_groups, 'message')}, {shown}{self._wire_words}{self._gather_words})"
        )

    @property
    def _wire_words(self) -> str:
        counts = Counter(filter(None, self.wire))
        return "".join(f", {number} of them in {name}" for name, number in counts.items())

    @property
    def _gather_words(self) -> str:
        if not self.gathers:
            return ""
        number = "all" if all(self.sharded) else f"{sum(self.sharded)}"
        gathers = plural(len(self.gathers), "gather")
        return f", {number} of them reduce-scattered, {gathers}, {_sizes_words(self.gathers)}"

    def __str__(self) -> str:
        """Return the plan as text: a line for each message, in the order in which they are sent. `parse` reads it.

        >>> print(MergePlan("toy", "by hand", (("d", "c"), ("b", "the last"))))
        plan of toy by "by hand"
        message 1: d c
        message 2: b "the last"
        >>> print(MergePlan("toy", "by hand", (("c",), ("b", "a")), gathers=(("a",), ("b",))))
        plan of toy by "by hand"
        message 1: c
        message 2: b a
        gather 1: a
        gather 2: b
        """
        lines = [f"plan of {_word(self.model)} by {_word(self.planner)}"]
        lines += [
            f"message {number}{f' in {wire}' if wire else ''}: {' '.join(_word(name) for name in group)}"
            for number, (group, wire) in enumerate(zip(self.groups, self.wires, strict=True), 1)
        ]
        lines += [
            f"gather {number}: {' '.join(_word(name) for name in group)}"
            for number, group in enumerate(self.gathers, 1)
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
        gathers: list[tuple[str, ...]] = []
        wire: list[str] = []
        predicted: dict[str, Any] = {}
        for number, line in enumerate(lines, 2):
            start, _, rest = line.partition(": ")
            start, _, precision = start.partition(" in ")
            if start == f"message {len(groups) + 1}" and not gathers:
                groups.append(tuple(_words(rest, number)))
                wire.append(precision)
            elif start == f"gather {len(gathers) + 1}" and not precision:
                gathers.append(tuple(_words(rest, number)))
            elif start == "predicted" and number == len(lines) + 1:
                predicted = _json(rest, number)
            else:
                due = f"gather {len(gathers) + 1}" if gathers else f"message {len(groups) + 1}"
                raise PlanError(f"line {number} is {quote(line)}, expected '{due}: NAMES'")
        return cls(words[2], words[4], tuple(groups), predicted, tuple(wire), tuple(gathers))

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
    def wires(self) -> tuple[str, ...]:
        """The precision of each message, "" for that of its gradients."""
        return self.wire or ("",) * len(self.groups)

    @property
    def sharded(self) -> tuple[bool, ...]:
        """Which messages are reduce-scatters: those whose parameters are gathered in the next forward pass."""
        gathered = set(chain.from_iterable(self.gathers))
        return tuple(group[0] in gathered for group in self.groups)

    @property
    def messages(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """All that two plans which send the same have in common: groups, how they travel, and what is gathered."""
        return self.groups, self.wire, self.gathers

    def low_bytes(self, size_of: Mapping[str, int]) -> int:
        """Return how many bytes of gradients travel in low precision, with the bytes of each by its name.

        >>> MergePlan("toy", "by hand", (("b",), ("a",)), wire=("", "bfloat16")).low_bytes({"a": 4, "b": 8})
        4
        """
        return sum(size_of[name] for group, wire in zip(self.groups, self.wires, strict=True) if wire for name in group)

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

    def check_all_reduced(self, who: str) -> None:
        """Raise where parameters are gathered in the forward pass, which ``who`` does not do."""
        if self.gathers:
            raise PlanError(
                f"the plan gathers parameters in the forward pass, for a sharded optimizer, and {who} all-reduces all "
                "messages: make a plan with `mgwfbp plan --engine ddp`"
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
        self.check_all_reduced("torch's DDP")
        if self.wire:
            raise PlanError(
                "the plan sends messages in low precision, which torch's DDP cannot be told: give it to "
                "mgwfbp.DistributedDataParallel(wire=...) instead"
            )
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
            "format": self.LATER_FORMAT if self.wire or self.gathers else self.FORMAT,
            "model": self.model,
            "planner": self.planner,
            "groups": [list(group) for group in self.groups],
            **({"wire": [wire or None for wire in self.wire]} if self.wire else {}),
            **({"gathers": [list(group) for group in self.gathers]} if self.gathers else {}),
            "predicted": dict(self.predicted),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a plan from the content of ``plan.json``."""
        fields = Fields(data)
        is_later = fields.get("format", "") == cls.LATER_FORMAT
        fields.check_format(cls.LATER_FORMAT if is_later else cls.FORMAT)
        gathers = tuple(fields.items("gathers")) if is_later and "gathers" in fields else ()
        # Without either it is torn: what it says besides its groups is missing.
        has_wire = is_later and ("wire" in fields or not gathers)
        wire = tuple("" if one is None else one for one in fields.items("wire")) if has_wire else ()
        groups, predicted = tuple(fields.items("groups")), fields.get("predicted", {})
        return cls(fields["model"], fields["planner"], groups, predicted, wire, gathers)


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


def _check_wire(wire: object, num_groups: int) -> tuple[str, ...]:
    listed = tuple("" if one is None else one for one in check_items(wire, object, "wire", PlanError))
    for index, one in enumerate(listed):
        if one not in ("", *WIRES):
            raise PlanError(f"wire[{index}] is {quote(one)}, expected null or one of {', '.join(WIRES)}")
    if listed and len(listed) != num_groups:
        raise PlanError(f"wire has {len(listed)} entries, expected one for each of {plural(num_groups, 'message')}")
    return tuple(str(one) for one in listed) if any(listed) else ()


def _check_group(what: str, group: object) -> tuple[str, ...]:
    if not isinstance(group, (list, tuple)) or not group:
        raise PlanError(f"{what} is {quote(group)}, expected a non-empty list of gradient names")
    return tuple(check_text(name, f"{what}[{place}]", PlanError) for place, name in enumerate(group))


def _sizes_words(groups: Sequence[tuple[str, ...]]) -> str:
    """Return how many names each group has, of many groups of the first."""
    sizes = [str(len(group)) for group in groups]
    return "+".join(sizes if len(sizes) <= 12 else [*sizes[:11], "…"])
