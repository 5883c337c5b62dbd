"""Real workers without the command line, started quickly: see `tests.forking`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp.errors import MgwfbpError
from mgwfbp.run import LoggedStep, TrainingRun
from mgwfbp.runtime.messages.gloo import destroy_process_group
from mgwfbp.train.checkpoints import CheckpointFolder
from mgwfbp.train.claim import Job
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.listener import Listener
from mgwfbp.train.worker import run_worker
from tests.forking import context

TIMEOUT_S = 60.0


class Said(Listener):
    """Keeps what a run says in a file; after its last step, where it has one, the run waits to be ended."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        self._path, self._last_step = path, last_step

    def say(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text + "\n")

    def step(self, line: LoggedStep, num_steps: int) -> None:  # noqa: ARG002 - as it is called
        if self._last_step is not None and line.step >= self._last_step:
            signal.pause()


@dataclass
class Ranks:
    """Processes of one run."""

    processes: list[BaseProcess]
    folder: Path = field(default_factory=Path)

    def wait(self) -> list[int | None]:
        """Wait for all of them and return how they ended."""
        end = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@contextmanager
def started(
    work: Callable[..., None], workers: int, scratch: Path, *arguments: object, timeout_s: float = 20.0
) -> Iterator[Ranks]:
    """Run ``work(rank, *arguments)`` in a process group; whatever happens, nobody is left."""
    scratch.mkdir(parents=True, exist_ok=True)
    store = scratch / f"store-{time.monotonic_ns()}"
    processes = [
        context().Process(target=_main, args=(work, rank, workers, store, timeout_s, arguments))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    ranks = Ranks(processes)
    try:
        yield ranks
    finally:
        ranks.kill()


def _main(
    work: Callable[..., None], rank: int, workers: int, store: Path, timeout_s: float, arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=timeout_s),
    )
    work(rank, *arguments)
    destroy_process_group()


def forked(work: Callable[..., None], *arguments: object) -> int | None:
    """Call ``work`` in a process of its own, where it may do what must not be done here; return how it ended."""
    return fork_all([(work, arguments)])[0]


def fork_all(calls: list[tuple[Callable[..., None], tuple[object, ...]]]) -> list[int | None]:
    """Do calls at the same time, each in a process of its own; return how they ended."""
    ranks = Ranks([context().Process(target=work, args=arguments) for work, arguments in calls])
    for process in ranks.processes:
        process.start()
    try:
        return ranks.wait()
    finally:
        ranks.kill()


def train(
    rank: int, config: TrainConfig, folder: Path, resume: bool, job: Job | None = None, last_step: int | None = None
) -> None:
    """What one rank does in a run; its errors go to ``rankN.txt`` beside the folder."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    beside = folder.parent / f"{folder.name}-said"
    beside.mkdir(exist_ok=True)
    listener = Said(beside / "said.txt", last_step) if rank == 0 else Listener()
    try:
        run_worker(
            config,
            folder,
            torch.device("cpu"),
            resume=resume,
            why_stop=lambda: "the test" if asked else "",
            listener=listener,
            job=job,
        )
    except (MgwfbpError, RuntimeError) as error:
        (beside / f"rank{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def train_to_end(config: TrainConfig, folder: Path, *, resume: bool = False) -> TrainingRun:
    """Train with as many real processes as the configuration asks for."""
    with started(train, config.workers, folder.parent, config, folder, resume) as ranks:
        codes = ranks.wait()
    assert codes == [0] * config.workers, (codes, said(folder))
    return TrainingRun.load(folder)


def said(folder: Path) -> str:
    """Everything that the ranks of a run said."""
    beside = folder.parent / f"{folder.name}-said"
    return "\n".join(path.read_text() for path in sorted(beside.glob("*.txt")))


def weights(folder: Path) -> dict[str, Any]:
    """The model at the end of a run."""
    checkpoint, problems = CheckpointFolder(folder / "checkpoints", keep=1).newest()
    assert checkpoint is not None, problems
    return {**checkpoint.model, "step": checkpoint.step, "momentum": checkpoint.optimizer["state"]}


def equal(a: object, b: object) -> bool:
    """Bitwise equality of whatever a checkpoint holds."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def logged_step(folder: Path) -> int:
    """The last step in a run's log, 0 while there is none."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError):
        return 0


def wait_until(is_so: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def python() -> list[str]:
    return [sys.executable, "-m", "mgwfbp"]
