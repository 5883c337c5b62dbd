"""Steps of FSDP2 in a report: what is computed, what is sent, what is exposed; predicted, and of a profile."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mgwfbp import FormatError, FsdpPlan, LayerTrace, LinearCost, ModelTrace, predict_fsdp
from mgwfbp.cli import run
from mgwfbp.costs import ShardedCost
from mgwfbp.errors import ReportError
from mgwfbp.fsdp_step import FsdpStep
from mgwfbp.measure.fsdp_profile import steps_from_profile
from mgwfbp.memory import Precision
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.report import Inputs, build_page
from mgwfbp.report.fsdp import draw_fsdp_case, exposed_s, find_fsdp_cases, fsdp_events, parts_of
from tests.report.test_perfetto_and_text import SCHEMA

TRACE = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10, 1.0) for name in "cba"))
COST = LinearCost(2, 2.0, 0.2)
PLAN = FsdpPlan("toy", (("a",), ("b", "c")), (True, False))


def given(**more: Any) -> Inputs:
    return Inputs(traces=(("t.json", TRACE),), costs=(("c.json", COST),), fsdp_plans=(("p.json", PLAN),), **more)


@pytest.mark.parametrize("limit", [None, 100])
def test_what_is_not_computed_is_exposed_and_parts_are_those_of_the_step(limit: int | None) -> None:
    step = predict_fsdp(TRACE, COST, plan_fsdp(TRACE, COST, memory_limit=limit))
    assert exposed_s(step) == pytest.approx(step.iteration_s - step.compute_s)
    kinds = [part.kind for part in parts_of(step)]
    number = len(step.groups)
    assert [kinds.count(kind) for kind in ("gather", "forward", "backward", "reduce-scatter")] == [number] * 4
    assert kinds.count("gather again") == sum(again is not None for again in step.gathers_again_s)
    assert max(part.end_s for part in parts_of(step)) == step.iteration_s


def test_a_plan_is_drawn_beside_wrapping_by_block_in_text_and_for_perfetto() -> None:
    (case,) = find_fsdp_cases(given())
    # By hand: gathers take 2 and 3, passes 1 and 2, then 4 and 2; `a` is gathered again once the other has been copied
    # out of its gather, beside the forward pass of it.
    lines = draw_fsdp_case(case, width=48).splitlines()
    assert lines[0].startswith(
        "toy with FSDP2 on 2 workers over c.json. p.json is predicted to be 1.06 times as fast as"
    )
    assert lines[0].endswith("wrapping by block. No plan can be below 13 s.")
    assert lines[2:6] == [
        "p.json, predicted: 2 groups, 1 of them gathered again, step 16 s, exposed 7 s, 110 B a rank",
        "compute   |    fff   FFFFFbbbbbbbbBBBBB        |",
        "messages  |<<<<>>>>>>>((((        =======####  |",
        "exposed   |!!!!! !!!!!                !!!!!!!  |",
    ]
    events = fsdp_events([case], 7)
    jsonschema.validate({"traceEvents": events}, SCHEMA)
    assert {event["pid"] for event in events} == {7, 8}
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 7 and event["cat"] != "step"]
    assert [event["name"] for event in spans if event["cat"] == "communication"] == [
        "gather: a",
        "gather: b and 1 more",
        "gather again: a",
        "reduce-scatter: b and 1 more",
        "reduce-scatter: a",
    ]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(16e6)


def test_measured_halves_are_what_gathers_and_reduce_scatters_cost(tmp_path: Path) -> None:
    halves = ShardedCost(COST, LinearCost(2, 3.0, 0.1), LinearCost(2, 0.5, 0.1))
    cases = find_fsdp_cases(given(halves=(("c.json", halves),)))
    assert cases[0].entries[0].step == predict_fsdp(TRACE, halves, PLAN)
    other = FsdpPlan("other", (("x",),), (True,))
    with pytest.raises(ReportError, match=r"^p: the plan is for no trace here: the plan for 'other' has 1 module"):
        find_fsdp_cases(Inputs(traces=(("t", TRACE),), costs=(("c", COST),), fsdp_plans=(("p", other),)))
    for name, record in (("t.json", TRACE), ("c.json", halves), ("p.json", PLAN)):
        record.save(tmp_path / name)
    names = [str(tmp_path / name) for name in ("t.json", "c.json", "p.json")]
    for output in ("page.html", "text.txt", "perfetto.json"):
        assert run(["report", *names, "-o", str(tmp_path / output)]) == 0
    assert "p.json, predicted: 2 groups" in (tmp_path / "text.txt").read_text()
    assert "every rank, by block, predicted" in (tmp_path / "perfetto.json").read_text()


def test_the_page_has_the_pieces_of_both_passes_and_no_name_ends_its_data() -> None:
    named = FsdpPlan("toy", (("a",), ("</script>", "c")), (True, False))
    trace = ModelTrace("toy", 3.0, tuple(LayerTrace(f"{name}.w", 2.0, 10, 1.0) for name in ("c", "</script>", "a")))
    inputs = Inputs(traces=(("t.json", trace),), costs=(("c.json", COST),), fsdp_plans=(("p.json", named),))
    page = build_page(inputs)
    start = page.index('type="application/json">') + len('type="application/json">')
    content = json.loads(page[start : page.index("</script>", start)])
    (case,) = content["fsdp"]
    step = case["steps"][0]
    assert [len(step[name]["start"]) for name in ("forwards", "backward", "messages", "gathers")] == [2, 2, 2, 3]
    assert step["gathers"]["kind"] == ["gather", "gather", "gather again"]
    assert sum(end - begin for begin, end in step["idle"]) == pytest.approx(7.0)
    assert "</script>" in content["names"]


def gpu_profile(*, is_whole: bool = True) -> dict[str, Any]:
    """A step on a GPU as Kineto writes it, of two groups and the root; times are in microseconds."""
    events: list[dict[str, Any]] = []

    def host(name: str, ts: float, dur: float, category: str = "user_annotation", **details: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": details}
        )

    def gpu(name: str, launched: float, ts: float, dur: float, stream: int) -> None:
        number = len(events)
        host("cudaLaunchKernel", launched, 0.5, "cuda_runtime", correlation=number)
        host(name, ts, dur, "kernel", correlation=number, stream=stream)

    host("FSDP::root_pre_forward", 0, 1)
    for place, group in enumerate(("", " (h.0)", " (h.1)")):
        at = 2 + 10 * place
        host(f"FSDP::pre_forward{group}", at, 4)
        host(f"FSDP::all_gather{group}", at + 1, 2)
        gpu("ncclDevKernel_AllGather_RING_LL", at + 2, 100 + 20 * place, 20, 20)
        gpu("gemm", at + 5, 120 + 20 * place, 15, 7)
        gpu("copy", at + 5.5, 300, 5, 9)  # of another stream
    host("FSDP::pre_backward", 40, 1)
    for place, group in enumerate((" (h.1)", " (h.0)")):
        at = 42 + 10 * place
        host(f"FSDP::pre_backward{group}", at, 3)
        if place == 1:
            host(f"FSDP::all_gather{group}", at + 1, 2)
            gpu("ncclDevKernel_AllGather_RING_LL", at + 2, 185, 10, 20)
        gpu("gemm", at + 4, 180 + 30 * place, 20, 7)
        host(f"FSDP::post_backward_reduce{group}", at + 6, 2)
        gpu("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", at + 7, 210 + 30 * place, 30, 20)
    if is_whole:
        host("FSDP::root_post_backward_callback", 65, 10)
        host("FSDP::post_backward_reduce", 66, 2)
        gpu("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 67, 280, 10, 20)
    host("FSDP::all_gather (h.0)", 100, 40, "gpu_user_annotation")  # which Kineto repeats
    return {"schemaVersion": 1, "traceEvents": events}


def test_a_profile_of_a_gpu_shows_kernels_of_nccl_and_of_the_busiest_stream(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(gpu_profile()))
    (step,) = steps_from_profile(path)
    micro = 1e-6

    def moments(*pairs: tuple[float, float] | None) -> list[Any]:
        return [None if pair is None else pytest.approx([micro * at for at in pair]) for pair in pairs]

    assert step.groups == (("",), ("h.0",), ("h.1",))
    assert list(step.gathers_s) == moments((0, 20), (20, 40), (40, 60))
    assert list(step.forward_s) == moments((20, 35), (40, 55), (60, 75))
    assert list(step.gathers_again_s) == moments(None, (85, 95), None)
    assert list(step.backward_s) == moments((130, 130), (110, 130), (80, 100))
    assert list(step.sent_s) == moments((180, 190), (140, 170), (110, 140))
    assert step.iteration_s == pytest.approx(190 * micro)
    path.write_text(json.dumps(gpu_profile(is_whole=False)))
    with pytest.raises(FormatError, match=r"profile\.json: the profile holds no whole step of FSDP2"):
        steps_from_profile(path)


def test_a_step_without_a_plan_is_a_case_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(gpu_profile()))
    (step,) = steps_from_profile(path)
    assert isinstance(step, FsdpStep)
    assert run(["report", str(path), "-o", str(tmp_path / "text.txt")]) == 0
    assert (
        "profile.json, measured, one observed step: 3 groups, 1 of them gathered again"
        in (tmp_path / "text.txt").read_text()
    )
    assert run(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0


def test_a_plan_is_drawn_beside_wrapping_by_block_with_the_same_modules_in_the_root() -> None:
    tied = FsdpPlan("toy", (("b",), ("c",)), (True, False), root=("a",))
    inputs = Inputs(traces=(("t.json", TRACE),), costs=(("c.json", COST),), fsdp_plans=(("p.json", tied),))
    (case,) = find_fsdp_cases(inputs)
    assert [entry.step.groups for entry in case.entries] == [(("",), ("b",), ("c",))] * 2


def test_modules_that_only_the_plan_has_in_the_root_are_groups_where_it_is_wrapped_by_block() -> None:
    layers = tuple(LayerTrace(f"{name}.w", 1.0, size, 0.5) for name, size in zip("cba", (40, 8, 8), strict=True))
    trace = ModelTrace("toy", 1.5, layers, {"not_called": ["b"]})
    plan = plan_fsdp(trace, COST)
    assert plan.predicted["at_root"] == ("b",)
    chosen = replace(plan, groups=(("c",),), reshard=(False,), root=("a", "b"))
    inputs = Inputs(traces=(("t.json", trace),), costs=(("c.json", COST),), fsdp_plans=(("p.json", chosen),))
    (case,) = find_fsdp_cases(inputs)
    assert [entry.step.groups for entry in case.entries] == [(("",), ("c",)), (("",), ("a",), ("c",))]


def test_a_plan_is_drawn_in_the_precision_it_was_made_for() -> None:
    half = Precision(gather=0.5, reduce=1.0)
    plan = plan_fsdp(TRACE, COST, precision=half)
    inputs = Inputs(traces=(("t.json", TRACE),), costs=(("c.json", COST),), fsdp_plans=(("p.json", plan),))
    (case,) = find_fsdp_cases(inputs)
    assert case.entries[0].step == predict_fsdp(TRACE, COST, plan, precision=half)
    parts = parts_of(case.entries[0].step)
    assert sum(part.num_bytes for part in parts if part.kind == "gather") == 15
    assert sum(part.num_bytes for part in parts if part.kind == "reduce-scatter") == 30
