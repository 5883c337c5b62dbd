"""When each gradient is ready and how many bytes it has: `LayerTrace`, `ModelTrace`."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mgwfbp.errors import FormatError, TraceError
from mgwfbp.record import (
    Fields,
    Record,
    check_count,
    check_free_form,
    check_items,
    check_real,
    check_text,
    first_repeated,
)
from mgwfbp.units import format_bytes, format_seconds, plural, quote

__all__ = ["LayerTrace", "ModelTrace", "layers_of", "load_trace", "recorded_traces"]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One gradient's share of the backward pass, and where it is known its layer's of the forward pass."""

    name: str  # parameter name, e.g. "layer1.0.conv1.weight"
    backward_s: float  # t_b^(l): from the previous gradient being ready to this one
    grad_bytes: int  # bytes this gradient puts on the wire
    forward_s: float | None = None  # what the layer takes in the forward pass, where it is known

    def __post_init__(self) -> None:
        check_text(self.name, "a layer's name", TraceError)
        what = f"layer {quote(self.name)}"
        if self.forward_s is not None:
            object.__setattr__(self, "forward_s", check_real(self.forward_s, f"{what}: forward_s", TraceError))
        object.__setattr__(self, "backward_s", check_real(self.backward_s, f"{what}: backward_s", TraceError))
        object.__setattr__(self, "grad_bytes", check_count(self.grad_bytes, f"{what}: grad_bytes", TraceError))


def layers_of(
    moments: Iterable[tuple[str, float, int]],
    start_s: float = 0.0,
    forward_s: Mapping[str, float | None] = MappingProxyType({}),
) -> tuple[LayerTrace, ...]:
    """Make layers of gradients in ready order: (name, when it is ready, bytes), times from where ``start_s`` is from.

    No gradient is ready before the one in front of it, or before the backward pass starts. ``forward_s`` is what layers
    take in the forward pass, by name, where it is known.

    >>> [layer.backward_s for layer in layers_of([("c", 1.0, 4), ("b", 5.0, 4), ("a", 4.5, 4)], start_s=3.0)]
    [0.0, 2.0, 0.0]
    """
    layers, previous_s = [], start_s
    for name, moment_s, grad_bytes in moments:
        ready_s = max(previous_s, moment_s)
        layers.append(LayerTrace(name, ready_s - previous_s, grad_bytes, forward_s.get(name)))
        previous_s = ready_s
    return tuple(layers)


@dataclass(frozen=True, slots=True, repr=False)
class ModelTrace(Record):
    """One training step of one worker, without communication, gradients in ready order.

    Index 0 is the gradient that is ready first: the paper's layer L. The forward pass uses layers in the opposite
    order. Either all layers say what they take in it, or none.

    >>> trace = ModelTrace("toy", 3.0, (LayerTrace("b", 2.0, 8), LayerTrace("a", 1.0, 4)))
    >>> trace.ready_s, trace.compute_s, trace.grad_bytes
    ((5.0, 6.0), 6.0, 12)
    >>> trace
    ModelTrace('toy': 2 gradients, 12 B, forward 3 s, backward 3 s)
    """

    FORMAT: ClassVar[str] = "mgwfbp.trace/1"

    model: str
    forward_s: float  # t_f
    layers: tuple[LayerTrace, ...]
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)  # where it comes from; free-form

    def __post_init__(self) -> None:
        check_text(self.model, "model", TraceError)
        object.__setattr__(self, "forward_s", check_real(self.forward_s, "forward_s", TraceError))
        object.__setattr__(self, "layers", check_items(self.layers, LayerTrace, "layers", TraceError))
        object.__setattr__(self, "source", check_free_form(self.source, "source", TraceError))
        if not self.layers:
            raise TraceError(f"model {quote(self.model)} has no layers, expected at least one gradient")
        repeated = first_repeated(layer.name for layer in self.layers)
        if repeated is not None:
            raise TraceError(f"layer {quote(repeated)} stands twice, expected every name once")
        known = [layer.forward_s for layer in self.layers if layer.forward_s is not None]
        if known and len(known) < len(self.layers):
            unknown = next(layer.name for layer in self.layers if layer.forward_s is None)
            raise TraceError(f"layer {quote(unknown)} has no forward_s and others have one, expected it of all or none")
        check_real(sum(known), "forward_s of all layers together", TraceError)
        check_real(self.compute_s, "forward_s and all backward_s together", TraceError)
        check_count(self.grad_bytes, "all grad_bytes together", TraceError)

    def __repr__(self) -> str:
        return (
            f"ModelTrace({quote(self.model)}: {plural(len(self.layers), 'gradient')}, {format_bytes(self.grad_bytes)}, "
            f"forward {format_seconds(self.forward_s)}, backward {format_seconds(self.backward_s)})"
        )

    @property
    def ready_s(self) -> tuple[float, ...]:
        r"""When each gradient is ready, from the start of the step: :math:`\tau_b^{(l)} + t_b^{(l)}`, Eq. (6)."""
        times = accumulate((layer.backward_s for layer in self.layers), initial=self.forward_s)
        return tuple(times)[1:]

    @property
    def layer_forward_s(self) -> tuple[float, ...]:
        """What each layer takes in the forward pass, in ready order, together ``forward_s``.

        In proportion to what layers say, or where they say nothing to their ``backward_s``; all alike where that is 0.

        >>> ModelTrace("toy", 3.0, (LayerTrace("b", 2.0, 8), LayerTrace("a", 1.0, 4))).layer_forward_s
        (2.0, 1.0)
        """
        shares = [layer.backward_s if layer.forward_s is None else layer.forward_s for layer in self.layers]
        total_s = sum(shares)
        if not total_s:
            return (self.forward_s / len(shares),) * len(shares)
        factor = self.forward_s / total_s
        return tuple(share_s * factor for share_s in shares)

    @property
    def compute_s(self) -> float:
        """Forward and backward, t_f + t_b: the step of a single worker."""
        return self.ready_s[-1]

    @property
    def backward_s(self) -> float:
        """The whole backward pass, t_b."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def grad_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.grad_bytes for layer in self.layers)

    def scaled(self, factor: float) -> Self:
        """Return the trace with all computation taking ``factor`` times as long.

        >>> ModelTrace("toy", 3.0, (LayerTrace("a", 2.0, 8),)).scaled(0.5)
        ModelTrace('toy': 1 gradient, 8 B, forward 1.5 s, backward 1 s)
        """
        if factor == 1:
            return self
        layers = tuple(
            replace(
                layer,
                backward_s=layer.backward_s * factor,
                forward_s=None if layer.forward_s is None else layer.forward_s * factor,
            )
            for layer in self.layers
        )
        return replace(self, forward_s=self.forward_s * factor, layers=layers)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``trace.json``."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "forward_s": self.forward_s,
            "layers": [
                {
                    "name": layer.name,
                    "backward_s": layer.backward_s,
                    "grad_bytes": layer.grad_bytes,
                    **({} if layer.forward_s is None else {"forward_s": layer.forward_s}),
                }
                for layer in self.layers
            ],
            "source": dict(self.source),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a trace from the content of ``trace.json``."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        layers = []
        for entry in fields.objects("layers"):
            name, backward_s, grad_bytes = entry["name"], entry["backward_s"], entry["grad_bytes"]
            try:
                layers.append(LayerTrace(name, backward_s, grad_bytes, entry.get("forward_s", None)))
            except TraceError as error:
                raise FormatError(f"{entry.where}: {error}") from None
        return cls(fields["model"], fields["forward_s"], tuple(layers), fields.get("source", {}))


def recorded_traces() -> list[str]:
    """Return the names of the traces that come with the package; `load_trace` takes them."""
    folder = resources.files("mgwfbp") / "data" / "traces"
    if not folder.is_dir():  # a checkout without them
        return []
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_trace(name_or_path: str | os.PathLike[str]) -> ModelTrace:
    """Read a trace that comes with the package, by its name, or ``trace.json``.

    Args:
        name_or_path: one of `recorded_traces`, or a file.

    Raises:
        TraceError: where it is neither.
        FileError: where the file cannot be read.
        FormatError: where it holds no trace.
    """
    name = os.fspath(name_or_path)
    if name in recorded_traces():
        with resources.as_file(resources.files("mgwfbp") / "data" / "traces" / f"{name}.json") as path:
            return ModelTrace.load(path)
    if not os.path.exists(name) and os.sep not in name and not name.endswith(".json"):  # noqa: PTH110 - NUL bytes
        raise TraceError(f"trace {quote(name)} is neither a file nor one of those that `mgwfbp traces` lists")
    return ModelTrace.load(name)
