"""CUDA MPS: without it, ranks that share a GPU take turns, about 5 ms per all-reduce."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mgwfbp.errors import LabError

__all__ = ["client_environment", "find_control", "is_running", "mps_environment", "start", "stop"]

_ANSWER_S = 10  # a daemon that does not answer for so long is no daemon


def find_control() -> str | None:
    """Return the path of NVIDIA's control program, or None where there is none."""
    return shutil.which("nvidia-cuda-mps-control")


def mps_environment(directory: Path) -> dict[str, str]:
    """Return the variables by which a daemon and its clients find one another."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}


def client_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what makes a rank's streams run beside one another, as they do on a GPU of its own.

    A client of MPS gets two hardware queues where a process without it gets eight, so that a third stream (one that
    waits for a message, say) stops the kernels of another: GoogLeNet's step was 30 % longer with one such stream.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: environment.get(name, "8")}


def is_running(control: str, environment: Mapping[str, str]) -> bool:
    """Tell whether a daemon answers where this environment points."""
    return _tell(control, "get_server_list", environment) == 0


def start(control: str, directory: Path, environment: Mapping[str, str]) -> None:
    """Start a daemon of our own, with its pipes in `directory`."""
    directory.mkdir(mode=0o700)
    try:
        done = subprocess.run(  # noqa: S603 - the program was looked up, nothing comes from outside
            [control, "-d"],
            env={**environment, **mps_environment(directory)},
            stdin=subprocess.DEVNULL,
            # Not pipes: the daemon would keep them open, and we would wait for their end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{control} -d: {error}") from error
    if done.returncode != 0:
        raise LabError(f"{control} -d ended with exit status {done.returncode}")


def stop(control: str, directory: Path, environment: Mapping[str, str]) -> None:
    """Ask our daemon to end; one that does not is killed with the rest of the lab."""
    _tell(control, "quit", {**environment, **mps_environment(directory)})


def _tell(control: str, request: str, environment: Mapping[str, str]) -> int | None:
    try:
        return subprocess.run(  # noqa: S603 - the program was looked up, nothing comes from outside
            [control],
            env=dict(environment),
            input=request.encode() + b"\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
