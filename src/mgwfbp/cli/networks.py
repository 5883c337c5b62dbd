"""Networks and costs by name: a preset, a network.json or a cost.json, and what other options say of its links."""

from pathlib import Path
from typing import Annotated

import typer

from mgwfbp.cost import LinearCost, PiecewiseCost, load_cost
from mgwfbp.network import ALGORITHMS, PRESETS, Network, load_network
from mgwfbp.record import read_json
from mgwfbp.simulate import Cluster, CostSource, MeasuredCluster

__all__ = ["CostOrNetwork", "Inside", "Links", "NetworkWorkers", "PerNode", "read_cost"]

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

    def source(self, name: str, option: str = "--network") -> CostSource:
        """Return the cluster, or the workers of a measured cost, of which nothing else can be said."""
        measured = _measured_cost(name)
        if measured is None:
            return self.cluster(name)
        if self._algorithm or self._inside or self._slow_link != 1.0:
            raise typer.BadParameter(
                f"{name} is a measured cost; --algorithm, --inside and --slow-link need a network", param_hint=option
            )
        return MeasuredCluster(name, measured)


def read_cost(name: str, workers: int | None, links: Links) -> LinearCost | PiecewiseCost:
    """Return what --cost stands for: a cost, or that of a network between so many workers."""
    source, measured = links.source(name, "--cost"), _measured_cost(name)
    if measured is not None:
        source.cost(workers or measured.workers)  # which refuses any other number
        return measured
    if workers is None:
        raise typer.BadParameter(
            f"missing; {name} is a network and does not say how many it joins", param_hint="--workers"
        )
    return links.cluster(name).cost(workers)


def _measured_cost(name: str) -> LinearCost | PiecewiseCost | None:
    """Return the cost if the name is that of a cost.json."""
    if name.lower() in PRESETS or not Path(name).is_file():
        return None
    data = read_json(name)
    if isinstance(data, dict) and data.get("format") == LinearCost.FORMAT:
        return load_cost(name)
    return None
