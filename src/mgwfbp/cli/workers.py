"""Several workers for one command: those of torchrun, or local ones that we start."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from mgwfbp.cli.children import run_workers
from mgwfbp.cli.meeting import meeting
from mgwfbp.errors import MeasureError

__all__ = ["network_name", "process_group", "rank", "start_local_workers", "under_launcher"]

# How long a rank waits for the others' part in a message before it gives up.
TIMEOUT_S = 60.0


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
    raise typer.Exit(run_workers([sys.executable, "-m", "mgwfbp", *sys.argv[1:]], workers))


@contextmanager
def process_group(device_type: str, backend: str | None, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Join the other workers for a while; ``timeout_s`` is how long they may be silent once they are there."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from mgwfbp.runtime.messages import gloo

    chosen = backend or ("nccl" if device_type == "cuda" else "gloo")
    if not dist.is_backend_available(chosen):
        raise MeasureError(f"this torch has no backend {chosen!r}")
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        with meeting() as store:
            arguments: Any = {"store": store, "rank": rank(), "world_size": int(os.environ["WORLD_SIZE"])}
            timeout = timedelta(seconds=timeout_s)
            if chosen == "gloo":
                gloo.init_process_group(timeout=timeout, device_id=device, **arguments)
            else:
                # nccl would guess the device from the rank, and warn.
                dist.init_process_group(chosen, timeout=timeout, device_id=device, **arguments)
            store.set_timeout(timeout)
    except MeasureError:
        raise
    except (RuntimeError, ValueError) as error:
        raise MeasureError(f"the workers did not find one another: {str(error).partition(chr(10))[0]}") from error
    try:
        yield
    finally:
        gloo.destroy_process_group()
