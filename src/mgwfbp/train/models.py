"""Models by name, and the loss of what they return."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mgwfbp.errors import MeasureError, TrainError
from mgwfbp.measure.factory import call_factory
from mgwfbp.measure.workload import torchvision_models
from mgwfbp.units import quote

__all__ = ["SmallCnn", "build_model", "classification_loss", "scores", "usual_size"]

# The weight of GoogLeNet's auxiliary heads (Szegedy et al. 2015, Section 5).
AUXILIARY_WEIGHT = 0.3
# Models of torchvision that are trained with auxiliary heads.
_WITH_HEADS = ("googlenet", "inception_v3")


class SmallCnn(nn.Module):
    """A convolutional net for small images: 1.2 M parameters, 26 gradients."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        blocks: list[nn.Module] = []
        for index, width in enumerate(widths):
            for before in (channels if index == 0 else widths[index - 1], width):
                blocks += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if index < 2:
                blocks.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for every class."""
        return self.head(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


def build_model(name: str, *, num_classes: int, channels: int) -> nn.Module:
    """Make a model with random weights: ``cnn``, one of torchvision, or what ``package.module:function`` returns.

    A function of yours is called with ``num_classes`` and ``channels`` as far as it takes them. It returns the model;
    of ``(model, batch)`` or ``(model, batch, loss_fn)``, as for measuring, a run takes the model: it has its own data.
    """
    if name == "cnn":
        return SmallCnn(num_classes, channels)
    try:
        if ":" in name:
            # The smallest batch of a function that cannot do without: nobody will see it.
            return call_factory(name, {"num_classes": num_classes, "channels": channels}, {"batch_size": 1}).model
        models = torchvision_models(name, otherwise="'cnn' is a small one, your own is package.module:function")
    except MeasureError as error:
        raise TrainError(str(error)) from error
    options = {"aux_logits": True, "init_weights": True} if name in _WITH_HEADS else {}
    return models.get_model(name, weights=None, num_classes=num_classes, **options)  # type: ignore[no-any-return]


def usual_size(model: str, data: str) -> int:
    """Return how many pixels a side images have for a model, unless somebody asks for others."""
    if data == "digits":
        # 32 and 75 are the least that torchvision's nets take; the digits themselves are 8 x 8.
        return 8 if model == "cnn" or ":" in model else 96 if model == "inception_v3" else 32
    return 299 if model == "inception_v3" else 224


def classification_loss(output: Any, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy; auxiliary heads, as GoogLeNet has in training, count 0.3."""
    heads = _heads(output)
    losses = [nn.functional.cross_entropy(head, labels, label_smoothing=label_smoothing) for head in heads]
    total = losses[0]
    for loss in losses[1:]:
        total = total + AUXILIARY_WEIGHT * loss
    return total


def scores(output: Any) -> Tensor:
    """Return the scores that count: the main head's."""
    return _heads(output)[0]


def _heads(output: Any) -> Sequence[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    heads = [head for head in output if head is not None] if isinstance(output, tuple) else []
    if not heads or not all(isinstance(head, Tensor) for head in heads):
        raise TrainError(f"the model returned {quote(type(output).__name__)}, expected scores or a tuple of them")
    return heads
