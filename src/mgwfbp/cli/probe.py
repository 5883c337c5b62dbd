"""``python -m mgwfbp.cli.probe NAME...``: import packages and say what came of it, one line of JSON each.

`doctor` runs it in a process of its own: a package that is broken may end the process, and takes nobody with it.
"""

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["ask"]


def ask(name: str) -> dict[str, Any]:
    """Import a package; return its version, and of torch what can be done with it, or what went wrong."""
    try:
        package = importlib.import_module(name)
    except Exception as error:  # whatever a package does when it is imported
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        return {"problem": _words(error), "is_missing": is_missing}
    answer = {"version": str(getattr(package, "__version__", "of unknown version"))}
    if name != "torch":
        return answer
    try:
        return {**answer, **_ask_torch()}
    except Exception as error:  # of a torch that is not whole
        return {**answer, "lacks": [_words(error)], "gpus": [], "backends": {}}


def _ask_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"lacks": ["torch.distributed"], "gpus": [], "backends": {}}
    from mgwfbp.runtime.reducer.support import missing

    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    backends = {
        "gloo": _try(lambda: _all_reduce("gloo", "cpu")) if dist.is_gloo_available() else "not in this torch",
        "nccl": "not in this torch" if gpus else "needs a GPU",
        "mpi": "" if dist.is_mpi_available() else "not in this torch; one that was built from source may have it",
    }
    if gpus and dist.is_nccl_available():
        backends["nccl"] = _try(lambda: _all_reduce("nccl", "cuda"))
    return {"lacks": list(missing()), "gpus": gpus, "backends": backends}


def _all_reduce(backend: str, device: str) -> None:
    """Send a message among one rank: enough to see whether the backend finds a network interface, or the GPU."""
    import torch
    import torch.distributed as dist

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
    finally:
        from mgwfbp.runtime.messages.gloo import destroy_process_group

        with suppress(Exception):  # what went wrong is known by now
            destroy_process_group()


def _try(work: Callable[[], None]) -> str:
    """Say what went wrong; empty where nothing did."""
    try:
        work()
    except Exception as error:  # of a backend: anything
        return _words(error)
    return ""


def _words(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        sys.stdout.write(json.dumps({"name": asked, **ask(asked)}) + "\n")
        sys.stdout.flush()
