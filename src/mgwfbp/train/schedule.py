"""The learning rate of every step."""

import math

from mgwfbp.train.config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    r"""Return the learning rate of a step; the first is 0.

    During the warm-up it rises in a straight line to the peak p. After it, with x epochs done of E,

    .. math:: p \cdot \tfrac12 (1 + \cos \pi \tfrac{x - w}{E - w}) \quad\text{(cosine)}\qquad
              p \cdot f^{\lfloor x / n \rfloor} \quad\text{(step)}

    where w is ``warmup_epochs``, f ``step_factor``, n ``step_epochs``. A function of the step alone: a run that is
    resumed needs nothing else.

    >>> config = TrainConfig(lr=1.0, epochs=3, warmup_epochs=1)
    >>> [round(learning_rate(config, step, 4), 3) for step in range(12)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]
    """
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if step + 1 <= warmup_steps:
        return config.peak_lr * (step + 1) / warmup_steps
    done_epochs = step / steps_per_epoch
    if config.schedule == "step":
        return float(config.peak_lr * config.step_factor ** (done_epochs // config.step_epochs))
    # A run may go on beyond the epochs its schedule was made for only by being asked for more of them.
    share = (done_epochs - config.warmup_epochs) / max(config.epochs - config.warmup_epochs, 1e-9)
    return config.peak_lr * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0))) / 2
