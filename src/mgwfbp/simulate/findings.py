"""What a sweep says in words: where computation hides communication, where bandwidth bounds, where start-ups cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from mgwfbp.simulate.limits import NEAR, Limit
from mgwfbp.simulate.sweep import BASELINES, SweepRow
from mgwfbp.units import plural

__all__ = ["Finding", "Gain", "find_crossing", "find_gains", "find_limits", "where_words"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What limits the best plan on some numbers of workers, and what merging does for it."""

    network: str
    scale: float
    workers: tuple[int, ...]
    limit: Limit  # of the best plan
    above_bound: float  # how far the best plan is above the bandwidth bound, at most
    merging_gain: float | None  # WFBP's step, which merges nothing, over the best, at most; None: not in the sweep

    @property
    def merging_matters(self) -> bool | None:
        """Whether sending every gradient alone is noticeably slower than the best plan."""
        return None if self.merging_gain is None else self.merging_gain > 1 + NEAR

    def __str__(self) -> str:
        return f"{where_words(self.network, self.scale, self.workers)}: {self._verdict()}"

    def _verdict(self) -> str:
        unmerged = f"; without merging a step takes up to {self.merging_gain or 0:.2f} times as long"
        left = f"start-up times of zero would gain {self.above_bound:.1%} at most"
        match self.limit, self.merging_matters:
            case "computation", False:
                return "computation hides communication, merged or not"
            case "computation", matters:
                return "the best plan hides communication behind computation" + (unmerged if matters else "")
            case "bandwidth", False:
                return f"bandwidth bounds the step, merged or not: {left}"
            case "bandwidth", matters:
                return f"bandwidth bounds the best plan's step: {left}" + (unmerged if matters else "")
            case "messages' own time", matters:
                above = (
                    "starting and copying messages takes time from the computation: the best plan is up to "
                    f"{self.above_bound:.0%} above what bandwidth allows"
                )
                return above + (unmerged if matters else "")
            case _, matters:
                above = (
                    f"start-up times cost: the best plan is up to {self.above_bound:.0%} above what bandwidth allows"
                )
                return above + (unmerged if matters else "")


def where_words(network: str, scale: float, workers: Sequence[int]) -> str:
    """Name a point of a sweep, or a row of them.

    >>> where_words("10GbE", 2.0, (4, 8))
    '10GbE, 4 to 8 workers, computation x 2'
    """
    first, last = workers[0], workers[-1]
    where = f"{network}, {f'{first} to ' if last > first else ''}{plural(last, 'worker')}"
    return where if scale == 1.0 else f"{where}, computation x {scale:g}"


def find_limits(rows: Iterable[SweepRow]) -> list[Finding]:
    """Say for every cluster and scale what limits the best plan, neighbouring numbers of workers together."""
    points: dict[tuple[str, float], dict[int, list[SweepRow]]] = {}
    for row in rows:
        if row.planner not in BASELINES and row.workers > 1:
            points.setdefault((row.network, row.scale), {}).setdefault(row.workers, []).append(row)
    findings = []
    for by_workers in points.values():
        singles = [_finding(by_workers[workers]) for workers in sorted(by_workers)]
        for _, run in groupby(singles, key=lambda single: (single.limit, single.merging_matters)):
            findings.append(_join(list(run)))
    return findings


def _finding(rows: Sequence[SweepRow]) -> Finding:
    best = min(rows, key=lambda row: row.iteration_s)
    unmerged = next((row for row in rows if row.planner == "wfbp"), None)
    above = best.iteration_s / best.bandwidth_bound_s - 1 if best.bandwidth_bound_s else 0.0
    gain = None
    if unmerged is not None:
        gain = unmerged.iteration_s / best.iteration_s if best.iteration_s else 1.0
    # The best plan lets bytes wait only in order to save start-up times.
    limit: Limit = "start-up" if best.limit == "not overlapped" else best.limit
    return Finding(best.network, best.scale, (best.workers,), limit, max(above, 0.0), gain)


def _join(run: Sequence[Finding]) -> Finding:
    gains = [finding.merging_gain for finding in run if finding.merging_gain is not None]
    return Finding(
        run[0].network,
        run[0].scale,
        tuple(count for finding in run for count in finding.workers),
        run[0].limit,
        max(finding.above_bound for finding in run),
        max(gains, default=None),
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster a planner is than the best plan that all-reduces everything, on some numbers of workers."""

    network: str
    scale: float
    workers: tuple[int, ...]
    planner: str
    least: float
    most: float

    def __str__(self) -> str:
        between = " to ".join(dict.fromkeys((f"{self.least:.2f}", f"{self.most:.2f}")))
        where = where_words(self.network, self.scale, self.workers)
        return f"{where}: {self.planner} is {between} times as fast as the best plan that all-reduces everything"


def find_gains(rows: Iterable[SweepRow], planner: str) -> list[Gain]:
    """Say for every cluster and scale how much faster a planner is than the best plan that all-reduces everything."""
    mine_s: dict[tuple[str, float], dict[int, float]] = {}
    best_s: dict[tuple[str, float, int], float] = {}
    for row in rows:
        if row.planner == planner and row.workers > 1 and row.iteration_s:
            mine_s.setdefault((row.network, row.scale), {})[row.workers] = row.iteration_s
        elif row.planner not in BASELINES and not row.num_gathers:
            point = (row.network, row.scale, row.workers)
            best_s[point] = min(row.iteration_s, best_s.get(point, row.iteration_s))
    found = []
    for where, steps_s in mine_s.items():
        points = {
            count: best_s[*where, count] / steps_s[count] for count in sorted(steps_s) if (*where, count) in best_s
        }
        if points:
            found.append(Gain(*where, tuple(points), planner, min(points.values()), max(points.values())))
    return found


def find_crossing(rows: Iterable[SweepRow], first: str = "wfbp", second: str = "single") -> tuple[int, int] | None:
    """Return between which neighbouring numbers of workers the second strategy overtakes the first, if it does.

    The paper points out that WFBP is ahead of SyncEASGD on few nodes and behind it on many.
    """
    steps_s: dict[int, dict[str, float]] = {}
    for row in rows:
        steps_s.setdefault(row.workers, {})[row.planner] = row.iteration_s
    ahead = [(workers, steps_s[workers][second] < steps_s[workers][first]) for workers in sorted(steps_s)]
    for (workers, is_ahead), (next_workers, is_next_ahead) in pairwise(ahead):
        if is_next_ahead and not is_ahead:
            return workers, next_workers
    return None
