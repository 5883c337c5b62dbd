"""Options of commands that plan for torch's way to train, for a sharded optimizer, or for FSDP2."""

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from mgwfbp.cli.output import talk
from mgwfbp.cost import Cost
from mgwfbp.costs import ShardedCost
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = ["Engine", "Engines", "check_without_wire", "read_engines", "talk_of_halves"]

ENGINES = ("ddp", "sharded", "fsdp2")
Engine = Annotated[
    Literal["ddp", "sharded", "fsdp2"],
    typer.Option(
        "--engine",
        help="Who runs the plan: ddp all-reduces gradients; sharded may reduce-scatter them and gather parameters "
        "during the next forward pass; fsdp2 is torch's fully_shard, whose groups are modules.",
    ),
]
Engines = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAMES",
        help="Who trains besides ddp: sharded (a sharded optimizer), fsdp2 (torch's fully_shard, planned and by "
        "block), or both: sharded,fsdp2.",
    ),
]


def read_engines(text: str, wire: str | None) -> frozenset[str]:
    """Return who was asked for, and ddp, whose steps theirs are compared with; or refuse what cannot be."""
    names = {"ddp", *(name.strip() for name in text.split(","))}
    if unknown := sorted(names.difference(ENGINES)):
        raise typer.BadParameter(f"{quote(unknown[0])}, expected any of {','.join(ENGINES)}", param_hint="--engine")
    if len(names) > 1:
        check_without_wire(wire)
    return frozenset(names)


def check_without_wire(wire: str | None) -> None:
    """Refuse low precision, which no plan with halves of all-reduces has."""
    if wire is not None:
        raise typer.BadParameter("such a plan sends messages as they are; leave out --wire", param_hint="--engine")


def talk_of_halves(trace: ModelTrace, costs: Sequence[Cost]) -> None:
    """Say what is assumed of the halves of an all-reduce, and of layers in the forward pass, where it is not known."""
    if not all(isinstance(cost, ShardedCost) for cost in costs):
        talk("a reduce-scatter and an all-gather are taken to cost half an all-reduce each, as in a ring")
    if trace.layers[0].forward_s is None:
        talk("the trace has no forward pass by layer: layers are taken to share it as they share the backward pass")
