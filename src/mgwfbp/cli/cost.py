"""``mgwfbp cost``: make a cost from a measured sweep or from a network's link."""

from pathlib import Path
from typing import Annotated

import typer

from mgwfbp.cli.networks import Inside, Links, PerNode
from mgwfbp.cli.options import Output
from mgwfbp.cli.output import check_not_input, talk, talk_of_padding, write_record
from mgwfbp.cost import LinearCost
from mgwfbp.files import naming
from mgwfbp.fitting import LINE_IS_GOOD_ENOUGH, FitKind, fit
from mgwfbp.measure.sweeps import SWEEP_READERS
from mgwfbp.network import PRESETS
from mgwfbp.units import printable

__all__ = ["cost"]


def cost(
    workers: Annotated[int, typer.Option(min=1, help="How many workers took, or will take, part.")],
    osu: Annotated[str | None, typer.Option(metavar="FILE", help="Output of osu_allreduce.")] = None,
    nccl_tests: Annotated[str | None, typer.Option(metavar="FILE", help="Output of all_reduce_perf.")] = None,
    points: Annotated[str | None, typer.Option(metavar="FILE", help="Lines of `bytes seconds`.")] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=f"network.json, or one of {', '.join(PRESETS)}.")
    ] = None,
    kind: Annotated[
        FitKind, typer.Option(help="A straight line, a curve, or the line if it fits within 10 %.")
    ] = "auto",
    per_node: PerNode = 1,
    inside: Inside = None,
    output: Output = None,
) -> None:
    """Make a cost from a measured sweep or from a network."""
    sweeps = {"osu": osu, "nccl-tests": nccl_tests, "points": points}
    given = {name: path for name, path in {**sweeps, "network": network}.items() if path is not None}
    if len(given) != 1:
        raise typer.BadParameter("give exactly one", param_hint=["--osu", "--nccl-tests", "--points", "--network"])
    ((name, path),) = given.items()
    check_not_input(output, [path])
    if name == "network":
        if kind == "piecewise":
            raise typer.BadParameter("--network gives a straight line; a curve needs a sweep", param_hint="--kind")
        write_record(Links(per_node, inside).cluster(path).cost(workers), output)
        return
    if per_node > 1 or inside is not None:
        raise typer.BadParameter("a measured sweep has its own nodes", param_hint=["--per-node", "--inside"])
    samples = SWEEP_READERS[name](path)
    source = {"sweep": name, "file": printable(Path(path).name)}
    with naming(path):
        found = fit(samples, workers, kind=kind, source=source)
    write_record(found.cost, output)
    talk(
        f"{found.cost!r}: mean error {found.mean_error:.1%}, worst {found.worst_error:.1%} over {found.num_sizes} sizes"
    )
    talk_of_padding(found.cost)
    if found.mean_error > LINE_IS_GOOD_ENOUGH:
        better = (
            "a curve may follow them: --kind piecewise"
            if isinstance(found.cost, LinearCost) and kind == "linear"
            else "its sizes contradict one another: measure again, with more repeats on an otherwise idle network"
        )
        talk(f"plans made with it can be off as far; {better}")
    largest = max(size for size, _ in samples)
    if found.cost(2 * largest) == found.cost(largest):
        talk("the times do not grow with the size, so larger messages would be free: measure larger ones")
