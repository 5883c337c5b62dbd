"""What a forward pass reads of a model's parameters, and what of that while their module does not run: `find_reads`.

Also which modules return nothing that a gradient reaches: FSDP2 gathers for the backward pass when one does.

[Note: what is read elsewhere]
FSDP2 gathers the parameters of a module when its forward pass begins, and frees that memory when it ends. Whoever reads
them at another time has a shard (torch says "mixed torch.Tensor and DTensor"), and what still points into them then, as
a view that the module returned, points into memory that is gone: the process dies. Such modules stay with the root.

Models ask for parameters to see their type and device, or walk over all of them, which reads nothing, and keep views.
So a second forward pass looks at operations. Those that have parameters alone, and no gradients, do not count: an
average of two models can be made of shards. Where operations cannot be seen, as with what must be compiled as one
graph, a parameter counts that was asked for while its module did not run.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mgwfbp.measure.modules import called_of, open_modules, owned_by, unit_names
from mgwfbp.measure.operations import takes_no_time

__all__ = ["Reads", "find_reads"]


@dataclass(frozen=True, slots=True)
class Reads:
    """What a forward pass read, see [Note: what is read elsewhere]."""

    parameters: frozenset[int]  # that were asked for or read, by their ids
    elsewhere: tuple[str, ...]  # units with parameters that are read while their module does not run
    returned: tuple[str, ...]  # units that return a parameter of theirs, or a view of one
    no_gradient: tuple[str, ...]  # units that ran, and of whose output nothing got a gradient

    def modules(self) -> dict[str, list[str]]:
        """Return what was seen of modules, by name, as the source of a trace has it."""
        return {
            "read_elsewhere": list(self.elsewhere),
            "returned": list(self.returned),
            "no_gradient": list(self.no_gradient),
        }

    def unread(self, model: nn.Module, not_called: Collection[str], unused: Collection[str]) -> list[str]:
        """Return the parameters that nothing calls or reads, by name: frozen ones, and those that get no gradient.

        Of what is inside of a compiled or scripted module nothing was seen: if it is ``unused`` it counts as not read.
        """
        found = {name: one for name, one in model.named_parameters() if name in unused or not one.requires_grad}
        seen, silent = open_modules(model), owned_by(not_called, found)
        hidden = {name: found[name] for name in unused if name.rpartition(".")[0] not in seen}
        return [name for name, one in {**silent, **hidden}.items() if id(one) not in self.parameters]


def find_reads(model: nn.Module, forward: Callable[[], Tensor]) -> Reads:
    """Return what a forward pass reads, see [Note: what is read elsewhere], and what a backward pass reaches.

    Args:
        model: whose modules have hooks meanwhile.
        forward: does a forward pass of it, and returns the loss; it is called once or twice.
    """
    running = _Running(model)
    with running:
        with _noting_asked(model, running) as asked:
            loss = forward()
        loss.backward()
    no_gradient = running.without_gradient()
    elsewhere = asked.elsewhere
    # Compiled modules would run as they are written, which may need more memory than there is.
    if elsewhere or len(open_modules(model)) == len(list(model.modules())):
        with contextlib.suppress(Exception), running, _without_copies(), _Operations(model, running) as operations:
            forward()
            elsewhere = operations.read
    read = frozenset(asked.inside | asked.elsewhere | elsewhere)
    return Reads(read, running.units_of(elsewhere), running.returned(), no_gradient)


class _Running:
    """Knows, as long as it is entered, which modules run that FSDP2 may gather, and which of them returned parameters.

    They run from before the user's own hooks until behind these, as FSDP2 has them gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        seen = open_modules(model)
        called = {name: called_of(seen[name]) for name in unit_names(model) if name in seen}
        self._units = {name: called[name] or [] for name in seen if name in called}
        self._parts = {id(part): part for part in chain(*self._units.values())}
        self._parameters = {part: list(module.parameters()) for part, module in self._parts.items()}
        self._owners: dict[int, list[int]] = {}  # by parameter: the modules that are gathered with it
        for part, parameters in self._parameters.items():
            for parameter in parameters:
                self._owners.setdefault(id(parameter), []).append(part)
        self._depth, self._returned = Counter[int](), set[int]()
        self._ran, self._reached = set[int](), set[int]()  # by a forward pass, and by the gradient of an output
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._depth.clear()
        for part in self._parts.values():
            self._handles.append(part.register_forward_pre_hook(self._begin, prepend=True))
            self._handles.append(part.register_forward_hook(self._end, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._depth[id(module)] += 1

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        self._depth[id(module)] -= 1
        self._ran.add(id(module))
        own, tensors = set(map(_storage_of, self._parameters[id(module)])), _tensors(output)
        if not own.isdisjoint(map(_storage_of, tensors)):
            self._returned.add(id(module))
        for one in tensors:
            if one.requires_grad:
                one.register_hook(partial(self._reach, id(module)))

    def _reach(self, module: int, _: Tensor) -> None:
        self._reached.add(module)

    def is_away(self, parameter: int) -> bool:
        """Whether FSDP2 has only shards of a parameter: modules are gathered with it, and none of them runs."""
        owners = self._owners.get(parameter, ())
        return bool(owners) and not any(self._depth[part] for part in owners)

    def units_of(self, parameters: Collection[int]) -> tuple[str, ...]:
        """Return the units that have one of these, in the order of the model's modules."""
        return self._with({part for parameter in parameters for part in self._owners.get(parameter, ())})

    def returned(self) -> tuple[str, ...]:
        """Return the units that returned a parameter of theirs, or a view of one."""
        return self._with(self._returned)

    def without_gradient(self) -> tuple[str, ...]:
        """Return the units that ran, and of whose output nothing got a gradient."""
        silent = self._ran - self._reached
        return tuple(name for name, modules in self._units.items() if modules and silent.issuperset(map(id, modules)))

    def _with(self, parts: Collection[int]) -> tuple[str, ...]:
        return tuple(name for name, modules in self._units.items() if any(id(part) in parts for part in modules))


class _Asked:
    """Parameters that were asked for, by their ids."""

    def __init__(self, running: _Running) -> None:
        self.inside, self.elsewhere, self._running = set[int](), set[int](), running

    def note(self, parameter: Any) -> None:
        (self.elsewhere if self._running.is_away(id(parameter)) else self.inside).add(id(parameter))


class _Noting(dict[str, Any]):
    """Parameters of a module that note which of them are asked for."""

    def __init__(self, parameters: dict[str, Any], asked: _Asked) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        self._asked.note(found := super().__getitem__(name))
        return found

    def items(self) -> Any:
        for one in super().values():
            self._asked.note(one)
        return super().items()

    def values(self) -> Any:
        for one in super().values():
            self._asked.note(one)
        return super().values()


@contextlib.contextmanager
def _noting_asked(model: nn.Module, running: _Running) -> Iterator[_Asked]:
    """Yield which parameters are asked for meanwhile, but of compiled and scripted modules."""
    asked = _Asked(running)
    before = [(module, module._parameters) for module in open_modules(model).values() if module._parameters]
    for module, own in before:
        module._parameters = _Noting(own, asked)
    try:
        yield asked
    finally:
        for module, own in before:
            module._parameters = own


class _Operations(TorchDispatchMode):
    """Notes the parameters that operations read while no module runs that is gathered with them."""

    def __init__(self, model: nn.Module, running: _Running) -> None:
        super().__init__()
        self.read, self._running = set[int](), running
        self._stored: dict[int | None, list[int]] = {}
        for parameter in model.parameters():
            self._stored.setdefault(_storage_of(parameter), []).append(id(parameter))
        self._stored.pop(None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        storages = set(map(_storage_of, _tensors((args, kwargs))))
        is_alone = not torch.is_grad_enabled() and storages <= self._stored.keys()
        if not is_alone and not takes_no_time(func):  # a view reads nothing, and whoever reads it is seen
            for storage in storages & self._stored.keys():
                # Several may be parts of one storage: then it is theirs whose module runs.
                if all(map(self._running.is_away, self._stored[storage])):
                    self.read.update(self._stored[storage])
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_copies() -> Iterator[None]:
    """Let autocast keep no copies of parameters: to read one is no operation on the parameter."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage_of(tensor: Any) -> int | None:
    """Return what is the same for a tensor and its views; None where it has no storage, as a sparse one."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        return own.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):  # ValueError: a parameter that nothing used yet has no size
        return None
