"""What FSDP2 cannot run and what does not fit: dtypes that are kept apart, the least memory, models without modules."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import LayerTrace, LinearCost, ModelTrace, PlanError, TraceError, load_network, load_trace
from mgwfbp.cost import Cost
from mgwfbp.fsdp import FsdpPlan, predict_fsdp
from mgwfbp.fsdp_units import units_of
from mgwfbp.memory import Precision
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import BY_HAND, plan_blocks_alone, plan_by_block
from mgwfbp.units import format_bytes, parse_bytes
from tests.test_fsdp import COST, all_plans, costs, models

SLOW = LinearCost(workers=2, startup_s=5.0, per_byte_s=0.01)  # few messages are best


@st.composite
def with_frozen(draw: st.DrawFn) -> ModelTrace:
    """Some units, of which up to two are frozen, and may be large."""
    trace = draw(models(3))
    names = [layer.name for layer in trace.layers]
    sizes = st.sampled_from([2, 10, 40])
    frozen = [
        {
            "name": f"z{place}{draw(st.sampled_from(['', 'x']))}.w",
            "bytes": draw(sizes),
            "within": names[0],
            "share": 0.0,
        }
        for place in range(draw(st.integers(0, 2)))
    ]
    parts = [{**one, "next": draw(st.sampled_from([*names, None]))} for one in frozen]
    return ModelTrace(trace.model, trace.forward_s, trace.layers, {"frozen": parts})


@given(with_frozen(), costs(), st.sampled_from([Precision(), Precision(0.5, 1.0), Precision(states=0, kept=0.0)]))
@settings(max_examples=25, deadline=None)
def test_the_least_of_a_small_model_is_that_of_all_plans_and_what_needs_it_is_found(
    trace: ModelTrace, cost: Cost, precision: Precision
) -> None:
    steps = [predict_fsdp(trace, cost, plan, precision=precision) for plan in all_plans(trace)]
    least = min(step.memory_bytes for step in steps)
    best_s = min(step.iteration_s for step in steps if step.memory_bytes == least)
    found = plan_fsdp(trace, cost, memory_limit=least, precision=precision).predicted
    assert found["memory_bytes"] == least
    assert found["iteration_s"] == pytest.approx(best_s, rel=1e-9)
    with pytest.raises(PlanError, match=f"the least is {format_bytes(least, 'up')} a rank"):
        plan_fsdp(trace, cost, memory_limit=least - 1, precision=precision)


def test_a_large_frozen_module_beside_a_trained_root_is_kept_where_that_needs_less() -> None:
    # The host has all shares. Where all is resharded the backward pass of the large one needs 40 + 2 * 100 + 10 + 40;
    # where all is kept its forward pass needs 40 + 60 + 2 * 100 + 10; where it alone is, the first one's 40 + 2 * 60 +
    # 100.
    sizes = {"last.w": 10, "first.w": 60, "rest": 40}
    layers = tuple(LayerTrace(name, 1.0, size, 1.0) for name, size in sizes.items())
    frozen = {"name": "large.w", "bytes": 100, "within": "rest", "share": 0.0, "next": "last.w"}
    trace, shares = ModelTrace("toy", 3.0, layers, {"frozen": [frozen]}), Precision(states=0, kept=0.0)
    found = plan_fsdp(trace, COST, memory_limit=260, precision=shares)
    assert (found.groups[:2], found.reshard[:2]) == ((("first",), ("large",)), (True, False))
    assert found.predicted["memory_bytes"] == 260


def in_dtypes(trace: ModelTrace, dtypes: dict[str, str]) -> ModelTrace:
    """A trace that says which units are of which type."""
    found: dict[str, list[str]] = {}
    for unit, dtype in dtypes.items():
        found.setdefault(dtype, []).append(unit)
    return ModelTrace(trace.model, trace.forward_s, trace.layers, {**trace.source, "dtypes": found})


@given(with_frozen(), costs(), st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=6), st.floats(0.0, 1.0))
@settings(max_examples=25, deadline=None)
def test_no_group_is_of_two_dtypes_and_the_plan_is_the_best_of_such(
    trace: ModelTrace, cost: Cost, drawn: list[str], share: float
) -> None:
    trained = [unit.name for unit in units_of(trace) if unit.trained_bytes]
    dtypes = dict(zip(trained, drawn, strict=False))
    trace = in_dtypes(trace, dtypes)

    def is_apart(plan: FsdpPlan) -> bool:
        groups = (*plan.groups, (*plan.root, *([""] if "" in trained else [])))
        return all(len({dtypes[name] for name in group if name in dtypes}) <= 1 for group in groups)

    assert all(is_apart(by_hand(trace, ())) for by_hand in BY_HAND.values())
    plans = [plan for plan in all_plans(trace, rest=plan_blocks_alone(trace).root) if is_apart(plan)]
    steps = [predict_fsdp(trace, cost, plan) for plan in plans]
    needed = [step.memory_bytes for step in steps]
    limit = int(min(needed) + share * (max(needed) - min(needed)))
    found = plan_fsdp(trace, cost, memory_limit=limit)
    best_s = min(step.iteration_s for step in steps if step.memory_bytes <= limit)
    assert is_apart(found)
    assert found.predicted["iteration_s"] == pytest.approx(best_s, rel=1e-9)
    assert found.predicted["memory_bytes"] <= limit


@pytest.mark.parametrize("limit", [None, 700])
def test_of_many_modules_those_of_one_dtype_are_merged_and_frozen_ones_go_with_any(limit: int | None) -> None:
    layers = tuple(LayerTrace(f"h.{place}.{part}.w", 1.0, 10, 1.0) for place in reversed(range(12)) for part in "ab")
    between = {"name": "between.w", "bytes": 10, "within": "h.5.b.w", "share": 0.0, "next": "h.6.b.w"}
    trace = ModelTrace("toy", 24.0, layers, {"frozen": [between]})
    trace = in_dtypes(trace, {f"h.{place}": "float32" if place < 6 else "bfloat16" for place in range(12)})
    plan = plan_fsdp(trace, SLOW, memory_limit=limit)
    dtypes = {unit.name: unit.dtypes for unit in units_of(trace)}
    assert {len(frozenset[str]().union(*(dtypes[name] for name in group))) for group in plan.groups} <= {0, 1}
    assert any("between" in group and len(group) > 1 for group in plan.groups)
    assert len(plan.groups) < 7


def test_what_must_be_together_and_has_two_dtypes_is_one_line() -> None:
    layers = tuple(LayerTrace(f"{name}.w", 2.0, 10, 1.0) for name in "cba")
    end = " has trained parameters of bfloat16 and float32, and FSDP2 gathers those of one dtype together: cast it to"
    for source, what in (
        ({"dtypes": {"float32": ["a", "b", "c"], "bfloat16": ["b"]}}, "'b'"),
        (
            {"dtypes": {"float32": ["a", "b"], "bfloat16": ["c"]}, "shared": ["a", "c"]},
            r"what must be in the root's group \('a', 'c'\)",
        ),
    ):
        with pytest.raises(PlanError, match=f"^{what}{end} one dtype$"):
            plan_fsdp(ModelTrace("toy", 3.0, layers, source), COST)
    with pytest.raises(TraceError, match="expected lists of modules by dtype"):
        plan_fsdp(ModelTrace("toy", 3.0, layers, {"dtypes": {"float32": "abc"}}), COST)


def test_a_model_whose_parameters_are_all_the_roots_is_planned_and_a_trace_without_known_names_is_refused() -> None:
    layers = (LayerTrace("bias", 1.0, 4, 1.0), LayerTrace("weight", 1.0, 40, 1.0))
    plan = plan_fsdp(ModelTrace("toy", 2.0, layers, {"dtypes": {"float32": [""]}}), COST)
    assert (plan.groups, plan.root, plan.predicted["exact"]) == ((), (), True)
    with pytest.raises(PlanError, match="are in no module whose name is known"):
        plan_fsdp(ModelTrace("toy", 2.0, layers), COST)


def test_what_fits_when_a_frozen_head_is_kept_is_found() -> None:
    blocks = [LayerTrace(f"h.{n}.{part}.w", 10.0, 10, 5.0) for n in reversed(range(8)) for part in ("b", "a")]
    head = {"name": "head.w", "bytes": 100, "within": "h.7.b.w", "share": 0.0, "next": None}
    trace = ModelTrace("toy", 80.0, (*blocks, LayerTrace("rest", 1.0, 30, 0.0)), {"frozen": [head]})
    cost = LinearCost(workers=8, startup_s=0.01, per_byte_s=0.001)
    by_block = predict_fsdp(trace, cost, plan_by_block(trace))
    for limit in (None, by_block.memory_bytes):
        found = plan_fsdp(trace, cost, memory_limit=limit).predicted
        assert found["memory_bytes"] <= by_block.memory_bytes
        assert found["iteration_s"] <= by_block.iteration_s
    with pytest.raises(PlanError, match=f"the least is at most {by_block.memory_bytes} B a rank"):
        plan_fsdp(trace, cost, memory_limit=by_block.memory_bytes - 1)


@pytest.mark.parametrize("model", [f"{name}-h200-b32" for name in ("bert", "resnet50", "vgg16", "vit_b_16")])
def test_the_least_that_is_printed_fits_when_it_is_given_back(model: str) -> None:
    trace, cost = load_trace(model), load_network("25gbe").cost(4)
    for precision in (Precision(), Precision(0.5, 1.0)):
        with pytest.raises(PlanError) as refused:
            plan_fsdp(trace, cost, memory_limit=1, precision=precision)
        printed = re.search(r"fits into 1 B: the least is at most (.*) a rank", str(refused.value))
        assert printed
        limit = parse_bytes(printed[1])
        found = plan_fsdp(trace, cost, memory_limit=limit, precision=precision).predicted["memory_bytes"]
        assert 0.98 * limit <= found <= limit
