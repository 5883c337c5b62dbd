"""Options that say which model to run and where, and what they give; shared by the commands that run one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mgwfbp.errors import MeasureError

if TYPE_CHECKING:
    import torch

    from mgwfbp.measure.workload import Workload

__all__ = [
    "Autocast",
    "BatchSize",
    "Chosen",
    "Factory",
    "ImageSize",
    "Model",
    "OnDevice",
    "SequenceLength",
    "Workers",
    "autocast_dtype",
    "check_device",
    "choose",
    "device_of",
]

Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="A torchvision model, or hf:TYPE of Hugging Face (hf:bert, hf:gpt2).")
]
Factory = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Your own: a function that returns (model, batch[, loss_fn]), and may take batch_size.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one worker (32; of a factory, its own).")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels a side, if not the model's usual.")]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample of a language model (128).")]
Autocast = Annotated[Literal["bf16", "fp16"] | None, typer.Option(help="Mixed precision.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Start so many local workers; under torchrun those given are used.")
]
OnDevice = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to run.")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which model the options name."""

    spec: str
    batch_size: int | None
    image_size: int | None = None
    sequence_length: int | None = None

    def build(self, device: "torch.device | str") -> "Workload":
        """Make the model, its batch and its loss."""
        from mgwfbp.measure.workload import build_workload

        # A factory may stand in the folder we are run from; Python looks there only when run as `python -m`.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return build_workload(
            self.spec,
            batch_size=self.batch_size,
            device=device,
            image_size=self.image_size,
            sequence_length=self.sequence_length,
        )

    def describe(self, workload: "Workload") -> dict[str, Any]:
        """Return what a trace says about where it comes from."""
        from mgwfbp.measure.workload import DEFAULT_SEQUENCE_LENGTH

        said = {"batch_size": workload.batch_size, "workload": self.spec}
        if self.spec.startswith("hf:"):
            said["sequence_length"] = self.sequence_length or DEFAULT_SEQUENCE_LENGTH
        return said


def choose(
    *,
    model: str | None,
    factory: str | None,
    batch_size: int | None,
    image_size: int | None = None,
    sequence_length: int | None = None,
) -> Chosen:
    """Return the one model that is named, or refuse none, several, and options that it does not have."""
    if (model is None) == (factory is None):
        raise typer.BadParameter("give exactly one", param_hint=["--model", "--factory"])
    if factory is not None and ":" not in factory:
        raise typer.BadParameter(f"{factory!r}, expected package.module:function", param_hint="--factory")
    if image_size is not None and (model is None or model.startswith("hf:")):
        raise typer.BadParameter("only models of torchvision have one; leave it out", param_hint="--image-size")
    if sequence_length is not None and (model is None or not model.startswith("hf:")):
        raise typer.BadParameter("only models hf:TYPE have one; leave it out", param_hint="--sequence-length")
    return Chosen(model or factory or "", batch_size, image_size, sequence_length)


def autocast_dtype(name: str | None) -> "torch.dtype | None":
    """Return the type that ``--autocast`` names."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name] if name else None


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
