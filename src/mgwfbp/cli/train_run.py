"""A training run: start its workers and say how it ended, or be one of them."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgwfbp.cli.blame import failures_of
from mgwfbp.cli.meeting import START_S
from mgwfbp.cli.output import print_line, talk
from mgwfbp.cli.report import report
from mgwfbp.cli.train_progress import ProgressLines
from mgwfbp.cli.workers import network_name, process_group, rank
from mgwfbp.errors import MgwfbpError, TrainError
from mgwfbp.files import naming, read_json, show_path
from mgwfbp.record import Fields
from mgwfbp.run import RunResults, TrainingRun
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.listener import Listener
from mgwfbp.units import plural

if TYPE_CHECKING:
    import torch

__all__ = ["start", "work"]

# How long workers that were told to stop have for the step at hand and a checkpoint, unless --timeout is shorter; a
# worker that hangs delays a restart by as much.
SHUTDOWN_S = 60


def _find_own_modules() -> None:
    """Let a factory stand in the folder we are run from; Python looks there only when run as `python -m`."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def start(config: TrainConfig, folder: Path, *, resume: bool, max_restarts: int) -> None:
    """Check everything that can be, then start the workers and wait for them."""
    _find_own_modules()
    from mgwfbp.train.claim import make_folder
    from mgwfbp.train.launch import launch
    from mgwfbp.train.worker import INTERRUPTED, check_folder, check_startable

    with failures_of(config.model, config.batch_size, config.device):
        check_startable(config)
    check_folder(folder, resume=resume)
    make_folder(folder)
    # As torchrun does; torch reads it when a worker imports it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A store of its own for every start: in one that outlives a restart, workers find where the dead ones listened.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The options again: of two --output the last one counts.
    command = [sys.executable, "-m", "mgwfbp", *sys.argv[1:], "--output", str(folder)]
    talk(f"{folder}: {plural(config.workers, 'worker')}, {config.model} on {config.data}, strategy {config.strategy}")
    stopped_by = launch(
        command, workers=config.workers, max_restarts=max_restarts, shutdown_s=int(min(SHUTDOWN_S, config.timeout_s))
    )
    results = TrainingRun.load(folder).results if (folder / "config.json").exists() else None
    again = f"go on with --resume --output {folder}"
    if results is not None:
        _show_results(folder, results)
    elif (folder / INTERRUPTED).exists():
        saved = f"the step was finished and saved; {again}"
        if stopped_by is None:
            raise TrainError(f"{_who_was_told(folder / INTERRUPTED)}: {saved}")
        talk(f"{stopped_by}: {saved}")
    elif stopped_by is not None:
        raise TrainError(f"ended by {stopped_by} before it could be saved; {again}")
    else:
        raise TrainError(f"{show_path(folder)}: the workers ended without results")


def _who_was_told(path: Path) -> str:
    """Say which worker somebody told to stop, and by what."""
    with naming(path):
        told = Fields(read_json(path)).get("told_to_stop", {})
    said = [f"worker {rank} got {why}" for rank, why in told.items()] if isinstance(told, dict) else []
    return ", ".join(said) or "a worker was told to stop"


def _show_results(folder: Path, results: RunResults) -> None:
    count = results.num_messages
    messages = "torch's own buckets" if count is None else f"{plural(count, 'message')} a step"
    print_line(
        f"top-1 {results.top1:.2%}, top-5 {results.top5:.2%} after {plural(results.epochs, 'epoch')}; "
        f"{results.samples_per_s:.0f} samples/s in {messages}; {folder}"
    )


def work(config: TrainConfig, folder: Path, *, resume: bool) -> None:
    """Be one of the workers."""
    _find_own_modules()
    import torch

    from mgwfbp.train.claim import Job
    from mgwfbp.train.failures import lost_workers
    from mgwfbp.train.worker import check_machine, run_worker

    check_machine(config)
    job_name = os.environ.get("TORCHELASTIC_RUN_ID")
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    listener: Listener = ProgressLines() if rank() == 0 else Listener()
    with (
        failures_of(config.model, config.batch_size, config.device),
        lost_workers(),
        process_group(config.device, None, timeout_s=max(START_S, config.timeout_s)),
    ):
        # Only now: until the workers have met there is nothing to save, and a signal ends them at once.
        requests = _Requests(has_agent=job_name is not None)
        has_ended = run_worker(
            config,
            folder,
            _place(torch.device(config.device)),
            resume=resume,
            why_stop=requests.why_stop,
            listener=listener,
            network=network_name(),
            job=None if job_name is None else Job(job_name, is_restarted),
        )
    if has_ended and rank() == 0:
        _write_report(folder)


class _Requests:
    """Remembers what told this worker to stop; it does so after the step at hand."""

    def __init__(self, *, has_agent: bool) -> None:
        self._signals: list[int] = []
        self._agent = os.getppid() if has_agent else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda found, _: self._signals.append(found))

    def why_stop(self) -> str:
        """Name the first signal; an elastic agent that is gone, and can start nobody again, counts as one."""
        if self._signals:
            return signal.Signals(self._signals[0]).name
        is_alone = self._agent is not None and os.getppid() != self._agent
        return "no answer from its launcher, which is gone" if is_alone else ""


def _write_report(folder: Path) -> None:
    """Write the run's page beside its files; a run that has ended well does not fail for want of a picture."""
    try:
        report([str(folder)], output=str(folder / "report.html"))
    except MgwfbpError as error:
        talk(f"no page: {error}")


def _place(device: "torch.device") -> "torch.device":
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
