"""Timelines for other eyes: Perfetto's, a terminal's."""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import LinearCost, MergePlan, ModelTrace, Timeline, find_plan, predict
from mgwfbp.planners import find_sharded_plan
from mgwfbp.report import Inputs, draw_case, draw_timeline, find_cases, timelines_of, to_perfetto
from mgwfbp.report.cases import plan_of, step_rows
from mgwfbp.report.perfetto import MAX_RANKS, LabelledTimeline
from tests.examples import linear_costs, traces
from tests.report.records import TRACE, bench

# The Trace Event Format as Perfetto's importer reads it (trace_processor's json_trace_tokenizer): an object with
# traceEvents; complete events need ts and dur in microseconds, metadata events a known name and their argument.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "pid", "name"],
                "oneOf": [
                    {
                        "required": ["ts", "dur", "tid", "cat"],
                        "properties": {
                            "ph": {"const": "X"},
                            "name": {"type": "string", "minLength": 1},
                            "cat": {"type": "string"},
                            "pid": {"type": "integer", "minimum": 1},
                            "tid": {"type": "integer", "minimum": 0},
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "args": {"type": "object"},
                        },
                        "additionalProperties": False,
                    },
                    {
                        "required": ["args"],
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"pattern": "^(process|thread)_(name|sort_index)$"},
                            "pid": {"type": "integer"},
                            "tid": {"type": "integer"},
                            "args": {
                                "type": "object",
                                "properties": {"name": {"type": "string"}, "sort_index": {"type": "integer"}},
                                "minProperties": 1,
                                "additionalProperties": False,
                            },
                        },
                        "additionalProperties": False,
                    },
                ],
            },
        },
    },
}

COST = LinearCost(4, 1e-3, 2e-9)


def step(planner: str = "optimal") -> Timeline:
    return predict(TRACE, COST, find_plan(TRACE, COST, planner))


def spans_by_thread(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def test_the_trace_is_valid_and_survives_json() -> None:
    trace = to_perfetto(timelines_of(find_cases(Inputs(benches=(("b", bench()),)))))
    jsonschema.validate(trace, SCHEMA)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace


def test_the_schema_notices_what_is_wrong() -> None:
    trace = to_perfetto([LabelledTimeline("toy", "optimal", "predicted", step())])
    trace["traceEvents"][-1]["dur"] = -1.0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(trace, SCHEMA)


@settings(max_examples=60)
@given(traces(), linear_costs, st.sampled_from([find_plan, find_sharded_plan]))
def test_spans_add_up_to_the_step_on_every_rank(
    trace: ModelTrace, cost: LinearCost, find: Callable[[ModelTrace, LinearCost], MergePlan]
) -> None:
    timeline = predict(trace, cost, find(trace, cost))
    exported = to_perfetto([LabelledTimeline("random", "optimal", "predicted", timeline)])
    threads = spans_by_thread(exported)
    assert len(threads) == 3 * timeline.workers
    for (_, thread), spans in threads.items():
        total_s = sum(span["dur"] for span in spans) / 1e6
        computation_s = timeline.compute_s - timeline.waited_s
        expected_s = (timeline.iteration_s, computation_s, timeline.communication_s)[thread]
        assert total_s == pytest.approx(expected_s)
        assert max(span["ts"] + span["dur"] for span in spans) / 1e6 <= timeline.iteration_s * (1 + 1e-9)
    assert max(span["ts"] + span["dur"] for some in threads.values() for span in some) / 1e6 == pytest.approx(
        timeline.iteration_s
    )


def test_ranks_are_processes_with_names_and_messages_carry_their_gradients() -> None:
    trace = to_perfetto([LabelledTimeline("toy", "optimal", "predicted", step())])
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"rank {rank}, optimal, predicted, toy" for rank in range(4)]
    messages = [event for event in trace["traceEvents"] if event.get("cat") == "communication" and event["pid"] == 1]
    assert [tuple(event["args"]["layers"]) for event in messages] == [span.layers for span in step().messages]
    assert [event["args"]["bytes"] for event in messages] == [span.num_bytes for span in step().messages]


def test_gathers_are_drawn_and_named_where_there_are_some() -> None:
    plan = find_sharded_plan(TRACE, COST)
    timeline = predict(TRACE, COST, plan)
    trace = to_perfetto([LabelledTimeline("toy", "sharded", "predicted", timeline)], max_ranks=1)
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "communication"]
    assert [name for name in names if name.startswith("gather")] == names[: len(plan.gathers)]
    (case,) = find_cases(
        Inputs(traces=(("t", TRACE),), costs=(("c", COST),), plans=(("sharded.json", plan),)),
    )
    text = draw_case(case)
    assert f"{len(plan.groups)} messages and {len(plan.gathers)} gathers" in text
    assert text.endswith(", < > gathers in turn\n")
    row = next(row for row in step_rows(case) if row.strategy.startswith("sharded.json"))
    assert row.compute_s + row.exposed_s == pytest.approx(row.iteration_s)
    assert plan_of(timeline).messages == plan.messages  # whose range the prediction has, and no other plan's


def test_of_thousands_of_ranks_that_are_alike_a_few_are_written() -> None:
    cost = LinearCost(4096, 1e-3, 2e-9)
    timeline = predict(TRACE, cost, find_plan(TRACE, cost))
    trace = to_perfetto([LabelledTimeline("toy", "optimal", "predicted", timeline)])
    assert len({event["pid"] for event in trace["traceEvents"]}) == MAX_RANKS


def test_a_measured_step_is_one_process_since_one_rank_was_observed() -> None:
    trace = to_perfetto([LabelledTimeline("toy", "optimal", "measured", step())])
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["the observed rank, optimal, measured, one observed step, toy"]


@settings(max_examples=30)
@given(traces(), linear_costs)
def test_a_drawn_line_is_as_long_as_it_should_be_and_gradients_come_after_forward(
    trace: ModelTrace, cost: LinearCost
) -> None:
    timeline = predict(trace, cost, find_plan(trace, cost))
    lines = draw_timeline(timeline, width=80).splitlines()
    assert all(len(line) == 80 for line in lines[1:])
    computation = lines[1].partition("|")[2]
    assert "f" not in computation.lstrip("f").rstrip("|")


def test_every_wide_message_is_drawn_and_the_exposed_part_marked() -> None:
    timeline = step("single")
    text = draw_timeline(timeline, width=110)
    messages = text.splitlines()[2].partition("|")[2]
    exposed = text.splitlines()[3].partition("|")[2]
    assert set(messages) == {" ", "=", "|"}
    assert messages.count("=") == exposed.count("!") == round(timeline.exposed_s / timeline.iteration_s * 98)


def test_a_case_is_drawn_to_one_scale_with_its_words_first() -> None:
    (case,) = find_cases(Inputs(traces=(("t", TRACE),), costs=(("c", COST),)))
    text = draw_case(case, width=90)
    assert text.startswith("toy on 4 workers over c: with PyTorch's default buckets")
    assert text.count("compute   |") == 5
    ends = {line.split()[-2:][0] for line in text.splitlines() if line.lstrip().startswith("0 s")}
    assert len(ends) == 1
