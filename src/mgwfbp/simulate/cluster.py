"""What an all-reduce costs N workers of a cluster: `Cluster`, and `MeasuredCluster` for a cost that was measured."""

from dataclasses import dataclass, replace
from typing import Protocol

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.costs import LowCost, WireCost, full_precision_cost
from mgwfbp.errors import SimulationError
from mgwfbp.network import Network
from mgwfbp.record import check_count, check_text
from mgwfbp.simulate.scenario import check_factors
from mgwfbp.units import plural, quote

__all__ = ["Cluster", "CostSource", "MeasuredCluster", "WireCluster"]


class CostSource(Protocol):
    """Anything that knows what N workers pay for a message."""

    @property
    def name(self) -> str:
        """What to call it in a table."""

    def cost(self, workers: int) -> Cost:
        """Return the cost of an all-reduce over ``workers``."""

    def parameter_server_cost(self, workers: int, *, servers: int) -> Cost:
        """Return the cost of a push to, and a pull from, ``servers`` parameter servers."""


@dataclass(frozen=True, slots=True)
class Cluster:
    r"""Nodes of ``workers_per_node`` GPUs, joined inside a node by one network and between nodes by another.

    With N workers on n nodes of k a message is reduced inside each node, all-reduced between nodes and broadcast inside
    each node, one after the other:

    .. math:: T(M) = T_{inside}(M; k) + T_{between}(M; n)

    Reduce and broadcast inside cost together what an all-reduce of k costs (Table II), as they do for the tree;
    for the ring read: reduce-scatter, then every GPU all-reduces its share over the node's one link, then all-gather.
    No two levels work at the same time. With k = 1 this is the one-level cost itself; up to k workers fill one node.

    Links of different speed: every round of a synchronous all-reduce lasts as long as its slowest link does, so the
    largest of ``slow_links`` (per-byte times between nodes, relative to the others') governs all messages. For
    parameter servers the slow link is a worker's, which carries the message once each way.

    >>> from mgwfbp.network import load_network
    >>> Cluster(load_network("10GbE"), inside=load_network("nvlink3"), workers_per_node=8).cost(64)
    LinearCost(64 workers: 681.2 us + 1.41 ns/B)
    """

    network: Network  # between nodes
    inside: Network | None = None
    workers_per_node: int = 1  # k
    slow_links: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        per_node = check_count(self.workers_per_node, "workers_per_node", SimulationError, minimum=1)
        object.__setattr__(self, "workers_per_node", per_node)
        object.__setattr__(self, "slow_links", check_factors(self.slow_links, "slow_links"))
        if per_node > 1 and self.inside is None:
            raise SimulationError(f"{plural(per_node, 'worker')} per node, but no network inside a node is given")

    @property
    def name(self) -> str:
        """What to call it in a table."""
        if self.inside is None or self.workers_per_node == 1:
            return self.network.name
        return f"{self.network.name}, {self.workers_per_node} a node over {self.inside.name}"

    def cost(self, workers: int) -> LinearCost:
        """Return the cost of an all-reduce over ``workers``."""
        nodes, inside = self._levels(workers)
        return self._add(workers, inside, self._slowest_network().cost(nodes))

    def parameter_server_cost(self, workers: int, *, servers: int) -> LinearCost:
        r"""Return the cost of a push and a pull, by node: :math:`T_{inside}(M; k) + T_{ps}(M; n)`.

        A worker's own link carries the message out and in, however many servers share it: at least
        :math:`2\beta M`, with :math:`\beta` of the slowest link.
        """
        nodes, inside = self._levels(workers)
        between = self.network.parameter_server_cost(nodes, servers=servers)
        if nodes > 1:
            own_per_byte_s = 2 * self._slowest_network().per_byte_s
            between = replace(between, per_byte_s=max(between.per_byte_s, own_per_byte_s))
        return self._add(workers, inside, between)

    def _add(self, workers: int, inside: LinearCost | None, between: LinearCost) -> LinearCost:
        if inside is None:
            return between
        source = {"network": self.name, "inside": dict(inside.source), "between": dict(between.source)}
        return LinearCost(workers, inside.startup_s + between.startup_s, inside.per_byte_s + between.per_byte_s, source)

    def _slowest_network(self) -> Network:
        return replace(self.network, per_byte_s=self.network.per_byte_s * max(self.slow_links, default=1.0))

    def _levels(self, workers: int) -> tuple[int, LinearCost | None]:
        """Return how many nodes there are and, where a node has several workers, what they pay inside it."""
        count = check_count(workers, "workers", SimulationError, minimum=1)
        if self.inside is None or self.workers_per_node == 1:
            return count, None
        if count <= self.workers_per_node:
            return 1, self.inside.cost(count)
        if count % self.workers_per_node:
            raise SimulationError(
                f"{plural(count, 'worker')} do not fill nodes of {self.workers_per_node}, expected a multiple of it"
            )
        return count // self.workers_per_node, self.inside.cost(self.workers_per_node)


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """The workers that a cost was measured on; of any other number nothing is known."""

    name: str
    measured: Cost

    def __post_init__(self) -> None:
        check_text(self.name, "name", SimulationError)

    def cost(self, workers: int) -> Cost:
        """Return the measured cost, or raise unless it was measured on so many workers."""
        count = check_count(workers, "workers", SimulationError, minimum=1)
        if count != self.measured.workers:
            raise SimulationError(
                f"{quote(self.name)} was measured on {plural(self.measured.workers, 'worker')}, which says nothing of "
                f"{count}; give a network for other numbers"
            )
        return self.measured

    def parameter_server_cost(self, workers: int, *, servers: int) -> Cost:  # noqa: ARG002 - as the protocol has it
        """Raise: a measured all-reduce says nothing of a parameter server."""
        raise SimulationError(f"{quote(self.name)} is a measured all-reduce; a parameter server needs a network's link")


@dataclass(frozen=True, slots=True)
class WireCluster:
    """Workers of whom it was also measured what messages in low precision take."""

    source: CostSource
    low: LowCost

    @property
    def name(self) -> str:
        """What to call it in a table."""
        return self.source.name

    def cost(self, workers: int) -> Cost:
        """Return the cost of both precisions, or raise unless the low one was measured on so many workers."""
        full = full_precision_cost(self.source.cost(workers))
        if not isinstance(full, LinearCost | PiecewiseCost):
            raise SimulationError(f"{quote(self.name)} has a cost that is neither linear nor piecewise")
        return WireCost(full, self.low.beside(full))

    def parameter_server_cost(self, workers: int, *, servers: int) -> Cost:
        """Return the cost of a push to, and a pull from, ``servers`` parameter servers."""
        return self.source.parameter_server_cost(workers, servers=servers)
