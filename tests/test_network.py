"""Table II against the paper's numbers and against simulated message rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import Network, NetworkError, load_network
from mgwfbp.network import ALGORITHMS, PRESETS

ALPHA, BETA, GAMMA = 3.0, 0.5, 0.25


def costs(algorithm: str, workers: int) -> tuple[float, float]:
    cost = Network("link", algorithm, ALPHA, BETA, GAMMA).cost(workers)
    return cost.startup_s, cost.per_byte_s


@pytest.mark.parametrize(("workers", "startup_us"), [(2, 90.52), (4, 271.56), (8, 633.64)])
def test_a_ring_has_the_start_up_times_the_paper_measured(workers: int, startup_us: float) -> None:
    cost = Network("10GbE", "ring", latency_s=45.26e-6, per_byte_s=8e-10).cost(workers)
    assert cost.startup_s * 1e6 == pytest.approx(startup_us, abs=1e-9)


def test_table_2_for_eight_workers() -> None:
    assert costs("binary_tree", 8) == (2 * ALPHA * 3, (2 * BETA + GAMMA) * 3)
    assert costs("recursive_doubling", 8) == (ALPHA * 3, (BETA + GAMMA) * 3)
    assert costs("recursive_halving_doubling", 8) == (2 * ALPHA * 3, 2 * BETA - (2 * BETA + GAMMA) / 8 + GAMMA)
    assert costs("ring", 8) == (14 * ALPHA, 2 * 7 / 8 * BETA + 7 / 8 * GAMMA)


@given(st.integers(1, 6))
def test_halving_and_doubling_adds_up_its_rounds(log_workers: int) -> None:
    # Reduce-scatter: halves of what is left, each sent and added; then the same way back without adding.
    workers = 2**log_workers
    shares = [1 / 2**round_ for round_ in range(1, log_workers + 1)]
    per_byte_s = sum(share * (BETA + GAMMA) for share in shares) + sum(share * BETA for share in shares)
    assert costs("recursive_halving_doubling", workers) == pytest.approx((2 * ALPHA * log_workers, per_byte_s))


@given(st.integers(2, 200))
def test_a_ring_adds_up_its_rounds_for_any_number_of_workers(workers: int) -> None:
    share = 1 / workers
    per_byte_s = (workers - 1) * share * (BETA + GAMMA) + (workers - 1) * share * BETA
    assert costs("ring", workers) == pytest.approx((2 * (workers - 1) * ALPHA, per_byte_s))


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("algorithm", ["recursive_doubling", "recursive_halving_doubling"])
def test_other_numbers_of_workers_fold_into_the_power_of_two_below(algorithm: str, workers: int) -> None:
    below = 2 ** (workers.bit_length() - 1)
    startup_s, per_byte_s = costs(algorithm, below)
    assert costs(algorithm, workers) == pytest.approx((startup_s + 2 * ALPHA, per_byte_s + 2 * BETA + GAMMA))


@pytest.mark.parametrize("workers", [3, 5, 7])
def test_a_tree_has_as_many_levels_as_its_workers_need(workers: int) -> None:
    above = 2 ** workers.bit_length()
    assert costs("binary_tree", workers) == costs("binary_tree", above)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_one_worker_sends_nothing(algorithm: str) -> None:
    assert costs(algorithm, 1) == (0.0, 0.0)


@pytest.mark.parametrize("workers", [0, -1, True, 2.5, "8"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: int) -> None:
    with pytest.raises(NetworkError, match="workers is"):
        PRESETS["10gbe"].cost(workers)


def test_presets_go_by_name_in_any_case() -> None:
    assert load_network("IB-HDR") is PRESETS["ib-hdr"]
    between = [
        round(8e-9 / PRESETS[name].per_byte_s) for name in ("1gbe", "10gbe", "25gbe", "100gbe", "ib-hdr", "ib-ndr")
    ]
    assert between == [1, 10, 25, 100, 200, 400]
    assert [round(1e-9 / PRESETS[name].per_byte_s) for name in ("pcie3", "nvlink3")] == [16, 300]  # GB/s, inside a node


def test_a_parameter_server_adds_up_pushes_sums_and_pulls() -> None:
    # Each of 2 servers takes 6 copies of half of M in, adds 5 of them to the first, and sends 6 copies out.
    cost = Network("link", "ring", ALPHA, BETA, GAMMA).parameter_server_cost(6, servers=2)
    assert cost.startup_s == 2 * ALPHA
    assert cost.per_byte_s == pytest.approx((6 * BETA + 5 * GAMMA + 6 * BETA) / 2)


def test_latencies_of_the_presets_are_those_of_their_sources() -> None:
    assert {name: network.latency_s for name, network in PRESETS.items() if name.endswith("gbe")} == dict.fromkeys(
        ("1gbe", "10gbe", "25gbe", "100gbe"), 45.26e-6
    )
    assert PRESETS["ib-hdr"].latency_s == 9.6e-6


def test_a_tree_of_very_many_workers_has_exact_levels() -> None:
    assert Network("link", "binary_tree", 1.0, 0.0).cost(2**49 + 1).startup_s == 100


def test_an_unknown_network_is_refused_with_the_known_names() -> None:
    with pytest.raises(NetworkError, match=r"'avian' is neither a file nor one of 1gbe, 10gbe"):
        load_network("avian")


def test_an_unknown_algorithm_is_refused_with_the_known_names() -> None:
    with pytest.raises(NetworkError, match=r"algorithm is 'gossip', expected one of binary_tree"):
        Network("link", "gossip", 1.0, 1.0)
