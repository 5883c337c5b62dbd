"""The folder of a training run: what was asked for, what ran, what it gave.

::

    config.json       every option                       environment.json  versions, processors, hosts
    plan.json         the plan in force, if any          tuning.json       what the tuner found, if it worked
    trace.json        the backward pass, if measured     cost.json         the network, if measured
    timeline.json     a step as it was, if observed      predicted.json    the same step as the model has it
    log.jsonl         one object per logged step         log.csv           the same
    epochs.jsonl      one object per epoch               results.json      written last: the run is over
    checkpoints/      tensorboard/                       .lock             keeps a second run out

`TrainingRun` reads what is there: a run that is still going on, or that was killed, has less.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from mgwfbp.cost import Cost
from mgwfbp.costs import ShardedCost, cost_with_halves, cost_with_low
from mgwfbp.errors import FileError, FormatError, MgwfbpError, TrainError
from mgwfbp.files import naming, parse_json, read_json, read_text, show_path
from mgwfbp.plan import MergePlan
from mgwfbp.record import Fields, FrozenDict, Record, check_count, check_free_form, check_real, check_text
from mgwfbp.timeline import Timeline
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural, quote

__all__ = ["LoggedEpoch", "LoggedStep", "RunResults", "TrainingRun", "log_line", "read_log"]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """What a line of ``log.jsonl`` says of the steps since the line before."""

    step: int  # steps done since the run began
    epoch: int  # the first is 0
    loss: float  # mean over all workers
    samples_per_s: float  # of all workers together
    lr: float
    step_s: float  # mean
    exposed_s: float | None = None  # communication that nothing hid; None where it was not observed

    def __post_init__(self) -> None:
        for name, minimum in (("step", 1), ("epoch", 0)):
            object.__setattr__(self, name, check_count(getattr(self, name), name, TrainError, minimum=minimum))
        for name in ("loss", "samples_per_s", "lr", "step_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, TrainError))
        if self.exposed_s is not None:
            object.__setattr__(self, "exposed_s", check_real(self.exposed_s, "exposed_s", TrainError))


@dataclass(frozen=True, slots=True)
class LoggedEpoch:
    """What a line of ``epochs.jsonl`` says; accuracies are shares of all validation samples, each counted once."""

    epoch: int
    train_loss: float
    valid_loss: float
    top1: float
    top5: float
    seconds: float  # training and validation

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch", check_count(self.epoch, "epoch", TrainError))
        for name in ("train_loss", "valid_loss", "seconds"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, TrainError))
        for name in ("top1", "top5"):
            object.__setattr__(self, name, _check_share(getattr(self, name), name))


@dataclass(frozen=True, slots=True)
class RunResults(Record):
    """What a run gave: ``results.json``."""

    FORMAT: ClassVar[str] = "mgwfbp.run/1"

    model: str
    strategy: str
    workers: int
    epochs: int  # completed
    steps: int  # done
    top1: float  # of the last epoch
    top5: float
    samples_per_s: float  # median over the second half of the log, of all workers together
    seconds: float  # since the run began, without interruptions
    num_messages: int | None = None  # a step sends; None where the buckets are torch's own
    more: Mapping[str, Any] = field(default_factory=dict)  # free-form: restarts, skipped images

    def __post_init__(self) -> None:
        check_text(self.model, "model", TrainError)
        check_text(self.strategy, "strategy", TrainError)
        for name, minimum in (("workers", 1), ("epochs", 0), ("steps", 0)):
            object.__setattr__(self, name, check_count(getattr(self, name), name, TrainError, minimum=minimum))
        for name in ("top1", "top5"):
            object.__setattr__(self, name, _check_share(getattr(self, name), name))
        for name in ("samples_per_s", "seconds"):
            object.__setattr__(self, name, check_real(getattr(self, name), name, TrainError))
        if self.num_messages is not None:
            check_count(self.num_messages, "num_messages", TrainError, minimum=1)
        object.__setattr__(self, "more", check_free_form(self.more, "more", TrainError))

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        content = {name.name: getattr(self, name.name) for name in fields(self)}
        return {"format": self.FORMAT, **content, "more": dict(self.more)}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make the results from the content of ``results.json``."""
        content = Fields(data)
        content.check_format(cls.FORMAT)
        optional: dict[str, Any] = {"num_messages": None, "more": {}}
        names = [one.name for one in fields(cls)]
        return cls(**{name: content.get(name, optional[name]) if name in optional else content[name] for name in names})


def _check_share(value: object, what: str) -> float:
    share = check_real(value, what, TrainError)
    if share > 1:
        raise TrainError(f"{what} is {share}, expected a share from 0 to 1")
    return share


Line = TypeVar("Line", LoggedStep, LoggedEpoch)


def read_log(path: str | os.PathLike[str], kind: type[Line]) -> tuple[Line, ...]:
    """Read a file of one object per line; a last line without its end, of a run that was killed, does not count."""
    whole, _, _torn = read_text(path).rpartition("\n")
    lines: list[Line] = []
    for number, text in enumerate(whole.split("\n") if whole else (), 1):
        try:
            content = parse_json(text)
            if not isinstance(content, dict):
                raise FormatError(f"expected an object, found {quote(content)}")
            line = Fields(content)
            lines.append(kind(**{one.name: line[one.name] for one in fields(kind)}))
        except MgwfbpError as error:
            raise FormatError(f"{show_path(path)}: line {number}: {error}") from None
    return tuple(lines)


def log_line(line: LoggedStep | LoggedEpoch) -> str:
    """Return the text that `read_log` reads."""
    return json.dumps(asdict(line), allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True, repr=False)
class TrainingRun:
    """What is in the folder of a training run; None or empty for what is not there (yet)."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    results: RunResults | None  # None: it is still going on, or was interrupted
    plan: MergePlan | None
    trace: ModelTrace | None
    cost: Cost | None
    timeline: Timeline | None  # measured
    predicted: Timeline | None
    tuning: Mapping[str, Any] | None  # free-form: what the tuner says of itself
    steps: tuple[LoggedStep, ...]
    epochs: tuple[LoggedEpoch, ...]

    CONFIG_FORMAT: ClassVar[str] = "mgwfbp.train/1"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read a run's folder, finished or not.

        Args:
            folder: what ``mgwfbp train -o`` was given.

        Raises:
            FileError: where it is not the folder of a run, or a file cannot be read.
            FormatError: where a file in it is not what it should be; the message names it.
        """
        place = Path(folder)
        if not place.is_dir():
            raise FileError(f"{show_path(place)}: no such folder, expected that of a training run")
        if not (place / "config.json").exists():
            raise FileError(f"{show_path(place)}: no config.json, so this is not the folder of a training run")
        config = _read_object(place / "config.json")
        with naming(place / "config.json"):
            Fields(config).check_format(cls.CONFIG_FORMAT)
        return cls(
            place,
            config,
            _if_there(place / "environment.json", _read_object) or FrozenDict(),
            _if_there(place / "results.json", RunResults.load),
            _if_there(place / "plan.json", MergePlan.load),
            _if_there(place / "trace.json", ModelTrace.load),
            _if_there(place / "cost.json", _load_cost),
            _if_there(place / "timeline.json", Timeline.load),
            _if_there(place / "predicted.json", Timeline.load),
            _if_there(place / "tuning.json", _read_object),
            _if_there(place / "log.jsonl", lambda path: read_log(path, LoggedStep)) or (),
            _if_there(place / "epochs.jsonl", lambda path: read_log(path, LoggedEpoch)) or (),
        )

    def __repr__(self) -> str:
        if self.results is not None:
            how = f"{plural(self.results.epochs, 'epoch')}, top-1 {self.results.top1:.2%}"
        else:
            how = f"not finished, {plural(len(self.epochs), 'epoch')} so far"
        model, strategy = self.config.get("model"), self.config.get("strategy")
        return f"TrainingRun({quote(model)} by {quote(strategy)} in {self.folder}: {how})"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"


T = TypeVar("T")


def _load_cost(path: str | os.PathLike[str]) -> Cost:
    """Read ``cost.json``, with the costs of halves, or that of low precision, where it has them."""
    data = read_json(path)
    with naming(path):
        found = cost_with_halves(data)
        return found if isinstance(found, ShardedCost) else cost_with_low(data, Fields(data).get("wire", None))


def _if_there(path: Path, read: Callable[[Path], T]) -> T | None:
    return read(path) if path.exists() else None


def _read_object(path: Path) -> FrozenDict:
    content = read_json(path)
    with naming(path):
        return check_free_form(content, "the file", FormatError)
