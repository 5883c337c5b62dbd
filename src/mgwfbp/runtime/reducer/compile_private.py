"""Where a compiled model's graph is cut: everything that touches a private name of torch's compiler.

[Note: how a graph follows a plan]
A compiled graph gives all its gradients when its backward pass ends. So torch cuts the graph of a model inside DDP: its
``DDPOptimizer`` walks the graph from its end, adds parameters up, and cuts where one size of bucket is full (it knows
one size besides the first bucket's 1 MiB, and asserts that no size is below that). Torch looks that class up whenever
it compiles something inside a DDP's forward pass. A subclass in its place cuts where the plan does: once all gradients
of a message, and of those before it, have been met, the rest of the graph is another one. It tells torch so in its own
terms: a piece is of size 0 without parameters, 1 with some, and 2, which is "full", where the plan cuts.

A cut lies between two operations: parameters of one operation (weight and bias of a linear layer) are never parted.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgwfbp.runtime.reducer.support import lacks

__all__ = [
    "cut_after",
    "follow_plans",
    "missing",
    "notice_graphs",
    "warn_of_old_cuts",
]

_FIRST_BUCKET_BYTES: int = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**20)

_HAS_SOME, _FULL = 1, 2

_UNCUT = "the compiled graph is not cut by the plan, so that its gradients come at once or by torch's own rule"

# What cuts take; without them a model of our class still learns that it is compiled.
_NEEDED = ("add_param", "add_param_args")


def missing() -> tuple[str, ...]:
    """Name what this torch lacks for graphs that are cut by a plan; empty where it has it."""
    from torch._dynamo.backends import distributed

    optimizer = getattr(distributed, "DDPOptimizer", None)
    stock = getattr(optimizer, "stock", optimizer)  # behind ours
    names = [f"DDPOptimizer.{name}" for name in ("compile_fn", *_NEEDED) if not hasattr(stock, name)]
    if not hasattr(DistributedDataParallel, "_get_active_ddp_module"):
        names.append("DistributedDataParallel._get_active_ddp_module")
    return tuple(names)


def follow_plans() -> None:
    """Have the graphs of models of our class cut by their plans from now on; others are left to torch."""
    if set(missing()) - {f"DDPOptimizer.{name}" for name in _NEEDED}:
        return  # graphs are then cut by torch's own rule; nothing else depends on it
    from torch._dynamo.backends import distributed

    optimizer: Any = distributed.DDPOptimizer
    if not hasattr(optimizer, "stock"):
        distributed.DDPOptimizer = _following(optimizer)  # type: ignore[misc, assignment]
        _skip_ours()


def notice_graphs() -> None:
    """Have models of our class learn of every graph that is compiled in their forward passes, from now on.

    Also of those that are not cut, and of models that are not tuned; parameters are finished before it is traced.
    """
    _skip_ours()
    handler = getattr(torch._dynamo.callback, "callback_handler", None) if hasattr(torch._dynamo, "callback") else None
    if handler is not None and _graph_begins not in handler.start_callbacks:  # torch.compiler.reset() clears them
        handler.register_start_callback(_graph_begins)


def _graph_begins(*_: object) -> None:
    model: Any = DistributedDataParallel._get_active_ddp_module()
    if (shards := getattr(model, "_shards", None)) is not None:
        shards.runs_graphs = True
        shards.finish_all()


def _skip_ours() -> None:
    """Let Dynamo leave out what this package does around a forward pass."""
    from torch._dynamo import trace_rules

    for package in ("mgwfbp.runtime", "mgwfbp.measure"):
        trace_rules.add(package)


def warn_of_old_cuts(ddp: Any) -> None:
    """Warn where a model's graph was compiled before its plan changed."""
    if ddp._is_compiled and not missing():
        ddp._is_compiled = False
        warnings.warn(
            "the plan has changed after the model was compiled: messages are the new plan's, but the graph is still "
            "cut where the old one cut; call torch.compiler.reset() to have it compiled again",
            RuntimeWarning,
            stacklevel=3,
        )


def cut_after(uses: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> set[int]:
    """Return the operations after which a walk from the end of a graph shall cut.

    ``uses`` says, for each operation in the order of the walk, which parameters it uses. A gradient is complete
    once the walk has met all uses; a message goes when its gradients and all messages before it are complete. Messages
    without a parameter in this graph are other graphs' business.

    >>> sorted(cut_after([[3], [2, 1], [], [3], [0]], [[2], [3], [1, 0]]))
    [1, 3, 4]
    """
    last_use = {parameter: place for place, used in enumerate(uses) for parameter in used}
    cuts, reached = set(), -1
    for group in groups:
        places = [last_use[parameter] for parameter in group if parameter in last_use]
        if places:
            reached = max(reached, *places)
            cuts.add(reached)
    return cuts


def _following(optimizer: Any) -> type:
    class PlanOptimizer(optimizer):  # type: ignore[misc]
        """Torch's optimizer of graphs inside DDP, with cuts where a plan has them."""

        stock = optimizer

        def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any, first_bucket_cap: int | None = None) -> None:
            self._ddp: Any | None = None
            self._cuts: dict[Any, bool] = {}  # by operation; empty where torch's own rule holds
            active = DistributedDataParallel._get_active_ddp_module()
            if getattr(active, "_handle", None) is not None:  # of our class, and with a say in its buckets
                self._ddp = active
                # Torch asserts that the first bucket is the smallest; with bucket_cap_mb below 1 it is not.
                first_bucket_cap = min(_FIRST_BUCKET_BYTES, bucket_bytes_cap)
            super().__init__(bucket_bytes_cap, backend_compile_fn, first_bucket_cap)

        def compile_fn(self, gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ddp is None:
                return super().compile_fn(gm, example_inputs, *args, **kwargs)
            self._ddp._is_compiled = True
            self._ddp.synchronize()  # the graph runs next, and does not ask modules for parameters
            groups = _parameter_groups(self._ddp)
            if groups is not None and (absent := missing()):
                warnings.warn(f"{_UNCUT}: {lacks(absent)}", RuntimeWarning, stacklevel=2)
                groups = None
            self._cuts = {} if groups is None else _cuts_of(gm, example_inputs, groups)
            if self._cuts:
                self.bucket_bytes_cap = self.first_bucket_cap = _FULL
            try:
                return super().compile_fn(gm, example_inputs, *args, **kwargs)
            except (AssertionError, NotImplementedError) as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            # Not inside the handler: the error keeps alive what torch did for the pieces.
            warnings.warn(f"{_UNCUT}: {reason}", RuntimeWarning, stacklevel=2)
            _forget_pieces()
            return self.backend_compile_fn(gm, example_inputs, *args, **kwargs)

        def add_param(self, bucket: Any, *args: Any) -> None:
            size = bucket.size
            super().add_param(bucket, *args)
            if self._cuts:
                bucket.size = max(size, _HAS_SOME)

        def add_param_args(self, bucket: Any, node: Any) -> None:
            super().add_param_args(bucket, node)
            if self._cuts.get(node, False):
                bucket.size = _FULL

    return PlanOptimizer


def _forget_pieces() -> None:
    """Let torch forget that it was compiling a graph in pieces.

    It would count them in the backward pass, and take the first call of the whole graph for one that only asks for
    shapes.
    """
    context = torch._guards.TracingContext.try_get()
    for name, value in (("ddp_optimizer_ctx", None), ("fakify_first_call", False)):
        if context is not None and hasattr(context, name):
            setattr(context, name, value)


def _parameter_groups(ddp: Any) -> list[list[nn.Parameter]] | None:
    """Return the gradients of each message of a plan that will stay; None where torch's own rule shall cut."""
    handle = ddp._handle
    if handle.given is None or ddp.tuning.state == "working":  # tuning ends when a graph is compiled
        return None
    return [[handle.parameters[place] for place in bucket] for bucket in handle.given]


def _cuts_of(gm: Any, inputs: Sequence[Any], groups: Sequence[Sequence[nn.Parameter]]) -> dict[Any, bool]:
    """Say for every operation of a graph whether a walk from its end shall cut after it; empty without parameters."""
    places: dict[int, int] = {}
    for group in groups:
        for parameter in group:
            places[id(parameter)] = len(places)
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    by_node = {node: places[id(value)] for node, value in zip(given, inputs, strict=False) if id(value) in places}
    if not by_node:
        if any(id(parameter) in places for parameter in gm.parameters()):
            warnings.warn(f"{_UNCUT}: its parameters are not its inputs", RuntimeWarning, stacklevel=3)
        return {}
    walk = [node for node in reversed(gm.graph.nodes) if node.op not in ("output", "placeholder")]
    uses = [[by_node[used] for used in node.all_input_nodes if used in by_node] for node in walk]
    cuts = cut_after(uses, [[places[id(parameter)] for parameter in group] for group in groups])
    # Torch asks about functions alone: a cut after anything else waits for the next of them.
    functions = [place for place, node in enumerate(walk) if node.op == "call_function"]
    asked = {min((place for place in functions if place >= cut), default=len(walk)) for cut in cuts}
    return {node: place in asked for place, node in enumerate(walk)}
