"""Warnings that point at the user's line, ours and those of torch's constructor."""

import inspect
import warnings
from collections.abc import Callable
from types import FunctionType

__all__ = ["call_from_user_line", "warn_user"]


def warn_user(text: str) -> None:
    """Warn the line of the user's that made the model."""
    warnings.warn(text, RuntimeWarning, stacklevel=_levels_to_user())


def _levels_to_user() -> int:
    """Return how many frames lie between the caller and code that is neither ours nor torch's."""
    levels, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mgwfbp", "torch"):
        levels, frame = levels + 1, frame.f_back
    return levels


def call_from_user_line(call: Callable[[], None]) -> None:
    """Call something as if the user's line did: warnings that blame their caller name it, and its filters count.

    Not by catching and repeating warnings: filters belong to all threads, and one that makes an error of a warning must
    do so where torch warns, before any rank waits for another.
    """
    frame = inspect.currentframe()
    for _ in range(_levels_to_user() - 1):
        frame = frame.f_back if frame is not None else None
    if frame is None:
        call()
    else:
        place = _CALL.__code__.replace(co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno)
        FunctionType(place, frame.f_globals)(call)


_CALL = lambda call: call()  # noqa: E731 - on one line, which is then the user's
