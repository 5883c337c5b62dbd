"""Options of commands whose messages may travel in low precision."""

from typing import Annotated, Literal

import typer

from mgwfbp.cli.output import talk
from mgwfbp.cost import LinearCost, PiecewiseCost, load_cost
from mgwfbp.costs import WireCost
from mgwfbp.units import plural

__all__ = ["Wire", "WireCostFile", "read_low_cost", "talk_of_low_cost", "with_low_cost"]

Wire = Annotated[
    Literal["bfloat16", "float16"] | None,
    typer.Option("--wire", help="Messages may travel in this precision, where the step needs it."),
]
WireCostFile = Annotated[
    str | None,
    typer.Option(
        "--wire-cost",
        metavar="FILE",
        help="cost.json of messages in it, by the bytes of their gradients; if not given, that of half the bytes.",
    ),
]


def read_low_cost(wire: str | None, path: str | None) -> LinearCost | PiecewiseCost | None:
    """Return the cost of messages in low precision, None where it is not given."""
    if path is None:
        return None
    if wire is None:
        raise typer.BadParameter("needs --wire, the precision whose cost it is", param_hint="--wire-cost")
    return load_cost(path)


def talk_of_low_cost(wire: str | None, path: str | None) -> None:
    """Say what is assumed of messages in low precision, where it was not measured."""
    if wire is not None and path is None:
        talk(f"no --wire-cost: messages in {wire} are taken to cost what half the bytes cost, and converting nothing")


def with_low_cost(
    cost: LinearCost | PiecewiseCost, low: LinearCost | PiecewiseCost | None
) -> LinearCost | PiecewiseCost | WireCost:
    """Return the cost of both precisions, where both are given."""
    if low is None:
        return cost
    if low.workers != cost.workers:
        raise typer.BadParameter(
            f"is of {plural(low.workers, 'worker')}, --cost of {cost.workers}; give both of as many",
            param_hint="--wire-cost",
        )
    return WireCost(cost, low)
