"""The page of an `Explanation`: the answer and the advice in words, then the pictures behind them."""

from typing import Any

from mgwfbp.report.chart import Chart, Series, Table
from mgwfbp.report.explanation import PARTS, Explanation, advise
from mgwfbp.report.page import Names, render, step_json
from mgwfbp.report.tables import COMPUTATION_COLOR, EXPOSED_COLOR
from mgwfbp.units import format_seconds, plural

__all__ = ["build_explanation_page"]

_COLORS = {"between": 4, "forward": 5, "backward": 0, "waiting": 3, "communication": 1, "other": 6, "optimizer": 2}
# A bar for each of a thousand ranks is no picture.
MOST_RANKS = 16


def build_explanation_page(found: Explanation) -> str:
    """Return the text of a page that says why a step takes as long as it does; it opens without a network."""
    title = f"Why a step of {found.model} takes {format_seconds(found.step_s)} on {plural(len(found.ranks), 'rank')}"
    names, backwards = Names(), list[dict[str, Any]]()
    groups = [("ranks", "Where the time goes, rank by rank", ranks_chart(found))]
    if found.is_trusted:
        groups.append(("buckets", "Other buckets", buckets_chart(found)))
    content = {
        "title": title,
        "lead": [f"{found}.".replace("a step", "A step", 1), *advise(found)],
        "cases": [],
        "measured": [_timeline_json(found, names, backwards)] if found.timeline is not None else [],
        "what_if": [],
        "fsdp": [],
        "groups": [
            {"id": key, "title": words, "summary": [], "charts": [chart.to_json()]} for key, words, chart in groups
        ],
        "inputs": Table(("name", "kind", "what it is"), (("training", "observed", _source(found)),)).to_json(),
        "glossary": [(f"{name.capitalize()}:", meaning) for name, meaning in PARTS.values()],
        "backwards": backwards,
        "names": names.listed,
    }
    return render(title, content)


def _source(found: Explanation) -> str:
    words = f"{found.model}, {found.how_measured}, in which nothing but these parts was noted"
    return f"{words}; messages were not observed: {found.unknown}" if found.unknown else words


def _timeline_json(found: Explanation, names: Names, backwards: list[dict[str, Any]]) -> dict[str, Any]:
    assert found.timeline is not None  # noqa: S101 - asked for only then
    names.ranges([layer for span in found.timeline.backward for layer in span.layers])
    return {
        "title": f"The slowest rank, {found.slowest}, from its forward pass to averaged gradients",
        "steps": [step_json(found.timeline.planner, "measured", found.timeline, names, backwards)],
        "note": "One observed step; when gradients were ready is from another step, since to note both would slow it. "
        "On this rank a message may also wait for another rank to be ready.",
    }


def ranks_chart(found: Explanation) -> Chart:
    """Show what the step of every rank is made of, its parts in the order in which they come."""
    shown = sorted(range(len(found.ranks)), key=lambda rank: -found.ranks[rank].own_s)[:MOST_RANKS]
    shown.sort()
    labels = tuple(f"rank {rank}{', the slowest' * (rank == found.slowest and len(shown) > 1)}" for rank in shown)
    series = tuple(
        Series(name, tuple((float(place), found.ranks[rank][part]) for place, rank in enumerate(shown)), _COLORS[part])
        for part, (name, _) in PARTS.items()
    )
    rows = tuple(
        (f"rank {rank}", *(format_seconds(seconds) for seconds in (one.step_s, *(one[part] for part in PARTS))))
        for rank, one in enumerate(found.ranks)
    )
    some = "" if len(shown) == len(found.ranks) else f" Drawn: {plural(len(shown), 'rank')}, those that work longest."
    return Chart(
        title=f"What a step is made of, {found.how_measured}",
        kind="stacked",
        series=series,
        table=Table(("rank", "step", *(name for name, _ in PARTS.values())), rows),
        y_label="time of a step",
        y_unit="s",
        labels=labels,
        note=f"Parts stand in the order in which they come, from averaged gradients to averaged gradients.{some}",
    )


def buckets_chart(found: Explanation) -> Chart:
    """Show the step that is predicted with other buckets."""
    rest = tuple((float(place), max(0.0, one.step_s - one.exposed_s)) for place, one in enumerate(found.choices))
    exposed = tuple((float(place), one.exposed_s) for place, one in enumerate(found.choices))
    rows = [
        (one.name, "predicted", str(one.num_messages), format_seconds(one.step_s), format_seconds(one.exposed_s))
        for one in found.choices
    ]
    either, unseen = "", ""
    if found.wire:
        either = " in either precision"
        unseen = (
            f" What messages in {found.wire} would take as they are was measured on the idle network afterwards, and "
            "is taken to be longer beside a backward pass in the same ratio as what they take."
        )
    bound = (
        f" No buckets{either} give a step below {format_seconds(found.bound_s)}." if found.bound_s is not None else ""
    )
    error = "" if found.error is None else f" For the buckets in force the prediction is off by {found.error:+.1%}."
    return Chart(
        title="The step with other buckets, predicted",
        kind="stacked",
        series=(Series("all else", rest, COMPUTATION_COLOR), Series("exposed communication", exposed, EXPOSED_COLOR)),
        table=Table(("buckets", "known by", "messages", "step", "exposed"), tuple(rows)),
        y_label="time of a step",
        y_unit="s",
        labels=tuple(one.name for one in found.choices),
        note=f"All predicted, from what messages and gradients took in training.{unseen}{bound}{error}",
    )
