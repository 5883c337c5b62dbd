"""What `explain` predicts of other buckets, in a world where the costs of both precisions are known."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from mgwfbp import LayerTrace, MergePlan, ModelTrace, PiecewiseCost, find_plan, predict
from mgwfbp.bounds import lower_bound_s
from mgwfbp.costs import WireCost, cheaper_cost
from mgwfbp.planners import find_wire_plan, planner_of
from mgwfbp.report.explanation import Explanation, RankParts
from mgwfbp.runtime.breakdown import NotedMessages
from mgwfbp.runtime.observe.steps import AgreedSteps, Gradients, Seen
from mgwfbp.runtime.reducer.kinds import Kind
from mgwfbp.timeline import Timeline

MIB = 2**20
TRACE = ModelTrace("toy", 0.01, tuple(LayerTrace(f"g{place}", 0.005, MIB) for place in range(8)))
# Converting is dear: low precision takes 0.6 of the time, and not half.
IDLE = WireCost(
    PiecewiseCost(2, ((4, 1e-3), (16 * MIB, 1e-3 + 16 * 0.02))),
    PiecewiseCost(2, ((4, 1e-3), (16 * MIB, 1e-3 + 16 * 0.012))),
)
LONGER = 1.3  # messages beside a backward pass
KINDS = {layer.name: Kind(torch.float32, torch.device("cpu"), is_sparse=False) for layer in TRACE.layers}


def slowed(cost: object, by: float) -> PiecewiseCost:
    assert isinstance(cost, PiecewiseCost)
    return replace(cost, points=tuple((size, by * time_s) for size, time_s in cost.points))


BUSY = WireCost(slowed(IDLE.full, LONGER), slowed(IDLE.low, LONGER))
DEAR = WireCost(IDLE.full, slowed(IDLE.full, 1.5))  # a network on which converting only costs


def seen_with(step: Timeline, repeats: int = 5) -> Seen:
    """Return what ranks see of a step."""
    alike = (step.compute_s,) * repeats
    plain = AgreedSteps(
        (TRACE.forward_s,) * repeats, alike, alike, (step.iteration_s,) * repeats, (step.exposed_s,) * repeats, (), ()
    )
    ready_s = tuple(accumulate((layer.backward_s for layer in TRACE.layers), initial=TRACE.forward_s))[1:]
    messages = replace(plain, message_s=(tuple(span.duration_s for span in step.messages),) * repeats)
    return Seen(plain=plain, gradients=replace(plain, ready_s=(ready_s,) * repeats), messages=messages)


def explained(wire: tuple[str, ...], busy: WireCost = BUSY, idle: WireCost = IDLE) -> Explanation:
    """Explain four messages that travel so and take what ``busy`` says; nothing was swept that none travels in."""
    plan = replace(MergePlan.of_sizes(TRACE, [1, 2, 2, 3], planner="plan in force"), wire=wire)
    step = predict(TRACE, busy, plan)
    gradients = Gradients("toy", tuple(KINDS), (MIB,) * 8)
    rank = RankParts(0.0, 0.01, 0.04, 0.0, step.exposed_s, 0.0, 0.0, step.iteration_s, step.iteration_s)
    noted = NotedMessages(gradients, plan, KINDS, {}, "")
    found = Explanation("toy", "mgwfbp", has_optimizer=True, steps=5, ranks=(rank, rank))
    assert isinstance(idle.full, PiecewiseCost)
    assert isinstance(idle.low, PiecewiseCost)
    return noted.predict(found, seen_with(step), idle.full, idle.low if wire else None, step.dumps())


BF16, HALF_OF_THEM = ("bfloat16",) * 4, ("bfloat16", "", "bfloat16", "")


@pytest.mark.parametrize("wire", [BF16, HALF_OF_THEM, ()])
def test_each_precision_has_its_own_cost_whichever_was_seen(wire: tuple[str, ...]) -> None:
    found = explained(wire)
    now, *sizes, best = found.choices
    assert now.step_s == pytest.approx(found.step_s, rel=0.02)
    assert found.error == pytest.approx(0.0, abs=0.02)
    for choice in sizes:
        truly = predict(TRACE, BUSY, find_plan(TRACE, BUSY, planner_of(f"bucket-{choice.bucket_cap_mb}")))
        assert choice.step_s == pytest.approx(truly.iteration_s, rel=0.03)
        assert choice.num_messages == len(truly.messages)
        assert choice.name == f"bucket_cap_mb={choice.bucket_cap_mb}{' without wire=' if wire else ''}"
    plan = find_wire_plan(TRACE, BUSY) if wire else find_plan(TRACE, BUSY)
    assert best.name == plan.planner
    assert best.step_s == pytest.approx(predict(TRACE, BUSY, plan).iteration_s, rel=0.03)
    assert found.bound_s == pytest.approx(lower_bound_s(TRACE, cheaper_cost(BUSY) if wire else BUSY), rel=0.03)
    assert found.wire == next(iter(wire), "")


def test_buckets_in_full_precision_are_not_advised_where_low_precision_is_faster() -> None:
    found = explained(BF16)
    assert found.is_trusted
    assert min(choice.step_s for choice in found.choices[1:-1]) > 1.4 * found.choices[0].step_s
    assert found.best_bucket is None
    assert "bucket_cap_mb" not in str(found)


def test_where_low_precision_is_slower_the_advice_is_to_leave_it_out() -> None:
    found = explained(BF16, DEAR, DEAR)
    assert found.best_bucket is not None
    assert f"set {found.best_bucket.name} (predicted " in str(found)
    assert found.best_bucket.name.endswith(" without wire=")
    assert found.best_plan is not None  # which may use both, and uses one
    assert found.best_plan.step_s == pytest.approx(predict(TRACE, DEAR, find_plan(TRACE, DEAR)).iteration_s, rel=0.03)
