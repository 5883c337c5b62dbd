"""``mgwfbp train``: data-parallel training with any strategy."""

import os
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import typer

from mgwfbp.cli.train_run import start, work
from mgwfbp.cli.wire import WireTolerance
from mgwfbp.cli.workers import under_launcher
from mgwfbp.errors import TrainError
from mgwfbp.train.config import Autocast, OnCorrupt, Schedule, TrainConfig, Wire, split_batch

__all__ = ["train"]

DEFAULTS = TrainConfig()


def train(
    model: Annotated[str, typer.Option(metavar="NAME", help="cnn (small), or any of torchvision's.")] = DEFAULTS.model,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="Your own: a function that returns the model (or, as for measure and bench, (model, batch[, loss_fn]) "
            "of which only the model is used), and may take num_classes and channels.",
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="digits|synthetic|FOLDER",
            help="The digits of scikit-learn, random images, or FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE.",
        ),
    ] = DEFAULTS.data,
    image_size: Annotated[int | None, typer.Option(min=1, help="Pixels a side, if not what is usual.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of synthetic data.")] = DEFAULTS.num_samples,
    classes: Annotated[int, typer.Option(min=2, help="Of synthetic data.")] = DEFAULTS.num_classes,
    on_corrupt: Annotated[
        OnCorrupt, typer.Option(help="What to do about an image that cannot be read.")
    ] = DEFAULTS.on_corrupt,
    epochs: Annotated[int, typer.Option(min=1)] = DEFAULTS.epochs,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Samples of one worker for an update ({DEFAULTS.batch_size})."),
    ] = None,
    global_batch_size: Annotated[int | None, typer.Option(min=1, help="Instead: samples of all workers.")] = None,
    accumulation_steps: Annotated[int, typer.Option(min=1, help="Parts in which a worker computes its batch.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate of one worker.")] = DEFAULTS.lr,
    scale_lr: Annotated[bool, typer.Option(help="Times the number of workers.")] = True,
    schedule: Annotated[Schedule, typer.Option()] = DEFAULTS.schedule,
    warmup_epochs: Annotated[float, typer.Option()] = DEFAULTS.warmup_epochs,
    step_epochs: Annotated[
        int, typer.Option(min=1, help="Schedule step: epochs between two steps.")
    ] = DEFAULTS.step_epochs,
    step_factor: Annotated[
        float, typer.Option(help="Schedule step: what the rate is multiplied by.")
    ] = DEFAULTS.step_factor,
    momentum: Annotated[float, typer.Option()] = DEFAULTS.momentum,
    weight_decay: Annotated[float, typer.Option()] = DEFAULTS.weight_decay,
    label_smoothing: Annotated[float, typer.Option()] = DEFAULTS.label_smoothing,
    clip_norm: Annotated[float | None, typer.Option(help="The largest norm of all gradients.")] = None,
    autocast: Annotated[Autocast | None, typer.Option(help="Mixed precision.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="auto|ddp|naive|wfbp|single|bucket|mgwfbp|optimal|ps|PLAN.json",
            help="How gradients are averaged. With +bf16 or +fp16 behind it messages travel in that precision: all of "
            "them, or with auto and optimal those for which it shortens the step.",
        ),
    ] = DEFAULTS.strategy,
    wire: Annotated[
        Wire | None, typer.Option(help="Messages may travel in this precision; for auto, optimal and plans.")
    ] = None,
    wire_tolerance: WireTolerance = None,
    shard_optimizer: Annotated[
        bool,
        typer.Option(
            "--shard-optimizer", help="Each worker updates a share; parameters travel behind the next forward pass."
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="For mgwfbp and optimal; measured if not given."),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For mgwfbp and optimal; measured if not given."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local workers to start (1); under torchrun those given are used."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts anew from the last checkpoint after a failure.")] = 0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="After which a silent worker hangs.")
    ] = DEFAULTS.timeout_s,
    loaders: Annotated[int, typer.Option(min=0, help="Processes of each worker that read images.")] = 0,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="The run's folder."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Save so often, besides after every epoch.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are kept.")] = (DEFAULTS.keep),
    log_steps: Annotated[int, typer.Option(min=1, help="Log so often.")] = DEFAULTS.log_steps,
    tensorboard: Annotated[bool, typer.Option()] = True,
) -> None:
    """Train a model on several workers. Ctrl-C and SIGTERM finish the step, save and leave with status 0."""
    if factory is not None and model != DEFAULTS.model:
        raise typer.BadParameter("give one of them", param_hint=["--model", "--factory"])
    if factory is not None and ":" not in factory:
        raise typer.BadParameter(f"{factory!r}, expected package.module:function", param_hint="--factory")
    num_workers = _count_workers(workers)
    try:
        config = TrainConfig(
            model=factory or model,
            data=data,
            strategy=strategy,
            workers=num_workers,
            device=device,
            epochs=epochs,
            batch_size=_batch_size(batch_size, global_batch_size, num_workers),
            accumulation_steps=accumulation_steps,
            lr=lr,
            scale_lr=scale_lr,
            momentum=momentum,
            weight_decay=weight_decay,
            warmup_epochs=warmup_epochs,
            schedule=schedule,
            step_epochs=step_epochs,
            step_factor=step_factor,
            label_smoothing=label_smoothing,
            autocast=autocast,
            wire=wire,
            wire_tolerance=wire_tolerance,
            shard_optimizer=shard_optimizer,
            clip_norm=clip_norm,
            seed=seed,
            image_size=image_size,
            num_samples=samples,
            num_classes=classes,
            loaders=loaders,
            on_corrupt=on_corrupt,
            trace=trace,
            cost=cost,
            checkpoint_steps=checkpoint_steps,
            keep=keep,
            log_steps=log_steps,
            timeout_s=timeout,
            tensorboard=tensorboard,
        )
    except TrainError as error:
        raise typer.BadParameter(str(error)) from None
    if under_launcher():
        if output is None:
            raise typer.BadParameter("give the run a folder, the same on every start", param_hint="--output")
        work(config, Path(output), resume=resume)
    else:
        start(config, _folder(config, output, resume=resume), resume=resume, max_restarts=max_restarts)


def _count_workers(workers: int | None) -> int:
    if not under_launcher():
        return workers or 1
    found = int(os.environ["WORLD_SIZE"])
    if workers is not None and workers != found:
        raise typer.BadParameter(f"{workers}, but {found} were started; leave it out", param_hint="--workers")
    return found


def _batch_size(of_one: int | None, of_all: int | None, workers: int) -> int:
    if of_all is None:
        return DEFAULTS.batch_size if of_one is None else of_one
    if of_one is not None:
        raise typer.BadParameter("give one of them", param_hint=["--batch-size", "--global-batch-size"])
    return split_batch(of_all, workers)


def _folder(config: TrainConfig, output: str | None, *, resume: bool) -> Path:
    """Return the run's folder; where none was named, a new one."""
    if output is not None:
        return Path(output)
    if resume:
        raise typer.BadParameter("name the run's folder", param_hint="--output")
    plan = Path(config.strategy)
    name = f"{config.model.rpartition(':')[2]}-{plan.stem if plan.suffix == '.json' else plan.name}"
    names = (Path("runs") / f"{name}-{number}" for number in count(1))
    return next(folder for folder in names if not folder.exists())
