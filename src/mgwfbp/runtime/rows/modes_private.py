"""What is computed in earnest whatever mode is active, `without_modes`; the private name of torch's modes is here."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils import _python_dispatch

__all__ = ["without_modes"]


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no mode of the user's sees what is called.

    Some only pretend to compute (`FakeTensorMode`), others count or trace. Where torch lacks it, modes see it.
    """
    disable: Any = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
    found: AbstractContextManager[Any] = disable()
    return found
