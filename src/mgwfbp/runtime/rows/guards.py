"""Who asks a module for a parameter waits until it is finished: `Guards`.

[Note: nothing is read too early]
`Shards.gather` begins all all-gathers, into memory of their own, and returns. A parameter gets what was gathered when
somebody asks its module for it: while gathers are under way the dict in which a module keeps its parameters is a
`Guarded` one, which waits for the gather that carries the parameter and copies its group. So a forward pass waits for
what it uses when it uses it (also where a module uses the parameters of another, whose own forward pass never runs),
and ``parameters()``, ``state_dict()``, ``deepcopy``, pickles and averages of models see what is finished. A module that
is compiled, scripted, traced or a CUDA graph asks nobody, and waits for all. Nothing can stand in a scripted or traced
module, so that its own parameters are finished when they are gathered, and nothing hides.

Parameters may be held elsewhere besides. `Holders` looks for them when the optimizer is made, and when modules or
parameters were exchanged since. What a module has in lists, tuples, sets and dicts (torch's LSTM has a list of its own
parameters) it waits for when its forward pass begins. What is reached through something else that a module has (an
object, a hook, a function's closure or arguments, a deque, a cache) may be used wherever that is called: the forward
pass of the whole model waits for it when it begins, and so does that module's. Modules met on the way that are none of
the model's are guarded as its own.

Once the last gather is finished modules have their own dicts again, and no hook. Dynamo, which cannot see through a
`Guarded` dict, so traces what it would trace without us: the forward pass of a model in which something is compiled
begins when all gathers have ended. Its graphs check the types of these dicts: a compiled function or method that is
called outside of that while parameters travel is not run as the graph it was, but compiled again, which waits, or run
without a graph.

The lists of parameters in the optimizer's groups wait for all (`Finished` in ``sharded/views.py``). What can be read
too early is a parameter that is held by what no module leads to (a local or global name, a class), leads to only far
away (see `holders.DEEPEST` and `holders.MOST`), or was given later (a cache that a module fills while it runs); one
that is held as above and read outside of a forward pass; what has its memory and is another tensor (``.data``,
``.detach()``, a view); what a shallow copy of a module has; and what C++ reads or keeps (``torch.jit.save``, arrays of
objects): ``model.synchronize()`` first.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mgwfbp.runtime.rows.compiled_modules import graph_of, put_back, put_in
from mgwfbp.runtime.rows.holders import Holders
from mgwfbp.units import plural

__all__ = ["Guarded", "Guards"]


class Finisher(Protocol):
    """Who finishes parameters: `Shards`."""

    @property
    def pending(self) -> Mapping[int, object]:
        """What is not finished, by the ids of parameters; always the same dict."""

    def finish(self, parameter: Tensor) -> None:
        """Wait for a parameter."""

    def finish_all(self) -> None:
        """Wait for all parameters."""


class Guards:
    """What stands in a module and all in it while parameters travel; ``own`` has the ids of these.

    Only meanwhile it holds who finishes them: whoever keeps the module keeps no optimizer.
    """

    def __init__(self, module: nn.Module, pending: Mapping[int, object], own: Collection[int]) -> None:
        modules = list(module.modules())
        _finish_all(modules)
        holders = Holders(modules, own)
        _finish_all(holders.strays)
        self._modules = [*modules, *holders.strays]
        self._guarded = [
            (one, Guarded(pending))
            for one in self._modules
            if any(id(parameter) in own for parameter in one._parameters.values())
        ]
        # Whoever is called by others than the module that has it is called in some forward pass of the outermost.
        self._first = {place: parameter for held in holders.behind.values() for place, parameter in held.items()}
        self._holders = {one: holders.listed[one] | holders.behind[one] for one in modules}
        self._holders[module] |= self._first
        # What C++ has it gives away itself, and nothing can stand there: to be finished before anybody asks.
        scripted = [one for one in self._modules if isinstance(one, torch.jit.ScriptModule)]
        self.scripted = [one for module in scripted for one in module.parameters(recurse=False) if id(one) in own]
        self._handles: list[Any] = []
        self._graphs: list[nn.Module] = []  # in which something stands for what calls them
        self._tree = _tree_of(self._modules)

    @property
    def have_changed(self) -> bool:
        """Whether some module has other parameters or modules than it had; asked when nothing stands in them."""
        return _tree_of(self._modules) != self._tree

    @property
    def waits_early(self) -> str:
        """Which modules wait for parameters of others when they begin, since they hold them too; empty: none."""
        found = []
        for module, held in self._holders.items():
            here = held.keys() if module is self._modules[0] else held.keys() - self._first.keys()
            if others := len(here - set(map(id, module._parameters.values()))):
                found.append(f"{type(module).__name__} for {plural(others, 'parameter')}")
        return ", ".join(found)

    def put_on(self, finisher: Finisher, *, all_first: bool) -> None:
        """Let modules wait before they give a parameter away, or run a graph; with ``all_first`` also the outermost."""
        for module, guarded in self._guarded:
            if module._parameters is not guarded:  # else somebody kept it and put it back: it stands for the own ones
                guarded.own = module._parameters
                guarded.kept = put_in(module, "_parameters", guarded)
            guarded.stand(finisher)
        if not self._handles:
            hooks = [(module, _Finishes(finisher, held)) for module, held in self._holders.items() if held]
            # Before hooks of others, which may read what they hold.
            self._handles = [module.register_forward_pre_hook(hook, prepend=True) for module, hook in hooks]
        graphs = [(module, call) for module in self._modules if (call := graph_of(module)) is not None]
        outermost = self._modules[0]
        if all_first and outermost not in dict(graphs):
            graphs.append((outermost, outermost._call_impl))
        for module, call in graphs:
            if not isinstance(call, _FinishesFirst):
                first = _FinishesFirst(finisher, call)
                first.kept = put_in(module, "_compiled_call_impl", first)
                self._graphs.append(module)

    def take_off(self) -> None:
        """Give modules back what was there."""
        for module, guarded in self._guarded:
            if module._parameters is guarded:
                put_back(module, "_parameters", guarded.kept)
            guarded.finisher = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._graphs:
            call = vars(module).get("_compiled_call_impl")
            if isinstance(call, _FinishesFirst):
                put_back(module, "_compiled_call_impl", call.kept)
        self._graphs = []


def _finish_all(modules: Sequence[nn.Module]) -> None:
    """Let no optimizer before this one have anything under way."""
    for one in modules:
        if isinstance(one._parameters, Guarded):
            one._parameters.finish_all()


def _tree_of(modules: Sequence[nn.Module]) -> list[int]:
    """Return the ids of what each module has, parameters and modules, and of the module behind them."""
    found: list[Any] = []
    for module in modules:
        found += module._parameters.values()
        found += module._modules.values()
        found.append(module)
    return list(map(id, found))


class _Finishes:
    """A hook on a module's forward pass that waits for parameters. A copy of the module waits for nothing."""

    def __init__(self, finisher: Finisher, held: Mapping[int, Tensor]) -> None:
        self._finisher, self._held = finisher, held

    def __call__(self, *_: object) -> None:
        for one in list(self._finisher.pending):  # in the order in which they arrive
            if one in self._held:
                self._finisher.finish(self._held[one])

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def _nothing(*_: object) -> None:
    """Do nothing when a forward pass begins."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _FinishesFirst:
    """Stands for what calls a module's graph until all parameters are finished."""

    def __init__(self, finisher: Finisher, graph: Callable[..., Any]) -> None:
        self._finisher, self._graph, self.kept = finisher, graph, None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._finisher.finish_all()
        return self._graph(*arguments, **named)


def _changing(name: str) -> Any:
    """Return a method of a dict that changes the dict that this one stands for, and then holds what that does."""

    def call(self: "Guarded", *arguments: Any, **named: Any) -> Any:
        self._finish()
        found = getattr(self.own, name)(*arguments, **named)
        self._hold_own()
        return self if found is self.own else found

    return call


class Guarded(dict[str, Any]):
    """The parameters of a module, each of which is finished before anybody gets it. Its copy is an ordinary dict."""

    def __init__(self, pending: Mapping[int, object]) -> None:
        super().__init__()
        self.own: dict[str, Any] = {}  # the module's
        self.kept: Any = self.own  # what the module has instead when this one is taken off
        self.finisher: Finisher | None = None  # as long as something is pending
        self._pending = pending

    def stand(self, finisher: Finisher) -> None:
        """Hold what the module's own dict holds now."""
        self.finisher = finisher
        self._hold_own()

    def _hold_own(self) -> None:
        dict.clear(self)
        dict.update(self, self.own)

    def finish_all(self) -> None:
        """Finish all parameters, of other modules too."""
        if self.finisher is not None:
            self.finisher.finish_all()

    def _finish(self) -> None:
        for parameter in super().values():
            self._finish_one(parameter)

    def _finish_one(self, parameter: Any) -> None:
        if id(parameter) in self._pending and (finisher := self.finisher) is not None:  # else another thread has
            finisher.finish(parameter)

    def __iter__(self) -> Iterator[str]:
        # CPython copies a dict, for `dict(x)`, `{**x}` and `x | y`, without asking for its items where iteration is a
        # dict's own.
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if id(parameter) in self._pending:  # looked up here: a forward pass asks a thousand times
            self._finish_one(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, finished."""
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        """Return all names and parameters, finished."""
        self._finish()
        return super().items()

    def values(self) -> Any:
        """Return all parameters, finished."""
        self._finish()
        return super().values()

    __setitem__ = _changing("__setitem__")
    __delitem__ = _changing("__delitem__")
    __ior__ = _changing("__ior__")
    pop = _changing("pop")
    popitem = _changing("popitem")
    setdefault = _changing("setdefault")
    update = _changing("update")
    clear = _changing("clear")

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict."""
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)
