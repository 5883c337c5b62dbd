"""What touches private names of torch's autograd; `torch_private.missing` says whether they are there."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import distributed as torch_distributed

__all__ = ["accumulates_into", "drop_empty_hooks", "find_tensors", "when_backward_has_ended"]


def drop_empty_hooks(parameter: Tensor) -> None:
    """Let torch forget that a parameter had hooks on its gradient, once all are removed.

    It would otherwise call into Python for an empty list at each backward pass.
    """
    if hasattr(parameter, "_backward_hooks") and not parameter._backward_hooks:
        parameter._backward_hooks = None


def find_tensors(output: object) -> Iterable[Tensor]:
    """Walk over the tensors in what a model returned, as DDP itself does."""
    found: Iterable[Tensor] = torch_distributed._find_tensors(output)
    return found


def accumulates_into(parameters: Iterable[Tensor]) -> bool:
    """Say whether the backward pass under way adds to the gradient of any of these; ``autograd.grad`` does not."""
    leaves = (get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad)
    try:
        return any(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch says so of a leaf whose gradient autograd.grad is to return
        return False


def when_backward_has_ended(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that is under way, once the Reducer has averaged its gradients.

    Autograd calls what was queued in the order in which it was, and the Reducer queues its own end with its last
    gradient: what is queued by then comes after it.
    """
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))
