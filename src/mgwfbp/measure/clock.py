"""Moments of a training step, noted without making anything wait: `HostClock`, `CudaClock`."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mgwfbp.errors import MeasureError

__all__ = ["Clock", "CudaClock", "HostClock", "Moment", "clock_for"]

Moment = Any  # what a clock hands out: seconds of the host, or an event in a stream of a GPU


class Clock(Protocol):
    """A clock whose moments are read only when all of them have come."""

    def now(self) -> Moment:
        """Return the present moment of the computation."""

    def when_arrived(self, future: Any, note: Callable[[Moment], None]) -> None:
        """Note the moment at which the message that this future stands for has arrived."""

    def wait(self) -> None:
        """Wait until every moment handed out so far has come."""

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one moment to another."""

    def forget(self) -> None:
        """Take all moments back: they will not be read any more."""


class HostClock:
    """For work that runs on the host."""

    def now(self) -> Moment:
        """Return the present moment."""
        return time.perf_counter()

    def when_arrived(self, future: Any, note: Callable[[Moment], None]) -> None:
        """Note the moment at which the message that this future stands for has arrived."""
        future.add_done_callback(lambda _: note(self.now()))

    def wait(self) -> None:
        """Return at once: the present moment has come."""

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one moment to another."""
        return float(second - first)

    def forget(self) -> None:
        """Keep nothing, so there is nothing to take back."""


class CudaClock:
    """For work that runs on a GPU: events in the stream that gets there; read only after one synchronise.

    The future of an nccl message is done as soon as the message is queued, and a stream that waits for it waits for the
    message: an event behind that is its arrival. It must be a stream of our own and of high priority. In those that
    torch lends to callbacks the wait stands in the same hardware queue as later kernels of the backward pass, and
    these wait too.
    Other backends complete a future when the message has arrived, and an event in an idle stream is that moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside: torch.cuda.Stream | None = None
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []

    def now(self) -> Moment:
        """Return the moment at which the current stream gets here."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def when_arrived(self, future: Any, note: Callable[[Moment], None]) -> None:
        """Note the moment at which the message that this future stands for has arrived."""
        if not future.done():
            # Of a hook that queues messages later on, or of a backend that says when a message has arrived.
            future.add_done_callback(lambda done: self._note_aside(done, note))
        else:
            self._note_aside(future, note)

    def _note_aside(self, done: Any, note: Callable[[Moment], None]) -> None:
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(self._aside):
            done.wait()
            event = self._event()
            event.record(self._aside)
        note(event)

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one moment to another."""
        return float(first.elapsed_time(second) * 1e-3)

    def forget(self) -> None:
        """Use the events again."""
        self._free, self._used = self._free + self._used, []

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        self._used.append(event)
        return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock that fits the device."""
    if device.type == "cpu":
        return HostClock()
    if device.type == "cuda":
        return CudaClock(device)
    raise MeasureError(f"cannot time a model on device {device}, expected cpu or cuda")
