"""``mgwfbp demo``: what the README's first command runs."""

from mgwfbp.cli.compare import comparison, print_comparison
from mgwfbp.cli.output import talk
from mgwfbp.network import load_network
from mgwfbp.planners import PLANNERS
from mgwfbp.trace import load_trace

__all__ = ["demo"]

TRACE = "googlenet-h200-b64"


def demo() -> None:
    """Compare the planners on a recorded model and three networks: no fixed rule is best everywhere."""
    trace = load_trace(TRACE)
    talk(f"{trace!r}, recorded on an H200")
    for network, workers in (("10gbe", 8), ("100gbe", 32), ("ib-hdr", 64)):
        cost = load_network(network).cost(workers)
        talk(f"\n{load_network(network).name}, {cost!r}")
        print_comparison(comparison(trace, cost, dict(PLANNERS)))
    talk(
        f"\n`mgwfbp compare --trace {TRACE} --cost cost.json` compares on your network, "
        "`mgwfbp measure` measures your model and network."
    )
