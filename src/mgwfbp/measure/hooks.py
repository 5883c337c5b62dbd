"""Hooks on gradients that leave nothing behind: `GradientHooks`."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

__all__ = ["GradientHooks"]


class GradientHooks:
    """Calls ``note`` with the place of each parameter, and its gradient, when autograd has computed that gradient.

    Not hooks after the accumulation: torch goes on calling into Python for each parameter that ever had one, which
    costs 0.5 us a parameter in every backward pass. Of these nothing is left once they are removed.
    """

    def __init__(self, parameters: Sequence[Tensor], note: Callable[[int, Tensor], None]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._handles = [
            parameter.register_hook(partial(note, place))
            for place, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            # Torch would otherwise call into Python for an empty list at each backward pass.
            if not getattr(parameter, "_backward_hooks", True):
                parameter._backward_hooks = None
        self._handles, self._parameters = [], []
