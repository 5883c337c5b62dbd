"""``mgwfbp demo``: what the README's first command runs."""

from mgwfbp.cli.compare import comparison, print_comparison
from mgwfbp.cli.output import talk
from mgwfbp.network import load_network
from mgwfbp.planners import PLANNERS
from mgwfbp.trace import LayerTrace, ModelTrace

__all__ = ["demo"]


def demo() -> None:
    """Show on a small model what merging gradients gains and why it must be planned."""
    # Six gradients on 64 workers of 10GbE: the example of docs/optimality.md, in milliseconds and kilobytes.
    times_ms, sizes_kb = (4, 4, 4, 4, 4, 4), (100, 100, 100, 100, 100, 100)
    layers = [
        LayerTrace(f"layer{6 - index}.weight", time * 1e-3, size * 1000)
        for index, (time, size) in enumerate(zip(times_ms, sizes_kb, strict=True))
    ]
    trace = ModelTrace("example", 12e-3, tuple(layers))
    cost = load_network("10GbE").cost(64)
    talk(f"{trace!r}\n{cost!r}, 10GbE")
    print_comparison(comparison(trace, cost, dict(PLANNERS)))
