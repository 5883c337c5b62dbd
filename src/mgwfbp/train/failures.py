"""What torch says when a worker is gone or hangs, told from what a model raises."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mgwfbp.errors import TrainError
from mgwfbp.measure.agreement import first_line

__all__ = ["lost_workers"]

# In what gloo says when the other end is closed, or silent for too long.
_WORDS = ("gloo", "closed by peer", "reset by peer", "timed out", "pair closure", "broken pipe", "socket")


@contextmanager
def lost_workers() -> Iterator[None]:
    """Turn errors of communication into one that says what they mean for the run."""
    try:
        yield
    except TrainError:
        raise
    except (RuntimeError, dist.DistError) as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(word in text for word in _WORDS):
            raise
        what = "hangs" if "timed out" in text or "timeout" in text else "is gone"
        # Without the place in gloo's sources that it begins with.
        said = re.sub(r"^\[[^]]*\]\s*", "", first_line(error))
        raise TrainError(f"another worker {what}: {said}") from error
