"""What the user's own model raises becomes one line that says what and where."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgwfbp.errors import MeasureError, MgwfbpError

__all__ = ["failures_of"]


@contextmanager
def failures_of(model: str, batch_size: int | None, device: str) -> Iterator[None]:
    """Turn whatever a model raises into an error of ours; from Python its own exception goes through unchanged."""
    try:
        yield
    except MgwfbpError:
        raise
    except Exception as error:
        from mgwfbp.measure.agreement import first_line

        if _is_out_of_memory(error):
            size = "" if batch_size is None else f" with --batch-size {batch_size}"
            raise MeasureError(
                f"out of memory: {model!r}{size} does not fit on {device}; lower --batch-size ({first_line(error)})"
            ) from error
        raise MeasureError(
            f"model {model!r} failed: {type(error).__name__}: {first_line(error)} (in {_where(error)})"
            f"{_advice(error, device)}"
        ) from error


def _advice(error: Exception, device: str) -> str:
    """Say what to do about a model that looks at values where there are none."""
    if device != "meta" or "meta tensor" not in str(error).lower():
        return ""
    return "; it looks at values, and counting computes none: use `mgwfbp measure backward`"


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    # Of the CPU torch raises a plain RuntimeError.
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _where(error: BaseException) -> str:
    """Name the innermost line of the user's code: neither torch's nor ours, unless there is no other."""
    import torch

    frames = traceback.extract_tb(error.__traceback__)
    libraries = [Path(torch.__file__).parent, Path(__file__).parent.parent]
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in libraries)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, {frame.name}"
