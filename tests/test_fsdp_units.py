"""What a trace tells of modules that are trained, and get no gradient: planned as frozen ones are."""

import pytest

from mgwfbp import LayerTrace, LinearCost, ModelTrace, TraceError
from mgwfbp.fsdp import FsdpPlan, predict_fsdp
from mgwfbp.fsdp_units import as_if_reached, idle_of, root_of, units_of, whole_units, without_bytes
from mgwfbp.planners.fsdp import plan_fsdp

COST = LinearCost(workers=2, startup_s=1.0, per_byte_s=0.5)
LAYERS = (LayerTrace("b.w", 2.0, 10, 4.0), LayerTrace("a.w", 2.0, 10, 80.0))
# A tower before all that gets a gradient.
TOWER = {"name": "tower.w", "bytes": 100, "within": "a.w", "share": 0.5, "next": "a.w"}
FROZEN = ModelTrace("toy", 84.0, LAYERS, {"frozen": [TOWER]})
STOPPED = ModelTrace(
    "toy", 84.0, (LayerTrace("tower.w", 0.0, 100, 0.0), *LAYERS), {"unused": ["tower.w"], "not_reached": [TOWER]}
)


def test_what_is_trained_and_gets_no_gradient_is_planned_as_if_it_was_frozen() -> None:
    assert units_of(STOPPED) == units_of(FROZEN)
    plan = FsdpPlan("toy", (("tower",), ("a",), ("b",)), (True,) * 3)
    step = predict_fsdp(STOPPED, COST, plan)
    assert step == predict_fsdp(FROZEN, COST, plan)
    # A share of 120, and of what 20 of them need besides; the tower and what is gathered behind it.
    assert step.memory_bytes == (120 + 3 * 20) // 2 + 2 * 100 + 10
    found = plan_fsdp(STOPPED, COST)
    assert (found.idle, found.predicted["not_reached"]) == ((), ("tower",))
    assert (found.predicted["parameter_bytes"], found.predicted["trained_bytes"]) == (120, 120)


def test_behind_what_gets_a_gradient_it_is_not_gathered_again_either() -> None:
    late = {**TOWER, "within": "b.w", "next": None}
    units = units_of(ModelTrace("toy", 84.0, STOPPED.layers, {"unused": ["tower.w"], "not_reached": [late]}))
    assert [(unit.name, unit.goes_back) for unit in units] == [("a", True), ("b", True), ("tower", False)]


def test_in_an_older_trace_nothing_runs_what_gets_no_gradient() -> None:
    older = ModelTrace("toy", 84.0, STOPPED.layers, {"unused": ["tower.w"]})
    assert (idle_of(older), idle_of(STOPPED)) == (["tower"], [])


def test_a_trace_is_compared_with_a_model_by_what_is_trained_and_ignored_parameters_do_not_travel() -> None:
    assert [unit.trained_bytes for unit in whole_units(as_if_reached(STOPPED)).values()] == [10, 10, 100]
    assert [unit.num_bytes for unit in units_of(without_bytes(STOPPED, {"tower.w"}))] == [0, 10, 10]


def test_what_is_read_elsewhere_or_returned_stays_with_the_root_but_not_what_is_idle() -> None:
    source = {"read_elsewhere": ["a", "other"], "returned": ["b", "tower"], "unused": ["tower.w"]}
    assert root_of(ModelTrace("toy", 84.0, STOPPED.layers, source)) == ["a", "b"]


def test_a_parameter_that_stands_nowhere_is_one_line() -> None:
    bad = ModelTrace("toy", 84.0, STOPPED.layers, {"not_reached": [{**TOWER, "next": "c.w"}]})
    with pytest.raises(TraceError, match=r"source: not_reached: 'tower.w' stands at a layer that the trace has not"):
        units_of(bad)
