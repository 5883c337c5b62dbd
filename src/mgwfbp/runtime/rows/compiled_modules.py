"""Which modules are compiled, scripted, traced or CUDA graphs, and ask nobody for their parameters when they run."""

from typing import Any

import torch
from torch import nn

__all__ = ["graph_of", "put_back", "runs_graphs"]


def runs_graphs(module: nn.Module) -> bool:
    """Say whether something in a module is a graph of one of these kinds, so that it does not ask for parameters."""
    return any(graph_of(one) is not None for one in module.modules())


def graph_of(module: nn.Module) -> Any:
    """Return what calls a module that is compiled, scripted, traced or a CUDA graph; None of another."""
    compiled = vars(module).get("_compiled_call_impl")
    if compiled is not None:
        return compiled
    is_graph = isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
    return module._call_impl if is_graph or _replays(module) else None


def _replays(module: nn.Module) -> bool:
    """Say whether `torch.cuda.make_graphed_callables` has put a function of its own where the forward pass was."""
    return getattr(vars(module).get("forward"), "__module__", "") == "torch.cuda.graphs"


def put_back(module: nn.Module, name: str, value: Any) -> None:
    """Give a module what it had under a name."""
    del vars(module)[name]
    if getattr(module, name, None) is not value:  # else it is found elsewhere: a traced module has another one inside
        vars(module)[name] = value
