"""Moments of a training step, noted without making anything wait: `HostMoments`, `CudaMoments`."""

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["CudaMoments", "HostMoments", "Moment", "Moments", "moments_of"]

Moment = Any  # what a clock hands out: seconds of the host, or an event in a stream of a GPU


class Moments(Protocol):
    """A clock whose moments are read only when all of them have come."""

    def now(self) -> Moment:
        """Return the present moment of the computation."""

    def arrival(self) -> Moment:
        """Return the moment at which a message has arrived; to be called when its future is done."""

    def wait(self) -> None:
        """Wait until every moment handed out so far has come."""

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one moment to another."""

    def forget(self) -> None:
        """Take all moments back: they will not be read any more."""


class HostMoments:
    """For work that runs on the host."""

    def now(self) -> Moment:
        """Return the present moment."""
        return time.perf_counter()

    arrival = now

    def wait(self) -> None:
        """Return at once: the present moment has come."""

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one moment to another."""
        return float(second - first)

    def forget(self) -> None:
        """Keep nothing, so there is nothing to take back."""


class CudaMoments:
    """For work that runs on a GPU: events in the stream that gets there; read only after one synchronise.

    The future of an nccl message is done as soon as the message is queued, and its callbacks run in a stream that waits
    for it: an event there is the arrival. Other backends complete a future when the message has arrived, so that an
    event in an idle stream is.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        self._idle = None if "nccl" in backend else torch.cuda.Stream(device)
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []

    def now(self) -> Moment:
        """Return the moment at which the current stream gets here."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def arrival(self) -> Moment:
        """Return the moment at which the message whose future is done has arrived."""
        event = self._event()
        event.record(self._idle or torch.cuda.current_stream(self._device))
        return event

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


def moments_of(device: torch.device, group: dist.ProcessGroup | None) -> Moments:
    """Return the clock for a model on this device whose gradients this group averages."""
    return CudaMoments(device, dist.get_backend(group)) if device.type == "cuda" else HostMoments()
