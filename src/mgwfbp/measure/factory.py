"""Models of the user's own: what ``--factory package.module:function`` means to every command."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mgwfbp.errors import MeasureError
from mgwfbp.units import quote

__all__ = ["LossFn", "Made", "call_factory", "model_name"]

LossFn = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Made:
    """What a factory returned."""

    model: nn.Module
    batch: Any = None  # what the model is called with; None: the factory returned the model alone
    loss_fn: LossFn | None = None


def call_factory(spec: str, given: Mapping[str, int], fallback: Mapping[str, int]) -> Made:
    """Import ``package.module:function`` and call it with those of the given arguments that it takes.

    Arguments of ``fallback`` are for a function that has no default of its own. It returns a model, ``(model, batch)``
    or ``(model, batch, loss_fn)``: the same function serves commands that need a batch and those that have data.
    """
    function = _load(spec)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    needed = {one.name for one in named if one.default is one.empty}
    chosen = {key: value for key, value in fallback.items() if key in needed}
    chosen |= {key: value for key, value in given.items() if takes_all or key in {one.name for one in named}}
    if missing := sorted(needed - set(chosen)):
        known = ", ".join(dict.fromkeys([*given, *fallback]))
        raise MeasureError(
            f"factory {quote(spec)} needs {', '.join(missing)}, and this command gives only {known}: "
            "let the others have a default"
        )
    return _checked(spec, function(**chosen))


def model_name(spec: str, model: nn.Module) -> str:
    """Name a model that a factory made: by its ``name`` if it has one, else by its class.

    A class of torch's own (``Sequential``) says nothing about a model: then the function's name stands for it.
    """
    given = getattr(model, "name", None)
    if isinstance(given, str) and given:
        return given
    is_torchs = type(model).__module__.partition(".")[0] == "torch"
    return spec.partition(":")[2] if is_torchs else type(model).__name__


def _load(spec: str) -> Callable[..., Any]:
    module_name, _, function_name = spec.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise MeasureError(
            f"factory {quote(spec)}: {error}; expected package.module:function, importable from here"
        ) from error
    return function


def _checked(spec: str, made: Any) -> Made:
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (1, 2, 3) or not isinstance(parts[0], nn.Module) or not (len(parts) < 3 or callable(parts[2])):
        raise MeasureError(
            f"factory {quote(spec)} returned {quote(type(made).__name__)}, "
            "expected a torch.nn.Module, (model, batch) or (model, batch, loss_fn)"
        )
    model, *rest = parts
    # A mapping that is no dict, such as a tokenizer's, would hide its tensors from torch.
    if rest and isinstance(rest[0], Mapping):
        rest[0] = dict(rest[0])
    return Made(model, *rest)
