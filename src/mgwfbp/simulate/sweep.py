"""Many simulations: every strategy on every cluster, number of workers and scale, planned anew for each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from mgwfbp.bounds import lower_bound_s
from mgwfbp.cost import Cost
from mgwfbp.costs import cheaper_cost
from mgwfbp.errors import SimulationError
from mgwfbp.plan import MergePlan
from mgwfbp.record import check_count, check_real
from mgwfbp.simulate.cluster import CostSource
from mgwfbp.simulate.compute import draw_computation
from mgwfbp.simulate.limits import Limit, bandwidth_bound_s, find_limit
from mgwfbp.simulate.scenario import IDEAL, Scenario
from mgwfbp.simulate.steps import Simulation, send_messages
from mgwfbp.trace import ModelTrace

__all__ = ["BASELINES", "Grid", "Strategy", "SweepRow", "sweep"]

Planner = Callable[[ModelTrace, Cost], MergePlan]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to average gradients: who plans the messages, when they may start, and who adds them up."""

    name: str
    planner: Planner
    overlap: bool = True  # False: all messages wait for the end of the backward pass
    servers: Callable[[int], int] | None = None  # parameter servers for N workers; None: an all-reduce
    bound: Callable[[ModelTrace, Cost], float] = lower_bound_s  # no plan of this kind has a shorter step

    def cost(self, source: CostSource, workers: int) -> Cost:
        """Return what a message costs this strategy."""
        if self.servers is None:
            return source.cost(workers)
        return source.parameter_server_cost(workers, servers=self.servers(workers))


def _one_each(name: str) -> Planner:
    def plan(trace: ModelTrace, cost: Cost) -> MergePlan:  # noqa: ARG001 - every planner takes a cost
        return MergePlan.of_sizes(trace, [1] * len(trace.layers), planner=name)

    return plan


# What the paper compares with besides plans: naive S-SGD, Eq. (3), and TensorFlow's parameter server, of which it does
# not say how many there were: one, or one for every worker.
BASELINES: Mapping[str, Strategy] = MappingProxyType(
    {
        "naive": Strategy("naive", _one_each("naive"), overlap=False),
        "ps": Strategy("ps", _one_each("ps"), servers=lambda _: 1),
        "ps-sharded": Strategy("ps-sharded", _one_each("ps-sharded"), servers=lambda workers: workers),
    }
)


@dataclass(frozen=True, slots=True)
class Grid:
    """What to simulate: every combination."""

    sources: tuple[CostSource, ...]
    workers: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    scales: tuple[float, ...] = (1.0,)  # times the trace's computation: a larger batch above 1, a faster device below

    def __post_init__(self) -> None:
        for name in ("sources", "workers", "strategies", "scales"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise SimulationError(f"{name}: empty, expected at least one")
        workers = (check_count(count, "workers", SimulationError, minimum=1) for count in self.workers)
        object.__setattr__(self, "workers", tuple(workers))
        scales = tuple(check_real(scale, "scale", SimulationError) for scale in self.scales)
        if 0.0 in scales:
            raise SimulationError("scale is 0, expected a number above 0")
        object.__setattr__(self, "scales", scales)

    @property
    def num_points(self) -> int:
        """How many simulations this is."""
        return len(self.sources) * len(self.workers) * len(self.strategies) * len(self.scales)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One point of a sweep; times are means over the steps."""

    network: str
    scale: float
    workers: int
    planner: str
    num_groups: int
    iteration_s: float
    iteration_std_s: float
    iteration_p95_s: float
    compute_s: float  # of the slowest worker: the end of its backward pass, less waits for gathers and `taken_s`
    exposed_s: float
    speedup: float  # over one undisturbed worker of the same scale
    efficiency: float
    bandwidth_bound_s: float  # the step if start-up times were nothing
    limit: Limit  # what the step is made of
    steps: int
    num_gathers: int
    all_reduced_bytes: int  # of gradients; the others are sharded
    lower_bound_s: float | None  # which no plan of the kind can undercut; None: messages in flight overlap start-ups
    sent_bytes: int = 0  # of a step's gradients, as they travel
    low_bytes: int = 0  # how many bytes of gradients travel in low precision
    memory_bytes: int | None = None  # a rank's, of parameters, gradients and the optimizer's state; None: not asked for
    taken_s: float = 0.0  # what messages take from the computation

    @property
    def low_share(self) -> float:
        """Which part of the gradients' bytes travels in low precision, half of them as many as they are."""
        all_bytes = self.sent_bytes + self.low_bytes // 2
        return self.low_bytes / all_bytes if all_bytes else 0.0

    def to_json(self, *, with_gathers: bool = False, with_wire: bool = False) -> dict[str, Any]:
        """Return the row as JSON-ready data; of gathers and bounds, and of precision, only if that is asked for."""
        left_out = (() if with_gathers else _OF_GATHERS) + (() if with_wire else _OF_WIRE)
        left_out += ("memory_bytes",) if self.memory_bytes is None else ()
        return {name: value for name, value in asdict(self).items() if name not in left_out}


_OF_WIRE: tuple[str, ...] = ("sent_bytes", "low_bytes")
_OF_GATHERS: tuple[str, ...] = ("num_gathers", "all_reduced_bytes", "lower_bound_s")


def sweep(trace: ModelTrace, grid: Grid, scenario: Scenario = IDEAL) -> Iterator[SweepRow]:
    """Simulate all points of the grid, one row at a time.

    Each plan is made for its own point, from the slowest worker's trace without jitter, which is what measuring over
    all workers would give. All strategies and clusters with equally many workers meet the same jitter.
    """
    for scale in grid.scales:
        scaled = trace.scaled(scale)
        for workers in grid.workers:
            computation = draw_computation(scaled, workers, scenario)
            planned = scaled.scaled(scenario.slowest(workers))
            for source in grid.sources:
                for strategy in grid.strategies:
                    cost = strategy.cost(source, workers)
                    plan = strategy.planner(planned, cost)
                    result = send_messages(computation, cost, plan, overlap=strategy.overlap)
                    row = _row(source.name, scale, strategy, result, cost)
                    if scenario.in_flight == 1:
                        known = cheaper_cost(cost) if plan.wire else cost
                        row = replace(row, lower_bound_s=strategy.bound(planned, known))
                    yield row


def _row(network: str, scale: float, strategy: Strategy, result: Simulation, cost: Cost) -> SweepRow:
    plan = result.plan
    bound_s = bandwidth_bound_s(result.computation, cheaper_cost(cost) if plan.wire else cost, plan)
    compute_s = float((result.compute_s - result.waited_s).mean()) - result.taken_s
    size_of = {layer.name: layer.grad_bytes for layer in result.computation.trace.layers}
    kept = [group for group, is_sharded in zip(plan.groups, plan.sharded, strict=True) if not is_sharded]
    low_bytes = plan.low_bytes(size_of)
    bytes_alone = send_messages(result.computation, cost, plan, overlap=strategy.overlap, startup=False)
    return SweepRow(
        network=network,
        scale=scale,
        workers=result.workers,
        planner=strategy.name,
        num_groups=plan.num_groups,
        iteration_s=result.mean_iteration_s,
        iteration_std_s=float(result.iteration_s.std()),
        iteration_p95_s=result.quantile_s(0.95),
        compute_s=compute_s,
        exposed_s=result.mean_exposed_s,
        speedup=result.speedup,
        efficiency=result.efficiency,
        bandwidth_bound_s=bound_s,
        limit=find_limit(
            result.mean_iteration_s,
            compute_s,
            bound_s,
            without_startup_s=bytes_alone.mean_iteration_s,
            taken_s=result.taken_s,
        ),
        steps=result.computation.scenario.steps,
        num_gathers=len(plan.gathers),
        all_reduced_bytes=sum(size_of[name] for group in kept for name in group),
        lower_bound_s=None,
        taken_s=result.taken_s,
        sent_bytes=sum(size_of.values()) - low_bytes // 2,
        low_bytes=low_bytes,
    )
