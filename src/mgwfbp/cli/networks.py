"""Networks and costs by name: a preset, a network.json or a cost.json, and what other options say of its links."""

import os
from typing import Annotated

import typer

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.costs import ShardedCost, WireCost, cost_with_halves, cost_with_low
from mgwfbp.files import naming, read_json
from mgwfbp.network import ALGORITHMS, PRESETS, Network, load_network
from mgwfbp.simulate import Cluster, CostSource, MeasuredCluster
from mgwfbp.units import printable

__all__ = ["CostOrNetwork", "Inside", "Links", "NetworkWorkers", "PerNode", "read_cost", "read_cost_with_halves"]

CostOrNetwork = Annotated[
    str,
    typer.Option(
        "--cost",
        metavar="FILE|NETWORK",
        help=f"cost.json, or with --workers a network.json or one of {', '.join(PRESETS)}.",
    ),
]
NetworkWorkers = Annotated[
    int | None, typer.Option("--workers", min=1, help="How many workers a network joins; a cost.json has its own.")
]
PerNode = Annotated[int, typer.Option(min=1, help="Workers in a node; the network is then between nodes.")]
Inside = Annotated[str | None, typer.Option(metavar="NAME|FILE", help="The network inside a node.")]


class Links:
    """Turns names of networks into clusters, with what options say of their links."""

    def __init__(
        self, per_node: int = 1, inside: str | None = None, algorithm: str | None = None, slow_link: float = 1.0
    ) -> None:
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise typer.BadParameter(f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}", param_hint="--algorithm")
        if (per_node > 1) != (inside is not None):
            raise typer.BadParameter("give both or none", param_hint=["--per-node", "--inside"])
        self._algorithm, self._per_node, self._slow_link = algorithm, per_node, slow_link
        self._inside = load_network(inside) if inside is not None else None

    def cluster(self, name: str) -> Cluster:
        """Return the cluster that a network by this name joins."""
        return self.join(load_network(name))

    def join(self, link: Network) -> Cluster:
        """Return the cluster that a network joins."""
        if self._algorithm is not None and self._algorithm != link.algorithm:
            link = Network(
                f"{link.name} {self._algorithm}",
                self._algorithm,
                link.latency_s,
                link.per_byte_s,
                link.reduce_per_byte_s,
            )
        return Cluster(link, self._inside, self._per_node, (self._slow_link,))

    def source(
        self, name: str, option: str = "--network", *, with_halves: bool = False, wire: str | None = None
    ) -> CostSource:
        """Return the cluster, or the workers of a measured cost, of which nothing else can be said.

        With what the halves of an all-reduce cost, or messages in a low precision, where that is asked for and known.
        """
        found = _cost_or_network(name, wire, with_halves=with_halves)
        if isinstance(found, Network):
            return self.join(found)
        if self._algorithm or self._inside or self._slow_link != 1.0:
            raise typer.BadParameter(
                f"{name} is a measured cost; --algorithm, --inside and --slow-link need a network", param_hint=option
            )
        return MeasuredCluster(printable(name), found)


def read_cost(
    name: str, workers: int | None, links: Links, wire: str | None = None
) -> LinearCost | PiecewiseCost | WireCost:
    """Return what --cost stands for: a cost, or that of a network between so many workers.

    With what messages in this low precision cost, where that was measured.
    """
    found = _cost_of(links.source(name, "--cost", wire=wire), name, workers)
    assert isinstance(found, LinearCost | PiecewiseCost | WireCost)  # noqa: S101 - no halves were asked for
    return found


def read_cost_with_halves(name: str, workers: int | None, links: Links) -> LinearCost | PiecewiseCost | ShardedCost:
    """Return what --cost stands for, with what the halves of an all-reduce cost where that was measured."""
    found = _cost_of(links.source(name, "--cost", with_halves=True), name, workers)
    assert isinstance(found, LinearCost | PiecewiseCost | ShardedCost)  # noqa: S101 - nor low precision here
    return found


def _cost_of(source: CostSource, name: str, workers: int | None) -> Cost:
    if isinstance(source, MeasuredCluster):
        return source.cost(workers or source.measured.workers)  # which refuses any other number
    if workers is None:
        raise typer.BadParameter(
            f"missing; {name} is a network and does not say how many it joins", param_hint="--workers"
        )
    return source.cost(workers)


def _cost_or_network(
    name: str, wire: str | None, *, with_halves: bool
) -> LinearCost | PiecewiseCost | WireCost | ShardedCost | Network:
    """Return what a preset's name or a file stands for, read once: a pipe gives its content only once."""
    if name.lower() in PRESETS or not os.path.exists(name):  # noqa: PTH110 - a name may be too long for a file's
        return load_network(name)
    data = read_json(name)
    with naming(name):
        if not isinstance(data, dict) or data.get("format") != LinearCost.FORMAT:
            return Network.from_json(data)
        halves = cost_with_halves(data) if with_halves else None
        return halves if isinstance(halves, ShardedCost) else cost_with_low(data, wire)
