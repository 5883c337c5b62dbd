"""What a report is made from: files recognised by what they say they are, folders of runs, names of what we have."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mgwfbp.cost import LinearCost, PiecewiseCost, cost_from_json
from mgwfbp.costs import LowCost, ShardedCost, WireCost
from mgwfbp.errors import FormatError, ReportError
from mgwfbp.files import naming, read_json
from mgwfbp.fsdp import FsdpPlan
from mgwfbp.fsdp_step import FsdpStep
from mgwfbp.measure.fsdp_profile import steps_from_profile
from mgwfbp.network import PRESETS, Network, load_network
from mgwfbp.plan import MergePlan
from mgwfbp.record import Fields, check_count, check_real, check_text
from mgwfbp.results import BenchResult
from mgwfbp.run import RunResults, TrainingRun
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace, load_trace, recorded_traces
from mgwfbp.units import plural, printable, quote

__all__ = ["Inputs", "KnownCost", "ScalingRow", "load_inputs"]

T = TypeVar("T")
Named = tuple[str, T]  # what the user calls it, and what it is
KnownCost = LinearCost | PiecewiseCost


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """What one strategy gives on so many workers."""

    model: str
    network: str
    strategy: str
    workers: int
    num_messages: int
    iteration_s: float
    compute_s: float
    exposed_s: float
    speedup: float
    efficiency: float
    how: str  # simulated, predicted or measured


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that was given, by kind."""

    traces: tuple[Named[ModelTrace], ...] = ()
    costs: tuple[Named[KnownCost], ...] = ()
    networks: tuple[Named[Network], ...] = ()
    plans: tuple[Named[MergePlan], ...] = ()
    timelines: tuple[Named[Timeline], ...] = ()
    benches: tuple[Named[BenchResult], ...] = ()
    runs: tuple[Named[TrainingRun], ...] = ()
    sweeps: tuple[Named[tuple[ScalingRow, ...]], ...] = ()
    fsdp_plans: tuple[Named[FsdpPlan], ...] = ()
    fsdp_steps: tuple[Named[FsdpStep], ...] = ()  # observed, of profiles
    halves: tuple[Named[ShardedCost], ...] = ()  # costs that know those of reduce-scatters and gathers, named as theirs
    lows: tuple[Named[WireCost], ...] = ()  # costs that know that of messages in low precision, named as theirs
    low_cost: LowCost | None = None  # of messages in low precision, where it was given apart

    def low_of(self, name: str) -> LowCost | None:
        """Return what messages in low precision cost beside a cost of this name, where that is known."""
        lows = (LowCost(both.low, knows_taken=True) for label, both in self.lows if label == name)
        return self.low_cost or next(lows, None)

    @property
    def descriptions(self) -> tuple[tuple[str, str, str], ...]:
        """Of each its name, its kind and what it is."""
        records: list[tuple[str, tuple[Named[Any], ...]]] = [
            ("trace", self.traces),
            ("cost", self.costs),
            ("network", self.networks),
            ("plan", self.plans),
            ("plan for FSDP2", self.fsdp_plans),
            ("timeline", self.timelines),
            ("benchmark", self.benches),
            ("training run", self.runs),
        ]
        found = [(name, kind, _describe(record)) for kind, some in records for name, record in some]
        found += [(name, "profile of FSDP2", plural(len(step.groups), "group")) for name, step in self.fsdp_steps]
        return (*found, *((name, "simulation", plural(len(rows), "point")) for name, rows in self.sweeps))


def _describe(record: object) -> str:
    source = getattr(record, "source", {})
    said = [
        f"{key}: {str(source[key])[:80]}"
        for key in ("measured", "device", "batch_size", "backend", "date")
        if key in source
    ]
    return f"{record!r}{' ' * bool(said)}{', '.join(said)}"


def load_inputs(names: Iterable[str | os.PathLike[str]]) -> Inputs:
    """Read files, folders of training runs, recorded traces and preset networks, whatever each name stands for.

    Args:
        names: paths, and names of recorded traces and networks.

    Raises:
        FileError: where one cannot be read.
        FormatError: where one is of no kind that can be shown.
    """
    found: dict[str, list[Any]] = {}
    paths = [os.fspath(name) for name in names]
    for path, label in zip(paths, _labels(paths), strict=True):
        for kind, record in _load(path, label):
            found.setdefault(kind, []).append((label, record))
    by_kind: dict[str, Any] = {kind: tuple(some) for kind, some in found.items()}
    return Inputs(**by_kind)


def _labels(paths: Sequence[str]) -> list[str]:
    """Call each by the last part of its path, by all of it where that is not enough, and never two the same.

    >>> _labels(["a/run", "b/run", "trace.json", "trace.json"])
    ['a/run', 'b/run', 'trace.json', 'trace.json (2)']
    """
    short = [printable(Path(path).name or path) for path in paths]
    labels: list[str] = []
    for path, name in zip(paths, short, strict=True):
        label = name if short.count(name) == 1 else printable(path)
        times = sum(other == label or other.startswith(f"{label} (") for other in labels)
        labels.append(f"{label} ({times + 1})" if times else label)
    return labels


def _load(name: str, label: str) -> list[tuple[str, Any]]:
    if os.path.isdir(name):  # noqa: PTH112 - a NUL byte in a name is no crash
        return [("runs", TrainingRun.load(name))]
    if not os.path.exists(name):  # noqa: PTH110
        if name in recorded_traces():
            return [("traces", load_trace(name))]
        if name.lower() in PRESETS:
            return [("networks", load_network(name))]
    if _is_profile(name):
        return [("fsdp_steps", steps_from_profile(name)[-1])]
    data = read_json(name)
    if isinstance(data, list):
        with naming(name):
            return [("sweeps", _rows(data, label.removesuffix(".json")))]
    with naming(name):
        fields = Fields(data)
        rows = fields.get("rows", None)
        if fields.get("format", None) is None and isinstance(rows, dict):  # of `mgwfbp paper --json`
            return [
                ("sweeps", _rows(fields.child("rows").items(model), check_text(model, "a model's name", ReportError)))
                for model in rows
            ]
        form = fields["format"]
        if not isinstance(form, str) or form not in _READERS:
            known = ", ".join(_READERS)
            raise FormatError(f"format: {quote(form)} is not one a report is made from: {known}")
        if form != RunResults.FORMAT:
            kind, make = _READERS[form]
            found = [(kind, make(data))]
            if kind == "costs" and "reduce_scatter" in fields and "all_gather" in fields:
                found.append(("halves", ShardedCost.from_json(data)))
            if kind == "costs" and "low" in fields:
                found.append(("lows", WireCost.from_json(data)))
            return found
    return [("runs", TrainingRun.load(Path(name).parent))]


def _is_profile(name: str) -> bool:
    """Whether a file begins as what torch.profiler exports; a pipe gives its content only once, and is none."""
    if not os.path.isfile(name):  # noqa: PTH113 - a NUL byte in a name is no crash
        return False
    with open(name, "rb") as stream:  # noqa: PTH123
        start = stream.read(4096)
    return start.lstrip().startswith(b"{") and (b'"schemaVersion"' in start or b'"traceEvents"' in start)


# format -> where it belongs, how it is made of what was read: once, since a pipe gives its content only once
_READERS: Mapping[str, tuple[str, Callable[[object], Any]]] = MappingProxyType(
    {
        ModelTrace.FORMAT: ("traces", ModelTrace.from_json),
        LinearCost.FORMAT: ("costs", cost_from_json),
        Network.FORMAT: ("networks", Network.from_json),
        MergePlan.FORMAT: ("plans", MergePlan.from_json),
        MergePlan.LATER_FORMAT: ("plans", MergePlan.from_json),
        FsdpPlan.FORMAT: ("fsdp_plans", FsdpPlan.from_json),
        Timeline.FORMAT: ("timelines", Timeline.from_json),
        BenchResult.FORMAT: ("benches", BenchResult.from_json),
        RunResults.FORMAT: ("runs", RunResults.from_json),
    }
)


def _rows(data: Sequence[Any], model: str) -> tuple[ScalingRow, ...]:
    """Read what `mgwfbp simulate --json` prints."""
    if not data:
        raise FormatError("an empty list, expected the rows of `mgwfbp simulate --json`")
    return tuple(_row(Fields(entry, f"[{index}]"), model) for index, entry in enumerate(data))


def _row(fields: Fields, model: str) -> ScalingRow:
    def real(name: str) -> float:
        return check_real(fields[name], fields.path(name), ReportError)

    network = check_text(fields.get("network", "network"), fields.path("network"), ReportError)
    if fields.get("scale", 1.0) != 1.0:
        network += f", computation x {real('scale'):g}"
    return ScalingRow(
        model=model,
        network=network,
        strategy=check_text(fields["planner"], fields.path("planner"), ReportError),
        workers=check_count(fields["workers"], fields.path("workers"), ReportError, minimum=1),
        num_messages=check_count(fields["num_groups"], fields.path("num_groups"), ReportError, minimum=1),
        iteration_s=real("iteration_s"),
        compute_s=real("iteration_s") - real("exposed_s"),
        exposed_s=real("exposed_s"),
        speedup=real("speedup"),
        efficiency=real("efficiency"),
        how="simulated",
    )
