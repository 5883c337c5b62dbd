"""Two levels, slow links, parameter servers, measured costs: what N workers pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import Cluster, LinearCost, Network, SimulationError, load_network
from mgwfbp.network import ALGORITHMS
from mgwfbp.simulate import MeasuredCluster

rates = st.floats(0.0, 1e-3)
networks = st.builds(Network, st.just("random"), st.sampled_from(sorted(ALGORITHMS)), rates, rates, rates)


@given(networks, networks, st.integers(1, 300))
def test_one_level_equals_two_levels_with_one_worker_a_node(network: Network, inside: Network, workers: int) -> None:
    one_level, two_levels = Cluster(network), Cluster(network, inside, 1)
    assert two_levels.cost(workers) == one_level.cost(workers) == network.cost(workers)
    servers = one_level.parameter_server_cost(workers, servers=1)
    assert two_levels.parameter_server_cost(workers, servers=1) == servers
    assert servers == network.parameter_server_cost(workers, servers=1)


@given(networks, networks, st.integers(2, 16), st.integers(2, 40))
def test_two_levels_add_up(network: Network, inside: Network, per_node: int, nodes: int) -> None:
    cost = Cluster(network, inside, per_node).cost(per_node * nodes)
    assert cost.workers == per_node * nodes
    for num_bytes in (0, 1000, 10**8):
        expected_s = inside.cost(per_node)(num_bytes) + network.cost(nodes)(num_bytes)
        assert cost(num_bytes) == pytest.approx(expected_s, rel=1e-12)


@given(networks, networks, st.integers(2, 16))
def test_workers_of_one_node_do_not_use_the_network_between(network: Network, inside: Network, workers: int) -> None:
    cost = Cluster(network, inside, 16).cost(workers)
    assert (cost.startup_s, cost.per_byte_s) == (inside.cost(workers).startup_s, inside.cost(workers).per_byte_s)


@given(networks, st.integers(1, 300), st.lists(st.floats(1.0, 100.0), max_size=3))
def test_the_slowest_link_governs(network: Network, workers: int, slow_links: list[float]) -> None:
    cost = Cluster(network, slow_links=tuple(slow_links)).cost(workers)
    worst = Cluster(network, slow_links=(max(slow_links, default=1.0),)).cost(workers)
    usual = network.cost(workers)
    assert cost == worst
    assert cost.startup_s == usual.startup_s
    assert usual.per_byte_s <= cost.per_byte_s <= usual.per_byte_s * max(slow_links, default=1.0) * (1 + 1e-12)


def test_a_worker_cannot_talk_to_parameter_servers_faster_than_its_own_link() -> None:
    cluster = Cluster(load_network("10gbe"))
    for servers in (8, 64, 10**6):
        cost = cluster.parameter_server_cost(8, servers=servers)
        assert cost.per_byte_s == pytest.approx(2 * 8e-10)
    slow = Cluster(load_network("10gbe"), slow_links=(20.0,)).parameter_server_cost(8, servers=1)
    assert slow.per_byte_s == pytest.approx(2 * 20 * 8e-10)


def test_one_worker_pays_nothing() -> None:
    for cluster in (Cluster(load_network("1gbe")), Cluster(load_network("1gbe"), load_network("pcie3"), 4)):
        assert cluster.cost(1)(10**9) == 0.0
        assert cluster.parameter_server_cost(1, servers=3)(10**9) == 0.0


def test_a_measured_cost_holds_for_its_own_workers_only() -> None:
    measured = MeasuredCluster("cost.json", LinearCost(8, 1e-3, 1e-9))
    assert measured.cost(8)(0) == 1e-3
    with pytest.raises(SimulationError, match="measured on 8 workers"):
        measured.cost(16)
    with pytest.raises(SimulationError, match="parameter server needs a network"):
        measured.parameter_server_cost(8, servers=1)


def test_impossible_clusters_are_refused() -> None:
    network, inside = load_network("10gbe"), load_network("nvlink3")
    with pytest.raises(SimulationError, match="workers is 0"):
        Cluster(network).cost(0)
    with pytest.raises(SimulationError, match="10 workers do not fill nodes of 4"):
        Cluster(network, inside, 4).cost(10)
    with pytest.raises(SimulationError, match="no network inside"):
        Cluster(network, workers_per_node=4)
    with pytest.raises(SimulationError, match="workers_per_node is 0"):
        Cluster(network, inside, 0)
    with pytest.raises(SimulationError, match=r"slow_links: 0\.5"):
        Cluster(network, slow_links=(0.5,))
