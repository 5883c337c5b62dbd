"""Messages in low precision in a report: marked in every picture, counted in tables, planned on request."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import PLANNERS, BenchResult, LinearCost, MergePlan, Timeline, find_plan, load_network, predict
from mgwfbp.cli import run
from mgwfbp.costs import LowCost, WireCost, halved
from mgwfbp.planners import find_wire_plan, plan_wire
from mgwfbp.report import Inputs, draw_case, find_cases, load_inputs, step_rows, summarize, timelines_of, to_perfetto
from mgwfbp.report.inputs import KnownCost
from mgwfbp.report.measured import side_by_side
from mgwfbp.report.tables import breakdown_chart, steps_table
from mgwfbp.units import format_bytes, format_seconds
from tests.report.browser import Tab, drawn_messages, write_page
from tests.report.records import TRACE, bench, measured_cost, stretched, write_all, write_run
from tests.report.test_what_if import SCRIPT, cost_json, random_cost, shown_s

COST = LinearCost(4, 1e-3, 4e-9)
LOW = LinearCost(4, 2e-3, 2.5e-9)
# Messages of 4, 4 and 4 gradients; the second one of 2 004 000 + 8000 bytes in bfloat16.
PLAN = replace(MergePlan.of_sizes(TRACE, [4, 4, 4]), wire=("", "bfloat16", ""))
LOW_BYTES = sum(layer.grad_bytes for layer in TRACE.layers[4:8])
SENT_BYTES = TRACE.grad_bytes - LOW_BYTES // 2


def unmarked(timeline: Timeline) -> Timeline:
    """A step as it is observed: it does not say how messages travel."""
    return replace(timeline, messages=tuple(replace(span, wire="") for span in timeline.messages))


def low_bench(**changes: Any) -> BenchResult:
    """A benchmark in which the last strategy sends by `PLAN`."""
    found = bench()
    first, second, last = found.strategies
    observed = stretched(predict(TRACE, measured_cost(), PLAN), 1.1)  # does not say how messages travel
    low = replace(last, strategy="auto+bf16", plan=PLAN, num_messages=3, timeline=observed)
    return replace(found, strategies=(first, second, replace(low, **changes)))


def wires(timeline: Timeline | None) -> list[str]:
    assert timeline is not None
    return [span.wire for span in timeline.messages]


# ---- records


def test_a_predicted_step_says_how_its_messages_travel_and_keeps_it_in_a_file(tmp_path: Path) -> None:
    step = predict(TRACE, COST, PLAN)
    assert wires(step) == ["", "bfloat16", ""]
    assert (step.grad_bytes, step.low_bytes, step.sent_bytes) == (TRACE.grad_bytes, LOW_BYTES, SENT_BYTES)
    assert (
        find_wire_plan(TRACE, COST).predicted["sent_bytes"] == predict(TRACE, COST, plan_wire(TRACE, COST)).sent_bytes
    )
    step.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == step
    # A file of a step without such messages is what it was.
    assert "wire" not in json.dumps(predict(TRACE, COST, find_plan(TRACE, COST)).to_json())


def test_a_plan_in_low_precision_is_an_input_and_its_step_is_predicted_so(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    TRACE.save(tmp_path / "trace.json")
    COST.save(tmp_path / "cost.json")
    inputs = load_inputs([tmp_path / name for name in ("plan.json", "trace.json", "cost.json")])
    (case,) = find_cases(inputs)
    assert case.strategies[-1].predicted == predict(TRACE, COST, PLAN)
    (case,) = find_cases(replace(inputs, low_cost=LowCost(LOW, knows_taken=True)))
    assert case.strategies[-1].predicted == predict(TRACE, WireCost(COST, LOW), PLAN)


def test_the_steps_of_a_benchmark_are_marked_by_its_plan() -> None:
    low = ((0, 1e-3), (10**7, 2e-2))
    found = replace(low_bench(), source={"low_cost": low})
    (case,) = find_cases(Inputs(benches=(("b", found),)))
    strategy = case.strategies[-1]
    assert wires(strategy.measured) == wires(strategy.predicted) == ["", "bfloat16", ""]
    assert found.cost is not None
    both = WireCost(found.cost, replace(measured_cost(), points=low))
    assert strategy.predicted is not None
    assert strategy.predicted.iteration_s == predict(TRACE, both, PLAN).iteration_s
    (shown,) = side_by_side([case])
    assert [name for name, _ in shown.steps] == ["ddp", "auto+bf16"]


def test_what_a_benchmark_learnt_to_take_nothing_is_not_taken_for_unknown() -> None:
    full = replace(measured_cost(), taken_s=1e-3)
    low = replace(full, taken_s=0.0)
    for said, expected_s in ((low.to_json(), 0.0), (low.points, 1e-3)):  # older editions learnt the points alone
        found = replace(low_bench(), cost=full, source={"low_cost": said})
        (case,) = find_cases(Inputs(benches=(("b", found),)))
        assert case.low_cost == replace(low, source={}, taken_s=expected_s)
        assert case.both_costs == WireCost(full, case.low_cost)


def test_a_strategy_that_was_not_predicted_says_nothing_of_its_bytes() -> None:
    hook = low_bench(strategy="bf16-hook-25", plan=find_plan(TRACE, COST), timeline=None, predicted_s=None)
    found = replace(hook, strategies=(*hook.strategies, low_bench().strategies[-1]))
    (case,) = find_cases(Inputs(benches=(("b", found),)))
    assert [(row.how, row.sent_bytes) for row in step_rows(case) if row.strategy == "bf16-hook-25"] == [
        ("measured", None)
    ]
    table = steps_table(step_rows(case))
    assert [row[-2:] for row in table.rows if row[0] == "bf16-hook-25"] == [("", "")]


def test_the_steps_of_a_run_are_marked_by_its_plan_and_predicted_with_what_its_tuner_learnt(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plan=PLAN)
    for name in ("timeline.json", "predicted.json"):
        unmarked(Timeline.load(folder / name)).save(folder / name)
    (case,) = find_cases(load_inputs([folder]))
    assert wires(case.strategies[0].measured) == wires(case.strategies[0].predicted) == ["", "bfloat16", ""]
    (folder / "predicted.json").unlink()
    low = replace(measured_cost(2), points=((0, 1e-3), (10**7, 2e-2)))
    tuning = {"format": "mgwfbp.tuning/1", "state": "settled", "low_cost": low.to_json()}
    (folder / "tuning.json").write_text(json.dumps(tuning))
    (case,) = find_cases(load_inputs([folder]))
    expected = predict(TRACE, WireCost(measured_cost(2), low), PLAN)
    assert case.strategies[0].predicted == expected


def test_an_observed_timeline_joins_the_plan_it_ran_with_and_is_marked_by_it() -> None:
    plan = plan_wire(TRACE, COST)
    step = predict(TRACE, COST, plan)
    observed = stretched(step, 2.0)
    inputs = Inputs((("t", TRACE),), (("c", COST),), timelines=(("observed.json", observed),))
    (case,) = find_cases(inputs, planners={**PLANNERS, "optimal+bf16": plan_wire})
    assert wires(case.strategies[-1].measured) == wires(step)
    assert any(wires(step))


# ---- tables and pictures


def low_inputs() -> Inputs:
    return Inputs((("t", TRACE),), (("c", COST),), plans=(("mine.json", PLAN),))


def test_tables_count_what_is_sent_only_where_some_of_it_is_in_low_precision() -> None:
    (case,) = find_cases(low_inputs())
    table = breakdown_chart(case).table
    assert table.titles[-2:] == ("sent", "low precision")
    assert {row[-2:] for row in table.rows[:-1]} == {(format_bytes(TRACE.grad_bytes), "0%")}
    assert table.rows[-1][-2:] == (format_bytes(SENT_BYTES), f"{LOW_BYTES / TRACE.grad_bytes:.0%}")
    (case,) = find_cases(replace(low_inputs(), plans=()))
    assert "sent" not in breakdown_chart(case).table.titles


def test_text_has_other_marks_for_messages_in_low_precision() -> None:
    (case,) = find_cases(low_inputs(), planners={})
    drawn = draw_case(case)
    (lane,) = [line for line in drawn.splitlines() if line.startswith("messages")]
    assert [mark for mark in "=~#-" if mark in lane] == ["=", "~"]
    assert lane.index("=") < lane.index("~") < lane.rindex("=")
    assert "% of the bytes in bfloat16" in drawn
    assert "- ~ messages in low precision in turn" in drawn
    (case,) = find_cases(replace(low_inputs(), plans=()))
    assert "precision" not in draw_case(case)


def test_perfetto_names_the_precision_of_a_message() -> None:
    events = to_perfetto(timelines_of(find_cases(low_inputs(), planners={})), max_ranks=1)["traceEvents"]
    messages = [event for event in events if event.get("cat") == "communication"]
    assert [event["name"].split(":")[0] for event in messages] == ["message 0", "message 1 in bfloat16", "message 2"]
    assert [event["args"].get("wire") for event in messages] == [None, "bfloat16", None]


def test_figures_have_stripes_and_say_what_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure as Canvas

    from mgwfbp.report.figures import draw_timelines

    def drawn(plan: MergePlan) -> tuple[list[str | None], list[str]]:
        axes = Canvas().subplots()
        draw_timelines([("mine", predict(TRACE, COST, plan))], axes)
        legend = axes.get_legend()
        assert legend is not None
        return [patch.get_hatch() for patch in axes.patches], [text.get_text() for text in legend.get_texts()]

    hatches, words = drawn(PLAN)
    assert hatches.count("////") == 1
    assert words[-1] == "in low precision"
    hatches, words = drawn(replace(PLAN, wire=()))
    assert not any(hatches)
    assert "in low precision" not in words


@pytest.mark.parametrize(("cost", "helps"), [(COST, True), (LinearCost(4, 1e-4, 1e-12), False)])
def test_words_say_what_low_precision_adds_to_the_best_plan(cost: LinearCost, helps: bool) -> None:
    inputs = Inputs((("t", TRACE),), (("c", cost),))
    (case,) = find_cases(inputs, planners={**PLANNERS, "optimal+bf16": plan_wire})
    words = summarize(case)[-1]
    step, best = (predict(TRACE, cost, plan) for plan in (plan_wire(TRACE, cost), find_plan(TRACE, cost)))
    assert bool(step.low_bytes) == helps
    if helps:
        assert f"With {step.low_bytes / step.grad_bytes:.0%} of the bytes in bfloat16" in words
        assert f"{best.iteration_s / step.iteration_s:.3g} times as fast" in words
        assert f"({format_seconds(step.iteration_s)} instead of {format_seconds(best.iteration_s)}, both" in words
    else:
        assert words.startswith("No message needs low precision")
    (case,) = find_cases(inputs)
    assert "precision" not in " ".join(summarize(case))


# ---- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_all(tmp_path)
    COST.save(tmp_path / "line.json")
    LOW.save(tmp_path / "low.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_of_both_precisions_stands_beside_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", "trace.json", "line.json", "--wire", "bfloat16"]
    assert run([*arguments, "--planner", "optimal"]) == 0
    shown = capsys.readouterr()
    step = predict(TRACE, COST, find_wire_plan(TRACE, COST))
    assert (
        f"optimal+bf16, predicted: {len(step.messages)} messages, step {format_seconds(step.iteration_s)}" in shown.out
    )
    assert "half the bytes" in shown.err
    assert run([*arguments, "--wire-cost", "low.json"]) == 0
    shown = capsys.readouterr()
    both = WireCost(COST, LOW)
    dear = predict(TRACE, both, find_wire_plan(TRACE, both))
    assert dear.iteration_s > step.iteration_s
    assert f"step {format_seconds(dear.iteration_s)}, exposed" in shown.out.partition("optimal+bf16, predicted")[2]
    assert shown.err == ""


def test_a_plan_in_low_precision_is_shown_with_the_cost_that_was_measured_or_it_is_said_what_is_assumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(PLAN, planner="low").save("low_plan.json")
    WireCost(COST, LOW, "bfloat16").save("both.json")
    WireCost(COST, LOW, "float16").save("other.json")
    for files, cost in (
        (("both.json",), WireCost(COST, LOW)),
        (("line.json", "--wire-cost", "low.json"), WireCost(COST, LOW)),
        (("line.json",), COST),
        (("other.json",), COST),  # which says nothing of bfloat16
    ):
        assert run(["report", "trace.json", "low_plan.json", *files, "--planner", "optimal"]) == 0
        shown = capsys.readouterr()
        step_s = predict(TRACE, cost, PLAN).iteration_s
        assert f"step {format_seconds(step_s)}, exposed" in shown.out.partition("(low), predicted")[2]
        assert ("half the bytes" in shown.err) == (cost is COST)
    replace(PLAN, wire=("", "float16", "")).save("other_plan.json")
    assert run(["report", "trace.json", "line.json", "low_plan.json", "other_plan.json"]) == 2
    assert "messages travel in bfloat16 and in float16" in " ".join(capsys.readouterr().err.split())


def test_a_run_whose_tuner_learnt_the_cost_is_planned_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "run", "--wire", "bfloat16"]) == 0
    assert "half the bytes" in capsys.readouterr().err
    low = replace(measured_cost(2), points=((0, 1e-4), (10**7, 2e-3)))
    tuning = {"format": "mgwfbp.tuning/1", "state": "settled", "low_cost": low.to_json()}
    (folder / "run" / "tuning.json").write_text(json.dumps(tuning))
    assert run(["report", "run", "--wire", "bfloat16"]) == 0
    shown = capsys.readouterr()
    both = WireCost(measured_cost(2), low)
    step = predict(TRACE, both, plan_wire(TRACE, both))
    assert f"step {format_seconds(step.iteration_s)}, exposed" in shown.out.partition("optimal+bf16, predicted")[2]
    assert shown.err == ""


def test_curves_over_workers_have_the_plan_of_both_precisions_unless_its_cost_was_measured(folder: Path) -> None:
    command = ["report", "trace.json", "10gbe", "--workers", "4", "--wire", "bfloat16", "-o", "page.html"]
    counted = []
    for more in ([], ["--wire-cost", "low.json"]):
        assert run([*command, *more]) == 0
        records = (folder / "page.html").read_text().partition('type="application/json">')[2].partition("</script>")[0]
        (scaling,) = [group for group in json.loads(records)["groups"] if group["id"] == "scaling"]
        found = {series["name"]: series["points"] for series in scaling["charts"][0]["series"]}
        counted.append("optimal+bf16" in found)
        assert ("optimal+bf16 is left out of the curves" in " ".join(scaling["summary"])) != counted[-1]
        if counted[-1]:
            cost = load_network("10gbe").cost(8)
            expected = predict(TRACE, cost, plan_wire(TRACE, cost)).speedup
            assert [8.0, expected] in found["optimal+bf16"]
    assert counted == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace.json", "line.json", "--wire-cost", "low.json"], "needs --wire"),
        (["bench.json", "--wire", "bfloat16"], "nothing is planned here"),
        (["trace.json", "10gbe", "--workers", "4,8", "--wire", "float16", "--wire-cost", "low.json"], "of 8"),
        (["trace.json", "line.json", "run", "--wire", "float16", "--wire-cost", "low.json"], "of 2"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["report", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


# ---- the page


def test_the_page_stripes_messages_in_low_precision_and_says_so(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, low_inputs()))
    mine = tab.page.locator("[data-step^='mine.json']")
    assert mine.locator("path.low").count() == 1
    assert tab.page.locator("[data-step=optimal] path.low").count() == 0
    # The stripes lie on the second message, and on no other.
    box = mine.locator("path.low").evaluate("path => [path.getBBox().x, path.getBBox().x + path.getBBox().width]")
    left, _, width = drawn_messages(tab, "[data-step^='mine.json']")[1]
    assert left - 0.1 <= box[0] < box[1] <= left + width + 1.0
    assert "striped: in low precision" in tab.page.locator(".case .legend").first.inner_text()
    mine.locator("svg").focus()
    for _ in range(2):
        tab.page.keyboard.press("ArrowRight")
    assert f"travels in bfloat16: {format_bytes(LOW_BYTES // 2)} sent" in tab.page.locator("#tooltip").inner_text()
    tab.page.keyboard.press("ArrowRight")
    assert "travels in" not in tab.page.locator("#tooltip").inner_text()
    assert "Low precision:" in tab.page.locator("#words").inner_text()
    tab.check()


def test_a_page_without_low_precision_says_nothing_of_it(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, replace(low_inputs(), plans=())))
    assert tab.page.locator("path.low").count() == 0
    for part in (".case", "#words"):
        assert "low precision" not in tab.page.locator(part).inner_text().lower()


@pytest.mark.parametrize("kind", ["curve", "line", "network"])
def test_what_if_all_messages_were_in_bfloat16_is_what_python_plans_with_half_the_bytes(
    tab: Tab, tmp_path: Path, kind: str
) -> None:
    network = load_network("10gbe")
    costs: dict[str, KnownCost] = {
        "curve": measured_cost(),
        "line": replace(COST, taken_s=1e-4),
        "network": network.cost(8),
    }
    inputs = Inputs((("t", TRACE),), (("c", costs[kind]),) if kind != "network" else ())
    if kind == "network":
        inputs = replace(inputs, networks=(("n", network),))
    tab.open(write_page(tmp_path, inputs, workers=(8,)))
    begun = {name: shown_s(tab, name) for name in PLANNERS}
    tab.page.locator("#what-if-precision").select_option("bfloat16")
    low = halved(costs[kind])
    for name in PLANNERS:
        plan = find_plan(TRACE, low, name)
        assert shown_s(tab, name) == predict(TRACE, low, plan).iteration_s
        # And the same plan with all its messages in bfloat16 takes as long.
        all_low = replace(plan, wire=("bfloat16",) * plan.num_groups)
        assert shown_s(tab, name) == predict(TRACE, costs[kind], all_low).iteration_s
    row = tab.page.locator("#what-if tr[data-planner=optimal] td").all_inner_texts()
    assert row[-2:] == [format_bytes(TRACE.grad_bytes / 2), "100%"]
    assert tab.page.locator("[data-what-if=optimal] path.low").count() == 1
    assert "half the bytes" in tab.page.locator("#what-if .reading").inner_text()
    tab.page.get_by_role("button", name="As it was").click()
    assert {name: shown_s(tab, name) for name in PLANNERS} == begun
    assert tab.page.locator("#what-if path.low").count() == 0
    tab.check()


def test_what_if_takes_the_measured_cost_and_has_the_plan_of_both_precisions_as_it_is(tab: Tab, tmp_path: Path) -> None:
    inputs = Inputs((("t", TRACE),), (("c", COST),), lows=(("c", WireCost(COST, LOW, "bfloat16")),))
    tab.open(write_page(tmp_path, replace(inputs, plans=(("p.json", PLAN),))))
    both = WireCost(COST, LOW)
    row = tab.page.locator("#what-if tr[data-planner^='p.json']")
    step = predict(TRACE, both, PLAN)
    assert float(row.get_attribute("data-iteration")) == step.iteration_s
    cells = row.locator("td").all_inner_texts()
    assert cells[-2:] == [format_bytes(step.sent_bytes), f"{step.low_bytes / step.grad_bytes:.0%}"]
    tab.page.locator("#what-if-precision").select_option("bfloat16")
    for name in PLANNERS:
        assert shown_s(tab, name) == predict(TRACE, LOW, find_plan(TRACE, LOW, name)).iteration_s
    assert "were measured, conversions included" in tab.page.locator("#what-if .reading").inner_text()
    tab.check()


def test_a_cost_that_holds_both_precisions_is_reported_with_both(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = WireCost(COST, LOW, "bfloat16")
    both.save(folder / "both.json")
    assert run(["report", "trace.json", "both.json", "--wire", "bfloat16"]) == 0
    shown = capsys.readouterr()
    step = predict(TRACE, both, find_wire_plan(TRACE, both))
    assert f"step {format_seconds(step.iteration_s)}, exposed" in shown.out.partition("optimal+bf16, predicted")[2]
    assert shown.err == ""


def test_the_page_halves_costs_as_python_does(tab: Tab) -> None:
    chance = random.Random(5)
    sizes = [0, 1, 50, 12345, 10**6, 10**9]
    costs = [random_cost(chance, 1.0, curved=number % 2 == 0) for number in range(100)]
    measure = """;
        return cases.map(([cost, sizes]) => {
            const found = halvedCost(scaledCost(cost, cost.workers, 1, 1));
            return sizes.map((size) => messageTime(found, size));
        });
    }"""
    found = tab.page.evaluate("(cases) => {" + SCRIPT + measure, [[cost_json(cost), sizes] for cost in costs])
    assert found == [[halved(cost)(size) for size in sizes] for cost in costs]
