"""What FSDP2 cannot run and what does not fit: dtypes that are kept apart, the least memory, models without modules."""

import re

import pytest

from mgwfbp import LayerTrace, LinearCost, ModelTrace, PlanError, TraceError, load_network, load_trace
from mgwfbp.fsdp import predict_fsdp
from mgwfbp.fsdp_units import units_of
from mgwfbp.memory import Precision
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import plan_by_block
from mgwfbp.units import parse_bytes
from tests.test_fsdp import COST

SLOW = LinearCost(workers=2, startup_s=5.0, per_byte_s=0.01)  # few messages are best


def in_dtypes(trace: ModelTrace, dtypes: dict[str, str]) -> ModelTrace:
    """A trace that says which units are of which type."""
    found: dict[str, list[str]] = {}
    for unit, dtype in dtypes.items():
        found.setdefault(dtype, []).append(unit)
    return ModelTrace(trace.model, trace.forward_s, trace.layers, {**trace.source, "dtypes": found})


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
    with pytest.raises(PlanError, match=f"the least is {by_block.memory_bytes} B a rank"):
        plan_fsdp(trace, cost, memory_limit=by_block.memory_bytes - 1)


@pytest.mark.parametrize("model", [f"{name}-h200-b32" for name in ("bert", "resnet50", "vgg16", "vit_b_16")])
def test_the_least_that_is_printed_fits_when_it_is_given_back(model: str) -> None:
    trace, cost = load_trace(model), load_network("25gbe").cost(4)
    for precision in (Precision(), Precision(0.5, 1.0)):
        with pytest.raises(PlanError) as refused:
            plan_fsdp(trace, cost, memory_limit=1, precision=precision)
        printed = re.search(r"fits into 1 B: the least is (.*) a rank", str(refused.value))
        assert printed
        limit = parse_bytes(printed[1])
        found = plan_fsdp(trace, cost, memory_limit=limit, precision=precision).predicted["memory_bytes"]
        assert 0.98 * limit <= found <= limit
