"""Data to train and validate on: the digits, random images, or a folder of your own."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mgwfbp.errors import TrainError
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.images import ImageSamples
from mgwfbp.train.models import usual_size
from mgwfbp.train.sampler import Key
from mgwfbp.train.seeds import mixed_seed
from mgwfbp.units import quote

__all__ = ["Data", "Sample", "Samples", "open_data"]

# An image, its label, and -1, or the sample that could not be read: then the label is -1 in validation, and in training
# another sample stands in for it.
Sample = tuple[Tensor, int, int]


class Samples(Dataset[Sample]):
    """Images and labels that are in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        return self._images[index], self._labels[index], -1


class RandomSamples(Dataset[Sample]):
    """Random images that are made when they are asked for, the same ones every time; for speed, not for learning."""

    def __init__(self, num_samples: int, num_classes: int, image_size: int, *, seed: int) -> None:
        self._num_samples = num_samples
        self._num_classes = num_classes
        self._image_size = image_size
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, index))
        image = torch.randn(3, self._image_size, self._image_size, generator=generator)
        return image, int(torch.randint(self._num_classes, (), generator=generator)), -1


@dataclass(frozen=True, slots=True)
class Data:
    """What a run trains and validates on."""

    train: Samples | RandomSamples | ImageSamples
    valid: Samples | RandomSamples | ImageSamples
    num_classes: int
    channels: int


def open_data(config: TrainConfig) -> Data:
    """Find the data of a run, or raise where there is none or too little."""
    size = config.image_size or usual_size(config.model, config.data)
    if config.data == "digits":
        data = _digits(size, channels=1 if config.model == "cnn" or ":" in config.model else 3)
    elif config.data == "synthetic":
        # A fifth as many to validate on, other ones.
        some = [
            RandomSamples(count, config.num_classes, size, seed=seed)
            for seed, count in enumerate((config.num_samples, max(1, config.num_samples // 5)))
        ]
        data = Data(some[0], some[1], config.num_classes, 3)
    else:
        data = _folder(Path(config.data), size, config.seed)
    config.steps_per_epoch(len(data.train))
    return data


def _digits(size: int, *, channels: int) -> Data:
    """Return the handwritten digits that scikit-learn ships: 1437 to train on, 360 to validate on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise TrainError("the digits come with scikit-learn: pip install 'mgwfbp[train]'") from error
    found = load_digits()
    # Of 16 grey levels; centred and scaled with the mean and deviation of all pixels.
    images = (torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) - 4.88) / 6.02
    labels = torch.tensor(found.target)
    if size != images.shape[-1]:
        images = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    images = images.expand(-1, channels, -1, -1)
    # The file is ordered by writer: shuffled once, the same for every seed, so that runs can be compared.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    train, valid = (Samples(images[part], labels[part]) for part in (order[:cut], order[cut:]))
    return Data(train, valid, 10, channels)


def _folder(root: Path, size: int, seed: int) -> Data:
    if not root.is_dir():
        raise TrainError(f"no data: {quote(str(root))} is no folder; expected a folder, 'digits' or 'synthetic'")
    train = ImageSamples(root / "train", size, seed=seed, augment=True)
    valid = ImageSamples(root / "val", size, seed=seed, augment=False)
    if train.classes != valid.classes:
        odd = sorted(set(train.classes) ^ set(valid.classes))
        raise TrainError(f"{root}: train and val have different classes: {quote(odd[0])} is in one of them only")
    if len(train.classes) < 2:
        raise TrainError(f"{root}: one class alone, {quote(train.classes[0])}: nothing to learn; expected 2 or more")
    return Data(train, valid, len(train.classes), 3)
