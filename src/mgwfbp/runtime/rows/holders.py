"""Who holds parameters besides the dicts in which modules keep them: `Holders` of a model."""

import gc
import weakref
from collections.abc import Collection, Iterable, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mgwfbp.runtime.rows.spread import tensors_in

__all__ = ["Holders"]

DEEPEST = 12  # references from what a module has: objects within objects, each of which has a dict, five or six of them
MOST = 20_000  # objects looked at for one thing that a module has; a data set may have millions

# Where nothing is followed: what everything leads to, and what has all parameters to train them.
ENDS = (type, ModuleType, CodeType, FrameType, Tensor, Optimizer, DistributedDataParallel)


class Holders:
    """What modules hold of the parameters whose ids are ``own`` in other places than their ``_parameters``.

    Lists, tuples, sets and dicts that a module has are its own: ``listed`` has what is in them. Whatever else it has
    (a function with a closure or with arguments, an object, a deque) is followed from reference to reference, as the
    garbage collector does; ``behind`` has what is found there. Modules that hold some of these parameters and are not
    among the model's, ``strays``, give parameters away as those do.
    """

    def __init__(self, modules: Iterable[nn.Module], own: Collection[int]) -> None:
        self.listed: dict[nn.Module, dict[int, Tensor]] = {}
        self.behind: dict[nn.Module, dict[int, Tensor]] = {}
        modules = list(modules)
        search = _Search(modules, own)
        for module in modules:
            values = [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")]
            held = list(map(_referent, tensors_in(values)))
            self.listed[module] = {id(one): one for one in held if id(one) in own}
            self.behind[module] = {}
            for one in held:
                if id(one) not in own:
                    self.behind[module].update(search.found_behind(one))
        self.strays = search.strays


class _Search:
    """Follows references from object to object; what is found behind one that several modules have is kept."""

    def __init__(self, modules: Iterable[nn.Module], own: Collection[int]) -> None:
        self._known, self._own = set(map(id, modules)), own
        self._strays: dict[int, nn.Module] = {}
        self._kept: dict[int, tuple[Any, Mapping[int, Tensor]]] = {}  # with what it is of, so that no id comes again

    @property
    def strays(self) -> list[nn.Module]:
        """The modules met that hold some of the parameters, and are none of those given."""
        return [
            one
            for one in self._strays.values()
            if any(id(parameter) in self._own for parameter in one._parameters.values())
        ]

    def found_behind(self, start: Any) -> Mapping[int, Tensor]:
        """Return the parameters that can be reached from an object, by id."""
        if not self._leads_on(start):
            return {}
        if id(start) not in self._kept:
            self._kept[id(start)] = start, self._follow(start)
        return self._kept[id(start)][1]

    def _follow(self, start: Any) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        seen, level = {id(start): start}, [start]
        for _ in range(DEEPEST):
            holders, level = level, []
            for one in (held for holder in holders for held in self._held_by(holder)):
                if id(one) in self._own:
                    found[id(one)] = one
                elif id(one) not in seen and self._leads_on(one):
                    if len(seen) == MOST:
                        return found
                    seen[id(one)] = one
                    level.append(one)
        return found

    def _leads_on(self, one: Any) -> bool:
        """Say whether an object may hold others, of those that matter; it is not asked, for some answer for others."""
        kind = type(one)
        if not gc.is_tracked(one) or id(one) in self._known or issubclass(kind, ENDS):
            return False
        source = one.__module__ if kind is FunctionType else kind.__module__
        return not str(source).startswith("mgwfbp.") or issubclass(kind, nn.Module)

    def _held_by(self, one: Any) -> list[Any]:
        kind = type(one)
        if kind is FunctionType:  # which has all global names, too
            return [one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one)]
        if issubclass(kind, nn.Module):
            self._strays[id(one)] = one
            return [value for name, value in vars(one).items() if name != "_parameters"]
        return [_referent(one)] if issubclass(kind, weakref.ref) else gc.get_referents(one)


def _referent(one: Any) -> Any:
    """Return the tensor that a weak reference is to; anything else as it is, and of owners nothing."""
    if not issubclass(type(one), weakref.ref):
        return one
    found = one()
    return found if issubclass(type(found), Tensor) else one
