"""How sure a prediction is: what cost and trace may be off by, and what the model itself is off by.

A cost that was fitted or learnt knows how far it is from what was measured: ``source["spread"]`` has a relative error
for each of its points, or else ``source["fit"]`` the mean one. Of a network that was written down nothing is known. A
trace that was observed in training knows the error of its median, ``source["off"]``.

[Note: what a range means]
All sizes are taken to be off together, and by typical errors; what a recurrence leaves out (what else the machine does,
what messages do to one another) is in neither. So the range of a prediction is wider by a part of the step, the least
with which ranges held the measured step of three in four plans on a GPU, and as many in cells that it was not found
from: `MODEL_OFF`, and `LOW_MODEL_OFF` of plans with messages in low precision, which are predicted worse. It is a
typical error, no bound, and in one cell it may hold nearly all or few: benchmarks/gpu.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeGuard

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
from mgwfbp.costs import full_precision_cost, low_precision_cost, part_by_part, sharded_cost
from mgwfbp.plan import MergePlan
from mgwfbp.record import LARGEST, LARGEST_COUNT
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace

__all__ = [
    "LOW_MODEL_OFF",
    "MODEL_OFF",
    "RANGE_WORDS",
    "input_range",
    "off_by",
    "predict_range",
    "spread_of",
    "widened",
]

# Of 288 plans that the tuner predicted and measured, in benchmarks/gpu and benchmarks/wire: 249 with messages as they
# are, 39 with some in low precision. Printed by benchmarks/bench_tables.py.
MODEL_OFF, LOW_MODEL_OFF = 0.015, 0.033
# What is said where ranges are shown.
RANGE_WORDS = "such ranges held the measured step of three in four plans on a GPU"


def spread_of(cost: Cost) -> list[float] | None:
    """Return by which part each point of a cost may be off (of a straight line: all of it), or None where unknown."""
    cost = full_precision_cost(cost)
    if not isinstance(cost, LinearCost | PiecewiseCost):
        return None
    points = len(cost.points) if isinstance(cost, PiecewiseCost) else 1
    spread = cost.source.get("spread")
    if isinstance(spread, Sequence) and len(spread) == points and all(_is_part(part) for part in spread):
        return [float(part) for part in spread]
    fitted = cost.source.get("fit")
    error = fitted.get("mean_error") if isinstance(fitted, Mapping) else None
    return [float(error)] * points if _is_part(error) else None


def _is_part(value: object) -> TypeGuard[float]:
    """Whether something from a free-form field is a relative error; an absurd one says nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 10


def off_by(cost: Cost, errors: float) -> Cost:
    """Return a cost off by so many times its spread: messages slower, or (negative) faster; itself where unknown.

    >>> line = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.25}})
    >>> [round(off_by(line, errors)(2), 3) for errors in (-1, 0, 1)]
    [1.6, 2.0, 2.5]
    """
    return part_by_part(cost, lambda part: _off_by(part, errors))


def _off_by(cost: LinearCost | PiecewiseCost, errors: float) -> LinearCost | PiecewiseCost:
    spread = spread_of(cost)
    if spread is None:
        return cost
    factors = [math.exp(errors * math.log1p(part)) for part in spread]
    if isinstance(cost, LinearCost):
        return replace(cost, startup_s=cost.startup_s * factors[0], per_byte_s=cost.per_byte_s * factors[0])
    sizes, times_s = zip(*cost.points, strict=True)
    off_s = list(accumulate((time_s * factor for time_s, factor in zip(times_s, factors, strict=True)), max))
    beyond = min(2 * sizes[-1] + 1, LARGEST_COUNT)  # from the largest on the slope is off as that is
    if beyond > sizes[-1]:
        sizes, spread = (*sizes, beyond), [*spread, spread[-1]]
        off_s.append(off_s[-1] + factors[-1] * (cost(beyond) - times_s[-1]))
    points = tuple(zip(sizes, (min(time_s, LARGEST) for time_s in off_s), strict=True))
    return replace(cost, points=points, source={**cost.source, "spread": spread})


def predict_range(trace: ModelTrace, cost: Cost, plan: MergePlan) -> tuple[float, float] | None:
    r"""Return between what a measured step is to be expected; None where the cost does not know what it is off by.

    With :math:`t` for the step and :math:`[l, u]` for `input_range`, errors of the inputs and of the model are taken to
    be independent, [Note: what a range means]:

    .. math:: t - \sqrt{(t - l)^2 + (\epsilon t)^2} \quad\text{to}\quad t + \sqrt{(u - t)^2 + (\epsilon t)^2}

    where :math:`\epsilon` is `MODEL_OFF`, or `LOW_MODEL_OFF` of a plan with messages in low precision.

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, (LayerTrace("a", 2.0, 10),))
    >>> cost = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.2}})
    >>> low_s, high_s = predict_range(trace, cost, MergePlan.of_sizes(trace, [1]))
    >>> round(low_s, 3), round(high_s, 3)
    (9.986, 12.211)
    """
    between_s = input_range(trace, cost, plan)
    if between_s is None:
        return None
    return widened(predict(trace, cost, plan).iteration_s, between_s, LOW_MODEL_OFF if plan.wire else MODEL_OFF)


def widened(step_s: float, between_s: tuple[float, float], model_off: float) -> tuple[float, float]:
    """Return a range of what inputs may be off by with what the model is off by besides, as `predict_range` has it.

    >>> widened(10.0, (10.0, 10.3), 0.04)
    (9.6, 10.5)
    """
    low_s, high_s = between_s
    model_s = model_off * step_s
    return max(0.0, step_s - math.hypot(step_s - low_s, model_s)), step_s + math.hypot(high_s - step_s, model_s)


def input_range(trace: ModelTrace, cost: Cost, plan: MergePlan) -> tuple[float, float] | None:
    """Return the step with all faster, and with all slower, by what may be off; None where the cost does not know it.

    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, (LayerTrace("a", 2.0, 10),))
    >>> cost = LinearCost(2, 1.0, 0.5, {"fit": {"mean_error": 0.2}})
    >>> input_range(trace, cost, MergePlan.of_sizes(trace, [1]))
    (10.0, 12.2)
    """
    parts = [cost, *([low_precision_cost(cost)] if plan.wire else []), *(sharded_cost(cost) if plan.gathers else ())]
    if any(spread_of(part) is None for part in parts):
        return None
    off = trace.source.get("off")
    times = 1 + off if _is_part(off) else 1.0
    return (
        predict(trace.scaled(1 / times), off_by(cost, -1.0), plan).iteration_s,
        predict(trace.scaled(times), off_by(cost, 1.0), plan).iteration_s,
    )
