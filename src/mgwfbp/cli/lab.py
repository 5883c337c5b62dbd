"""``mgwfbp lab``: run a command on an emulated cluster."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, TypeVar

import typer

from mgwfbp.cli.output import talk
from mgwfbp.errors import LabError
from mgwfbp.lab import Cluster, LabResult, Line, parse_delay, parse_rate, run_lab
from mgwfbp.lab.cluster import MAX_HOSTS, MAX_RANKS_PER_HOST, parse_rate_change
from mgwfbp.units import quote

__all__ = ["lab"]

_Value = TypeVar("_Value")
_BOLD = 1
_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What each rank runs; put it after `--`.")],
    hosts: Annotated[int, typer.Option(min=1, max=MAX_HOSTS, help="How many hosts.")],
    rate: Annotated[str, typer.Option(help="Of each host's link, in each direction, e.g. 200mbit or 10gbit.")],
    rate_change: Annotated[
        list[str] | None, typer.Option(metavar="TIME=RATE", help="Another rate from then on, e.g. 60s=200mbit; repeat.")
    ] = None,
    delay: Annotated[
        str, typer.Option(help="One way between two hosts, e.g. 50us; needs netem in the kernel.")
    ] = "0us",
    ranks_per_host: Annotated[int, typer.Option(min=1, max=MAX_RANKS_PER_HOST, help="Processes on each host.")] = 1,
    mtu: Annotated[int, typer.Option(metavar="BYTES", help="The links' largest packet.")] = 1500,
    congestion_control: Annotated[
        str, typer.Option(metavar="NAME", help="TCP's, by its name in the kernel: reno unless told otherwise.")
    ] = "",
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep what each rank writes, in one file per rank.")
    ] = None,
    mps: Annotated[bool, typer.Option(help="Share a GPU by CUDA MPS, where installed and not yet running.")] = True,
) -> None:
    """Run COMMAND once per rank of an emulated cluster.

    Each host has a network of its own, joined to the others by links of the given rate. COMMAND finds its rank in the
    environment, as under torchrun. The first rank that fails ends the others, and its exit status is this command's.
    """
    cluster = _usage(
        "--rate, --rate-change, --delay, --mtu, --congestion-control",
        lambda: Cluster(
            num_hosts=hosts,
            rate_bits_per_s=_usage("--rate", lambda: parse_rate(rate)),
            delay_s=_usage("--delay", lambda: parse_delay(delay)),
            ranks_per_host=ranks_per_host,
            mtu_bytes=mtu,
            congestion_control=congestion_control,
            rate_changes=tuple(_usage("--rate-change", lambda: [parse_rate_change(one) for one in rate_change or ()])),
        ),
    )
    if shutil.which(command[0]) is None:
        raise typer.BadParameter(f"{quote(command[0])} is not a program that can be run", param_hint="COMMAND")
    with _signals_as_exits():
        result = run_lab(cluster, command, log_dir=log_dir, on_line=_print_line, use_mps=mps)
    if result.failed_rank is not None:
        _tell_failure(result)
        raise typer.Exit(result.status)


def _usage(option: str, make: Callable[[], _Value]) -> _Value:
    """Turn what the lab refuses into wrong usage of an option."""
    try:
        return make()
    except LabError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Leave by an exception on signals that would otherwise end this process at once, so that ranks can end well."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _print_line(line: Line) -> None:
    """Print a rank's line behind its host's name: what went to stdout to stdout, the rest to stderr."""
    stream = sys.stderr if line.is_error else sys.stdout
    name = line.label
    if stream.isatty() and not os.environ.get("NO_COLOR"):
        colour = _BOLD if line.host is None else _COLOURS[line.host % len(_COLOURS)]
        name = f"\x1b[{colour}m{name}\x1b[0m"
    stream.write(f"{name} | {line.text}\n")
    stream.flush()


def _tell_failure(result: LabResult) -> None:
    ended = f"ended with exit status {result.status}"
    if result.status > 128:
        number = result.status - 128
        known = number in {member.value for member in signal.Signals}
        ended = f"was killed by {signal.Signals(number).name if known else f'signal {number}'}"
    talk(f"mgwfbp lab: rank {result.failed_rank} on {result.failed_label} {ended}" + (":" if result.last_lines else ""))
    for text in result.last_lines:
        talk(f"  {text}")
