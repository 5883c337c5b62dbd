"""Strategies side by side on one model and network: `contest`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch.distributed as dist

from mgwfbp.bench.arena import Arena
from mgwfbp.bench.contenders import Contender, make_contender, predict_contender
from mgwfbp.bench.turns import Schedule, take_turns
from mgwfbp.cost import PiecewiseCost
from mgwfbp.measure.workload import Workload
from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.trace import ModelTrace

__all__ = ["Case", "Listener", "contest"]

# The turn without communication, among the strategies'.
ALONE = "no communication"


@dataclass(frozen=True, slots=True)
class Case:
    """What strategies are compared on: a model, its trace, and what messages cost between these workers."""

    workload: Workload
    trace: ModelTrace
    cost: PiecewiseCost
    server_cost: PiecewiseCost | None = None  # of a gradient through the rank that owns it
    network: str = "unnamed"
    ddp_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told how far a contest is."""

    on_steps: Callable[[int], object] = lambda _: None  # so many more steps are done
    on_turn: Callable[[int, Mapping[str, float]], object] = lambda _turn, _times: None


def contest(
    case: Case,
    strategies: Sequence[str],
    schedule: Schedule,
    *,
    listener: Listener | None = None,
    timelines: bool = True,
    source: Mapping[str, Any] | None = None,
) -> BenchResult:
    """Measure strategies in interleaved turns and predict each. All ranks must call it, and get the same result."""
    heard = listener or Listener()
    module = case.workload.model
    contenders = [make_contender(name, module, case.trace, case.cost) for name in strategies]
    arena = Arena(case.workload, case.trace, **case.ddp_arguments)
    ways = {ALONE: arena.enter_alone, **{one.strategy: arena.way(one) for one in contenders}}
    turns_s = take_turns(ways, schedule, arena.device, on_turn=heard.on_turn, on_steps=heard.on_steps)
    compute_s = median(turns_s[ALONE])
    return BenchResult(
        model=case.trace.model,
        workers=dist.get_world_size(),
        network=case.network,
        compute_s=compute_s,
        strategies=tuple(_result(case, one, turns_s[one.strategy], compute_s, timelines) for one in contenders),
        trace=case.trace,
        cost=case.cost,
        source={
            **(source or {}),
            "turns": schedule.turns,
            "steps": schedule.steps,
            "recorded_compute_s": case.trace.compute_s,
            "compute_turns_s": turns_s[ALONE],
        },
    )


def _result(
    case: Case, contender: Contender, turns_s: Sequence[float], compute_s: float, timelines: bool
) -> StrategyResult:
    predicted = predict_contender(contender, case.trace, case.cost, case.server_cost)
    return StrategyResult.of_turns(
        contender.strategy,
        turns_s,
        compute_s,
        num_messages=contender.plan.num_groups,
        predicted_s=None if predicted is None else predicted.iteration_s,
        plan=contender.plan,
        predicted_timeline=predicted if timelines else None,
    )
