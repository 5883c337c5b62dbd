"""FSDP2 beside what all-reduces: options and rows that several commands share."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import typer

from mgwfbp.cli.output import talk
from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, predict_fsdp, reported_bound_s
from mgwfbp.fsdp_units import frozen_bytes_of
from mgwfbp.memory import AS_STORED, STATES, Precision, ddp_memory_bytes, sharded_memory_bytes
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import BY_HAND
from mgwfbp.simulate.fsdp import FsdpPlanner, num_gathers
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_bytes, format_seconds, parse_bytes, plural

__all__ = [
    "FSDP2",
    "FsdpOptions",
    "FsdpPlanners",
    "MemoryLimit",
    "ParamDtype",
    "ReduceDtype",
    "States",
    "fastest_words",
    "fsdp_rows",
    "memory_words",
    "read_options",
    "with_memory",
]

FSDP2 = "fsdp2"
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="With --engine fsdp2: what a rank may have for parameters, gradients and the optimizer's state, "
        "without activations, such as 40GiB.",
    ),
]
Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
ParamDtype = Annotated[
    Dtype,
    typer.Option(help="With --engine fsdp2: param_dtype of its mixed-precision policy; the trace has float32."),
]
ReduceDtype = Annotated[
    Dtype | None, typer.Option(help="With --engine fsdp2: reduce_dtype of that policy; if not given, param_dtype.")
]
States = Annotated[
    float,
    typer.Option(
        min=0, help="With --engine fsdp2: bytes of the optimizer's state for each of a parameter; Adam has 2."
    ),
]


class FsdpOptions(NamedTuple):
    """What FSDP2 is planned for."""

    limit: int | None = None
    precision: Precision = AS_STORED

    @property
    def states_words(self) -> str:
        """What of the optimizer is counted."""
        return f"{self.precision.states:g} states of the optimizer"

    @property
    def is_short(self) -> bool:
        """Whether FSDP2 sends in another precision than engines beside it, which send gradients as they are."""
        return self.precision[:2] != AS_STORED[:2]

    def bits(self, planner: str) -> str:
        """Return how many bits numbers have as they travel, gathered and sent, by a row's planner.

        >>> options = FsdpOptions(None, Precision(0.5, 1.0))
        >>> options.bits("optimal"), options.bits("fsdp2-block"), FsdpOptions(None, Precision(0.5, 0.5)).bits("fsdp2")
        ('32', '16, 32', '16')
        """
        ratios = self.precision[:2] if planner.startswith(FSDP2) else AS_STORED[:2]
        return ", ".join(dict.fromkeys(f"{32 * ratio:g}" for ratio in ratios))

    def talk(self) -> None:
        """Say what counts as memory, and where rows are not of one precision."""
        talk(f"memory a rank: parameters, gradients and {self.states_words}, without activations")
        if self.is_short:
            talk(f"fsdp2 gathers and sends in {self.bits(FSDP2)} bits, the other engines send in 32: not alike")


def read_options(
    engine: str, memory_limit: str | None, param_dtype: Dtype, reduce_dtype: Dtype | None, states: float
) -> FsdpOptions:
    """Return what FSDP2 is planned for, or refuse what is no size or what no engine here heeds."""
    precision = Precision(ITEM_BYTES[param_dtype] / 4, ITEM_BYTES[reduce_dtype or param_dtype] / 4, states)
    if FSDP2 not in map(str.strip, engine.split(",")):
        if memory_limit is not None:
            raise typer.BadParameter(f"{engine} keeps all parameters; give --engine fsdp2", param_hint="--memory-limit")
        if precision != AS_STORED:
            raise typer.BadParameter(
                f"{engine} sends gradients as they are; give --engine fsdp2",
                param_hint="--param-dtype/--reduce-dtype" if FsdpOptions(None, precision).is_short else "--states",
            )
        return FsdpOptions()
    if memory_limit is None:
        return FsdpOptions(None, precision)
    try:
        return FsdpOptions(parse_bytes(memory_limit), precision)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="--memory-limit") from None


class FsdpPlanners:
    """Plans of FSDP2 for any point, those wrapped by hand first; says where none of ours fits."""

    def __init__(self, options: FsdpOptions) -> None:
        self._options = options
        self._problem: PlanError | None = None
        self._has_fitted = False

    def listed(self) -> Mapping[str, FsdpPlanner]:
        """Return planners by name."""
        return {**{name: self._by_hand(name) for name in BY_HAND}, FSDP2: self._plan}

    def _by_hand(self, name: str) -> FsdpPlanner:
        predicted = {"precision": self._options.precision._asdict()}
        return lambda trace, cost: replace(BY_HAND[name](trace, ()), predicted=predicted)  # noqa: ARG005 - as all

    def _plan(self, trace: ModelTrace, cost: Cost) -> FsdpPlan | None:
        limit, precision = self._options
        try:
            plan = plan_fsdp(trace, cost, memory_limit=limit, precision=precision)
        except PlanError as problem:
            self._problem = problem
            talk(f"{plural(cost.workers, 'worker')}: {problem}")
            return None
        self._has_fitted = True
        return plan

    def check_any(self) -> None:
        """Raise where nothing fitted anywhere."""
        if self._problem is not None and not self._has_fitted:
            raise self._problem


def fsdp_rows(trace: ModelTrace, cost: Cost, planners: FsdpPlanners, precision: Precision) -> list[dict[str, Any]]:
    """Return what `mgwfbp compare` says of FSDP2 wrapped by hand, and by plan where one fits."""
    rows = []
    free_s = fsdp_lower_bound_s(trace, cost, precision=precision)
    for name, planner in planners.listed().items():
        plan = planner(trace, cost)
        if plan is None:
            continue
        step = predict_fsdp(trace, cost, plan, precision=precision)
        step_s, compute_s = step.iteration_s, trace.compute_s
        bound_s = reported_bound_s(plan.predicted.get("lower_bound_s", free_s), step_s)
        spans = [*step.gathers_s, *(one for one in step.gathers_again_s if one is not None), *step.sent_s]
        rows.append(
            {
                "planner": name,
                "num_groups": len(step.groups),
                "iteration_s": step_s,
                "exposed_s": step_s - step.compute_s,
                "lower_bound_s": bound_s,
                "gap": step_s / bound_s - 1 if bound_s else 0.0,
                "num_gathers": num_gathers(step),
                "all_reduced_bytes": 0,
                "gathered_again_bytes": step.again_bytes,
                "num_resharded": sum(plan.reshard),
                "forward_prefetch": plan.forward_prefetch,
                "backward_prefetch": plan.backward_prefetch,
                "communication_s": sum(end_s - start_s for start_s, end_s in spans),
                "ratio": (step_s - compute_s) / compute_s if compute_s else None,
                "speedup": cost.workers * compute_s / step_s if step_s else float(cost.workers),
                "efficiency": compute_s / step_s if step_s else 1.0,
                "case": None,  # the paper's cases are of messages that are all-reduced
                "memory_bytes": step.memory_bytes,
            }
        )
    return rows


def fastest_words(rows: Iterable[Mapping[str, Any]], limit: int | None) -> str:
    """Say which row is the fastest that fits, what it needs, and how far the next engine is behind.

    >>> row = {"planner": "optimal", "iteration_s": 1.0, "memory_bytes": 500}
    >>> fastest_words([row, {"planner": "fsdp2", "iteration_s": 1.5, "memory_bytes": 100}], None)
    'fastest: optimal, 1 s a step, 500 B a rank; 1.50 times as fast as fsdp2'
    >>> fastest_words([row], 100)
    'nothing fits into 100 B: the least of these is optimal with 500 B a rank'
    """
    every = list(rows)
    fitting = sorted(
        (row for row in every if limit is None or row["memory_bytes"] <= limit), key=lambda row: row["iteration_s"]
    )
    if not fitting:
        least = min(every, key=lambda row: row["memory_bytes"])
        needed = format_bytes(least["memory_bytes"], "up")
        room = format_bytes(limit or 0, "down")
        return f"nothing fits into {room}: the least of these is {least['planner']} with {needed} a rank"
    best, others = fitting[0], fitting[1:]
    words = (
        f"fastest{'' if limit is None else ' that fits'}: {best['planner']}, {format_seconds(best['iteration_s'])} a "
        f"step, {format_bytes(best['memory_bytes'])} a rank"
    )
    if not others or not best["iteration_s"]:
        return words
    return f"{words}; {others[0]['iteration_s'] / best['iteration_s']:.2f} times as fast as {others[0]['planner']}"


def with_memory(row: dict[str, Any], trace: ModelTrace, workers: int, options: FsdpOptions) -> dict[str, Any]:
    """Add what a rank holds to a row, whether that is within the limit, and in which precision it sends."""
    all_reduced = row.get("all_reduced_bytes", trace.grad_bytes)
    needed = row.get("memory_bytes")
    if needed is None:
        needed = memory_bytes(trace, all_reduced, workers, options.precision.states)
    fits = {} if options.limit is None else {"fits": needed <= options.limit}
    bits = {"bits": options.bits(row["planner"])} if options.is_short else {}
    return {**row, "memory_bytes": needed, **fits, **bits}


def memory_bytes(trace: ModelTrace, all_reduced_bytes: int, workers: int, states: float = STATES) -> int:
    """Return what a rank holds that all-reduces so many of its bytes and shards the optimizer of the others."""
    num_bytes, frozen_bytes = trace.grad_bytes, frozen_bytes_of(trace)
    if all_reduced_bytes == num_bytes:
        return ddp_memory_bytes(num_bytes, states, frozen_bytes)
    return sharded_memory_bytes(num_bytes, all_reduced_bytes, workers, states, frozen_bytes)


def memory_words(needed: int, limit: int | None) -> str:
    """Return a cell of a table."""
    return f"{format_bytes(needed)}{'' if limit is None or needed <= limit else ', too much'}"
