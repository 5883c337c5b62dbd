"""Records of every kind a report is made from, small and made by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mgwfbp import (
    BenchResult,
    LayerTrace,
    MergePlan,
    ModelTrace,
    PiecewiseCost,
    Span,
    StrategyResult,
    Timeline,
    find_plan,
    fit,
    predict,
)
from mgwfbp.run import LoggedEpoch, LoggedStep, RunResults, log_line

# Twelve gradients, every third one large; a step of 30 ms of computation.
_SIZES = {"weight": 2_000_000, "bias": 4000}
_PARTS = [f"layer{place}.{'weight' if place % 3 == 0 else 'bias'}" for place in range(12)]
TRACE = ModelTrace("toy", 0.006, tuple(LayerTrace(name, 0.002, _SIZES[name.split(".")[1]]) for name in _PARTS))


def measured_cost(workers: int = 4) -> PiecewiseCost:
    """A curve fitted to a sweep, as `measure allreduce` writes it: with the points in it."""
    streamed = [(4**power, 1e-4 + 4**power * 1e-9 * (1.03 if power % 2 else 0.97)) for power in range(1, 14)]
    isolated = [(size, time * 1.3) for size, time in streamed]
    source = {"measured": "allreduce", "backend": "gloo", "streamed": streamed, "isolated": isolated}
    cost = fit(streamed, workers, kind="piecewise", source=source).cost
    assert isinstance(cost, PiecewiseCost)
    return cost


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """The same step with everything so many times as long, as a measurement might have it."""

    def longer(span: Span) -> Span:
        return Span(span.layers, span.num_bytes, span.ready_s * factor, span.start_s * factor, span.end_s * factor)

    return Timeline(
        timeline.model,
        timeline.planner,
        timeline.workers,
        longer(timeline.forward),
        tuple(longer(span) for span in timeline.backward),
        tuple(longer(span) for span in timeline.messages),
    )


def bench(workers: int = 4, names: Sequence[str] = ("bucket", "wfbp", "optimal")) -> BenchResult:
    """Strategies measured 10 % above their prediction."""
    cost = measured_cost(workers)
    results = []
    for name in names:
        plan = find_plan(TRACE, cost, name)
        predicted = predict(TRACE, cost, plan)
        turns_s = [predicted.iteration_s * factor for factor in (1.08, 1.10, 1.13)]
        results.append(
            StrategyResult.of_turns(
                "ddp" if name == "bucket" else name,
                turns_s,
                TRACE.compute_s,
                num_messages=plan.num_groups,
                predicted_s=predicted.iteration_s,
                plan=plan,
                timeline=stretched(predicted, 1.10),
            )
        )
    return BenchResult("toy", workers, "1 Gbit lab", TRACE.compute_s, tuple(results), TRACE, cost)


def write_run(folder: Path, *, model: str = "toy", finished: bool = True, plan: MergePlan | None = None) -> Path:
    """The folder of a training run of three epochs; its step was measured to be 5 % longer than predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": "mgwfbp.train/1", "model": model, "strategy": "optimal"}
    (folder / "config.json").write_text(json.dumps(config))
    cost = measured_cost(2)
    plan = plan or find_plan(TRACE, cost)
    predicted = predict(TRACE, cost, plan)
    TRACE.save(folder / "trace.json")
    cost.save(folder / "cost.json")
    plan.save(folder / "plan.json")
    predicted.save(folder / "predicted.json")
    stretched(predicted, 1.05).save(folder / "timeline.json")
    steps = [LoggedStep(step, step // 11, 2.0 / step, 900.0 + step, 0.1, 0.05, 0.001) for step in range(1, 31)]
    (folder / "log.jsonl").write_text("".join(map(log_line, steps)))
    epochs = [LoggedEpoch(epoch, 2.0 - epoch / 2, 1.5 - epoch / 3, 0.5 + epoch / 10, 0.9, 3.0) for epoch in range(3)]
    (folder / "epochs.jsonl").write_text("".join(map(log_line, epochs)))
    if finished:
        RunResults(model, "optimal", 2, 3, 30, 0.7, 0.9, 915.0, 9.0, plan.num_groups).save(folder / "results.json")
    return folder


def write_demo(folder: Path) -> list[Path]:
    """What `mgwfbp demo` leaves: a run of DDP, which measured its step and no more, and one that was tuned."""
    cost = measured_cost(2)
    ddp = write_run(folder / "ddp", plan=find_plan(TRACE, cost, "bucket"))
    for name in ("trace.json", "cost.json", "plan.json", "predicted.json"):
        (ddp / name).unlink()
    auto = write_run(folder / "auto")
    tuning = {"format": "mgwfbp.tuning/1", "state": "settled", "before_s": 0.0412, "after_s": 0.0387}
    (auto / "tuning.json").write_text(json.dumps(tuning))
    for run, planner in ((ddp, "ddp"), (auto, "auto")):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "strategy": planner}))
        timeline = Timeline.load(run / "timeline.json")
        replace(timeline, planner=planner).save(run / "timeline.json")
    return [ddp, auto]


def sweep_rows() -> list[dict[str, object]]:
    """What `mgwfbp simulate --json` prints."""
    return [
        {
            "planner": planner,
            "network": "10GbE",
            "scale": 1.0,
            "workers": workers,
            "num_groups": 3,
            "iteration_s": 0.03 * (1 + loss * workers),
            "compute_s": 0.03,
            "exposed_s": 0.03 * loss * workers,
            "speedup": workers / (1 + loss * workers),
            "efficiency": 1 / (1 + loss * workers),
        }
        for workers in (4, 8, 16)
        for planner, loss in (("wfbp", 0.05), ("bucket", 0.02), ("optimal", 0.01))
    ]


def write_all(folder: Path) -> list[str]:
    """One file of every kind; returns their names."""
    cost = measured_cost()
    plan = MergePlan.of_sizes(TRACE, [4, 8], planner="by hand")
    TRACE.save(folder / "trace.json")
    cost.save(folder / "cost.json")
    plan.save(folder / "plan.json")
    bench().save(folder / "bench.json")
    stretched(predict(TRACE, cost, find_plan(TRACE, cost, "mgwfbp")), 1.2).save(folder / "timeline.json")
    (folder / "sweep.json").write_text(json.dumps(sweep_rows()))
    write_run(folder / "run")
    return ["trace.json", "cost.json", "plan.json", "bench.json", "timeline.json", "sweep.json", "run"]
