"""``mgwfbp measure``: the backward pass, the network, and what a processor we do not have would do."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import typer

from mgwfbp.cli.blame import failures_of
from mgwfbp.cli.options import Output
from mgwfbp.cli.output import check_not_input, talk, talk_of_padding, write_record
from mgwfbp.cli.progress import progress_bar
from mgwfbp.cli.workers import network_name, process_group, rank, start_local_workers, under_launcher
from mgwfbp.cli.workloads import (
    Autocast,
    BatchSize,
    Factory,
    ImageSize,
    Model,
    OnDevice,
    SequenceLength,
    Workers,
    autocast_dtype,
    check_device,
    choose,
    device_of,
)
from mgwfbp.cost import LinearCost, PiecewiseCost
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.measure.devices import DEVICES
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import plural

__all__ = ["measure"]

# How long a rank waits for the others to come to the end of their own measurement.
MEASURE_TIMEOUT_S = 600.0

measure = typer.Typer(help="Measure the backward pass or the network.")


@measure.command()
def backward(
    model: Model = None,
    factory: Factory = None,
    batch_size: BatchSize = None,
    device: OnDevice = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that do not.")] = 5,
    accumulation_steps: Annotated[int, typer.Option(min=1, help="Backward passes a step.")] = 1,
    autocast: Autocast = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    workers: Workers = None,
    output: Output = None,
) -> None:
    """Run a model and note when each gradient is ready.

    And what each layer takes in the forward pass.
    """
    chosen = choose(
        model=model, factory=factory, batch_size=batch_size, image_size=image_size, sequence_length=sequence_length
    )
    check_device(device)
    start_local_workers(workers)

    from mgwfbp.measure.agreement import agree_on_trace, together
    from mgwfbp.measure.backward import measure_backward

    def local() -> ModelTrace:
        with (
            failures_of(chosen.spec, batch_size, device),
            progress_bar("backward", warmup + 2 * steps, shown=rank() == 0) as advance,
        ):
            workload = chosen.build(device_of(device))
            trace = measure_backward(
                workload.model,
                workload.batch,
                workload.loss_fn,
                name=workload.name,
                steps=steps,
                warmup=warmup,
                accumulation_steps=accumulation_steps,
                autocast_dtype=autocast_dtype(autocast),
                on_step=lambda: advance(1),
            )
            return replace(trace, source={**trace.source, **chosen.describe(workload)})

    if under_launcher():
        # A rank that is slower than the others is no dead one.
        with process_group(device, None, timeout_s=MEASURE_TIMEOUT_S):
            trace = agree_on_trace(together(local))
    else:
        trace = local()
    if rank() == 0:
        _write_trace(trace, output)


@measure.command()
def allreduce(
    workers: Workers = None,
    device: OnDevice = "cpu",
    backend: Annotated[
        Literal["gloo", "nccl", "mpi"] | None, typer.Option(help="nccl on a GPU and gloo on a CPU if not given.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="About how long it may take.")] = 5.0,
    max_mb: Annotated[float, typer.Option(min=0.001, metavar="MB", help="The largest message.")] = 256.0,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Take all gradients of this trace as the largest message.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the numbers in the messages.")
    ] = "float32",
    halves: Annotated[
        bool,
        typer.Option(
            "--halves",
            help="Measure reduce-scatters and all-gathers of the same sizes, too: plans for a sharded optimizer use "
            "them.",
        ),
    ] = False,
    wire: Annotated[
        Literal["bfloat16", "float16"] | None,
        typer.Option(
            help="Measure messages in this precision, too, with converting, as a model with wire= sends them: "
            "--wire-cost of other commands reads the file."
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Measure what all-reduces take between the workers."""
    if not (math.isfinite(max_mb) and math.isfinite(budget)):
        raise typer.BadParameter("expected finite numbers", param_hint=["--max-mb", "--budget"])
    if wire and (halves or dtype != "float32"):
        raise typer.BadParameter("goes with all-reduces of float32 only", param_hint="--wire")
    max_bytes = load_trace(trace).grad_bytes if trace else int(max_mb * 1e6)
    check_device(device)
    start_local_workers(workers)
    if not under_launcher():
        raise typer.BadParameter(
            "2 or more, or run under torchrun: one worker has nobody to talk to", param_hint="--workers"
        )
    import torch

    from mgwfbp.measure.allreduce import measure_allreduce, measure_halves, measure_wire

    with process_group(device, backend), progress_bar("all-reduce", 1.0, shown=rank() == 0) as advance:
        done, network = 0.0, network_name()

        def on_progress(fraction: float) -> None:
            nonlocal done
            advance(fraction - done)
            done = fraction

        of_type = {"dtype": getattr(torch, dtype)}
        measured: Callable[..., PiecewiseCost | ShardedCost | WireCost] = (
            partial(measure_wire, wire) if wire else partial(measure_halves if halves else measure_allreduce, **of_type)
        )
        cost = measured(device=device_of(device), max_bytes=max(8, max_bytes), budget_s=budget, on_progress=on_progress)
    if rank() == 0:
        _write_cost(cost, network, output)


def _write_cost(cost: PiecewiseCost | ShardedCost | WireCost, network: str, output: str | None) -> None:
    """Write what was measured, name the network in it, and say how near each curve is to its samples."""

    def named(part: LinearCost | PiecewiseCost) -> LinearCost | PiecewiseCost:
        return replace(part, source={**part.source, "network": network})

    if isinstance(cost, ShardedCost):
        halves = {"reduce-scatter: ": named(cost.reduce_scatter), "all-gather: ": named(cost.all_gather)}
        parts = {"": named(cost.all_reduce), **halves}
        write_record(ShardedCost(*parts.values()), output)
    elif isinstance(cost, WireCost):
        parts = {"": named(cost.full), f"in {cost.wire}: ": named(cost.low)}
        full, low = parts.values()
        write_record(WireCost(full, low, cost.wire), output)
    else:
        parts = {"": named(cost)}
        write_record(parts[""], output)
    for words, part in parts.items():
        quality = part.source["fit"]
        talk(f"{words}{part!r}: mean error {quality['mean_error']:.1%}, worst {quality['worst_error']:.1%}")
        talk_of_padding(part)


@measure.command()
def analytic(
    model: Model = None,
    factory: Factory = None,
    batch_size: BatchSize = None,
    device: Annotated[
        str, typer.Option(metavar="|".join(DEVICES), help="The processor.", callback=lambda name: _known_device(name))
    ] = "k80",
    images_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="The speed of one worker, to which all times are scaled.")
    ] = None,
    autocast: Autocast = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    output: Output = None,
) -> None:
    """Estimate the backward pass on a GPU you do not have.

    By counting a model's operations: when each gradient would be ready.
    """
    chosen = choose(
        model=model, factory=factory, batch_size=batch_size, image_size=image_size, sequence_length=sequence_length
    )
    from mgwfbp.measure.analytic import measure_analytic

    with failures_of(chosen.spec, batch_size, "meta"):
        workload = chosen.build("meta")
        trace = measure_analytic(
            workload, DEVICES[device], images_per_second=images_per_second, autocast_dtype=autocast_dtype(autocast)
        )
    _write_trace(replace(trace, source={**trace.source, **chosen.describe(workload)}), output)


@measure.command()
def profile(
    file: Annotated[str, typer.Argument(metavar="PROFILE.JSON", help="What prof.export_chrome_trace wrote.")],
    model: Model = None,
    factory: Factory = None,
    batch_size: BatchSize = None,
    output: Output = None,
) -> None:
    """Make a trace from an export of torch.profiler."""
    check_not_input(output, [file])
    chosen = choose(model=model, factory=factory, batch_size=batch_size)
    from mgwfbp.measure.profile import trace_from_profile

    with failures_of(chosen.spec, batch_size, "meta"):
        trace = trace_from_profile(file, chosen.build("meta"))
    _write_trace(trace, output)


def _known_device(name: str) -> str:
    if name not in DEVICES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(DEVICES)}")
    return name


def _write_trace(trace: ModelTrace, output: str | None) -> None:
    write_record(trace, output)
    talk(repr(trace))
    if trace.source.get("foreign_gradients"):
        left_out = plural(trace.source["foreign_gradients"], "gradient")
        talk(f"left out: {left_out} of a shape that no parameter of the model has")
    if trace.source.get("unused"):
        talk(f"unused parameters, ready from the start: {', '.join(trace.source['unused'][:5])}")
    if trace.source.get("num_orders", 1) > 1:
        talk(f"the order of gradients changed from step to step: {trace.source['num_orders']} orders were seen")
