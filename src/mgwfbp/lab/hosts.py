"""Hosts, a switch and shaped links, made with rtnetlink: neither ``ip`` nor ``tc`` is needed."""

import errno
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgwfbp.errors import LabError
from mgwfbp.lab.cluster import INTERFACE, Cluster
from mgwfbp.lab.kernel import forbidden, inside, new_network, own_sys
from mgwfbp.units import quote

__all__ = ["STEADY_TCP", "Shaping", "build_hosts", "change_rate", "shaping"]

_LOOPBACK = 1  # its index in every network namespace
_ROOT_HANDLE, _INNER_HANDLE = 0x10000, 0x20000
_ETHERNET_BYTES = 14
_MAX_PACKET_BYTES = 65536  # the kernel's own limit for TCP over IPv4
# Measured with three gloo ranks at 200 Mbit (benchmarks/lab.md): a bucket of 4 ms lets 64 KiB pass twice as fast as the
# link carries them; with one of 1 ms, two packets of 0.5 ms, the fastest of each size get 94 to 110 % of the rate.
_PACKET_S = 500e-6
_WAKE_UP_S = 200e-6  # between two wake-ups of the kernel's timer on a busy machine
_QUEUE_S = 20e-3
_TCP = Path("/proc/sys/net/ipv4")
# Every kernel has it. BBR, which some machines use, lets hardly anything pass for 0.2 s every 10 s and paces what
# follows a pause: 0.5 MB between 4 hosts of 1 Gbit took 9 to 13 ms instead of 6.6 (benchmarks/lab.md).
STEADY_TCP = "reno"


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a token bucket (``tbf``) is set so that a link of some rate behaves like one.

    The bucket lets `burst_bytes` through at once after a pause. It must hold the largest packet, and what the rate
    gives between two wake-ups of the kernel's timer, or the link is slower than asked for; but all it holds is time
    that a message does not pay. So at low rates packets are kept small too.
    """

    rate_bytes_per_s: int
    burst_bytes: int
    packet_bytes: int  # the largest that TCP may hand to the link at once, to be cut into frames later
    queue_bytes: int  # what waits beyond this is lost, as in a switch


def shaping(cluster: Cluster, rate_bits_per_s: float | None = None) -> Shaping:
    """Choose the token bucket of a cluster's links, as they are at first or at another rate.

    >>> shaping(Cluster(num_hosts=2, rate_bits_per_s=200e6))
    Shaping(rate_bytes_per_s=25000000, burst_bytes=25000, packet_bytes=12500, queue_bytes=500000)
    >>> shaping(Cluster(num_hosts=2, rate_bits_per_s=25e9)).burst_bytes
    625000
    """
    rate_bytes_per_s = int((rate_bits_per_s or cluster.rate_bits_per_s) / 8)
    frame_bytes = cluster.mtu_bytes + _ETHERNET_BYTES
    # Connections keep the size of their packets, whatever the rate becomes.
    lowest_bytes_per_s = min(cluster.rate_bits_per_s, *(rate for _, rate in cluster.rate_changes), math.inf) / 8
    packet_bytes = min(max(int(lowest_bytes_per_s * _PACKET_S), 2 * frame_bytes), _MAX_PACKET_BYTES)
    return Shaping(
        rate_bytes_per_s=rate_bytes_per_s,
        burst_bytes=max(2 * packet_bytes, int(rate_bytes_per_s * _WAKE_UP_S)),
        packet_bytes=packet_bytes,
        queue_bytes=max(8 * packet_bytes, int(rate_bytes_per_s * _QUEUE_S)),
    )


def build_hosts(cluster: Cluster) -> list[int]:
    """Build the cluster around the current network namespace, which becomes its switch.

    Returns a descriptor of each host's network namespace. Nothing has a name outside, and all goes with the last
    process (see [Note: who holds what]).
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as switch:
            if cluster.delay_s:
                _require_netem(switch)
            switch.link("add", ifname="switch", kind="bridge", mtu=cluster.mtu_bytes)
            bridge = switch.link_lookup(ifname="switch")[0]
            switch.link("set", index=bridge, state="up")
            networks = [_add_host(switch, bridge, cluster, host) for host in range(cluster.num_hosts)]
            _keep_in_order(*(cluster.host_name(host) for host in range(cluster.num_hosts)))
            return networks
    except NetlinkError as error:
        if error.code in (errno.EPERM, errno.EACCES):
            raise forbidden(OSError(error.code, str(error.args[-1]))) from error
        raise LabError(
            f"the kernel cannot make the network ({error.args[-1]}): "
            "it needs veth, bridge and sch_tbf, built in or as modules"
        ) from error


def change_rate(cluster: Cluster, networks: Sequence[int], rate_bits_per_s: float) -> None:
    """Give all links another rate; called where `build_hosts` was, with what it returned."""
    from pyroute2 import IPRoute

    bucket = shaping(cluster, rate_bits_per_s)
    parent = _ROOT_HANDLE | 1 if cluster.delay_s else None
    with IPRoute() as switch:
        for host, network in enumerate(networks):
            _set_bucket(switch, switch.link_lookup(ifname=cluster.host_name(host))[0], bucket, how="change")
            with inside(network), IPRoute() as inner:
                _set_bucket(inner, inner.link_lookup(ifname=INTERFACE)[0], bucket, parent, how="change")


def _require_netem(switch: Any) -> None:
    """Refuse a delay that the kernel cannot give, before a host is made."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        switch.tc("add", "netem", index=_LOOPBACK, handle=_ROOT_HANDLE, delay=1)
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        raise LabError(
            "a delay needs netem, which this kernel does not have (CONFIG_NET_SCH_NETEM, module sch_netem): "
            "load it, or leave the delay out"
        ) from error


def _add_host(switch: Any, bridge: int, cluster: Cluster, host: int) -> int:
    from pyroute2 import IPRoute

    bucket = shaping(cluster)
    name = cluster.host_name(host)
    network = new_network()
    # The smaller packets must be there before the first connection is: TCP asks once.
    size = {"mtu": cluster.mtu_bytes, "gso_max_size": bucket.packet_bytes}
    switch.link("add", ifname=name, kind="veth", **size, peer={"ifname": INTERFACE, "net_ns_fd": network, **size})
    port = switch.link_lookup(ifname=name)[0]
    _set_bucket(switch, port, bucket)
    switch.link("set", index=port, master=bridge, state="up")
    with inside(network), IPRoute() as inner:
        interface = inner.link_lookup(ifname=INTERFACE)[0]
        if cluster.delay_s:
            _add_delay(inner, interface, cluster.delay_s, bucket)
        _set_bucket(inner, interface, bucket, _ROOT_HANDLE | 1 if cluster.delay_s else None)
        _set_tcp(cluster.congestion_control)
        inner.addr("add", index=interface, address=cluster.address(host), prefixlen=24)
        inner.link("set", index=_LOOPBACK, state="up")
        inner.link("set", index=interface, state="up")
        _keep_in_order(INTERFACE)
    return network


def _set_tcp(congestion_control: str) -> None:
    """Choose how TCP sends from the current host."""
    try:
        (_TCP / "tcp_congestion_control").write_text(congestion_control or STEADY_TCP)
    except OSError as error:
        if congestion_control:
            allowed = (_TCP / "tcp_allowed_congestion_control").read_text().strip()
            raise LabError(
                f"congestion control {quote(congestion_control)} cannot be used ({error.strerror}); "
                f"hosts may use: {allowed}"
            ) from error
    with suppress(OSError):
        # A pause is the computation between messages, not a sign that the way has changed.
        (_TCP / "tcp_slow_start_after_idle").write_text("0")


def _keep_in_order(*names: str) -> None:
    """Let one core, chosen by its addresses, receive all packets of a connection, where the kernel allows it.

    Otherwise the core receives that sent: packets from two of them overtake each other, TCP takes them for lost, and
    sends them again and slower.
    """
    with suppress(OSError), own_sys():
        for name in names:
            file = Path("/sys/class/net", name, "queues", "rx-0", "rps_cpus")
            file.write_text(_all_cores(os.cpu_count() or 1), encoding="ascii")


def _all_cores(num_cores: int) -> str:
    """Return the set of so many cores as the kernel writes it.

    >>> _all_cores(2), _all_cores(40)
    ('3', 'ff,ffffffff')
    """
    digits = f"{(1 << num_cores) - 1:x}"
    return ",".join(digits[max(0, end - 8) : end] for end in reversed(range(len(digits), 0, -8)))


def _set_bucket(netlink: Any, index: int, bucket: Shaping, parent: int | None = None, *, how: str = "add") -> None:
    position = {"handle": _ROOT_HANDLE} if parent is None else {"handle": _INNER_HANDLE, "parent": parent}
    netlink.tc(
        how,
        "tbf",
        index=index,
        rate=bucket.rate_bytes_per_s,
        burst=bucket.burst_bytes,
        limit=bucket.queue_bytes,
        **position,
    )


def _add_delay(netlink: Any, index: int, delay_s: float, bucket: Shaping) -> None:
    # netem holds what is under way, and counts packets: as many frames as the rate can send meanwhile, and the queue.
    num_packets = int((bucket.rate_bytes_per_s * delay_s + bucket.queue_bytes) / 1000) + 1000
    netlink.tc("add", "netem", index=index, handle=_ROOT_HANDLE, delay=max(1, round(delay_s * 1e6)), limit=num_packets)
