"""What happens in the steps of a model that trains: `StepWatch`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mgwfbp.runtime.autograd_private import (
    accumulates_into,
    drop_empty_hooks,
    find_tensors,
    when_backward_has_ended,
)
from mgwfbp.runtime.moments import Moment, Moments
from mgwfbp.runtime.torch_private import PlannableParallel

__all__ = ["SeenMessage", "SeenStep", "StepWatch"]

# How long a message that the Reducer has waited for may take to tell us so.
LATE_S = 1.0


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """A message of one step; times from the start of the step."""

    num_bytes: int
    ready_s: float  # when the Reducer asked for it
    start_s: float  # when the one before it had arrived too
    end_s: float  # when it had arrived


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step in which gradients were averaged; times from the start of its forward pass."""

    forward_s: float  # end of the forward pass
    end_s: float  # all gradients are averaged
    ready_s: dict[int, float]  # by place of the parameter; empty where gradients were not watched
    messages: tuple[SeenMessage, ...]  # empty where messages were not listened to


@dataclass(slots=True)
class _Sent:
    """A message of which only moments are known."""

    num_bytes: int
    asked: Moment
    arrived: Moment | None = None


@dataclass(slots=True)
class _Open:
    """A step that has begun; it counts only if its backward pass comes, and is averaged."""

    start: Moment
    forward_end: Moment | None = None
    end: Moment | None = None
    gradients: dict[int, Moment] = field(default_factory=dict)
    messages: list[_Sent] = field(default_factory=list)


class StepWatch:
    """Follows a model's synchronised steps and calls ``on_step`` at the end of each.

    Such a step begins with a forward pass whose gradients are to be averaged and ends when they are; then
    ``on_step`` is called, inside ``backward()``, on every rank after the same step. Forward passes without a backward
    pass, ``no_sync``, steps under ``join`` and ``autograd.grad`` leave no trace. After `stop` nothing is left on the
    model.

    A backward pass is seen where it meets the tensors that the model returned. Where steps are trained and none was
    seen, ``on_blind`` is called, on every rank before the same forward pass.

    ``watches_gradients`` says whether the next step notes when each gradient is ready; `listen` whether messages are
    noted.
    """

    def __init__(
        self,
        model: PlannableParallel,
        parameters: Sequence[nn.Parameter],
        moments: Moments,
        on_step: Callable[[], object],
        on_blind: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._parameters, self._moments = model, parameters, moments
        self._on_step, self._on_blind = on_step, on_blind
        self._began: _Open | None = None  # the last forward pass
        self._in_backward: _Open | None = None
        self._is_due = False  # whether the Reducer will average the gradients of the next backward pass
        self._is_blind = not model.has_trained  # until a step is seen
        self._steps: list[_Open] = []
        self._listens = False
        self._gradient_handles: list[RemovableHandle] = []
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]

    @property
    def watches_gradients(self) -> bool:
        """Whether it is noted when each gradient is ready."""
        return bool(self._gradient_handles)

    @watches_gradients.setter
    def watches_gradients(self, wanted: bool) -> None:
        if wanted == self.watches_gradients:
            return
        if wanted:
            # Not hooks after the accumulation: torch goes on calling into Python for each parameter that ever had one.
            self._gradient_handles = [
                parameter.register_hook(partial(self._gradient_is_ready, place))
                for place, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ]
            return
        for handle in self._gradient_handles:
            handle.remove()
        self._gradient_handles = []
        for parameter in self._parameters:
            drop_empty_hooks(parameter)

    def listen(self, wanted: bool) -> None:
        """Note messages from now on, or no longer; to be called between steps."""
        if wanted != self._listens:
            self._listens = wanted
            self._model.overhear(self._message_is_sent if wanted else None)

    def stop(self) -> None:
        """Take everything off the model."""
        self.watches_gradients = False
        self.listen(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._began = self._in_backward = None

    def take(self) -> list[SeenStep]:
        """Return the steps that ended since the last call, in seconds; waits until their messages have arrived."""
        until_s = time.monotonic() + LATE_S
        while any(sent.arrived is None for step in self._steps for sent in step.messages):
            if time.monotonic() > until_s:
                break
            time.sleep(1e-4)
        self._moments.wait()
        seen = [self._seen(step) for step in self._steps]
        self._steps = []
        self._moments.forget()
        return seen

    def _seen(self, step: _Open) -> SeenStep:
        def since_start(moment: Moment) -> float:
            return max(0.0, self._moments.between_s(step.start, moment))

        messages: list[SeenMessage] = []
        if all(sent.arrived is not None for sent in step.messages):
            for sent in step.messages:
                ready_s, end_s = since_start(sent.asked), since_start(sent.arrived)
                link_free_s = messages[-1].end_s if messages else 0.0
                # A message that overtakes the one before it (gloo has two threads) is taken to arrive with it.
                end_s = max(ready_s, link_free_s, end_s)
                messages.append(SeenMessage(sent.num_bytes, ready_s, max(ready_s, link_free_s), end_s))
        ready_s_of = {place: since_start(moment) for place, moment in step.gradients.items()}
        return SeenStep(since_start(step.forward_end), since_start(step.end), ready_s_of, tuple(messages))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, *_: object) -> None:
        self._in_backward = self._began = None  # of a backward pass that failed
        if not self._model.synchronises:
            return
        if self._is_blind and self._model.has_trained:
            self._on_blind()
            return
        self._began = _Open(self._moments.now())
        self._is_due = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, _model: object, _arguments: object, output: object) -> None:
        step = self._began
        if step is None:
            return
        step.forward_end = self._moments.now()
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:  # a parameter that is returned would keep the hook for ever
                tensor.register_hook(partial(self._backward_has_begun, step))

    def _backward_has_begun(self, step: _Open, _gradient: Tensor) -> None:
        if not self._handles or self._in_backward is not None or not self._is_due:
            return
        if accumulates_into(self._parameters):
            # Of several forward passes with one backward pass the one whose output was used last begins the step.
            self._in_backward = step
            when_backward_has_ended(self._backward_has_ended)

    def _gradient_is_ready(self, place: int, _gradient: Tensor) -> None:
        if self._in_backward is not None:
            self._in_backward.gradients[place] = self._moments.now()

    def _message_is_sent(self, num_bytes: int) -> Callable[[Any], None]:
        step = self._in_backward
        if step is None:
            return lambda _: None
        sent = _Sent(num_bytes, self._moments.now())
        step.messages.append(sent)

        def note(moment: Moment) -> None:
            sent.arrived = moment

        return lambda future: self._moments.when_arrived(future, note)

    def _backward_has_ended(self) -> None:
        step, self._in_backward = self._in_backward, None
        if step is None or not self._model.has_finished:  # another backward pass brings the other gradients
            return
        self._began, self._is_due, self._is_blind = None, False, False
        step.end = self._moments.now()
        self._steps.append(step)
        self._on_step()
