"""What a result says of the machine that it was measured on."""

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mgwfbp.units import printable

__all__ = ["describe_run", "meters", "processor", "since"]


def describe_run() -> dict[str, Any]:
    """Say what was run where, for whoever reads the result."""
    import torch

    import mgwfbp

    return {
        "command": printable(shlex.join(["mgwfbp", *sys.argv[1:]])),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "mgwfbp": mgwfbp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor(),
        "congestion_control": _congestion_control(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],  # before the first step
        "nice": os.nice(0),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _congestion_control() -> str:
    """Return TCP's, where the kernel tells it: it decides how long a message takes after a pause."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def processor() -> str:
    """Return the processor's name, where the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def meters() -> dict[str, dict[str, int]]:
    """Return what the kernel counts of all that can make steps uneven: packets, and ticks of the processors."""
    return {"tcp": _tcp_counts(), "processors": _processor_counts()}


def since(before: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return how far the meters have gone since `before`."""
    return {
        meter: {name: count - before[meter][name] for name, count in counts.items()}
        for meter, counts in meters().items()
    }


def _tcp_counts() -> dict[str, int]:
    """Return what TCP has counted on this host: packets sent, those sent again, and those that came too early.

    A network that loses or mixes up packets makes steps uneven. Empty where the kernel does not tell.
    """
    counts: dict[str, str] = {}
    try:
        for name in ("snmp", "netstat"):
            lines = [line.split() for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()]
            for titles, values in zip(lines[::2], lines[1::2], strict=True):  # a line of names, then one of numbers
                counts.update((titles[0] + title, value) for title, value in zip(titles, values, strict=True))
        wanted = {"sent": "Tcp:OutSegs", "sent_again": "Tcp:RetransSegs", "too_early": "TcpExt:TCPOFOQueue"}
        return {name: int(counts[key]) for name, key in wanted.items()}
    except (OSError, ValueError, KeyError):
        return {}


def _processor_counts() -> dict[str, int]:
    """Return the ticks of this machine's processors so far: idle, taken away for other machines ("stolen"), and all.

    A virtual machine whose processors are taken away makes steps uneven. Empty where the kernel does not tell.
    """
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        ticks = [int(word) for word in first.split()[1:9]]  # user, nice, system, idle, waiting, two interrupts, stolen
        return {"idle": ticks[3] + ticks[4], "stolen": ticks[7], "all": sum(ticks)}
    except (OSError, ValueError, IndexError):
        return {}
