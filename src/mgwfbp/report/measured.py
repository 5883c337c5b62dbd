"""Steps as they were measured, one above the other: the first picture of a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from mgwfbp.report.cases import DEFAULTS, OURS, OURS_LOW, Case, CaseStrategy
from mgwfbp.timeline import Timeline
from mgwfbp.units import plural

__all__ = ["SideBySide", "side_by_side"]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Observed steps of one model on one number of workers, DDP's first."""

    title: str
    steps: tuple[tuple[str, Timeline], ...]  # by strategy
    note: str


def side_by_side(cases: Sequence[Case]) -> list[SideBySide]:
    """Return what was observed of every model and number of workers, where it is two steps or more.

    Of a benchmark these are DDP's step and ours, also that in low precision; its other strategies, often much slower,
    would make them small.
    """
    found = []
    for model, workers in dict.fromkeys((case.model, case.workers) for case in cases):
        mine = [case for case in cases if (case.model, case.workers) == (model, workers)]
        shown = [(case, strategy) for case in mine for strategy in _shown(case)]
        if len(shown) < 2:
            continue
        shown.sort(key=lambda pair: _rank(pair[1]))
        names = [strategy.name for _, strategy in shown]
        steps = tuple(
            (name if names.count(name) == 1 else f"{name}, {case.where}", strategy.measured)
            for name, (case, strategy) in zip(names, shown, strict=True)
            if strategy.measured is not None
        )
        title = f"As measured: {model} on {plural(workers, 'worker')}"
        found.append(SideBySide(title, steps, _note(mine)))
    return found


def _shown(case: Case) -> list[CaseStrategy]:
    observed = [strategy for strategy in case.strategies if strategy.measured is not None]
    if all(strategy.result is None for strategy in observed):
        return observed
    kinds = (DEFAULTS, OURS, OURS_LOW)
    found = [next((one for name in names for one in observed if one.kind == name), None) for names in kinds]
    return [strategy for strategy in found if strategy is not None]


def _rank(strategy: CaseStrategy) -> int:
    """DDP's before ours before others."""
    return 0 if strategy.kind in DEFAULTS else 1 if strategy.kind in (*OURS, *OURS_LOW) else 2


def _note(cases: Sequence[Case]) -> str:
    words = "Each is one observed step: of the few that were watched the one of median length, on one worker."
    if any(strategy.result is not None for case in cases for strategy in case.strategies):
        words += " What a benchmark measured, the median of its turns, stands in the table below."
    if sum(case.num_runs for case in cases) > 1:
        words += " Runs come one after the other, so what else the machine did meanwhile is in them."
    return words
