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
from mgwfbp.results import BenchResult
from mgwfbp.run import TrainingRun
from mgwfbp.units import format_range, format_seconds, plural

__all__ = ["demo"]

# DDP's default puts all but the first gradients of this model into one bucket, which leaves when the backward pass has
# ended. As slow, and at this rate, messages take about as long as the backward pass, and two cores carry them easily.
REPLAYED, SCALE, RATE = "mobilenet_v2-h200-b64", 4, "600mbit"
WORKERS = 2
# Torch's own buckets, and the plan made of what was measured in the run itself.
STRATEGIES = ("ddp", "optimal")


def demo(
    turns: Annotated[int, typer.Option(min=1, help="How often DDP's default and ours take turns.")] = 9,
    epochs: Annotated[int, typer.Option(min=1, help="Of the training run.")] = 10,
    rate: Annotated[str, typer.Option(help="Of the emulated network between the workers.")] = RATE,
    lab: Annotated[bool, typer.Option(help="Emulate a network, where this machine allows it.")] = True,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FOLDER", help="Where results are kept.")
    ] = None,
) -> None:
    """Compare DDP's default with ours, and train a net.

    Over an emulated network: first a recorded model, whose steps with DDP's default buckets and with ours take turns;
    then a net that learns handwritten digits while its buckets are tuned.
    """
    try:
        cluster = Cluster(num_hosts=WORKERS, rate_bits_per_s=parse_rate(rate))
    except LabError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None
    names = (Path("runs") / f"demo-{number}" for number in count(1))
    folder = Path(output) if output else next(name for name in names if not name.exists())
    replay, training = folder / "replay.json", folder / "training"
    for place in (replay, training / "config.json"):
        if place.exists():
            raise FileError(f"{place} is there already; choose another folder by --output")
    folder.mkdir(parents=True, exist_ok=True)
    hosts = f"{plural(WORKERS, 'emulated host')} with links of {rate}"
    where = hosts if lab else f"{plural(WORKERS, 'worker')} on this machine"

    talk(f"MobileNet-v2 as recorded on an H200, {SCALE} times as slow, on {where}: both ways in turns")
    command = ["bench", "--replay", REPLAYED, "--scale", str(SCALE), "--strategies", ",".join(STRATEGIES)]
    command += ["--turns", str(turns), "--steps", "2", "--budget", "2", "--output", str(replay)]
    lab = _run(command, cluster, lab=lab)
    result = BenchResult.load(replay)

    talk("")
    talk(f"A net that learns handwritten digits, on {where}: tuned while it trains")
    _run(["train", "--strategy", "auto", "--epochs", str(epochs), "--output", str(training)], cluster, lab=lab)
    run = TrainingRun.load(training)
    if run.results is None:
        raise TrainError(f"{training}: the run was ended before its last epoch")

    talk("")
    _show_replay(result, lab=lab)
    _show_training(run)
    page = folder / "report.html"
    report([str(replay), str(training)], output=str(page))
    print_line(f"both, message by message: {page}")


def _run(command: Sequence[str], cluster: Cluster, *, lab: bool) -> bool:
    """Run one of our commands on emulated hosts, or on local workers; return whether hosts could be emulated."""
    full = [sys.executable, "-m", "mgwfbp", *command]
    if lab:
        # As torchrun does: the workers share the cores.
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        try:
            result = run_lab(cluster, full, environment=environment, on_line=lambda line: _show_line(line.text))
        except LabError as error:
            talk(f"no emulated network here: {error}")
        else:
            if result.failed_rank is not None:
                raise TrainError(f"worker {result.failed_rank} failed, status {result.status}")
            return True
    _run_here([*full, "--workers", str(cluster.num_hosts)])
    return False


def _run_here(command: Sequence[str]) -> None:
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
    if not text.startswith(("step ", "strategy ", *(f"{name} " for name in STRATEGIES))):  # they come again, below
        talk(text)


def _show_replay(result: BenchResult, *, lab: bool) -> None:
    """Print both ways side by side."""
    names = {"ddp": "DDP's default", "optimal": "ours"}
    rows = [
        (
            names[one.strategy],
            str(one.num_messages),
            format_seconds(one.measured_s),
            format_range(one.low_s, one.high_s),
            format_seconds(one.exposed_s),
            f"{result.ratio_to(one.strategy):.2f}x",
        )
        for one in result.strategies
    ]
    print_table(("MobileNet-v2, replayed", "messages", "step", "quartiles", "exposed", "vs DDP"), rows)
    turns = plural(len(result.strategies[0].turns_s), "turn")
    typer.echo(f"Measured: medians of {turns} each, one after the other, over {result.network}.")
    if not lab:
        typer.echo("Between workers on one machine messages take next to nothing: here there is little to win.")


def _show_training(run: TrainingRun) -> None:
    """Say what the net learnt and what the tuner found."""
    assert run.results is not None  # noqa: S101  # it was looked at
    typer.echo(
        f"The net that was trained: {run.results.top1:.2%} of the digits right after "
        f"{plural(len(run.epochs), 'epoch')}, {run.results.samples_per_s:.0f} samples/s."
    )
    tuning = run.tuning or {}
    if tuning.get("state") == "settled":
        before, after = (format_seconds(tuning[name]) for name in ("before_s", "after_s"))
        if run.plan is None or run.plan.planner == "ddp":
            typer.echo(f"Its tuner found nothing faster than DDP's own buckets ({before} a step) and kept them.")
        else:
            typer.echo(f"Its tuner, in turns: DDP's own buckets {before} a step, the plan that was kept {after}.")
    elif tuning.get("reason"):  # it gave up, or had too few steps
        print_line(f"Its tuner: {tuning['reason']}")
