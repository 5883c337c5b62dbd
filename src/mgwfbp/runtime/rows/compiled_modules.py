"""Which modules are compiled, scripted, traced or CUDA graphs, and ask nobody for their parameters when they run."""

from typing import Any

import torch
from torch import nn

__all__ = ["graph_of", "put_back", "put_in", "runs_graphs"]

_NOTHING = object()


def runs_graphs(module: nn.Module) -> bool:
    """Say whether something in a module is a graph of one of these kinds, so that it does not ask for parameters."""
    return any(graph_of(one) is not None for one in module.modules())


def graph_of(module: nn.Module) -> Any:
    """Return what calls a module that is compiled, scripted, traced or a CUDA graph; None of another."""
    has = vars(module)  # asked of every module in every step
    compiled = has.get("_compiled_call_impl")
    if compiled is not None:
        return compiled
    is_graph = isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
    # `torch.cuda.make_graphed_callables` puts a function of its own where the forward pass was.
    replays = "forward" in has and getattr(has["forward"], "__module__", "") == "torch.cuda.graphs"
    return module._call_impl if is_graph or replays else None


def put_in(module: nn.Module, name: str, value: Any) -> Any:
    """Let a module have something else under a name; return what `put_back` needs."""
    kept = vars(module).get(name, _NOTHING)  # a traced module has it in another one inside
    vars(module)[name] = value
    return kept


def put_back(module: nn.Module, name: str, kept: Any) -> None:
    """Give a module what it had under a name."""
    if kept is _NOTHING:
        del vars(module)[name]
    else:
        vars(module)[name] = kept
