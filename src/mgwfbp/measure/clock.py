"""Clocks that note when each gradient is ready: the host's, or CUDA's by events."""

import time
from typing import Protocol

import torch

from mgwfbp.errors import MeasureError

__all__ = ["Clock", "make_clock"]


class Clock(Protocol):
    """Notes moments of one step, cheaply, and says afterwards how far apart they were."""

    def start(self) -> None:
        """Begin a step, once everything before it is done."""

    def note(self, slot: int) -> None:
        """Note the present moment under a number; a later note of the same number replaces it."""

    def read(self) -> dict[int, float]:
        """End the step and return the seconds from its start to every noted moment."""


class HostClock:
    """For work that runs on the host: when the note is taken, the gradient is there."""

    def __init__(self) -> None:
        self._start = 0
        self._noted: dict[int, int] = {}

    def start(self) -> None:
        """Begin a step."""
        self._noted.clear()
        self._start = time.perf_counter_ns()

    def note(self, slot: int) -> None:
        """Note the present moment."""
        self._noted[slot] = time.perf_counter_ns()

    def read(self) -> dict[int, float]:
        """Return the seconds from the start of the step to every noted moment."""
        return {slot: (moment - self._start) * 1e-9 for slot, moment in self._noted.items()}


class CudaClock:
    """For work that runs on a GPU: events, made beforehand, in the stream that computes; one synchronise a step."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_slots + 1)]
        self._noted: set[int] = set()
        self._stream = torch.cuda.current_stream(device)

    def start(self) -> None:
        """Begin a step."""
        self._noted.clear()
        torch.cuda.synchronize(self._device)
        # Autograd runs each operation of the backward pass in the stream of its forward operation: this one.
        self._stream = torch.cuda.current_stream(self._device)
        self._events[-1].record(self._stream)

    def note(self, slot: int) -> None:
        """Note the moment at which the GPU gets here."""
        self._events[slot].record(self._stream)
        self._noted.add(slot)

    def read(self) -> dict[int, float]:
        """Wait for the GPU and return the seconds from the start of the step to every noted moment."""
        torch.cuda.synchronize(self._device)
        return {slot: self._events[-1].elapsed_time(self._events[slot]) * 1e-3 for slot in self._noted}


def make_clock(device: torch.device, num_slots: int) -> Clock:
    """Return the clock that fits the device."""
    if device.type == "cpu":
        return HostClock()
    if device.type == "cuda":
        return CudaClock(device, num_slots)
    raise MeasureError(f"cannot time a model on device {device}, expected cpu or cuda")
