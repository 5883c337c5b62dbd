"""Options that say which model to run and where, and what they give; shared by the commands that run one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mgwfbp.errors import MeasureError

if TYPE_CHECKING:
    import torch

    from mgwfbp.measure.workload import Workload

__all__ = [
    "BatchSize",
    "Factory",
    "ImageSize",
    "Model",
    "OnDevice",
    "SequenceLength",
    "Workers",
    "check_device",
    "device_of",
    "make_workload",
    "one_of",
]

Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="A torchvision model, or hf:TYPE of Hugging Face (hf:bert, hf:gpt2).")
]
Factory = Annotated[
    str | None, typer.Option(metavar="PACKAGE.MODULE:FUNCTION", help="Your own: returns (model, batch[, loss_fn]).")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples of one worker.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels a side, if not the model's usual.")]
SequenceLength = Annotated[int, typer.Option(min=1, help="Tokens of a sample of a language model.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Start so many local workers; under torchrun those given are used.")
]
OnDevice = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to run.")]


def one_of(**given: str | None) -> str:
    """Return the one option that is given, by whatever name, or refuse none and several."""
    values = [value for value in given.values() if value is not None]
    if len(values) != 1:
        raise typer.BadParameter("give exactly one", param_hint=[f"--{name}" for name in given])
    factory = given.get("factory")
    if factory is not None and ":" not in factory:
        raise typer.BadParameter(f"{factory!r}, expected package.module:function", param_hint="--factory")
    return values[0]


def make_workload(
    spec: str, batch_size: int, device: "torch.device | str", image_size: int | None, sequence_length: int
) -> "Workload":
    """Make the model, its batch and its loss."""
    from mgwfbp.measure.workload import build_workload

    # A factory may stand in the folder we are run from; Python looks there only when run as `python -m`.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return build_workload(
        spec, batch_size=batch_size, device=device, image_size=image_size, sequence_length=sequence_length
    )


def check_device(device: str) -> None:
    """Raise where a GPU is asked for and none is there."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise MeasureError(
            "no CUDA device here; use --device cpu, or `mgwfbp measure analytic` for a GPU you do not have"
        )


def device_of(device: str) -> "torch.device":
    """Return the device of this rank."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
