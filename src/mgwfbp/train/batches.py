"""Batches on the device, and what to do about samples that cannot be read."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from mgwfbp.errors import TrainError
from mgwfbp.train.data import RandomSamples, Samples
from mgwfbp.train.images import ImageSamples
from mgwfbp.train.sampler import Key

__all__ = ["Batches"]

AnySamples = Samples | RandomSamples | ImageSamples


class Batches:
    """Walks over batches of images and labels; samples that cannot be read are refused, or named and skipped."""

    def __init__(
        self,
        samples: AnySamples,
        sampler: Sampler[list[Key]],
        device: torch.device,
        *,
        loaders: int,
        refuse: bool,
        on_skip: Callable[[str], object],
    ) -> None:
        self._samples = samples
        self._device = device
        self._refuse = refuse
        self._on_skip = on_skip
        self._named: set[int] = set()
        # A generator of its own: a run that is resumed in mid-epoch must not draw one number more from the model's.
        self._loader = DataLoader(
            samples,
            batch_sampler=sampler,
            num_workers=loaders,
            generator=torch.Generator(),
            pin_memory=device.type == "cuda",
            persistent_workers=loaders > 0,
            worker_init_fn=_outlive_signals,
            multiprocessing_context=_context() if loaders else None,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, unread in self._loader:
            self._judge(labels, unread)
            yield images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    @property
    def num_skipped(self) -> int:
        """How many different samples this rank could not read."""
        return len(self._named)

    def _judge(self, labels: Tensor, unread: Tensor) -> None:
        for index in unread[unread >= 0].tolist():
            assert isinstance(self._samples, ImageSamples)  # noqa: S101  # others are in memory
            if self._refuse:
                raise TrainError(f"{self._samples.describe_problem(index)}; remove it, or use --on-corrupt skip")
            if index not in self._named:
                self._named.add(index)
                self._on_skip(self._samples.describe_problem(index))
            if self._samples.augment and (labels < 0).any():
                raise TrainError(f"{self._samples.describe_problem(index)}, nor are those that follow it")


def _context() -> Any:
    """Fork loaders off a process that has imported what they need: not off this one, which has threads by now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mgwfbp.train.data", "torchvision"])
    return context


def _outlive_signals(_: int) -> None:
    """Let the worker decide: a signal to its whole session must not take the loaders from under its last step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
