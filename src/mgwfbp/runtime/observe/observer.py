"""What happens in the steps of a model that trains: `Observer` notes it, `ObservedStep` says it."""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from mgwfbp.errors import MeasureError
from mgwfbp.measure.agreement import problem_of
from mgwfbp.measure.clock import Clock, Moment
from mgwfbp.measure.hooks import GradientHooks
from mgwfbp.runtime.messages.sharing import Queue, spread_out
from mgwfbp.runtime.messages.stand_ins import holds_gradients
from mgwfbp.runtime.reducer.handle import ReducerHandle, when_backward_has_ended

__all__ = ["ObservedMessage", "ObservedStep", "Observer", "weakly"]

# How long a message that the Reducer has waited for may take to tell us so.
LATE_S = 1.0


def _kept(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what fails in a method of an `Observer` for `Observer.take`: whoever trains must not meet it."""

    @wraps(method)
    def call(self: "Observer", *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            self.problem = self.problem or problem_of(error)
            return None

    return call


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class ObservedMessage:
    """A message of one step; times from the start of the step."""

    num_bytes: int
    ready_s: float  # when the Reducer asked for it
    start_s: float  # when the one before it had arrived too
    end_s: float  # when it had arrived; of several in flight at once see `spread_out`


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One step whose gradients were averaged; times from the start of its last forward pass."""

    forward_s: float  # end of that forward pass
    compute_s: float  # end of the backward pass
    end_s: float  # all gradients are averaged
    ready_s: dict[int, float]  # by place of the parameter; empty where gradients were not noted
    messages: tuple[ObservedMessage, ...]  # empty where messages were not noted
    gathers: tuple[ObservedMessage, ...] = ()  # that a sharded optimizer began before it; empty where not noted
    pieces_s: tuple[float, ...] = ()  # of the forward pass: from when each gather was there to when the next was needed

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides."""
        return self.end_s - self.compute_s


@dataclass(slots=True)
class _Sent:
    """A message of which only moments are known."""

    num_bytes: int
    queue: Queue
    asked: Moment
    arrived: Moment | None = None


class _Gathered:
    """A gather of which only moments are known; torch and `Shards` tell of them."""

    def __init__(self, num_bytes: int, now: Callable[[], Moment]) -> None:
        self.num_bytes, self._now, self.begun = num_bytes, now, now()
        self.arrived: Moment | None = None
        self.asked: Moment | None = None
        self.got: Moment | None = None

    def arrive(self, moment: Moment) -> None:
        self.arrived = moment

    def ask(self) -> None:
        self.asked = self._now()

    def get(self) -> None:
        self.got = self._now()

    @property
    def is_complete(self) -> bool:
        return None not in (self.arrived, self.asked, self.got)


@dataclass(slots=True)
class _Step:
    """A step of which only moments are known, from its last forward pass on."""

    start: Moment
    forward_end: Moment | None = None
    compute_end: Moment | None = None
    end: Moment | None = None
    gradients: dict[int, Moment] = field(default_factory=dict)
    messages: list[_Sent] = field(default_factory=list)
    gathers: list[_Gathered] = field(default_factory=list)


class Observer:
    """Notes what happens in a model's steps, and calls ``on_step`` at the end of each, inside ``backward()``.

    [Note: a step]
    A step is a reduction: the Reducer has asked for its messages and finished. What the Reducer sends, it sends on all
    ranks alike, or they would wait for one another for ever; so all ranks count the same steps, whatever else each of
    them does: forward passes without a backward pass, losses that do not come from what the model returned, several
    backward passes for one reduction, passes under ``no_sync``. ``on_step`` is therefore called on every rank after
    the same reduction, and there, and only there, ranks may talk to one another and change buckets.

    The step begins with the last forward pass before the reduction. Where several models end a reduction in one
    backward pass, they are called in the order in which they were wrapped, on every rank. Where a backward pass raises
    after the reduction has ended (in a callback of the user's, say), autograd calls nobody any more: the step then ends
    when the next forward pass begins, since other ranks, where nothing was raised, may wait for this one already.
    """

    # Those whose reduction has ended and who have not been called, by autograd's number of the backward pass: threads
    # may train models at once, and those on one GPU share the thread that runs their backward passes.
    _ended: ClassVar[dict[int, list["Observer"]]] = {}
    _numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, reducer: ReducerHandle, clock: Clock, on_step: Callable[[], object] = lambda: None) -> None:
        self._reducer, self._clock, self._on_step = reducer, clock, on_step
        self._notes_messages = False
        self._hooks: GradientHooks | None = None
        self._current: _Step | None = None
        self._is_in_backward = False
        self._has_sent = False  # in the reduction under way
        self._steps: list[_Step] = []
        self.problem = ""  # the first failure; nothing is observed after it
        self._gathering: list[_Gathered] = []  # begun since the last forward pass
        self._number = next(self._numbers)
        reducer.problem = ""  # of an earlier observer
        reducer.observe_messages(weakly(self._message_is_asked_for))

    @_kept
    def note(
        self,
        *,
        gradients: bool = False,
        messages: bool = False,
        gathers: bool = False,
        alone: bool = False,
        all_reduces: bool = False,
    ) -> None:
        """Say what is noted of the next steps besides their length: when gradients are ready, what messages take.

        And of a model with a sharded optimizer what gathers take that are begun from now on; or, with ``alone``, what
        the forward pass takes when it begins after them. With ``all_reduces`` steps begin so, too, and all-reduce their
        messages.
        """
        self._notes_messages = messages
        on_gather = weakly(self._gather_has_begun) if gathers else None
        self._reducer.observe_gathers(on_gather, waits_first=alone or all_reduces, all_reduces=all_reduces)
        if gradients and self._hooks is None:
            self._hooks = GradientHooks(self._reducer.parameters, weakly(self._gradient_is_ready))
        elif not gradients and self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    @_kept
    def stop(self) -> None:
        """Take everything off the model."""
        self._current = None
        for ended in list(self._ended.values()):
            if self in ended:
                ended.remove(self)
        self.note()
        self._reducer.observe_messages(None)

    def take(self) -> list[ObservedStep]:
        """Return the steps that ended since the last call, in seconds; waits until their messages have arrived.

        Raises:
            MeasureError: where observing a step has failed, since the first call.
        """
        if problem := self.problem or self._reducer.problem:
            raise MeasureError(problem)
        until_s = time.monotonic() + LATE_S
        while any(sent.arrived is None for step in self._steps for sent in step.messages):
            if time.monotonic() > until_s:
                break
            time.sleep(1e-4)
        self._clock.wait()
        observed = [self._observed(step) for step in self._steps]
        self._steps = []
        self._clock.forget()
        return observed

    def _observed(self, step: _Step) -> ObservedStep:
        def since_start(moment: Moment) -> float:
            return max(0.0, self._clock.between_s(step.start, moment))

        messages: list[ObservedMessage] = []
        if all(sent.arrived is not None for sent in step.messages):
            asked_s = [since_start(sent.asked) for sent in step.messages]
            arrived_s = [since_start(sent.arrived) for sent in step.messages]
            spans = spread_out(asked_s, arrived_s, [sent.queue for sent in step.messages])
            for sent, ready_s, (start_s, end_s) in zip(step.messages, asked_s, spans, strict=True):
                messages.append(ObservedMessage(sent.num_bytes, ready_s, start_s, end_s))
        end_s = since_start(step.end)
        compute_s = end_s if step.compute_end is None else min(since_start(step.compute_end), end_s)
        # A backward pass inside of the forward pass ends before that does.
        forward_s = 0.0 if step.forward_end is None else min(since_start(step.forward_end), compute_s)
        ready_s_of = {place: min(since_start(moment), end_s) for place, moment in step.gradients.items()}
        return ObservedStep(forward_s, compute_s, end_s, ready_s_of, tuple(messages), *self._gathered(step, forward_s))

    def _gathered(self, step: _Step, forward_s: float) -> tuple[tuple[ObservedMessage, ...], tuple[float, ...]]:
        """Return the gathers of a step, in the order in which they were begun, and the pieces of its forward pass."""
        if not all(one.is_complete for one in step.gathers):
            return (), ()
        since = partial(self._clock.between_s, step.start)  # they are begun before the forward pass
        gathers: list[ObservedMessage] = []
        for one in step.gathers:
            begun_s, link_free_s = since(one.begun), gathers[-1].end_s if gathers else -math.inf
            start_s = max(begun_s, link_free_s)
            gathers.append(ObservedMessage(one.num_bytes, begun_s, start_s, max(start_s, since(one.arrived))))
        order = sorted(range(len(gathers)), key=lambda place: since(step.gathers[place].asked))
        pieces_s, end_s = [0.0] * len(gathers), forward_s
        for place in reversed(order):
            # Who reads parameters between two steps (an average of the model) asks before the forward pass begins.
            asked_s, got_s = (
                max(0.0, since(moment)) for moment in (step.gathers[place].asked, step.gathers[place].got)
            )
            pieces_s[place] = max(0.0, end_s - got_s)
            end_s = asked_s
        if order:
            pieces_s[order[0]] += end_s  # what comes before the first
        return tuple(gathers), tuple(pieces_s)

    def _now(self) -> Moment:
        """Return the present moment; None where the clock fails."""
        try:
            return self._clock.now()
        except Exception as error:
            self.problem = self.problem or problem_of(error)
            return None

    def before_forward(self) -> None:
        """Note that a forward pass of training begins."""
        self._end_late()
        if not self._has_sent:  # else it is inside of a reduction that takes several backward passes
            self._current, self._gathering = _Step(self._now(), gathers=self._gathering), []

    def _end_late(self) -> None:
        """End a step whose backward pass raised before it could be ended."""
        if self._is_in_backward:
            self._is_in_backward = False
            if self._has_sent and self._reducer.has_finished:
                self._note_end()
                self._on_step()
        for backward, ended in list(self._ended.items()):
            if self in ended:
                self._tell(backward)

    def after_forward(self) -> None:
        """Note that it has ended."""
        if self._current is not None and self._current.forward_end is None:
            self._current.forward_end = self._now()

    def _gradient_is_ready(self, place: int, _: Tensor) -> None:
        if self._current is not None:
            self._current.gradients[place] = self._now()

    def _message_is_asked_for(self, message: Tensor) -> Callable[[Any], None] | None:
        if not self._is_in_backward:
            try:
                when_backward_has_ended(weakly(self._backward_ends), weakly(self._backward_has_ended))
            except RuntimeError:  # in no backward pass: join() sends for a rank that ran out of data
                return None
            self._is_in_backward = True
        self._has_sent = True
        step = self._current
        if step is None or not self._notes_messages or not holds_gradients(message):
            return None
        sent = _Sent(message.nbytes, self._reducer.queue_of(len(step.messages)), self._now())
        step.messages.append(sent)

        def note(moment: Moment) -> None:
            sent.arrived = moment

        return lambda future: self._when_arrived(future, note)

    @_kept
    def _when_arrived(self, future: Any, note: Callable[[Moment], None]) -> None:
        self._clock.when_arrived(future, note)

    def _gather_has_begun(self, num_bytes: int, arrives: Any) -> _Gathered:
        gathered = _Gathered(num_bytes, self._now)
        self._when_arrived(arrives, gathered.arrive)
        self._gathering.append(gathered)
        return gathered

    def _backward_ends(self) -> None:
        if self._current is not None:
            self._current.compute_end = self._now()

    def _backward_has_ended(self) -> None:
        self._is_in_backward = False
        if not self._has_sent or not self._reducer.has_finished:  # another backward pass brings the other gradients
            return
        self._note_end()
        backward = torch._C._current_graph_task_id()
        ended = self._ended.setdefault(backward, [])
        ended.append(self)
        if len(ended) == 1:
            when_backward_has_ended(lambda: None, partial(self._tell, backward))

    def _note_end(self) -> None:
        step, self._current, self._has_sent = self._current or _Step(self._now()), None, False
        step.end = self._now()
        self._steps.append(step)

    @classmethod
    def _tell(cls, backward: int) -> None:
        """Call those whose reduction has ended in a backward pass, in the order in which they were made."""
        for observer in sorted(cls._ended.pop(backward, ()), key=lambda observer: observer._number):
            observer._on_step()
