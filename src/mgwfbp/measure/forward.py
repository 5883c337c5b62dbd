"""What each layer takes in the forward pass: `FirstUses` notes when each is begun, `split_forward` makes times of it.

[Note: first use]
A parameter is used from the moment on at which a module begins that owns it: of several modules that share it, and of a
module that runs more than once, the first counts. Where no owner runs, because another module reads its weights (as
``MultiheadAttention`` does with those of ``out_proj``, or whoever has a ``ParameterList``), the parameter goes with the
nearest module around it that runs. So do those of compiled and scripted models, inside of which no hook is called: all
of them are used from the start, and a sharded optimizer waits for all of them before such a model begins. A compiled
module is noted where it is called, and nothing inside of it: a hook there would be compiled, too.

[Note: modules that run again]
FSDP2 ends the forward pass of a group when all of its modules have run. A module that runs more than once in a step, or
outside of the model's own forward pass (a head that the loss calls), would begin it anew, with modules that do not run
again: torch fails in the backward pass (pytorch#183702), or computes with shards. So such a module is a group by
itself, which torch gathers for each use. Calls are counted from where the model begins last: what accumulates
gradients, or calls the whole model twice, repeats all of it, and activations may be computed again in between.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from mgwfbp.measure.clock import Moment
from mgwfbp.measure.modules import called_of, open_modules, outside_of_compiled, shared_units, unit_names

__all__ = ["FirstUses", "resting_parts", "split_forward"]

Layer = TypeVar("Layer", bound=Hashable)


class FirstUses:
    """Notes, as long as it is entered, when forward passes begin to use each parameter: see [Note: first use].

    Args:
        model: whose modules get a hook meanwhile.
        parameters: of the model.
        now: gives the present moment.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], now: Callable[[], Moment]) -> None:
        self._model, self._modules, self._now = model, list(model.modules()), now
        self._parents: dict[int, list[int]] = {}
        owners: dict[int, list[int]] = {}
        for module in self._modules:
            for child in module.children():
                self._parents.setdefault(id(child), []).append(id(module))
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(id(module))
        self._owners = [owners.get(id(parameter), []) for parameter in parameters]
        self._began: dict[int, Moment] = {}  # by module, in the order in which they began
        self._is_inside, self._ran = False, set[int]()  # since the model began
        self._again = set[int]()
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for module in outside_of_compiled(self._model):
            if (call := vars(module).get("_compiled_call_impl")) is not None:
                self._compiled.append((module, call))
                vars(module)["_compiled_call_impl"] = partial(self._call, module, call)
                continue
            # Before the user's own hooks: some compute a weight of parameters (torch.nn.utils.weight_norm).
            self._handles.append(module.register_forward_pre_hook(partial(self._note, id(module)), prepend=True))
            if module is self._model:
                self._handles.append(module.register_forward_hook(self._note_end))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            vars(module)["_compiled_call_impl"] = call
        self._handles, self._compiled = [], []

    def _call(self, module: nn.Module, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note(id(module))
        found = call(*arguments, **named)
        if module is self._model:
            self._note_end()
        return found

    def _note(self, module: int, *_: Any) -> None:
        if module not in self._began:
            self._began[module] = self._now()
        if module == id(self._model):
            self._is_inside, self._ran, self._again = True, set(), set()
        elif module in self._ran or not self._is_inside:
            self._again.add(module)
        self._ran.add(module)

    def _note_end(self, *_: Any) -> None:
        self._is_inside = False

    def modules(self) -> dict[str, list[str]]:
        """Return what was seen of modules, by name, as the source of a trace has it."""
        shared = sorted(shared_units(self._model, unit_names(self._model)))
        return {"not_called": self.not_called(), "repeated": self.repeated(), "shared": shared}

    def repeated(self) -> list[str]:
        """Return the modules with parameters in them that run again, see [Note: modules that run again], by name."""
        return [name for name, module in _with_parameters(self._model) if id(module) in self._again]

    def not_called(self) -> list[str]:
        """Return the modules with parameters in them that did not run, by name.

        Of those that cannot run, lists of modules, these are the ones whose modules can be no group: they run again, or
        are not all that has parameters. A compiled or scripted module calls no hooks of those inside: of them nothing
        is known.
        """
        found, seen = [], open_modules(self._model)
        for name, module in _with_parameters(self._model):
            if name not in seen:
                continue
            parts = called_of(module)
            if parts == [module]:
                is_silent = id(module) not in self._began
            else:
                is_silent = parts is None or any(id(part) in self._again for part in parts)
            if is_silent:
                found.append(name)
        return found

    def moments(self) -> dict[int, Moment]:
        """Return the first use of each parameter by its place; without those that no module around them used."""
        places = {module: place for place, module in enumerate(self._began)}
        found = {}
        for place, owners in enumerate(self._owners):
            modules, above = owners, set(owners)
            while modules and not any(module in places for module in modules):
                modules = [
                    parent for module in modules for parent in self._parents.get(module, ()) if parent not in above
                ]
                above.update(modules)
            began = [module for module in modules if module in places]
            if began:
                found[place] = self._began[min(began, key=places.__getitem__)]
        return found


def _with_parameters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if next(module.parameters(), None) is not None]


def split_forward(
    first_use_s: Mapping[Layer, float], ready_order: Sequence[Layer], forward_s: float
) -> dict[Layer, float]:
    """Return what each layer takes of a forward pass: from its first use to that of the layer that is begun next.

    What comes before the first use goes with the layer that is begun first. Layers that are begun together wait for one
    another's parameters before anything is computed: what they take goes with the one whose gradient is ready first,
    behind which the forward pass, read against the ready order, has none of the others. A layer that is never used
    takes nothing. All together take ``forward_s``, as long as one is used.

    Args:
        first_use_s: when each layer that is used is begun, from the start of the forward pass.
        ready_order: all layers, in the order in which their gradients are ready.
        forward_s: when the forward pass ends.

    >>> split_forward({"fc": 5.0, "conv.bias": 1.0, "conv.weight": 1.0}, ["fc", "conv.bias", "conv.weight", "odd"], 9.0)
    {'fc': 4.0, 'conv.bias': 4.0, 'conv.weight': 1.0, 'odd': 0.0}
    """
    used = [layer for layer in reversed(ready_order) if layer in first_use_s]
    begun = sorted(used, key=first_use_s.__getitem__)  # which keeps the order of those that are begun together
    cuts_s = [0.0, *(min(first_use_s[layer], forward_s) for layer in begun[1:]), forward_s]
    taken_s = dict.fromkeys(ready_order, 0.0)
    taken_s.update((layer, end_s - start_s) for layer, (start_s, end_s) in zip(begun, pairwise(cuts_s), strict=False))
    return taken_s


def resting_parts(
    resting_bytes: Mapping[str, int],
    parts_s: Mapping[str, float],
    ready_order: Sequence[str],
    first_use_s: Mapping[str, float],
    forward_s: float,
) -> list[dict[str, Any]]:
    """Return of each parameter without a gradient, in the order of first uses, where it stands and what it takes.

    That is the layer which is used next, and which share of which layer's part of the forward pass is its own: of the
    one begun last before it, or first of all. A layer that is used without being called counts as used no earlier than
    those before it.

    Args:
        resting_bytes: how large they are.
        parts_s: what layers take of the forward pass, which may be scaled.
        ready_order: layers that get a gradient, in the order in which these are ready.
        first_use_s: when each of both is begun, from the start of a forward pass.
        forward_s: when that ends.

    >>> first_use_s = {"a": 0.0, "tower": 1.0, "b": 3.0}
    >>> resting_parts({"tower": 8}, {"a": 3.0, "b": 1.0}, ["b", "a"], first_use_s, 4.0)
    [{'name': 'tower', 'bytes': 8, 'within': 'a', 'share': 0.6666666666666666, 'next': 'b'}]
    """
    factor = sum(parts_s.values()) / forward_s if forward_s else 0.0
    alone_s = split_forward(first_use_s, [*ready_order, *resting_bytes], forward_s)
    in_turn = list(reversed(ready_order))
    begun = sorted(in_turn, key=first_use_s.__getitem__)
    latest_s = dict(zip(in_turn, accumulate((first_use_s[layer] for layer in in_turn), max), strict=True))
    found = []
    for name in sorted(resting_bytes, key=first_use_s.__getitem__):
        at_s = first_use_s[name]
        around = next((one for one in reversed(begun) if first_use_s[one] < at_s), begun[0])
        share = min(1.0, alone_s[name] * factor / parts_s[around]) if parts_s[around] else 0.0
        follower = next((one for one in in_turn if latest_s[one] >= at_s), None)
        part = {"name": name, "bytes": resting_bytes[name], "within": around, "share": share, "next": follower}
        found.append(part)
    return found
