"""Who takes part: a strategy's name, the messages it sends, and what its step is predicted to take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from mgwfbp.bench.servers import ServerCosts, predict_servers
from mgwfbp.cost import Cost
from mgwfbp.errors import StrategyError
from mgwfbp.plan import MergePlan
from mgwfbp.planners import Planner
from mgwfbp.record import first_repeated
from mgwfbp.runtime.strategies import STRATEGIES, plan_for, split_wire
from mgwfbp.timeline import Timeline, predict, predict_naive
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = [
    "HOOKED",
    "Contender",
    "Known",
    "Measured",
    "check_strategies",
    "hook_mib",
    "make_contender",
    "predict_contender",
]

# Strategies whose messages are known when something was measured.
MEASURED = ("auto", "ddp", "mgwfbp", "optimal", "cautious")
# Strategies that no plan can say: each needs a wrapped model of its own.
HOOKED = ("naive", "ps")
# Torch's own DDP with buckets of so many MiB and its hook that sends in bf16, the sums too: bf16-hook-25.
HOOK = "bf16-hook-"


@dataclass(frozen=True, slots=True)
class Contender:
    """A strategy that can take its turn."""

    strategy: str
    plan: MergePlan  # the messages of a step
    by_torch: bool = False  # torch's own buckets, of which the plan is only a description
    wire: str | None = None  # the precision in which its messages may travel


def hook_mib(strategy: str) -> float | None:
    """Return the size of buckets of torch's DDP with its hook; None for any other strategy.

    >>> hook_mib("bf16-hook-25"), hook_mib("wfbp")
    (25.0, None)
    """
    try:
        mib = float(strategy.removeprefix(HOOK)) if strategy.startswith(HOOK) else 0.0
    except ValueError:
        return None
    return mib if 0 < mib < math.inf else None


def check_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, or raise unless there are some, each once and each known."""
    if not names:
        raise StrategyError("no strategy is given, expected one or more")
    repeated = first_repeated(names)
    if repeated is not None:
        raise StrategyError(f"strategy {quote(repeated)} stands twice, expected every name once")
    toy = nn.Linear(1, 1)
    for name in names:
        if split_wire(name)[0] in MEASURED or hook_mib(name) is not None:
            continue
        try:
            plan_for(toy, name)
        except StrategyError:
            raise StrategyError(
                f"strategy {quote(name)} is unknown, expected one of {', '.join(STRATEGIES)}, bucket-N for N MiB, all "
                f"of these but naive and ps also with +bf16 or +fp16, or {HOOK}N for torch's own hook"
            ) from None
    return tuple(names)


def make_contender(
    strategy: str, module: nn.Module, trace: ModelTrace, cost: Cost, planner: Planner | None = None
) -> Contender:
    """Plan for a strategy's messages, with another planner than its own if one is given.

    ``ddp`` is described by what torch's buckets are once it has seen a step, and so is it with torch's hook.
    """
    if (mib := hook_mib(strategy)) is not None:
        buckets = plan_for(module, f"bucket-{mib:g}", trace=trace, cost=cost)
        return Contender(strategy, replace(buckets, planner=strategy), by_torch=True)
    if strategy == "ddp":
        buckets = plan_for(module, "bucket", trace=trace, cost=cost)
        return Contender("ddp", replace(buckets, planner="ddp"), by_torch=True)
    plan = plan_for(module, strategy, trace=trace, cost=cost, planner=planner)
    return Contender(strategy, plan, wire=split_wire(strategy)[1])


@dataclass(frozen=True, slots=True)
class Measured:
    """When gradients are ready and what messages cost."""

    trace: ModelTrace
    cost: Cost


@dataclass(frozen=True, slots=True)
class Known:
    """What predictions are made with, by whether messages and the backward pass are under way at the same time."""

    apart: Measured
    together: Measured
    servers: ServerCosts | None = None  # of gradients through the ranks that own them


def predict_contender(contender: Contender, known: Known) -> Timeline | None:
    """Lay out the step of a contender as the package's model has it; None where nothing is known of its messages.

    Naive S-SGD overlaps nothing: its messages have the network to themselves. Of torch's hook nothing was observed.
    """
    if hook_mib(contender.strategy) is not None:
        return None
    apart, together = known.apart, known.together
    if contender.strategy == "naive":
        return predict_naive(apart.trace, apart.cost)
    if contender.strategy == "ps":
        return None if known.servers is None else predict_servers(together.trace, known.servers, contender.plan)
    return predict(together.trace, together.cost, contender.plan)
