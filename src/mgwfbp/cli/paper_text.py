"""The sections of ``mgwfbp paper``: tables of simulated numbers, and in words what they are.

A difference from the paper is explained only by what was computed in the same run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mgwfbp.cli.document import Grid, Part, Section
from mgwfbp.network import Network
from mgwfbp.simulate import SweepRow, find_crossing, find_limits
from mgwfbp.simulate.evaluation import (
    MEASURED_STARTUP_S,
    MEASURED_WORKERS,
    SIMULATED_WORKERS,
    GainRow,
    compare_with_paper,
    logged_cost,
    predict_allreduce,
    ready_at_half,
    size_distribution,
)
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_seconds

__all__ = ["Case", "beyond_section", "evaluation_sections"]

LABELS = {
    "naive": "naive S-SGD",
    "ps": "PS, 1 server",
    "ps-sharded": "PS, N servers",
    "wfbp": "WFBP",
    "single": "SyncEASGD",
    "bucket": "DDP buckets",
    "mgwfbp": "MG-WFBP",
    "optimal": "ours",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One of the paper's models with one trace, and what was simulated."""

    name: str  # in JSON
    model: str  # whose gains the paper states
    label: str
    trace: ModelTrace
    rows: tuple[SweepRow, ...] = ()
    logged: tuple[SweepRow, ...] = ()  # with the all-reduce times logged beside the trace
    exchanged: Mapping[str, tuple[SweepRow, ...]] = field(default_factory=dict)  # words for an input -> with that one
    by_forward: Mapping[float, list[GainRow]] = field(default_factory=dict)  # forward pass as part of the backward pass

    @property
    def is_analytic(self) -> bool:
        """Whether nobody measured the trace."""
        return self.trace.source.get("measured") == "analytic"


def evaluation_sections(cases: Sequence[Case], network: Network) -> list[Section]:
    """Return the paper's Figs. 5 to 9 as tables, with its own numbers and what sets ours apart."""
    return [
        _inputs(cases, network),
        _figure_5(cases, network),
        _speedups("Figs. 6 and 7: speedup on 2 to 8 nodes", cases, MEASURED_WORKERS),
        _figure_8(cases),
        _speedups("Fig. 9: speedup on 4 to 64 nodes", cases, SIMULATED_WORKERS),
        _differences(cases),
    ]


def _inputs(cases: Sequence[Case], network: Network) -> Section:
    parts: list[Part] = [
        "Everything below is simulated, and written by `mgwfbp paper`. A node is one worker; a step is the forward "
        "pass, the backward pass, and what of the communication sticks out (the update is left out, as in the paper). "
        "Speedup is that of samples per second over one worker, with the same batch on each (Eq. 5). MG-WFBP is "
        "the paper's Algorithm 1; ours is the exact optimum of the same model; PS is the parameter server, which the "
        "paper measured as TensorFlow: with one server its link carries all gradients of all workers, N servers are "
        "N more machines that share the bytes, and a message costs two start-up times however many servers share it.",
        f"Network: {network!r}. The paper gives no constants for more than 8 nodes: here the same link is carried on.",
    ]
    for case in cases:
        stated = {name: value for name, value in case.trace.source.items() if value and not isinstance(value, Mapping)}
        source = ", ".join(f"{name}: {value}" for name, value in stated.items()) or "not stated"
        parts.append(f"{case.label}: {case.trace!r}. Source of the trace: {source}.")
    parts.append(tuple(_ready(case, cases) for case in cases))
    return Section("What was simulated", tuple(parts))


def _ready(case: Case, cases: Sequence[Case]) -> str:
    """Say how many bytes are ready at half the backward pass: what an analytic trace has to be judged by."""
    said = f"{case.label}: {ready_at_half(case.trace):.0%} of bytes ready at half the backward pass"
    logs = [ready_at_half(other.trace) for other in cases if other.model == case.model and other.logged]
    return f"{said}, in the authors' logs {logs[0]:.0%}" if case.is_analytic and logs else said


def _figure_5(cases: Sequence[Case], network: Network) -> Section:
    parts: list[Part] = []
    for case in cases:
        bins = size_distribution(case.trace)
        table = [
            (f"{size.low:,} to {size.high:,}", str(size.num_gradients), format_bytes(size.num_bytes)) for size in bins
        ]
        parts.append(Grid((f"{case.label}: elements", "gradients", "bytes together"), tuple(table)))
    times = [
        (f"{size:,}", *(format_seconds(seconds) for seconds in by_workers.values()))
        for size, by_workers in predict_allreduce(network)
    ]
    parts.append(Grid(("all-reduce of elements", *(f"{count} nodes" for count in MEASURED_WORKERS)), tuple(times)))
    startups = ", ".join(
        f"{format_seconds(network.cost(count).startup_s)} here, {format_seconds(seconds)} in the paper on {count} nodes"
        for count, seconds in MEASURED_STARTUP_S.items()
    )
    parts.append(
        "The paper: sizes of layers lie between 10^2 and 5 x 10^6 elements, and the start-up time of an all-reduce is "
        f"what a ring needs. Start-up times: {startups}."
    )
    return Section("Fig. 5: sizes of gradients, predicted all-reduce times", tuple(parts))


def _speedups(title: str, cases: Sequence[Case], workers: Sequence[int]) -> Section:
    parts: list[Part] = []
    for case in cases:
        found = {(row.planner, row.workers): row for row in case.rows}
        planners = list(dict.fromkeys(row.planner for row in case.rows))
        table = [(LABELS[name], *(f"{found[name, count].speedup:.2f}" for count in workers)) for name in planners]
        parts.append(Grid((case.label, *(f"{count} nodes" for count in workers)), tuple(table)))
        gains = compare_with_paper(case.model, case.rows)
        parts.append(_gains(case.label, [gain for gain in gains if gain.published.workers == workers[-1]]))
        if workers == SIMULATED_WORKERS:
            parts.append(_crossing(case))
    return Section(title, tuple(parts))


def _gains(label: str, gains: Sequence[GainRow]) -> Grid:
    table = [
        (
            f"{gain.published.workers} nodes, over {LABELS[gain.published.against]}",
            f"{gain.published.gain:.2f} ({gain.published.how})",
            f"{gain.ours['mgwfbp']:.2f}",
            f"{gain.ours['optimal']:.2f}",
        )
        for gain in gains
    ]
    return Grid((f"{label}: times faster", "MG-WFBP, the paper", "MG-WFBP, here", "ours, here"), tuple(table))


def _crossing(case: Case) -> str:
    crossing = find_crossing(case.rows)
    if crossing is None:
        return f"{case.label}: SyncEASGD does not overtake WFBP here, as it does in the paper."
    return (
        f"{case.label}: WFBP is ahead of SyncEASGD up to {crossing[0]} nodes and behind it from {crossing[1]} "
        "on. In the paper, too, the lines cross: WFBP is ahead on 4 to 16 nodes, SyncEASGD on 64."
    )


def _figure_8(cases: Sequence[Case]) -> Section:
    parts: list[Part] = []
    for case in cases:
        found = {(row.planner, row.workers): row for row in case.rows}
        planners = list(dict.fromkeys(row.planner for row in case.rows))
        table = [
            (
                LABELS[name],
                format_seconds(found[name, MEASURED_WORKERS[0]].compute_s),
                *(format_seconds(found[name, count].exposed_s) for count in MEASURED_WORKERS),
            )
            for name in planners
        ]
        titles = (case.label, "computation", *(f"exposed, {count} nodes" for count in MEASURED_WORKERS))
        parts.append(Grid(titles, tuple(table)))
    parts.append(
        "The paper gives this figure no numbers. It says: WFBP exposes little on 2 and 4 nodes and clearly more on 8, "
        "SyncEASGD exposes all of its communication, MG-WFBP very little even on 8."
    )
    return Section("Fig. 8: computation and communication that is not overlapped", tuple(parts))


def _differences(cases: Sequence[Case]) -> Section:
    parts: list[Part] = [
        f"Gradients: {', '.join(f'{len(case.trace.layers)} ({case.label})' for case in cases)}. In brackets what "
        "brings a number nearer to the paper's, where one input is exchanged and all others stay; without brackets "
        "nothing that was exchanged does.",
        tuple(_difference(case, gain) for case in cases for gain in compare_with_paper(case.model, case.rows)),
    ]
    for case in cases:
        if case.logged:
            parts.append(
                f"{case.label}, with the all-reduce times in the same logs instead of the network above: "
                f"{logged_cost(case.trace)!r}."
            )
            parts.append(_gains("With logged all-reduces", compare_with_paper(case.model, case.logged)))
            parts.append("The forward pass is not in the logs; if it took other parts of the backward pass:")
            parts.append(_forwards(case))
    for case in cases:
        if case.model == "resnet50":
            parts.append(_efficiencies(case))
    return Section("Where ours differ", tuple(parts))


def _difference(case: Case, gain: GainRow) -> str:
    published, ours = gain.published, gain.ours["mgwfbp"]
    where = f"{case.label}, {published.workers} nodes, MG-WFBP over {LABELS[published.against]}"
    off = ours / published.gain - 1
    numbers = f"{where}: {published.gain:.2f} in the paper ({published.how}), {ours:.2f} here, {off:+.0%}"
    reasons = [
        f"with {words} {other.ours['mgwfbp']:.2f}, nearer by {nearer:.2f}"
        for words, rows in case.exchanged.items()
        for other in compare_with_paper(case.model, rows)
        if other.published == published
        and (nearer := round(abs(ours - published.gain) - abs(other.ours["mgwfbp"] - published.gain), 2)) > 0
    ]
    return f"{numbers} ({'; '.join(reasons)})" if reasons else numbers


def _forwards(case: Case) -> Grid:
    table = [
        (
            f"{gains[0].published.workers} nodes, over {LABELS[gains[0].published.against]}",
            f"{gains[0].published.gain:.2f} ({gains[0].published.how})",
            *(f"{gain.ours['mgwfbp']:.2f}" for gain in gains),
        )
        for gains in zip(*case.by_forward.values(), strict=True)
    ]
    titles = (f"MG-WFBP, forward {part:g} of backward" for part in case.by_forward)
    return Grid(("times faster", "MG-WFBP, the paper", *titles), tuple(table))


def _efficiencies(case: Case) -> str:
    found = {row.planner: row.efficiency for row in case.rows if row.workers == SIMULATED_WORKERS[-1]}
    listed = ", ".join(f"{LABELS[name]} {found[name]:.0%}" for name in ("mgwfbp", "wfbp", "single"))
    return (
        f"Efficiency on {SIMULATED_WORKERS[-1]} nodes, {case.label}: {listed} here; the paper says almost linear, and "
        "around 55 % for both others (which does not go together with its factors of 1.75 and 1.45)."
    )


def beyond_section(rows: Mapping[str, Sequence[SweepRow]]) -> Section:
    """Return what more workers and faster networks would give, and what limits them."""
    parts: list[Part] = [
        "Computation as in the traces (an H200 in fp32, if none were given), gradients by tensor as PyTorch has them, "
        "all networks at line rate; 100GbE with the start-up times of TCP, InfiniBand HDR with 8 GPUs a node over "
        "NVLink 3. Times are those of a step; the last column says what the best plan's step is made of."
    ]
    for model, some in rows.items():
        planners = list(dict.fromkeys(row.planner for row in some))
        found = {(row.network, row.workers, row.planner): row for row in some}
        table = [
            (
                network,
                str(count),
                *(format_seconds(found[network, count, name].iteration_s) for name in planners),
                found[network, count, "optimal"].limit,
            )
            for network in dict.fromkeys(row.network for row in some)
            for count in sorted({row.workers for row in some})
        ]
        parts.append(Grid((model, "workers", *(LABELS[name] for name in planners), "made of"), tuple(table)))
        parts.append(tuple(f"{finding}." for finding in find_limits(some)))
    return Section("Past the paper", tuple(parts))
