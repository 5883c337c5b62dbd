"""Options of commands whose messages may travel in low precision."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import typer

from mgwfbp.cli.output import talk
from mgwfbp.cost import LinearCost, PiecewiseCost, cost_from_json
from mgwfbp.costs import LowCost, WireCost, halved_words
from mgwfbp.files import naming, read_json
from mgwfbp.plan import MergePlan
from mgwfbp.planners import Planner, plan_wire
from mgwfbp.planners.wire import DEFAULT_TOLERANCE
from mgwfbp.record import Fields
from mgwfbp.units import plural

__all__ = [
    "Wire",
    "WireCostFile",
    "WireTolerance",
    "check_tolerance",
    "read_low_cost",
    "sent_wire",
    "talk_of_low_cost",
    "wire_planner",
    "with_low_cost",
]

Wire = Annotated[
    Literal["bfloat16", "float16"] | None,
    typer.Option("--wire", help="Messages may travel in this precision, where the step needs it."),
]
WireCostFile = Annotated[
    str | None,
    typer.Option(
        "--wire-cost",
        metavar="FILE",
        help="cost.json of messages in it, as measure allreduce --wire writes it; if not given, that of --cost if it "
        "has one, or else half the bytes cost.",
    ),
]
WireTolerance = Annotated[
    float | None,
    typer.Option(
        "--wire-tolerance",
        metavar="PART",
        min=0,
        max=1,
        help=f"Which part longer than the shortest a step may be, to keep precision; {DEFAULT_TOLERANCE} if not given.",
    ),
]


def sent_wire(wire: str | None, plans: Iterable[MergePlan]) -> str | None:
    """Return the low precision that is asked for or that plans have; costs are of one."""
    found = sorted({*filter(None, (wire, *(one for plan in plans for one in plan.wire)))})
    if len(found) > 1:
        raise typer.BadParameter(
            f"messages travel in {' and in '.join(found)}, and costs are of one low precision: give each by itself",
            param_hint=["--plan", "--wire"],
        )
    return next(iter(found), None)


def read_low_cost(wire: str | None, path: str | None) -> LowCost | None:
    """Return the cost of messages in low precision, None where it is not given."""
    if path is None:
        return None
    if wire is None:
        raise typer.BadParameter("needs --wire, the precision whose cost it is", param_hint="--wire-cost")
    data = read_json(path)
    with naming(path):
        fields = Fields(data)
        if "low" not in fields:  # a cost by itself, of messages in low precision by the bytes of gradients
            return LowCost(cost_from_json(data), knows_taken="taken_s" in fields)
        both = WireCost.from_json(data)
    if both.wire != wire:
        raise typer.BadParameter(f"{path} is of {both.wire}, and --wire is {wire}", param_hint="--wire-cost")
    return LowCost(both.low, knows_taken="taken_s" in fields.child("low"))


def talk_of_low_cost(wire: str | None, *, is_known: bool) -> None:
    """Say what is assumed of messages in low precision, where it was not measured."""
    if wire is not None and not is_known:
        talk(halved_words(wire))


def with_low_cost(
    cost: LinearCost | PiecewiseCost | WireCost, low: LowCost | None
) -> LinearCost | PiecewiseCost | WireCost:
    """Return the cost of both precisions, where both are given."""
    if low is None:
        return cost
    if low.cost.workers != cost.workers:
        raise typer.BadParameter(
            f"is of {plural(low.cost.workers, 'worker')}, --cost of {cost.workers}; give both of as many",
            param_hint="--wire-cost",
        )
    full = cost.full if isinstance(cost, WireCost) else cost
    return WireCost(full, low.beside(full))


def wire_planner(wire: str, tolerance: float | None) -> Planner:
    """Return the planner of both precisions."""
    return partial(plan_wire, wire=wire, tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance)


def check_tolerance(wire: str | None, tolerance: float | None) -> None:
    """Refuse a tolerance where nothing may travel in low precision."""
    if tolerance is not None and wire is None:
        raise typer.BadParameter("needs --wire, the precision that is given up less for", param_hint="--wire-tolerance")
