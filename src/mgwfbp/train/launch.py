"""Local workers under torch's elastic agent: when one dies, all start again from the last checkpoint."""

import atexit
import logging
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mgwfbp.errors import TrainError

__all__ = ["launch"]


def launch(command: Sequence[str], *, workers: int, max_restarts: int, shutdown_s: int) -> str | None:
    """Run a command once per worker, with the environment that torchrun sets, until all have ended well.

    A signal that ends the agent is passed on to the workers, which have ``shutdown_s`` to end by themselves; its name
    is returned. A worker that fails more often than it may is a `TrainError` that says how it ended.
    """
    # What there is to say of workers that fail is said below, in one line. Each of these loggers has its own level.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Not in every torch that is supported; the agent's own default is 30 s.
    known = {one.name for one in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": shutdown_s} if "shutdown_timeout" in known else {}
    with tempfile.TemporaryDirectory(prefix="mgwfbp-train-") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            **patience,
        )
        try:
            with _own_handlers():
                elastic_launch(config, command[0])(*command[1:])
        except SignalException as error:
            # Kept to the end: the frames of the error hold the rendezvous, which torch leaves open after a signal, and
            # whose timer complains with a traceback when its own thread is the last to let go of it.
            atexit.register(id, error)
            return error.sigval.name
        except ChildFailedError as error:
            raise TrainError(_describe(error, max_restarts)) from error
    return None


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Give signals back the handlers that they have now; torch leaves its own, which raise, behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not Python's
                signal.signal(number, handler)


def _describe(error: ChildFailedError, max_restarts: int) -> str:
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"was killed ({failure.signal_name()})" if code < 0 else f"failed (status {code})"
    tries = f" after {max_restarts} restarts" if max_restarts else ""
    return f"worker {rank} {how}{tries}; --resume goes on from the last checkpoint, --max-restarts does so by itself"
