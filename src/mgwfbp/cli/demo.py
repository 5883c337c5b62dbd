"""``mgwfbp demo``: what the README's first command runs."""

from mgwfbp.cli.compare import comparison, print_comparison
from mgwfbp.cli.output import talk
from mgwfbp.cost import LinearCost
from mgwfbp.planners import PLANNERS
from mgwfbp.trace import LayerTrace, ModelTrace

__all__ = ["demo"]


def demo() -> None:
    """Show on six gradients what merging gains and that it must be planned."""
    # The example of docs/optimality.md, its units read as milliseconds and megabytes.
    layers = tuple(LayerTrace(f"layer{number}.weight", 2e-3, 1_000_000) for number in range(6, 0, -1))
    trace = ModelTrace("six layers", 6e-3, layers)
    cost = LinearCost(workers=8, startup_s=3e-3, per_byte_s=1e-9)
    talk(f"{trace!r}\n{cost!r}")
    print_comparison(comparison(trace, cost, dict(PLANNERS)))
