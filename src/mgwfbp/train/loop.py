"""The training loop: synchronous SGD from a position in the run to its end, or until it is told to stop."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp.errors import FileError, TrainError
from mgwfbp.measure.agreement import together
from mgwfbp.run import LoggedEpoch, LoggedStep
from mgwfbp.runtime.sharded.optimizer import ShardedOptimizer
from mgwfbp.train.checkpoints import Checkpoint, CheckpointFolder
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.evaluate import evaluate
from mgwfbp.train.listener import Listener
from mgwfbp.train.models import classification_loss
from mgwfbp.train.rng import capture_rng
from mgwfbp.train.sampler import TrainBatches
from mgwfbp.train.schedule import learning_rate
from mgwfbp.train.strategy import Wrapped
from mgwfbp.train.votes import StopVote
from mgwfbp.train.watching import CommunicationWatch
from mgwfbp.train.writer import SilentWriter

__all__ = ["Feed", "Outlet", "Position", "Trainer", "autocast_dtype"]

Batch = tuple[Tensor, Tensor]


def autocast_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype of the forward pass under autocast; None without it."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.autocast or "")


@dataclass(slots=True)
class Position:
    """How far a run is; the same on all ranks."""

    step: int = 0  # steps done
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    loss_sum: float = 0.0  # over them
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Feed:
    """What a rank trains and validates on."""

    sampler: TrainBatches
    train: Iterable[Batch]
    valid: Iterable[Batch]


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a rank says and keeps what comes of it; one rank does, the others have a silent one."""

    writer: SilentWriter
    listener: Listener
    checkpoints: CheckpointFolder | None


class Trainer:
    """Trains one rank's copy of a model together with the others.

    ``group`` is for what is not a gradient: losses, votes, validation. It works on the CPU, so that nothing of it waits
    for a GPU or stands between gradients.
    """

    def __init__(
        self,
        config: TrainConfig,
        wrapped: Wrapped,
        feed: Feed,
        outlet: Outlet,
        *,
        vote: StopVote,
        watch: CommunicationWatch,
        group: dist.ProcessGroup,
    ) -> None:
        self._config = config
        ddp = self._ddp = wrapped.ddp
        self._feed = feed
        self._outlet = outlet
        self._vote = vote
        self._watch = watch
        self._group = group
        self._device = next(ddp.parameters()).device
        self._dtype = autocast_dtype(config)
        options: dict[str, Any] = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        self._optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(ddp, torch.optim.SGD, plan=wrapped.sharded_plan, **options)
            if config.shard_optimizer
            else torch.optim.SGD(ddp.module.parameters(), **options)
        )
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=config.autocast == "fp16")
        self._steps_per_epoch = len(feed.sampler)
        self._position = Position()
        self._last_epoch: LoggedEpoch | None = None
        # Since the last line of the log: this rank's losses, those of all, steps, and the clock.
        self._losses = torch.zeros((), dtype=torch.float64, device=self._device)
        self._line_loss, self._line_steps, self._line_begin_s = 0.0, 0, perf_counter()

    @property
    def position(self) -> Position:
        """How far the run is."""
        return self._position

    @property
    def last_epoch(self) -> LoggedEpoch | None:
        """The last epoch that was done; None before there is one in this start of the run."""
        return self._last_epoch

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; the model's weights were set before it was wrapped."""
        self._optimizer.load_state_dict(dict(checkpoint.optimizer))
        if self._scaler.is_enabled() and checkpoint.scaler:
            self._scaler.load_state_dict(dict(checkpoint.scaler))
        self._position = Position(
            checkpoint.step, checkpoint.epoch, checkpoint.batch, checkpoint.loss_sum, checkpoint.seconds
        )

    def run(self) -> bool:
        """Train to the end and return True, or False after being told to stop; either way the run is saved."""
        position = self._position
        while position.epoch < self._config.epochs:
            began_s, seconds_before = perf_counter(), position.seconds
            is_stopped = self._train_epoch(began_s, seconds_before)
            if is_stopped:
                self._save(must=True)
                return False
            self._close_epoch(began_s, seconds_before)
            self._save(must=position.epoch == self._config.epochs)
        return True

    def _train_epoch(self, began_s: float, seconds_before: float) -> bool:
        """Train on what is left of the epoch; return whether it was ended early."""
        position, config = self._position, self._config
        self._ddp.train()
        self._feed.sampler.go_to(position.epoch, position.batch)
        self._begin_line()
        for images, labels in self._feed.train:
            self._vote.cast()
            self._watch.before_step(position.step)
            self._losses += self._step(images, labels)
            self._watch.after_step()
            position.step += 1
            position.batch += 1
            self._line_steps += 1
            position.seconds = seconds_before + perf_counter() - began_s
            if position.step % config.log_steps == 0:
                self._log_line()
            is_last = position.batch == self._steps_per_epoch
            if self._vote.count() and not (is_last and position.epoch + 1 == config.epochs):
                return True
            if config.checkpoint_steps and position.step % config.checkpoint_steps == 0 and not is_last:
                self._save(must=False)
        return False

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Update the weights once and return this rank's mean loss."""
        config, parts = self._config, self._config.accumulation_steps
        lr = learning_rate(config, self._position.step, self._steps_per_epoch)
        for options in self._optimizer.param_groups:
            options["lr"] = lr
        mean_loss = torch.zeros((), device=self._device)
        for index, (some, their_labels) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True)):
            # Only the last part's backward pass sends; the gradients of those before it wait.
            sync: AbstractContextManager[Any] = nullcontext() if index == parts - 1 else self._ddp.no_sync()
            with sync:
                with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None):
                    output = self._ddp(some)
                    loss = classification_loss(output, their_labels, label_smoothing=config.label_smoothing) / parts
                self._scaler.scale(loss).backward()
            mean_loss += loss.detach()
        if config.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            if isinstance(self._optimizer, ShardedOptimizer):
                self._optimizer.clip_grad_norm_(config.clip_norm)
            else:
                nn.utils.clip_grad_norm_(self._ddp.module.parameters(), config.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return mean_loss

    def _begin_line(self) -> None:
        self._line_loss, self._line_steps, self._line_begin_s = 0.0, 0, perf_counter()

    def _collect_losses(self) -> None:
        """Add up what all ranks lost since the last time; they find out together where it is no number any more."""
        total = self._losses.cpu().reshape(1)
        dist.all_reduce(total, group=self._group)
        loss = total.item() / self._config.workers
        self._losses.zero_()
        if not math.isfinite(loss):
            raise TrainError(
                f"the loss is {loss} at step {self._position.step}: training has diverged; "
                "lower --lr, lengthen --warmup-epochs or set --clip-norm"
            )
        self._line_loss += loss
        self._position.loss_sum += loss

    def _log_line(self) -> None:
        self._collect_losses()
        position, elapsed_s = self._position, perf_counter() - self._line_begin_s
        line = LoggedStep(
            step=position.step,
            epoch=position.epoch,
            loss=self._line_loss / self._line_steps,
            samples_per_s=self._line_steps * self._config.global_batch / elapsed_s,
            lr=self._optimizer.param_groups[0]["lr"],
            step_s=elapsed_s / self._line_steps,
            exposed_s=self._watch.exposed_s,
        )
        self._outlet.writer.log_step(line)
        self._outlet.listener.step(line, self._config.epochs * self._steps_per_epoch)
        self._begin_line()

    def _close_epoch(self, began_s: float, seconds_before: float) -> None:
        self._collect_losses()
        position = self._position
        # Running means and the like are this rank's own until the next forward pass brings those of rank 0.
        for buffer in self._ddp.module.buffers():
            dist.broadcast(buffer, 0, group=self._ddp.process_group)
        accuracy = evaluate(
            self._ddp.module, self._feed.valid, self._device, autocast_dtype=self._dtype, group=self._group
        )
        position.seconds = seconds_before + perf_counter() - began_s
        line = LoggedEpoch(
            epoch=position.epoch,
            train_loss=position.loss_sum / self._steps_per_epoch,
            valid_loss=accuracy.loss,
            top1=accuracy.top1,
            top5=accuracy.top5,
            seconds=perf_counter() - began_s,
        )
        self._last_epoch = line
        self._outlet.writer.log_epoch(line)
        self._outlet.listener.epoch(line, self._config.epochs)
        position.epoch, position.batch, position.loss_sum = position.epoch + 1, 0, 0.0

    def _save(self, *, must: bool) -> None:
        """Save a checkpoint; where it fails and need not be (``must``), say so and go on."""
        begin_s = perf_counter()
        self._collect_losses()
        rng: list[Any] = [None] * self._config.workers
        dist.all_gather_object(rng, capture_rng(self._device), group=self._group)
        optimizer = self._optimizer.state_dict()  # to which all ranks may have something to give
        if must:
            together(lambda: self._write(rng, optimizer), self._group)
        else:
            try:
                self._write(rng, optimizer)
            except FileError as error:
                self._outlet.listener.say(f"{error}; training goes on")
        self._line_begin_s += perf_counter() - begin_s  # saving is not training

    def _write(self, rng: list[Any], optimizer: dict[str, Any]) -> None:
        if self._outlet.checkpoints is None:
            return
        position, plan = self._position, self._ddp.plan
        self._outlet.checkpoints.save(
            Checkpoint(
                step=position.step,
                epoch=position.epoch,
                batch=position.batch,
                model=self._ddp.module.state_dict(),
                optimizer=optimizer,
                scaler=self._scaler.state_dict(),
                rng=tuple(rng),
                loss_sum=position.loss_sum,
                seconds=position.seconds,
                plan=None if plan is None else plan.dumps(),
                is_tuned=self._watch.is_tuned,
                config=self._config.to_json(),
            )
        )
