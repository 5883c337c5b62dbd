"""``mgwfbp traces``: what comes with the package."""

from mgwfbp.cli.output import print_table, talk
from mgwfbp.trace import load_trace, recorded_traces
from mgwfbp.units import format_bytes, format_seconds

__all__ = ["traces"]


def traces() -> None:
    """List the recorded traces that come with the package.

    Every command takes their names for a file.
    """
    rows, cautions = [], []
    for name in recorded_traces():
        trace = load_trace(name)
        if caution := trace.source.get("caution"):
            cautions.append(f"{name}: {caution}")
        rows.append(
            (
                name,
                str(trace.source.get("batch_size", "-")),
                str(len(trace.layers)),
                format_bytes(trace.grad_bytes),
                format_seconds(trace.forward_s),
                format_seconds(trace.backward_s),
                f"{trace.source.get('measured', '-')}, {trace.source.get('device', '-')}",
            )
        )
    print_table(("name", "batch", "gradients", "size", "forward", "backward", "how, on"), rows)
    for caution in cautions:
        talk(caution)
