"""Several workers for one command: those of torchrun, or local ones that we start."""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mgwfbp.errors import MeasureError

__all__ = ["network_name", "process_group", "rank", "start_local_workers", "under_launcher"]

# How long a rank waits for the others before it gives up.
TIMEOUT_S = 60.0
# How long the others have to say why they end, once a worker has failed.
GRACE_S = 10.0


def under_launcher() -> bool:
    """Say whether torchrun, or something like it, started us."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def rank() -> int:
    """Return our rank; 0 when we are alone."""
    return int(os.environ.get("RANK", "0"))


def network_name() -> str:
    """Return what results call the network between the workers, as far as it is known; inside `process_group`."""
    from mgwfbp.measure.agreement import backend_name

    if name := os.environ.get("MGWFBP_NETWORK"):  # set by `mgwfbp lab`, or by whoever knows better
        return name
    total, here = (int(os.environ.get(variable, "1")) for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    # Workers that we started have no LOCAL_WORLD_SIZE and are all here.
    is_local = here >= total or "LOCAL_WORLD_SIZE" not in os.environ
    return f"{backend_name()} on one machine" if is_local else f"{backend_name()} between {total // here} nodes"


def start_local_workers(workers: int | None) -> None:
    """Run this same command once per worker and leave with its status, unless we are such a worker or need none."""
    if under_launcher():
        if workers is not None and workers != int(os.environ["WORLD_SIZE"]):
            found = os.environ["WORLD_SIZE"]
            raise typer.BadParameter(f"{workers}, but {found} were started; leave it out", param_hint="--workers")
        return
    if workers is None or workers == 1:
        return
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    # As torchrun does. Now, since torch reads it when a worker imports it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # It would tell of every worker it ends by force; what there is to say is said below.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        running = start_processes(  # type: ignore[no-untyped-call]  # torch does not type it
            _worker, (sys.argv[1:], workers, _free_port()), nprocs=workers, start_method="spawn", join=False
        )
        while not running.join(grace_period=GRACE_S):
            pass
    except ProcessExitedException as error:
        if error.signal_name is not None:
            raise MeasureError(f"worker {error.error_index} was killed ({error.signal_name})") from error
        # The worker has said why.
        raise typer.Exit(error.exit_code) from error
    raise typer.Exit


def _worker(local_rank: int, arguments: list[str], workers: int, port: int) -> None:
    from mgwfbp.cli import run

    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(workers),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.exit(run(arguments))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process_group(device_type: str, backend: str | None, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Join the other workers for a while."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from mgwfbp.runtime import gloo

    chosen = backend or ("nccl" if device_type == "cuda" else "gloo")
    if not dist.is_backend_available(chosen):
        raise MeasureError(f"this torch has no backend {chosen!r}")
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        if chosen == "gloo":
            gloo.init_process_group(timeout=timedelta(seconds=timeout_s), device_id=device)
        else:
            # nccl would guess the device from the rank, and warn.
            dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s), device_id=device)
    except (RuntimeError, ValueError) as error:
        raise MeasureError(f"the workers did not find one another: {str(error).partition(chr(10))[0]}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()
