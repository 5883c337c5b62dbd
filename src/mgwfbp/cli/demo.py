"""``mgwfbp demo``: what the README's first command runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from mgwfbp.cli.children import start_child
from mgwfbp.cli.output import print_line, print_table, talk
from mgwfbp.cli.report import report
from mgwfbp.errors import FileError, LabError, TrainError
from mgwfbp.lab import Cluster, parse_rate, run_lab
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_seconds, plural

__all__ = ["demo"]

# What is compared: torch's own buckets, and ours.
STRATEGIES = ("ddp", "auto")


def demo(
    workers: Annotated[int, typer.Option(min=2, help="How many train together.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Of each of the two runs.")] = 16,
    rate: Annotated[str, typer.Option(help="Of the emulated network between the workers.")] = "1gbit",
    lab: Annotated[bool, typer.Option(help="Emulate a network, where this machine allows it.")] = True,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FOLDER", help="Where the two runs are kept.")
    ] = None,
) -> None:
    """Train a net with DDP's default and with ours, and compare.

    On handwritten digits, over an emulated network.
    """
    try:
        cluster = Cluster(num_hosts=workers, rate_bits_per_s=parse_rate(rate))
    except LabError as error:
        raise typer.BadParameter(str(error), param_hint="--rate, --workers") from None
    names = (Path("runs") / f"demo-{number}" for number in count(1))
    folder = Path(output) if output else next(name for name in names if not name.exists())
    for strategy in STRATEGIES:
        if (folder / strategy / "config.json").exists():
            raise FileError(f"{folder / strategy} holds a run already; choose another folder by --output")
    runs = []
    for strategy in STRATEGIES:
        place = folder / strategy
        command = [sys.executable, "-m", "mgwfbp", "train", "--strategy", strategy, "--epochs", str(epochs)]
        command += ["--output", str(place)]
        if lab:
            talk("")
            talk(f"{strategy}: {workers} emulated hosts with links of {rate}")
            lab = _train_in_lab(command, cluster)
        if not lab:
            talk("")
            talk(f"{strategy}: {plural(workers, 'worker')} on this machine")
            _train_here([*command, "--workers", str(workers)])
        runs.append(TrainingRun.load(place))
        if runs[-1].results is None:
            raise TrainError(f"{place}: the run was ended before its last epoch")
    _show(runs)
    _write_report(folder, runs)


def _train_in_lab(command: Sequence[str], cluster: Cluster) -> bool:
    """Train on emulated hosts; return False where there can be none."""
    # As torchrun does: the workers share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        result = run_lab(cluster, command, environment=environment, on_line=lambda line: _show_line(line.text))
    except LabError as error:
        talk(f"no emulated network here: {error}")
        return False
    if result.failed_rank is not None:
        raise TrainError(f"worker {result.failed_rank} failed, status {result.status}")
    return True


def _train_here(command: Sequence[str]) -> None:
    with start_child(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None  # noqa: S101  # it is a pipe
        try:
            for line in process.stderr:
                _show_line(line.rstrip())
        except KeyboardInterrupt:  # passed on once; the run saves the step at hand
            process.send_signal(signal.SIGINT)
            for line in process.stderr:
                _show_line(line.rstrip())
            raise
    if process.returncode:
        raise TrainError(f"`{' '.join(command[1:])}` failed, status {process.returncode}")


def _show_line(text: str) -> None:
    if not text.startswith("step "):
        talk(text)


def _show(runs: Sequence[TrainingRun]) -> None:
    """Print the runs side by side, and what the tuner has to say."""
    rows = []
    for run in runs:
        assert run.results is not None  # noqa: S101  # it was looked at
        exposed_s = next((line.exposed_s for line in reversed(run.steps) if line.exposed_s is not None), None)
        rows.append(
            (
                run.results.strategy,
                f"{run.results.samples_per_s:.0f}",
                "-" if run.timeline is None else str(len(run.timeline.messages)),
                "-" if exposed_s is None else format_seconds(exposed_s),
                f"{run.results.top1:.2%}",
            )
        )
    talk("")
    print_table(("strategy", "samples/s", "messages", "exposed", "top-1"), rows)
    tuned = runs[-1]
    if tuned.plan is not None:
        typer.echo(repr(tuned.plan))
    tuning = tuned.tuning or {}
    if tuning.get("state") == "settled":
        before, after = (format_seconds(tuning[name]) for name in ("before_s", "after_s"))
        typer.echo("These runs came one after the other, so what else the machine did meanwhile is in their speeds.")
        typer.echo(f"In turns within one run, by the tuner: DDP's buckets {before} a step, the chosen plan {after}.")
        if tuned.plan is not None and tuned.plan.planner == "ddp":
            typer.echo("They are the same: of all plans that were tried here, none was faster than DDP's own buckets.")
    elif tuning.get("reason"):  # it gave up
        print_line(f"the tuner kept DDP's own buckets: {tuning['reason']}")
    else:
        typer.echo("the run was too short for the tuner to settle: give more --epochs")


def _write_report(folder: Path, runs: Sequence[TrainingRun]) -> None:
    """Write a page with both runs and say where it is."""
    page = folder / "report.html"
    report([str(run.folder) for run in runs], output=str(page))
    print_line(f"both runs, step by step: {page}")
