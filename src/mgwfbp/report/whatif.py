"""What the reader may turn on the page: workers, bandwidth, start-up time; and costs as they might be."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mgwfbp.cost import LinearCost
from mgwfbp.costs import WireCost
from mgwfbp.network import Network
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, Planner
from mgwfbp.planners.fixed import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mgwfbp.report.cases import Case, plan_of
from mgwfbp.report.inputs import KnownCost
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds

__all__ = ["Slider", "WhatIf", "faster_bandwidth", "find_what_if", "no_startup", "scaled"]

# The settings there are; those of the case itself are added, and further ones where it would be the first or the last.
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
GIGABITS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
LATENCIES_US = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
# Where there is no network to name values of, so many times what the case has.
FASTER = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
LONGER = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Slider:
    """What can be chosen, in words and in numbers, and where the choice begins: with the case's own value, exactly."""

    title: str
    choices: tuple[tuple[str, float], ...]
    start: int

    def to_json(self) -> dict[str, Any]:
        """Return the slider as JSON-ready data."""
        return {"title": self.title, "choices": self.choices, "start": self.start}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A case to start from: the page plans it anew as workers, bandwidth or start-up times change."""

    title: str
    trace: ModelTrace
    cost: KnownCost
    network: Network | None  # where the cost comes from one: sliders then say its values, else how many times the cost
    bucket: Mapping[str, int]  # sizes, of planner `bucket`
    note: str
    given: Mapping[str, MergePlan] = field(default_factory=dict)  # with gathers or low precision: not planned anew
    low_cost: KnownCost | None = None  # of messages in low precision, where it was measured

    @property
    def sliders(self) -> dict[str, Slider]:
        """What may be changed."""
        workers = _slider("workers", "{:g}", WORKERS, (self.cost.workers, self.cost.workers), lambda count: count)
        if self.network is None:
            faster = tuple((_times(times), 1 / times) for times in FASTER)
            longer = tuple((_times(times), times) for times in LONGER)
            return {
                "workers": workers,
                "bandwidth": Slider("bandwidth", faster, FASTER.index(1.0)),
                "startup": Slider("start-up time", longer, LONGER.index(1.0)),
            }
        per_byte_s, latency_s = self.network.per_byte_s, self.network.latency_s
        gigabits = 8e-9 / per_byte_s if per_byte_s else math.inf
        return {
            "workers": workers,
            "bandwidth": _slider(
                "bandwidth of a link", "{:.4g} Gbit/s", GIGABITS, (gigabits, per_byte_s), lambda rate: 8e-9 / rate
            ),
            "startup": _slider(
                "start-up time between two workers",
                "{:.4g} us",
                LATENCIES_US,
                (latency_s * 1e6, latency_s),
                lambda time_us: time_us * 1e-6,
            ),
        }

    def to_json(self) -> dict[str, Any]:
        """Return what the page's own planner needs: the trace and the cost in full, and the settings there are."""
        return {
            "title": self.title,
            "note": self.note,
            "model": {
                "forward_s": self.trace.forward_s,
                "backward_s": [layer.backward_s for layer in self.trace.layers],
                "grad_bytes": [layer.grad_bytes for layer in self.trace.layers],
                **({"layer_forward_s": self.trace.layer_forward_s} if self.given else {}),
            },
            "given": [{"name": name, **self._places(plan)} for name, plan in self.given.items()],
            "cost": _cost_json(self.cost),
            "low_cost": None if self.low_cost is None else _cost_json(self.low_cost),
            "network": None if self.network is None else self.network.to_json(),
            "sliders": {name: slider.to_json() for name, slider in self.sliders.items()},
            "bucket": dict(self.bucket),
        }

    def _places(self, plan: MergePlan) -> dict[str, Any]:
        place_of = {layer.name: place for place, layer in enumerate(self.trace.layers)}
        groups, gathers = (
            [[place_of[name] for name in group] for group in some] for some in (plan.groups, plan.gathers)
        )
        return {"groups": groups, "gathers": gathers, "sharded": plan.sharded, "wire": plan.wires}


def _cost_json(cost: KnownCost) -> dict[str, Any]:
    taken = {"taken_s": cost.taken_s, "taken_per_byte_s": cost.taken_per_byte_s}
    if isinstance(cost, LinearCost):
        return {"workers": cost.workers, "startup_s": cost.startup_s, "per_byte_s": cost.per_byte_s, **taken}
    return {"workers": cost.workers, "points": cost.points, **taken}


def _slider(
    title: str, show: str, listed: Iterable[float], own: tuple[float, float], value_of: Callable[[float], float]
) -> Slider:
    """Return the listed choices and the case's own, a pair of what is shown and what is computed with, among them.

    >>> [label for label, _ in _slider("workers", "{:g}", (2, 4, 8), (8, 8), float).choices]
    ['2', '4', '8', '16', '40']
    """
    shown, _ = own
    numbers = {number for number in listed if not math.isclose(number, shown)}
    if 0 < shown < math.inf:  # less than nothing and more than all cannot be chosen
        numbers |= {shown * 2, shown * 5} if shown > max(numbers) else set()
        numbers |= {shown / 2, shown / 5} if shown < min(numbers) else set()
    choices = sorted([*((number, value_of(number)) for number in numbers), own])
    labels = [show.format(number) if number < math.inf else "unlimited" for number, _ in choices]
    return Slider(title, tuple(zip(labels, (value for _, value in choices), strict=True)), choices.index(own))


def _times(times: float) -> str:
    """Say how many times what the case has.

    >>> [_times(times) for times in (0.0, 0.5, 1.0, 2.0)]
    ['none', '1/2', 'as above', '2 times']
    """
    if times == 1:
        return "as above"
    if times < 1:
        return f"1/{1 / times:g}" if times else "none"
    return f"{times:g} times"


def find_what_if(case: Case, planners: Mapping[str, Planner] = PLANNERS) -> WhatIf | None:
    """Return what the page needs to plan this case anew, or None where nothing is known of trace or network."""
    if case.trace is None or case.cost is None or min(case.workers, case.cost.workers) < 2:
        return None
    if not case.cost(case.trace.grad_bytes):
        return None
    if case.network is not None:
        note = f"The network is {case.network!r}; every point is planned anew."
    else:
        note = (
            "It begins with what messages cost in the case above, and bandwidth and start-up times are so many times "
            "those; every point is planned anew. On other numbers of workers, N, start-up times go as N - 1 and times "
            "of bytes as (N - 1)/N: those of a ring do."
        )
    note += _otherwise(case, case.trace, case.cost, planners)
    given = _given_plans(case, case.trace)
    if sharded := [name for name, plan in given.items() if plan.gathers]:
        note += (
            f" {', '.join(sharded)}: for a sharded optimizer, with the groups as they are and not planned anew; a "
            "reduce-scatter and an all-gather are taken to cost half an all-reduce each."
        )
    both, low = case.both_costs, None
    if isinstance(both, WireCost):
        low = both.low
    if mixed := [name for name, plan in given.items() if plan.wire]:
        note += f" {', '.join(mixed)}: with messages and their precision as they are and not planned anew."
    if low is not None:
        note += " What messages in low precision cost was measured, and is so many times that, as the others' is."
    return WhatIf(case.title, case.trace, case.cost, case.network, _bucket_sizes(planners), note, given, low)


def _given_plans(case: Case, trace: ModelTrace) -> dict[str, MergePlan]:
    """Return the plans of the case for this trace that gather parameters or send some messages in low precision.

    If a strategy was predicted from another cost than the case's, the page says what this one gives.
    """
    steps = {strategy.name: strategy.predicted for strategy in case.strategies}
    plans = {name: plan_of(step) for name, step in steps.items() if step is not None}
    names = {layer.name for layer in trace.layers}
    special = {name: plan for name, plan in plans.items() if plan.gathers or plan.wire}
    return {name: plan for name, plan in special.items() if set(plan.layer_names) == names}


def _bucket_sizes(planners: Mapping[str, Planner]) -> dict[str, int]:
    """Return the sizes that planner `bucket` was given, or else DDP's."""
    bucket = planners.get("bucket")
    given = bucket.keywords if isinstance(bucket, partial) else {}
    return {
        "first_bytes": given.get("first_bucket_bytes", DEFAULT_FIRST_BUCKET_BYTES),
        "later_bytes": given.get("bucket_bytes", DEFAULT_BUCKET_BYTES),
    }


def _otherwise(case: Case, trace: ModelTrace, cost: KnownCost, planners: Mapping[str, Planner]) -> str:
    """Name the strategies whose steps the case has from another trace or cost than its own, if there are any."""
    found = []
    for strategy in case.strategies:
        name = "bucket" if strategy.kind == "ddp" else strategy.kind
        here = name in planners and name in PLANNERS  # the page plans no other
        if strategy.predicted is None or not here or not (strategy.result is not None or case.num_runs):
            continue
        there_s = strategy.predicted.iteration_s
        here_s = predict(trace, cost, planners[name](trace, cost)).iteration_s
        if not math.isclose(here_s, there_s):
            found.append(
                f"{strategy.name} ({format_seconds(there_s)} there, {format_seconds(here_s)} here to begin with)"
            )
    return f" Above, some were predicted from what was learnt of them alone: {', '.join(found)}." if found else ""


def scaled(cost: KnownCost, *, startup: float = 1.0, per_byte: float = 1.0, workers: int | None = None) -> KnownCost:
    r"""Return the cost with start-up times and times of bytes so many times as long, on as many workers or on others.

    The start-up time is that of a message of no bytes, :math:`T(0)`; the rest, :math:`T(M) - T(0)`, is the bytes'. On N
    workers in place of n they are those of a ring (Table II): :math:`(N-1)/(n-1)` and :math:`(N-1)n/(N(n-1))` times.
    What messages take from the computation stays.

    >>> from mgwfbp.cost import PiecewiseCost
    >>> scaled(PiecewiseCost(2, ((0, 1.0), (10, 3.0))), startup=0.5, per_byte=2)(10)
    4.5
    >>> scaled(LinearCost(2, 1.0, 0.5), workers=4)
    LinearCost(4 workers: 3 s + 7.5e+08 ns/B)
    """
    count = cost.workers if workers is None else workers
    if count != cost.workers:
        startup *= (count - 1) / (cost.workers - 1)
        per_byte *= (count - 1) * cost.workers / (count * (cost.workers - 1))
    if isinstance(cost, LinearCost):
        return replace(cost, workers=count, startup_s=cost.startup_s * startup, per_byte_s=cost.per_byte_s * per_byte)
    # So written it is exact where nothing changes, and never falls, however it is rounded.
    more_s = cost(0) * (startup - per_byte)
    return replace(cost, workers=count, points=tuple((size, time * per_byte + more_s) for size, time in cost.points))


def faster_bandwidth(cost: KnownCost, times: float = 2.0) -> KnownCost:
    """Return the cost with bytes going so many times as fast; start-up times stay.

    >>> faster_bandwidth(LinearCost(2, 1.0, 0.5))(10)
    3.5
    """
    return scaled(cost, per_byte=1 / times)


def no_startup(cost: KnownCost) -> KnownCost:
    """Return the cost without what a message of no bytes takes.

    >>> from mgwfbp.cost import PiecewiseCost
    >>> no_startup(PiecewiseCost(2, ((0, 1.0), (10, 3.0))))(10)
    2.0
    """
    return scaled(cost, startup=0.0)
