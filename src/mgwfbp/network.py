"""A link and an all-reduce algorithm: what N workers pay for a message, the paper's Table II."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mgwfbp.cost import LinearCost
from mgwfbp.errors import NetworkError
from mgwfbp.record import Fields, Record, check_count, check_real, check_text
from mgwfbp.units import format_seconds, quote

__all__ = ["ALGORITHMS", "PRESETS", "Network", "load_network"]


def _binary_tree(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    levels = (workers - 1).bit_length()
    return 2 * alpha * levels, (2 * beta + gamma) * levels


def _recursive_doubling(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    rounds = workers.bit_length() - 1
    fold_s, fold_per_byte_s = _fold(workers, alpha, beta, gamma)
    return alpha * rounds + fold_s, (beta + gamma) * rounds + fold_per_byte_s


def _recursive_halving_doubling(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    rounds = workers.bit_length() - 1
    fold_s, fold_per_byte_s = _fold(workers, alpha, beta, gamma)
    return 2 * alpha * rounds + fold_s, 2 * beta - (2 * beta + gamma) / 2**rounds + gamma + fold_per_byte_s


def _ring(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    return 2 * (workers - 1) * alpha, (2 * beta + gamma) * (workers - 1) / workers


def _fold(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    """Return what pairs of workers pay to come down to a power of two first and to hand the result back last."""
    if workers & (workers - 1) == 0:
        return 0.0, 0.0
    return 2 * alpha, 2 * beta + gamma


# name -> (workers, alpha, beta, gamma) -> (a, b)
ALGORITHMS: Mapping[str, Callable[[int, float, float, float], tuple[float, float]]] = MappingProxyType(
    {
        "binary_tree": _binary_tree,
        "recursive_doubling": _recursive_doubling,
        "recursive_halving_doubling": _recursive_halving_doubling,
        "ring": _ring,
    }
)


@dataclass(frozen=True, slots=True, repr=False)
class Network(Record):
    r"""A point-to-point link of :math:`\alpha + \beta M` and the algorithm that all-reduces over it.

    >>> ten_gbe = Network("10GbE", "ring", latency_s=45.26e-6, per_byte_s=8e-10)
    >>> [round(ten_gbe.cost(workers).startup_s * 1e6, 2) for workers in (2, 4, 8)]  # as the paper measured
    [90.52, 271.56, 633.64]
    """

    FORMAT: ClassVar[str] = "mgwfbp.network/1"

    name: str
    algorithm: str  # a key of ALGORITHMS
    latency_s: float  # alpha: start-up of one message between two workers
    per_byte_s: float  # beta: time of a byte between two workers
    reduce_per_byte_s: float = 0.0  # gamma: time to add a byte of one vector to another

    def __post_init__(self) -> None:
        check_text(self.name, "name", NetworkError)
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            raise NetworkError(f"algorithm is {quote(self.algorithm)}, expected one of {', '.join(ALGORITHMS)}")
        for name in ("latency_s", "per_byte_s", "reduce_per_byte_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, NetworkError))

    def __repr__(self) -> str:
        rate = f"{8e-9 / self.per_byte_s:.3g} Gbit/s" if self.per_byte_s else "unlimited"
        return f"Network({quote(self.name)}: {self.algorithm}, {format_seconds(self.latency_s)}, {rate})"

    def cost(self, workers: int) -> LinearCost:
        r"""Return the cost of an all-reduce over ``workers``, Table II.

        ============================== ============================ =========================================
        algorithm                      a                            b
        ============================== ============================ =========================================
        ``binary_tree``                :math:`2\alpha\log_2 N`      :math:`(2\beta+\gamma)\log_2 N`
        ``recursive_doubling``         :math:`\alpha\log_2 N`       :math:`(\beta+\gamma)\log_2 N`
        ``recursive_halving_doubling`` :math:`2\alpha\log_2 N`      :math:`2\beta-(2\beta+\gamma)/N+\gamma`
        ``ring``                       :math:`2(N-1)\alpha`         :math:`2\beta(N-1)/N+\gamma(N-1)/N`
        ============================== ============================ =========================================

        The paper assumes that N is a power of two. For other N: the ring needs no change; the tree has
        :math:`\lceil\log_2 N\rceil` levels; the two recursive algorithms run over the next lower power of two, to which
        the workers beyond it send their vector first and from which they get the result last (MPICH's way), which
        adds :math:`2\alpha` to a and :math:`2\beta+\gamma` to b. One worker sends nothing: the cost is zero.
        """
        count = check_count(workers, "workers", NetworkError, minimum=1)
        startup_s, per_byte_s = 0.0, 0.0
        if count > 1:
            startup_s, per_byte_s = ALGORITHMS[self.algorithm](
                count, self.latency_s, self.per_byte_s, self.reduce_per_byte_s
            )
        return LinearCost(count, startup_s, per_byte_s, {"network": self.name, "algorithm": self.algorithm})

    def parameter_server_cost(self, workers: int, *, servers: int = 1) -> LinearCost:
        r"""Return what it costs to push M bytes to the servers and to pull the average back.

        .. math:: T_{ps}(M) = 2\alpha + \left(2 N \beta + (N-1)\gamma\right) M / S

        with N ``workers`` and S ``servers`` on hosts of their own, each holding M/S bytes: a server's link carries N
        copies of its part in and N copies out, one direction after the other, and it adds N - 1 of them to the first.
        The paper gives no formula; this is its description of TensorFlow's parameter server. One worker needs no
        server: the cost is zero.
        """
        count = check_count(workers, "workers", NetworkError, minimum=1)
        shards = check_count(servers, "servers", NetworkError, minimum=1)
        startup_s, per_byte_s = 0.0, 0.0
        if count > 1:
            startup_s = 2 * self.latency_s
            per_byte_s = (2 * count * self.per_byte_s + (count - 1) * self.reduce_per_byte_s) / shards
        source = {"network": self.name, "algorithm": "parameter_server", "servers": shards}
        return LinearCost(count, startup_s, per_byte_s, source)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``network.json``."""
        return {
            "format": self.FORMAT,
            "name": self.name,
            "algorithm": self.algorithm,
            "latency_s": self.latency_s,
            "per_byte_s": self.per_byte_s,
            "reduce_per_byte_s": self.reduce_per_byte_s,
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a network from the content of ``network.json``."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        return cls(
            fields["name"],
            fields["algorithm"],
            fields["latency_s"],
            fields["per_byte_s"],
            fields.get("reduce_per_byte_s", 0.0),
        )


# Rates are line rates. Latencies: 45.26 us is what the paper measured per ring step on 10GbE with TCP (90.52, 271.56
# and 633.64 us for 2, 4 and 8 nodes); the other Ethernets take the same, since the host's TCP stack and not the wire
# makes most of it. 9.6 us is the latency of one network step of a ring in the tuning model of NCCL 2.8 to 2.11
# (src/graph/tuning.cc, ring, protocol Simple), made for InfiniBand; 5.7 and 3.4 us are its steps over PCI Express and
# NVLink, for the level inside a node; NVLink's rate is that of one direction of the third generation. gamma is 0:
# adding is far faster than sending. They are a first guess for a machine that is not there; measure the one that is.
PRESETS: Mapping[str, Network] = MappingProxyType(
    {
        "1gbe": Network("1GbE", "ring", latency_s=45.26e-6, per_byte_s=8e-9),
        "10gbe": Network("10GbE", "ring", latency_s=45.26e-6, per_byte_s=8e-10),
        "25gbe": Network("25GbE", "ring", latency_s=45.26e-6, per_byte_s=3.2e-10),
        "100gbe": Network("100GbE", "ring", latency_s=45.26e-6, per_byte_s=8e-11),
        "ib-hdr": Network("InfiniBand HDR", "ring", latency_s=9.6e-6, per_byte_s=4e-11),
        "ib-ndr": Network("InfiniBand NDR", "ring", latency_s=9.6e-6, per_byte_s=2e-11),
        "pcie3": Network("PCI Express 3", "ring", latency_s=5.7e-6, per_byte_s=1 / 16e9),
        "nvlink3": Network("NVLink 3", "ring", latency_s=3.4e-6, per_byte_s=1 / 300e9),
    }
)


def load_network(name_or_path: str | os.PathLike[str]) -> Network:
    """Return a preset by its name (any case) or read ``network.json``.

    Args:
        name_or_path: one of `PRESETS`, or a file.

    Raises:
        NetworkError: where it is neither.
        FileError: where the file cannot be read.
        FormatError: where it holds no network.

    >>> load_network("10GbE")
    Network('10GbE': ring, 45.26 us, 10 Gbit/s)
    """
    name = os.fspath(name_or_path)
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if not os.path.exists(name) and os.sep not in name and not name.endswith(".json"):  # noqa: PTH110 - NUL bytes
        raise NetworkError(f"network {quote(name)} is neither a file nor one of {', '.join(PRESETS)}")
    return Network.load(name)
