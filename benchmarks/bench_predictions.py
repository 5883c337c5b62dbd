"""What predictions were off by, from results of `mgwfbp bench`: sections of documents that bench_tables.py writes.

The tuner predicts every plan that it compares before the comparison (the one that it keeps again after it, with one
more observation), and its result has both the prediction and the measured step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import Any

from mgwfbp import BenchResult
from mgwfbp.ranges import LOW_MODEL_OFF, MODEL_OFF, widened

FAR_OFF = 0.06
# Of the measured steps, that ranges are to hold.
HELD = 0.75


@dataclass(frozen=True)
class Tuned:
    """A plan that a tuner predicted and measured."""

    cell: str
    folder: str
    name: str
    step_s: float
    predicted_s: float
    inputs_s: tuple[float, float]  # between what cost and trace may be off by; of newer results the whole range
    between_s: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1

    @property
    def is_low(self) -> bool:
        """Whether messages travel in low precision."""
        return "+" in self.name or self.name.startswith("all ")

    @property
    def kind(self) -> str:
        """Whose plan it is.

        >>> kinds = ("optimal 2+bf16", "bucket-25", "all bf16 1", "ddp")
        >>> [Tuned("", "", name, 1.0, 1.0, (1.0, 1.0), (1.0, 1.0)).kind for name in kinds]
        ['optimal+bf16', 'bucket', 'all bf16', 'ddp']
        """
        name, plus, wire = self.name.partition("+")
        words = name.split()
        return " ".join(words[:2]) if words[0] == "all" else words[0].partition("-")[0] + plus + wire


def tuned(folder: str, cell: str, result: BenchResult) -> list[Tuned]:
    known_off = result.source.get("model_off")  # older results have ranges of what inputs may be off by
    found = []
    for tuning in tunings(result):
        for row in tuning["candidates"]:
            if row["steps_s"] and row.get("between_s"):  # older results have no ranges
                numbers = row["step_s"], row["predicted_s"], tuple(row["between_s"])
                found.append(Tuned(cell, folder, row["name"], *numbers, numbers[2]))
    if known_off is not None:
        return found
    return [replace(one, between_s=with_model(one, LOW_MODEL_OFF if one.is_low else MODEL_OFF)) for one in found]


def with_model(one: Tuned, model_off: float) -> tuple[float, float]:
    return widened(one.predicted_s, one.inputs_s, model_off)


def tunings(result: BenchResult) -> list[Mapping[str, Any]]:
    return [value for name, value in result.source.items() if name.startswith("tuning") and value]


def share(some: Sequence[Tuned], attribute: str) -> float:
    return fmean(getattr(one, attribute)[0] <= one.step_s <= getattr(one, attribute)[1] for one in some)


def sections(folders: Mapping[str, Sequence[tuple[str, BenchResult]]]) -> Iterator[str]:
    """What the tuner predicted, by cell and by planner; results by folder, each with its cell's name."""
    plans = [one for name, cells in folders.items() for cell, result in cells for one in tuned(name, cell, result)]
    if not plans:
        return
    yield "\n## What the tuner predicted of the plans that it compared\n"
    yield from ranges_of(plans, folders)
    yield "\n## Signed errors, by planner\n"
    yield (
        "The plan that is chosen by a prediction is the one that it underestimates most. Below zero: the step took "
        "longer than predicted.\n"
    )
    names = list(folders)
    yield "| plans of | " + " | ".join(f"{name}: plans | signed | absolute" for name in names) + " | the worst |"
    yield "| --- |" + " --: |" * (3 * len(names)) + " --- |"
    for kind in dict.fromkeys(one.kind for one in plans):
        mine = [one for one in plans if one.kind == kind]
        cells = [cell for name in names for cell in signed([one for one in mine if one.folder == name])]
        worst = max(mine, key=lambda one: abs(one.error))
        yield f"| {kind} | {' | '.join(cells)} | {worst.error:+.1%}: {worst.cell} |"
    yield ""


def signed(some: Sequence[Tuned]) -> tuple[str, str, str]:
    if not some:
        return "", "", ""
    errors = [one.error for one in some]
    return str(len(some)), f"{fmean(errors):+.2%}", f"{fmean(map(abs, errors)):.2%}"


def ranges_of(plans: Sequence[Tuned], folders: Mapping[str, Sequence[tuple[str, BenchResult]]]) -> Iterator[str]:
    errors = [abs(one.error) for one in plans]
    yield (
        f"{len(plans)} plans, mean absolute error {fmean(errors):.2%}. What cost and trace may be off by holds "
        f"{share(plans, 'inputs_s'):.0%} of the measured steps; the range, which has what the model is off by besides, "
        f"holds **{share(plans, 'between_s'):.0%}**. The model is off by the least part with which ranges hold three "
        "in four plans in gpu/ and wire/ (`mgwfbp.ranges`); last, what they hold where it is found from all other "
        "cells.\n"
    )
    yield (
        "| messages | plans | signed error | absolute error | held by what inputs may be off by | the model is off by "
        "| held by the range | in the cell left out |"
    )
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for words, model_off, is_low in (("as they are", MODEL_OFF, False), ("in low precision", LOW_MODEL_OFF, True)):
        if mine := [one for one in plans if one.is_low == is_low]:
            held = f"{share(mine, 'inputs_s'):.0%} | {model_off:.1%} | {share(mine, 'between_s'):.0%}"
            yield f"| {words} | {' | '.join(signed(mine))} | {held} | {left_out(mine):.0%} |"
    yield ""
    for name, cells in folders.items():
        mine = [one for one in plans if one.folder == name]
        steps = [tuning["steps"] for _, result in cells for tuning in tunings(result)]
        spent = [tuning["spent_s"] for _, result in cells for tuning in tunings(result)]
        far = [f"{one.name} of {one.cell} {one.error:+.1%}" for one in mine if abs(one.error) > FAR_OFF]
        yield (
            f"`{name}/`: {len(mine)} plans, mean absolute error {fmean(abs(one.error) for one in mine):.2%}; tuners "
            f"took {min(steps)} to {max(steps)} steps and {min(spent):.0f} to {max(spent):.0f} s that were not "
            f"training; off by more than {FAR_OFF:.0%}: {', '.join(far) or 'none'}.\n"
        )
    yield "| cell | plans | signed error | absolute error | worst | held by what inputs may be off by | by the range |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for folder, name in dict.fromkeys((one.folder, one.cell) for one in plans):
        some = [one for one in plans if (one.folder, one.cell) == (folder, name)]
        number, mean, absolute = signed(some)
        worst = max(some, key=lambda one: abs(one.error))
        held = f"{share(some, 'inputs_s'):.0%} | {share(some, 'between_s'):.0%}"
        yield f"| {folder}/ {name} | {number} | {mean} | {absolute} | {worst.error:+.1%} | {held} |"
    yield ""


def share_held(some: Sequence[Tuned], model_off: float) -> float:
    """Which part of measured steps ranges hold, with this for what the model is off by."""
    return share([replace(one, between_s=with_model(one, model_off)) for one in some], "between_s")


def least_off(some: Sequence[Tuned]) -> float:
    """The least part of a step, in thousandths, by which the model may be off so that ranges hold `HELD` of the steps.

    >>> plans = [Tuned("", "", "", step_s, 1.0, (1.0, 1.0), (1.0, 1.0)) for step_s in (1.0, 1.01, 1.02, 1.5)]
    >>> least_off(plans)
    0.02
    """
    return next(off / 1000 for off in count() if share_held(some, off / 1000) >= HELD)


def left_out(plans: Sequence[Tuned]) -> float:
    """Which part of measured steps ranges hold in a cell, with what the model is off by found from all others."""
    held = 0.0
    for cell in {one.cell for one in plans}:
        mine = [one for one in plans if one.cell == cell]
        held += len(mine) * share_held(mine, least_off([one for one in plans if one.cell != cell]))
    return held / len(plans)


def before_and_after(results: Sequence[tuple[str, BenchResult]]) -> str:
    """What learning in training did to the mean errors of cells, without the parameter server."""
    means: list[tuple[str, float, float]] = []
    for cell, result in results:
        before_s = result.source["predicted_before_learning_s"]
        both = [
            (before_s[one.strategy] / one.measured_s - 1, one.predicted_s / one.measured_s - 1)
            for one in result.strategies
            if one.strategy != "ps" and one.predicted_s and before_s[one.strategy]
        ]
        if both:
            old, new = (fmean(map(abs, errors)) for errors in zip(*both, strict=True))
            means.append((cell, old, new))
    before, after = [mean for _, mean, _ in means], [mean for _, _, mean in means]
    worse = [f"{cell} ({old:.1%}, then {new:.1%})" for cell, old, new in means if new > old]
    return (
        f"Without `ps` the mean error of a cell was {min(before):.1%} to {max(before):.1%} before learning "
        f"({fmean(before):.1%} in the mean of cells) and {min(after):.1%} to {max(after):.1%} after "
        f"({fmean(after):.1%}); it grew in {', '.join(worse) or 'none'}.\n"
    )


def taken(results: Sequence[tuple[str, BenchResult]]) -> Iterator[str]:
    """What messages take from the computation, as it was learnt, of the results that kept their cost."""
    yield "\n## What messages take from the computation, learnt\n"
    kept = [(cell, result.cost) for cell, result in results if result.cost is not None]
    without = len(results) - len(kept)
    if without:
        yield f"{without} of {len(results)} results are of editions that did not keep the learnt cost.\n"
    if kept:
        yield "| cell | a message | a byte |\n| --- | --: | --: |"
        for cell, cost in kept:
            yield f"| {cell} | {cost.taken_s * 1e6:.0f} us | {cost.taken_per_byte_s * 1e9:.3f} ns |"
        yield ""
