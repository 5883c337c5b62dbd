"""Processes that start quickly: each is forked off one that has imported torch, and never computes itself."""

import faulthandler
import functools
import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What takes long to import in the ranks of tests; DDP's constructor imports torch._dynamo. What is not installed is
# left out.
PRELOADED = (
    "pytest",
    "sklearn.datasets",
    "tests.runtime.launch",
    "tests.train.ranks",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchvision",
)


@functools.cache
def context() -> Any:
    """Return the context of ``multiprocessing`` whose processes are such forks."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as the command's workers have it, however the tests are run
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_module(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    world: int,
    *,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> list[int | None]:
    """Run ``python -m module folder argument ...`` once per rank, and return how each ended; nobody is left.

    What a rank says goes to ``rankN.log`` in the folder. Its environment is that of the tests' first fork, with its
    rank, the number of ranks, and the variables.
    """
    ranks = []
    for rank in range(world):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **(variables or {})}
        ranks.append(context().Process(target=_be_module, args=(module, [str(folder), *arguments], environment)))
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout_s)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _be_module(module: str, arguments: list[str], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))  # Python has started already
    log = os.open(Path(arguments[0]) / f"rank{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    faulthandler.enable()
    gc.freeze()  # what was imported before the fork need not be looked through again in every collection
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
