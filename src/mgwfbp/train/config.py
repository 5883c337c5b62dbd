"""What a training run is asked for: `TrainConfig`, checked before any process starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from mgwfbp.errors import TrainError
from mgwfbp.record import check_count, check_real, check_text
from mgwfbp.run import TrainingRun
from mgwfbp.units import plural, quote

__all__ = ["Autocast", "OnCorrupt", "Schedule", "TrainConfig", "Wire", "differences", "same_plan", "split_batch"]

Schedule = Literal["cosine", "step"]
Autocast = Literal["bf16", "fp16"]
Wire = Literal["bfloat16", "float16"]
OnCorrupt = Literal["refuse", "skip"]

# A checkpoint fits only a run with the same of these: they say what a position in the data means.
_FIXED = ("model", "data", "batch_size", "workers", "seed", "image_size", "num_samples", "num_classes")
# What a plan is made from; with other ones of these a new one is made.
_PLANNED_WITH = ("strategy", "trace", "cost", "wire", "wire_tolerance")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Every option of a training run."""

    model: str = "cnn"  # "cnn", a name of torchvision, or package.module:function
    data: str = "digits"  # "digits", "synthetic", or a folder with train/CLASS/IMAGE and val/CLASS/IMAGE
    strategy: str = "auto"  # one of mgwfbp.runtime.strategies, or the path of a plan
    workers: int = 1
    device: str = "cpu"
    epochs: int = 13
    batch_size: int = 32  # samples of one worker for one update
    accumulation_steps: int = 1  # parts in which a worker computes its batch
    lr: float = 0.05  # of one worker; times the workers, unless scale_lr is False
    scale_lr: bool = True
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 1.0
    schedule: Schedule = "cosine"
    step_epochs: int = 30  # of the schedule "step": after so many epochs the rate is multiplied by step_factor
    step_factor: float = 0.1
    label_smoothing: float = 0.0
    autocast: Autocast | None = None
    wire: Wire | None = None  # the precision in which messages may travel
    wire_tolerance: float | None = None  # which part longer than the shortest a step may be, to keep it
    shard_optimizer: bool = False  # each worker updates its share, and parameters travel behind the forward pass
    clip_norm: float | None = None
    seed: int = 0
    image_size: int | None = None  # pixels a side; None: what suits model and data
    num_samples: int = 1280  # of synthetic data
    num_classes: int = 1000  # of synthetic data
    loaders: int = 0  # processes of each worker that read images
    on_corrupt: OnCorrupt = "refuse"
    trace: str | None = None  # for planners; None: measured when the run begins
    cost: str | None = None
    checkpoint_steps: int | None = None  # None: after every epoch only
    keep: int = 3  # checkpoints
    log_steps: int = 10
    timeout_s: float = 300.0  # how long a worker waits for the others
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name in ("model", "data", "strategy"):
            check_text(getattr(self, name), name, TrainError)
        counts = {"workers": 1, "epochs": 1, "batch_size": 1, "accumulation_steps": 1, "step_epochs": 1, "seed": 0}
        counts |= {"num_samples": 1, "num_classes": 2, "loaders": 0, "keep": 1, "log_steps": 1}
        for name, minimum in counts.items():
            check_count(getattr(self, name), name, TrainError, minimum=minimum)
        for name in ("image_size", "checkpoint_steps"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, TrainError, minimum=1)
        for name in ("lr", "momentum", "weight_decay", "warmup_epochs", "step_factor", "label_smoothing", "timeout_s"):
            check_real(getattr(self, name), name, TrainError)
        self._check_choices()
        for name, limit in (("momentum", 1.0), ("label_smoothing", 1.0)):
            if getattr(self, name) >= limit:
                raise TrainError(f"{name} is {getattr(self, name)}, expected less than {limit:g}")
        if self.wire_tolerance is not None:
            check_real(self.wire_tolerance, "wire_tolerance", TrainError)
        if self.timeout_s < 1:
            raise TrainError(f"timeout_s is {self.timeout_s:g}, expected 1 second or more")
        if self.clip_norm is not None and not check_real(self.clip_norm, "clip_norm", TrainError):
            raise TrainError("clip_norm is 0, which would leave no gradient; expected more, or none at all")
        if self.batch_size % self.accumulation_steps:
            raise TrainError(
                f"a worker's batch of {self.batch_size} samples does not divide into "
                f"{self.accumulation_steps} equal parts; choose a batch size that does"
            )

    def _check_choices(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "device": ("cpu", "cuda"),
            "schedule": get_args(Schedule),
            "autocast": (None, *get_args(Autocast)),
            "wire": (None, *get_args(Wire)),
            "on_corrupt": get_args(OnCorrupt),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(str(one) for one in allowed if one is not None)
                raise TrainError(f"{name} is {quote(getattr(self, name))}, expected one of {shown}")

    @property
    def global_batch(self) -> int:
        """Samples of all workers for one update."""
        return self.batch_size * self.workers

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up; linear in the workers, as the batch is (Goyal et al. 2017)."""
        return self.lr * (self.workers if self.scale_lr else 1)

    def steps_per_epoch(self, num_samples: int) -> int:
        """Return how many updates an epoch has, or raise unless there is one; what is left over waits for the next."""
        steps = num_samples // self.global_batch
        if not steps:
            raise TrainError(
                f"{quote(self.data)} has {num_samples} samples to train on, fewer than one batch of "
                f"{self.global_batch} ({plural(self.workers, 'worker')}, {self.batch_size} each)"
            )
        return steps

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {"format": TrainingRun.CONFIG_FORMAT, **asdict(self)}


def split_batch(global_batch: int, workers: int) -> int:
    """Return one worker's share of a batch, or raise unless it divides.

    >>> split_batch(256, 4)
    64
    """
    check_count(global_batch, "the batch of all workers", TrainError, minimum=1)
    if workers < 1 or global_batch % workers:
        raise TrainError(
            f"a batch of {global_batch} samples does not divide among {plural(workers, 'worker')}; choose one that does"
        )
    return global_batch // workers


def differences(before: Mapping[str, Any], now: TrainConfig) -> list[str]:
    """Say in what a run differs from how it was begun, or raise where it cannot go on so.

    >>> differences(TrainConfig(lr=0.1).to_json(), TrainConfig(lr=0.2))
    ['lr was 0.1, is 0.2']
    """
    changed = [
        (name, before.get(name), value) for name, value in now.to_json().items() if before.get(name, value) != value
    ]
    for name, was, value in changed:
        if name in _FIXED:
            raise TrainError(
                f"the run was begun with {name} {quote(was)}, now it is {quote(value)}: "
                "give the same again, or another folder"
            )
    return [f"{name} was {was}, is {value}" for name, was, value in changed]


def same_plan(before: Mapping[str, Any], now: TrainConfig) -> bool:
    """Say whether a run that goes on is still asked for the plan it had.

    >>> same_plan(TrainConfig(strategy="wfbp").to_json(), TrainConfig(strategy="optimal"))
    False
    """
    return all(before.get(name) == getattr(now, name) for name in _PLANNED_WITH)
