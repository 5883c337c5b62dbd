"""``mgwfbp bench``: strategies side by side, measured."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgwfbp.cli.blame import failures_of
from mgwfbp.cli.document import Grid, Section, to_markdown
from mgwfbp.cli.machine import describe_run, meters, since
from mgwfbp.cli.options import Output
from mgwfbp.cli.output import check_writable, print_table, talk, talk_of_padding, write_record
from mgwfbp.cli.progress import progress_bar
from mgwfbp.cli.workers import network_name, process_group, rank, start_local_workers, under_launcher
from mgwfbp.cli.workloads import (
    BatchSize,
    Factory,
    ImageSize,
    Model,
    OnDevice,
    SequenceLength,
    Workers,
    check_device,
    choose,
    device_of,
)
from mgwfbp.errors import StrategyError, TraceError
from mgwfbp.files import show_path, write_text
from mgwfbp.results import BenchResult
from mgwfbp.trace import ModelTrace, load_trace
from mgwfbp.units import format_seconds, plural

if TYPE_CHECKING:
    from mgwfbp.bench.contest import Case
    from mgwfbp.bench.turns import Schedule
    from mgwfbp.measure.workload import Workload

__all__ = ["bench"]

# A step in slow motion may take a minute, and a rank may wait for another's whole step.
BENCH_TIMEOUT_S = 900.0


def bench(
    model: Model = None,
    factory: Factory = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="A stand-in that waits as this trace says, and computes nothing."),
    ] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="With --replay: times so many times as long.")] = 1.0,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Of auto, ddp, naive, wfbp, single, bucket, bucket-N, mgwfbp, optimal, cautious, ps; of these all but "
            "naive and ps also with +bf16 or +fp16 behind the name; and bf16-hook-N, torch's hook with N MiB.",
        ),
    ] = "naive,wfbp,single,ps,mgwfbp,ddp,optimal,auto",
    turns: Annotated[int, typer.Option(min=1, help="How often every strategy's turn comes.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count in a turn.")] = 5,
    settle: Annotated[int, typer.Option(min=0, help="Steps before them that do not.")] = 1,
    learn: Annotated[
        bool, typer.Option(help="Plan and predict with what messages and gradients take in training, watched first.")
    ] = True,
    budget: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="For the sweep of message sizes.")] = 10.0,
    tune_steps: Annotated[int, typer.Option(min=0, help="In which `auto` may compare plans, at most.")] = 1200,
    batch_size: BatchSize = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    device: OnDevice = "cpu",
    workers: Workers = None,
    network_label: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the result calls the network.")
    ] = None,
    timelines: Annotated[bool, typer.Option(help="Keep predicted and measured timelines in the result.")] = True,
    output: Output = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the table, as Markdown.")] = None,
) -> None:
    """Measure strategies side by side, in interleaved turns.

    On a model of yours, or on a recorded one over the real network. Runs under torchrun or `mgwfbp lab`, or starts
    local workers itself. The table goes to stderr where the result goes to stdout.
    """
    if [model, factory, replay].count(None) != 2:
        raise typer.BadParameter("give exactly one", param_hint=["--model", "--factory", "--replay"])
    names = _strategy_names(strategies)
    if replay is None:
        if scale != 1:
            raise typer.BadParameter("only recorded times can be slowed: give --replay", param_hint="--scale")
        chosen = choose(
            model=model, factory=factory, batch_size=batch_size, image_size=image_size, sequence_length=sequence_length
        )
    else:
        _check_replayed(device, batch_size, image_size, sequence_length)
        recorded = _load_replay(replay, scale)
    check_device(device)
    if rank() == 0:
        check_writable(output, markdown)
    start_local_workers(workers)
    if not under_launcher():
        raise typer.BadParameter(
            "2 or more, or run under torchrun: one worker has nobody to talk to", param_hint="--workers"
        )
    from mgwfbp.bench.turns import Schedule

    schedule = Schedule(turns, steps, settle)
    with process_group(device, None, timeout_s=BENCH_TIMEOUT_S):
        wanted = _Wanted(names, network_label or network_name(), budget, tune_steps)
        if replay is None:
            with failures_of(chosen.spec, batch_size, device):
                case = _model_case(lambda: chosen.build(device_of(device)), wanted)
        else:
            case = _replay_case(recorded, scale, wanted)
        result = _run(case, names, schedule, learn, timelines)
    if rank() == 0:
        _show(result, output, markdown)


def _check_replayed(device: str, *of_models: int | None) -> None:
    """Refuse what a replay cannot heed."""
    if device != "cpu":
        raise typer.BadParameter("a replay needs no GPU; leave it out", param_hint="--device")
    for option, value in zip(("--batch-size", "--image-size", "--sequence-length"), of_models, strict=True):
        if value is not None:
            raise typer.BadParameter("a replay has that of its trace; leave it out", param_hint=option)


def _load_replay(name: str, scale: float) -> ModelTrace:
    """Return the recorded trace, or refuse one whose steps nobody can wait for before any worker is started."""
    recorded = load_trace(name)
    step_s = recorded.compute_s * scale
    if not 0 < step_s <= BENCH_TIMEOUT_S:
        raise TraceError(
            f"{show_path(name)}: a step of it would take {format_seconds(step_s)} of computation, expected more than "
            f"nothing and {BENCH_TIMEOUT_S:g} s at most; see --scale"
        )
    return recorded


def _strategy_names(text: str) -> tuple[str, ...]:
    """Return the names, or refuse unknown ones before any worker is started."""
    from mgwfbp.bench.contenders import check_strategies

    try:
        return check_strategies([name.strip() for name in text.split(",") if name.strip()])
    except StrategyError as error:
        raise typer.BadParameter(str(error), param_hint="--strategies") from error


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for, whatever the model."""

    strategies: tuple[str, ...]
    network: str
    budget_s: float  # for the sweep
    tune_steps: int


def _replay_case(recorded: ModelTrace, scale: float, wanted: _Wanted) -> "Case":
    import torch

    from mgwfbp.bench.replay import Replay, replayable
    from mgwfbp.measure.agreement import together
    from mgwfbp.measure.workload import Workload, default_loss

    trace = replayable(recorded.scaled(scale))
    workload = together(lambda: Workload(trace.model, Replay(trace), torch.zeros(1), 1, default_loss))
    # Gradients that stay in the Reducer's buffers are not copied back: the processor has only messages to carry.
    return _measured(workload, trace, wanted, {"gradient_as_bucket_view": True})


def _model_case(make: "Callable[[], Workload]", wanted: _Wanted) -> "Case":
    from mgwfbp.measure.agreement import agree_on_trace, together
    from mgwfbp.measure.backward import measure_backward

    workload = together(make)
    trace = together(lambda: measure_backward(workload.model, workload.batch, workload.loss_fn, name=workload.name))
    return _measured(workload, agree_on_trace(trace), wanted, {})


def _measured(workload: "Workload", trace: ModelTrace, wanted: _Wanted, ddp_arguments: Mapping[str, Any]) -> "Case":
    """Measure what messages cost between these workers."""
    from mgwfbp.bench.contest import Case
    from mgwfbp.bench.servers import measure_servers
    from mgwfbp.measure.allreduce import measure_allreduce

    device = next(workload.model.parameters()).device
    with _fraction("all-reduce") as on_progress:
        cost = measure_allreduce(
            device=device, max_bytes=max(8, trace.grad_bytes), budget_s=wanted.budget_s, on_progress=on_progress
        )
    _tell(repr(cost))
    servers = None
    if "ps" in wanted.strategies:
        with _fraction("parameter servers") as on_progress:
            largest = max(layer.grad_bytes for layer in trace.layers)
            servers = measure_servers(device, max_bytes=largest, on_progress=on_progress)
    return Case(workload, trace, cost, wanted.network, servers, {"tune_steps": wanted.tune_steps, **ddp_arguments})


def _run(case: "Case", names: tuple[str, ...], schedule: "Schedule", learns: bool, timelines: bool) -> BenchResult:
    from mgwfbp.bench.contest import Progress, contest, num_steps

    def on_turn(turn: int, times_s: Mapping[str, float]) -> None:
        shown = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in times_s.items())
        _tell(f"turn {turn + 1} of {schedule.turns}: {shown}")

    total = num_steps(names, schedule, learns=learns, timelines=timelines)
    with progress_bar("steps", total, shown=rank() == 0) as advance:
        progress = Progress(on_steps=advance, on_turn=on_turn, on_phase=_tell)
        source, before = describe_run(), meters()
        result = contest(case, names, schedule, learns=learns, timelines=timelines, progress=progress, source=source)
    return replace(result, source={**result.source, **since(before)})


def _show(result: BenchResult, output: str | None, markdown: str | None) -> None:
    from mgwfbp.bench.tables import bench_rows, bench_titles, error_summary, noise_summary

    titles, rows = bench_titles(result), bench_rows(result)
    write_record(result, output)
    alone = f"computation alone {format_seconds(result.compute_s)}"
    summary = "; ".join(filter(None, (alone, error_summary(result), noise_summary(result))))
    if output is not None:
        print_table(titles, rows)
    talk(f"{result!r}; {summary}")
    if result.cost is not None:
        talk_of_padding(result.cost)
    if markdown is not None:
        heading = f"{result.model}, {plural(result.workers, 'worker')}, {result.network}"
        table = Grid(titles, tuple(rows))
        write_text(markdown, to_markdown("Strategies side by side", [Section(heading, (table, summary))]))
        talk(f"wrote {markdown}")


def _tell(text: str) -> None:
    if rank() == 0:
        talk(text)


@contextmanager
def _fraction(what: str) -> Iterator[Any]:
    """Show the progress of something that says which fraction of it is done."""
    with progress_bar(what, 1.0, shown=rank() == 0) as advance:
        done = 0.0

        def on_progress(fraction: float) -> None:
            nonlocal done
            advance(fraction - done)
            done = fraction

        yield on_progress
