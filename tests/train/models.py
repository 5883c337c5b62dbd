"""Models that tests train: ``--factory tests.train.models:tiny``."""

from torch import nn


def tiny(num_classes: int, channels: int) -> nn.Module:
    """A net with everything that has a state: running means, and dropout that draws random numbers."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 4 * 4, num_classes),
    )


def plain(num_classes: int) -> nn.Module:
    """A net without anything random or shared between the samples of a batch."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, num_classes))


def not_a_model() -> int:
    return 3
