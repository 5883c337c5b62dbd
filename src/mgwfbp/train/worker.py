"""What one worker of a run does, from its data to its results."""

import platform
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.errors import FileError, MgwfbpError, TrainError
from mgwfbp.fitting import padding_words
from mgwfbp.measure.agreement import backend_name, first_line, gather, together
from mgwfbp.run import RunResults, TrainingRun
from mgwfbp.train.batches import Batches
from mgwfbp.train.checkpoints import Checkpoint, CheckpointFolder
from mgwfbp.train.claim import FolderClaim, Job
from mgwfbp.train.config import TrainConfig, differences, same_plan
from mgwfbp.train.data import Data, open_data
from mgwfbp.train.listener import Listener
from mgwfbp.train.loop import Feed, Outlet, Trainer
from mgwfbp.train.models import build_model
from mgwfbp.train.rng import restore_rng, seed_rng
from mgwfbp.train.sampler import TrainBatches, ValidBatches
from mgwfbp.train.seeds import mixed_seed
from mgwfbp.train.strategy import Wrapped, assumed_words, check_strategy, needs_measuring, wrap
from mgwfbp.train.votes import StopVote
from mgwfbp.train.watching import CommunicationWatch
from mgwfbp.train.writer import RunWriter, SilentWriter, describe_environment

__all__ = ["INTERRUPTED", "check_folder", "check_machine", "check_startable", "run_worker"]

# Written when a run was told to stop and was saved, removed when it goes on: where it is, which rank was told by what.
INTERRUPTED = "interrupted.json"

T = TypeVar("T")


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise where a run would overwrite another one, or where nothing can be written."""
    if (folder / "config.json").exists() and not resume:
        raise FileError(
            f"{folder} holds a run already: go on with it by --resume, or choose another folder by --output"
        )
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file, expected a folder for the run")


def check_startable(config: TrainConfig) -> None:
    """Raise where a run cannot begin, before any process is started for it: data, model, strategy, device."""
    check_machine(config)
    if config.device == "cuda" and config.workers > torch.cuda.device_count():
        raise TrainError(f"workers is {config.workers}, one GPU each, here are {torch.cuda.device_count()}")
    data = open_data(config)
    check_strategy(config, num_classes=data.num_classes, channels=data.channels)


def check_machine(config: TrainConfig) -> None:
    """Raise where a worker lacks something that it will need on this machine."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise TrainError("no CUDA device here; use --device cpu")
    if config.tensorboard and find_spec("tensorboard") is None:
        raise TrainError("TensorBoard is not installed: pip install 'mgwfbp[train]', or use --no-tensorboard")


def run_worker(
    config: TrainConfig,
    folder: Path,
    device: torch.device,
    *,
    resume: bool,
    why_stop: Callable[[], str],
    listener: Listener,
    network: str = "",
    job: Job | None = None,
) -> bool:
    """Train as one rank of the process group that is there; return True at the end, False after being told to stop.

    Rank 0 alone reads and writes the run's folder: on many machines it need not be shared. ``resume`` goes on from
    the last whole checkpoint, if there is one; so does a restart of the ``job`` that began the run. ``why_stop`` says
    what told this rank to stop; nothing, as long as it is empty. ``network`` is what the run's folder calls the network
    between the workers.
    """
    rank = dist.get_rank()
    # The group that is there waited for slow starters; from now on a worker that is silent for so long hangs.
    timeout = timedelta(seconds=config.timeout_s)
    gradients, group = dist.new_group(timeout=timeout), dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  # all ranks are in both
    assert isinstance(gradients, dist.ProcessGroup)  # noqa: S101
    data = together(lambda: open_data(config), group)
    store = CheckpointFolder(folder / "checkpoints", keep=config.keep)
    claim = FolderClaim(folder)

    def find_checkpoint() -> Checkpoint | None:
        signed = claim.take()
        goes_on = resume or (job is not None and job.is_restarted and job.name == signed)
        found = _find_checkpoint(config, folder, store, listener, resume=goes_on)
        claim.sign(job.name if job else "")
        return found

    checkpoint = _from_rank_0(find_checkpoint, group)
    module = together(lambda: _make_module(config, data, checkpoint), group).to(device)
    # The plan of before belongs to the strategy of before.
    keeps_plan = checkpoint is not None and same_plan(checkpoint.config, config)
    is_tuned = checkpoint is not None and keeps_plan and checkpoint.is_tuned
    if not keeps_plan and needs_measuring(config):
        listener.say("measuring the backward pass and the network")
    wrapped = wrap(
        module,
        config,
        lambda: _first_batch(data, config, rank, device),
        group=gradients,
        num_steps=config.epochs * config.steps_per_epoch(len(data.train)),
        plan_before=checkpoint.plan if checkpoint and keeps_plan else None,
        is_tuned=is_tuned,
    )
    for words in filter(None, (padding_words(wrapped.cost), assumed_words(config, wrapped.cost))):
        listener.say(words)
    hosts = gather(platform.node(), group)
    outlet = Outlet(SilentWriter(), Listener(), None)
    if rank == 0:
        writer = RunWriter(folder, listener, tensorboard=config.tensorboard)
        writer.open_logs(step=checkpoint.step if checkpoint else 0, epoch=checkpoint.epoch if checkpoint else 0)
        outlet = Outlet(writer, listener, store)
    _write_records(outlet.writer, config, wrapped, describe_environment(device, backend_name(), network, hosts))
    skipped: list[str] = []

    def on_skip(problem: str) -> None:
        skipped.append(problem)
        listener.say(f"{problem}; skipped")

    feed, trains_on, validates_on = _make_feed(config, data, device, on_skip)
    watch = CommunicationWatch(
        wrapped.ddp,
        outlet.writer,
        predict_with=(wrapped.trace, wrapped.cost) if wrapped.cost is not None else None,
        was_tuned=is_tuned,
    )
    trainer = Trainer(config, wrapped, feed, outlet, vote=StopVote(why_stop, group), watch=watch, group=group)
    if checkpoint is not None:
        trainer.restore(checkpoint)
        restore_rng(dict(checkpoint.rng[rank]), device)
    else:
        seed_rng(mixed_seed(config.seed, rank))  # dropout and the like differ from rank to rank
    has_finished = trainer.run()
    watch.close()
    num_skipped = sum(int(said) for said in gather(str(trains_on.num_skipped + validates_on.num_skipped), group))
    outlet.writer.save("plan.json", wrapped.ddp.plan)
    told = {} if has_finished else {str(place): why for place, why in enumerate(gather(why_stop(), group)) if why}
    if rank == 0 and has_finished:
        _conclude(config, folder, wrapped, trainer, outlet.writer, num_skipped)
    elif rank == 0:
        position = trainer.position
        outlet.writer.save(INTERRUPTED, {"step": position.step, "epoch": position.epoch, "told_to_stop": told})
    outlet.writer.close()
    claim.release()
    return has_finished


def _find_checkpoint(
    config: TrainConfig, folder: Path, store: CheckpointFolder, listener: Listener, *, resume: bool
) -> Checkpoint | None:
    check_folder(folder, resume=resume)
    if not resume:
        return None
    checkpoint, problems = store.newest()
    for problem in problems:
        listener.say(f"{problem}; the one before it is used")
    if checkpoint is None:
        listener.say(f"{folder} has no whole checkpoint: the run begins at its beginning")
        return None
    for change in differences(checkpoint.config, config):
        listener.say(f"not as before: {change}")
    listener.say(f"going on after step {checkpoint.step}, epoch {checkpoint.epoch + 1}")
    return checkpoint


def _make_module(config: TrainConfig, data: Data, checkpoint: Checkpoint | None) -> torch.nn.Module:
    seed_rng(config.seed)  # the same weights on every rank, whatever its place
    module = build_model(config.model, num_classes=data.num_classes, channels=data.channels)
    if checkpoint is not None:
        try:
            module.load_state_dict(dict(checkpoint.model))
        except RuntimeError as error:
            raise TrainError(
                f"the checkpoint is of another model than {config.model!r}: {first_line(error)}"
            ) from error
    return module.train()


def _first_batch(data: Data, config: TrainConfig, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return something to measure with."""
    first = rank * config.batch_size
    samples = [data.train[(0, (first + place) % len(data.train))] for place in range(config.batch_size)]
    images, labels = torch.stack([image for image, _, _ in samples]), torch.tensor([label for _, label, _ in samples])
    return images.to(device), labels.clamp(min=0).to(device)


def _make_feed(
    config: TrainConfig, data: Data, device: torch.device, on_skip: Callable[[str], object]
) -> tuple[Feed, Batches, Batches]:
    rank, workers, size = dist.get_rank(), config.workers, config.batch_size
    sampler = TrainBatches(len(data.train), size, rank=rank, workers=workers, seed=config.seed)
    shares = ValidBatches(len(data.valid), size, rank=rank, workers=workers)
    refuse = config.on_corrupt == "refuse"
    train = Batches(data.train, sampler, device, loaders=config.loaders, refuse=refuse, on_skip=on_skip)
    valid = Batches(data.valid, shares, device, loaders=config.loaders, refuse=refuse, on_skip=on_skip)
    return Feed(sampler, train, valid), train, valid


def _write_records(writer: SilentWriter, config: TrainConfig, wrapped: Wrapped, environment: dict[str, object]) -> None:
    for name in (INTERRUPTED, "results.json"):
        writer.remove(name)
    writer.save("config.json", config.to_json())
    writer.save("environment.json", environment)
    writer.save("plan.json", wrapped.ddp.plan)
    writer.save("trace.json", wrapped.trace)
    if wrapped.cost is not None:
        writer.save("cost.json", wrapped.cost.to_json())  # type: ignore[attr-defined]  # both kinds are records


def _conclude(
    config: TrainConfig,
    folder: Path,
    wrapped: Wrapped,
    trainer: Trainer,
    writer: SilentWriter,
    num_skipped: int,
) -> None:
    position, plan = trainer.position, wrapped.ddp.plan
    run = TrainingRun.load(folder)
    last = trainer.last_epoch or (run.epochs[-1] if run.epochs else None)
    if last is None:
        raise TrainError(f"{folder}: nothing was left to train, and epochs.jsonl, which says what came of it, is empty")
    results = RunResults(
        model=config.model,
        strategy=config.strategy,
        workers=config.workers,
        epochs=position.epoch,
        steps=position.step,
        top1=last.top1,
        top5=last.top5,
        # Of the second half: by then nothing is measured or tuned any more.
        samples_per_s=median(line.samples_per_s for line in run.steps[len(run.steps) // 2 :]) if run.steps else 0.0,
        seconds=position.seconds,
        num_messages=None if plan is None else plan.num_groups,
        more={"num_skipped": num_skipped},
    )
    writer.save("results.json", results)


def _from_rank_0(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do work on rank 0 alone and give all ranks what came of it, be it an error."""
    said: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = work()
        except MgwfbpError as error:
            said[1] = error
    dist.broadcast_object_list(said, 0, group=group)
    if isinstance(said[1], MgwfbpError):
        raise said[1]
    return said[0]  # type: ignore[return-value]  # as the work returned it
