"""The clock beside messages: while one is under way, computation takes ``contention`` times as long."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Times", "computed_s", "finished_s"]

Times = NDArray[np.float64]


def computed_s(elapsed_s: Times, busy_s: Times, contention: float) -> Times:
    """Return the computation done in ``elapsed_s``, of which the first ``busy_s`` are under contention."""
    return np.where(elapsed_s <= busy_s, elapsed_s / contention, busy_s / contention + (elapsed_s - busy_s))


def finished_s(missing_s: Times, start_s: Times, end_s: Times, contention: float) -> Times:
    """Invert `computed_s`: when ``missing_s`` are computed that begin with a message, which ends at ``end_s``."""
    under_contention_s = (end_s - start_s) / contention
    return np.where(
        missing_s <= under_contention_s, start_s + missing_s * contention, end_s + (missing_s - under_contention_s)
    )
