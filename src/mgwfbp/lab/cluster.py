"""What a lab emulates: hosts, their links, and the ranks that run on them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mgwfbp.errors import LabError
from mgwfbp.units import format_seconds, quote

__all__ = [
    "INTERFACE",
    "MASTER_PORT",
    "MAX_HOSTS",
    "MAX_RANKS_PER_HOST",
    "Cluster",
    "Rank",
    "parse_delay",
    "parse_rate",
    "parse_rate_change",
]

MAX_HOSTS = 254  # the addresses of one /24
MAX_RANKS_PER_HOST = 64
MIN_RATE_BITS_PER_S = 1e5  # slower, and opening a connection takes seconds
MAX_RATE_BITS_PER_S = 34e9  # tbf's 32-bit rate is in bytes per second
MIN_MTU_BYTES, MAX_MTU_BYTES = 576, 9000  # what every IPv4 host must take, and jumbo frames

INTERFACE = (
    "lab0"  # no machine has one of this name, so what is known of the machine's own eth0 is never taken for ours
)
MASTER_PORT = 29500  # torchrun's; each host has all ports for itself

# Powers of ten.
_RATE_UNITS = {"bit": 0, "kbit": 3, "mbit": 6, "gbit": 9}
_TIME_UNITS = {"us": -6, "ms": -3, "s": 0}


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the lab and where it runs."""

    rank: int
    host: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal hosts on one switch, each with one shaped link to it.

    >>> cluster = Cluster(num_hosts=4, rate_bits_per_s=parse_rate("10gbit"), ranks_per_host=2)
    >>> cluster.num_ranks, cluster.ranks[5]
    (8, Rank(rank=5, host=2, local_rank=1))
    """

    num_hosts: int
    rate_bits_per_s: float  # of each link, in each direction
    delay_s: float = 0.0  # one way, from one host to any other, beyond what the rate costs
    ranks_per_host: int = 1
    mtu_bytes: int = 1500
    congestion_control: str = ""  # TCP's, by its name in the kernel; empty for one that keeps a steady rate
    rate_changes: tuple[tuple[float, float], ...] = ()  # (seconds after the start, bits per second from then on)

    def __post_init__(self) -> None:
        changes = tuple((float(after_s), float(rate)) for after_s, rate in self.rate_changes)
        object.__setattr__(self, "rate_changes", changes)
        for (after_s, rate), before_s in zip(changes, (0.0, *(after_s for after_s, _ in changes)), strict=False):
            _check("rate_changes: seconds", after_s, before_s, 1e6)
            _check("rate_changes: bits per second", rate, MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S)
        _check("num_hosts", self.num_hosts, 1, MAX_HOSTS)
        _check("rate_bits_per_s", self.rate_bits_per_s, MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S)
        _check("delay_s", self.delay_s, 0, 10)
        _check("ranks_per_host", self.ranks_per_host, 1, MAX_RANKS_PER_HOST)
        _check("mtu_bytes", self.mtu_bytes, MIN_MTU_BYTES, MAX_MTU_BYTES)
        if not re.fullmatch(r"[a-z0-9_]{0,15}", self.congestion_control):
            raise LabError(
                f"congestion_control is {quote(self.congestion_control)}, expected a name such as reno or cubic"
            )

    @property
    def num_ranks(self) -> int:
        """How many processes run."""
        return self.num_hosts * self.ranks_per_host

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, host by host, as ``torchrun`` numbers them."""
        return tuple(
            Rank(host * self.ranks_per_host + local_rank, host, local_rank)
            for host in range(self.num_hosts)
            for local_rank in range(self.ranks_per_host)
        )

    def address(self, host: int) -> str:
        """Return a host's IPv4 address.

        >>> Cluster(num_hosts=2, rate_bits_per_s=1e9).address(1)
        '10.0.0.2'
        """
        return f"10.0.0.{host + 1}"

    def host_name(self, host: int) -> str:
        """Return what output and errors call a host."""
        return f"host{host}"

    def label(self, rank: Rank) -> str:
        """Return what output and errors call a rank: its host, and its local rank where a host has several.

        >>> cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9, ranks_per_host=2)
        >>> cluster.label(cluster.ranks[3])
        'host1:1'
        """
        return self.host_name(rank.host) + (f":{rank.local_rank}" if self.ranks_per_host > 1 else "")

    @property
    def network(self) -> str:
        """What results call the network between the hosts.

        >>> Cluster(num_hosts=2, rate_bits_per_s=2.5e9, delay_s=50e-6).network
        'lab, 2.5 Gbit/s, 50 us delay'
        """
        scale, unit = next(
            known for known in ((1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit")) if self.rate_bits_per_s >= known[0]
        )
        delay = f", {format_seconds(self.delay_s)} delay" if self.delay_s else ""
        delay += ", then other rates" if self.rate_changes else ""
        return f"lab, {self.rate_bits_per_s / scale:.4g} {unit}/s{delay}"

    def environment(self, rank: Rank, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return a rank's environment: what it inherits, what ``torchrun`` sets, and which interface to use."""
        # An outer torchrun's own variables would make a rank look for that one's store.
        kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
        defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        torchrun = {
            "RANK": rank.rank,
            "LOCAL_RANK": rank.local_rank,
            "GROUP_RANK": rank.host,
            "ROLE_RANK": rank.rank,
            "ROLE_NAME": "default",
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_WORLD_SIZE": self.ranks_per_host,
            "GROUP_WORLD_SIZE": self.num_hosts,
            "ROLE_WORLD_SIZE": self.num_ranks,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": MASTER_PORT,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "lab",  # some programs look for it to know that they need not start workers
        }
        libraries = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            # Ranks with different ids are on different hosts to NCCL, even on one GPU: it then talks over sockets only.
            "NCCL_HOSTID": self.host_name(rank.host),
            "NCCL_IB_DISABLE": 1,
            "NCCL_NET": "Socket",
        }
        ours = {"MGWFBP_NETWORK": self.network}  # for results that are measured here
        return {**defaults, **kept, **{name: str(value) for name, value in {**torchrun, **libraries, **ours}.items()}}


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise LabError(f"{name} is {value:g}, expected {lowest:g} to {highest:g}")


def parse_rate(text: str) -> float:
    """Read a link's rate, in bits per second, as ``tc`` writes it.

    Raises:
        LabError: where it is no rate.

    >>> parse_rate("2.5gbit"), parse_rate("200Mbit")
    (2500000000.0, 200000000.0)
    """
    return _parse(text, _RATE_UNITS, "a rate such as 200mbit or 10gbit")


def parse_rate_change(text: str) -> tuple[float, float]:
    """Read when a link's rate changes, and to what.

    >>> parse_rate_change("30s=200mbit")
    (30.0, 200000000.0)
    """
    after, _, rate = text.partition("=")
    return parse_delay(after), parse_rate(rate)


def parse_delay(text: str) -> float:
    """Read a delay, in seconds.

    Raises:
        LabError: where it is no delay.

    >>> parse_delay("50us"), parse_delay("2ms")
    (5e-05, 0.002)
    """
    return _parse(text, _TIME_UNITS, "a delay such as 50us or 2ms")


def _parse(text: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-z]+)", text.strip().lower(), flags=re.ASCII)
    if match is None or match[2] not in units:
        raise LabError(f"{quote(text)}, expected {expected} (units: {', '.join(units)})")
    return float(f"{match[1]}e{units[match[2]]}")
