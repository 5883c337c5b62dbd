"""Which samples a worker trains and validates on, as a function of its position in the run."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from mgwfbp.train.seeds import mixed_seed

__all__ = ["Key", "TrainBatches", "ValidBatches", "epoch_order"]

# What a data set is asked for: the epoch, on which random crops depend, and the sample.
Key = tuple[int, int]


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> list[int]:
    """Return all samples in the order of one epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


class TrainBatches(Sampler[list[Key]]):
    """One rank's batches of an epoch, from any position.

    The global batch b of W workers with B samples each is the b-th slice of W B samples of the epoch's order, and rank
    r has the r-th part of it: all ranks together train on what one worker with batches of W B would. What is left over
    at the end of an epoch waits for the next.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, workers: int, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._rank = rank
        self._workers = workers
        self._seed = seed
        self._epoch = 0
        self._first = 0

    def go_to(self, epoch: int, first: int = 0) -> None:
        """Let the next iteration begin with batch ``first`` of an epoch."""
        self._epoch, self._first = epoch, first

    def __len__(self) -> int:
        return self._num_samples // (self._batch_size * self._workers)

    def __iter__(self) -> Iterator[list[Key]]:
        order = epoch_order(self._num_samples, seed=self._seed, epoch=self._epoch)
        for batch in range(self._first, len(self)):
            start = (batch * self._workers + self._rank) * self._batch_size
            yield [(self._epoch, index) for index in order[start : start + self._batch_size]]


class ValidBatches(Sampler[list[Key]]):
    """One rank's share of the validation samples: over all ranks every sample once, none twice to fill a batch."""

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, workers: int) -> None:
        self._indices: Sequence[int] = range(rank, num_samples, workers)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self._indices), self._batch_size):
            yield [(0, index) for index in self._indices[start : start + self._batch_size]]
