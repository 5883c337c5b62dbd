"""Networks and costs by name: a preset, a network.json or a cost.json, and what other options say of its links."""

import os
from typing import Annotated

import typer

from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.costs import ShardedCost, cost_with_halves, full_precision_cost
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

    def source(self, name: str, option: str = "--network", *, with_halves: bool = False) -> CostSource:
        """Return the cluster, or the workers of a measured cost, of which nothing else can be said."""
        found = _cost_or_network(name)
        if isinstance(found, Network):
            return self.join(found)
        if self._algorithm or self._inside or self._slow_link != 1.0:
            raise typer.BadParameter(
                f"{name} is a measured cost; --algorithm, --inside and --slow-link need a network", param_hint=option
            )
        return MeasuredCluster(printable(name), found if with_halves else full_precision_cost(found))


def read_cost(name: str, workers: int | None, links: Links) -> LinearCost | PiecewiseCost:
    """Return what --cost stands for: a cost, or that of a network between so many workers."""
    found = read_cost_with_halves(name, workers, links)
    return found.all_reduce if isinstance(found, ShardedCost) else found


def read_cost_with_halves(name: str, workers: int | None, links: Links) -> LinearCost | PiecewiseCost | ShardedCost:
    """Return what --cost stands for, with what the halves of an all-reduce cost where that was measured."""
    source = links.source(name, "--cost", with_halves=True)
    if isinstance(source, MeasuredCluster):
        cost = source.cost(workers or source.measured.workers)  # which refuses any other number
    elif workers is None:
        raise typer.BadParameter(
            f"missing; {name} is a network and does not say how many it joins", param_hint="--workers"
        )
    else:
        cost = source.cost(workers)
    if not isinstance(cost, LinearCost | PiecewiseCost | ShardedCost):  # no other kind is read from a file
        raise typer.BadParameter(f"{name} is no cost that can be written", param_hint="--cost")
    return cost


def _cost_or_network(name: str) -> LinearCost | PiecewiseCost | ShardedCost | Network:
    """Return what a preset's name or a file stands for, read once: a pipe gives its content only once."""
    if name.lower() in PRESETS or not os.path.exists(name):  # noqa: PTH110 - a name may be too long for a file's
        return load_network(name)
    data = read_json(name)
    with naming(name):
        is_cost = isinstance(data, dict) and data.get("format") == LinearCost.FORMAT
        return cost_with_halves(data) if is_cost else Network.from_json(data)
