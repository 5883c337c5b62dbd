"""Images in ImageNet's folder layout, CLASS/IMAGE, with the usual crops and flips."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mgwfbp.errors import TrainError
from mgwfbp.train.sampler import Key
from mgwfbp.train.seeds import mixed_seed

__all__ = ["ImageSamples"]

# Mean and deviation of ImageNet's channels, with which torchvision's models are trained.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# How many samples in a row may be unreadable before a batch gives up.
_PATIENCE = 100


class ImageSamples(Dataset[tuple[Tensor, int, int]]):
    """The images of a folder; random crops depend on seed, epoch and image alone, not on who loads it and when.

    What cannot be read is told by the third value of a sample: its index. To train (``augment``) the next readable
    image stands in for it, so that batches stay full; to validate its label is -1, and it does not count.
    """

    def __init__(self, folder: Path, image_size: int, *, seed: int, augment: bool) -> None:
        try:
            from torchvision.datasets import ImageFolder
        except ImportError as error:
            raise TrainError("images need torchvision: pip install 'mgwfbp[train]'") from error
        if not folder.is_dir():
            raise TrainError(f"no data: {folder} is no folder; expected {folder}/CLASS/IMAGE, as ImageNet has it")
        try:
            found = ImageFolder(str(folder))
        except (FileNotFoundError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise TrainError(f"no data: {folder} holds no CLASS/IMAGE: {reason}") from None
        self.classes: tuple[str, ...] = tuple(found.classes)
        self._files: list[tuple[str, int]] = found.samples
        self._seed = seed
        self.augment = augment
        self._image_size = image_size
        self._transform = _transform(image_size, augment=augment)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int]:
        epoch, index = key
        for attempt in range(_PATIENCE if self.augment else 1):
            place = (index + attempt) % len(self)
            try:
                return self._read(epoch, place), self._files[place][1], index if attempt else -1
            except Exception:  # noqa: S112  # whatever a broken file makes of PIL; the caller names it
                continue
        return torch.zeros(3, self._image_size, self._image_size), -1, index

    def _read(self, epoch: int, index: int) -> Tensor:
        from PIL import Image

        with Image.open(self._files[index][0]) as file:
            image = file.convert("RGB")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(self._seed, epoch, index))
            return self._transform(image)  # type: ignore[no-any-return]

    def describe_problem(self, index: int) -> str:
        """Say which file cannot be read, and why."""
        path = self._files[index][0]
        try:
            self._read(0, index)
        except Exception as error:  # whatever a broken file makes of PIL
            reason = " ".join(str(error).replace(f"'{path}'", "it").split()) or type(error).__name__
            return f"{path}: not a readable image: {reason}"
        return f"{path}: could not be read at first"


def _transform(size: int, *, augment: bool) -> Any:
    from torchvision import transforms

    shape: list[Any]
    if augment:
        shape = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        # 256 of 224, as the models of torchvision are validated.
        shape = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    return transforms.Compose([*shape, transforms.ToTensor(), transforms.Normalize(_MEAN, _DEVIATION)])
