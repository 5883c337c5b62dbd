"""What if: the page plans anew, with the planners' own numbers, and begins with those of the section above it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import (
    PLANNERS,
    LayerTrace,
    LinearCost,
    MergePlan,
    ModelTrace,
    Network,
    PiecewiseCost,
    Timeline,
    find_plan,
    load_network,
    load_trace,
    predict,
)
from mgwfbp.costs import WireCost
from mgwfbp.network import ALGORITHMS
from mgwfbp.planners import find_sharded_plan, plan_bucket
from mgwfbp.report import Inputs, find_cases, load_inputs
from mgwfbp.report.inputs import KnownCost
from mgwfbp.report.whatif import WhatIf, find_what_if, scaled
from mgwfbp.units import format_seconds
from tests.examples import linear_costs, piecewise_costs
from tests.report.browser import Tab, drawn_messages, open_tab, write_page
from tests.report.records import TRACE, bench, measured_cost, write_demo

SCRIPT = (resources.files("mgwfbp.report") / "page" / "planner.js").read_text()


def step_of(planner: str, trace: ModelTrace, cost: KnownCost) -> Timeline:
    return predict(trace, cost, find_plan(trace, cost, planner))


def shown_s(tab: Tab, planner: str) -> float:
    """The step that the table says of a planner, with all its digits."""
    return float(tab.page.locator(f"#what-if tr[data-planner={planner}]").get_attribute("data-iteration"))


def choose(tab: Tab, name: str, label: str) -> None:
    """Move a slider to where it says this."""
    slider = tab.page.locator(f"#what-if-{name}")
    for place in range(int(slider.get_attribute("max")) + 1):
        slider.fill(str(place))
        if tab.page.locator(f"output[for=what-if-{name}]").inner_text() == label:
            return
    pytest.fail(f"{name} has no setting {label}")


@pytest.mark.parametrize(("workers", "gigabits", "latency_us"), [(4, 1.0, 50.0), (64, 25.0, 5.0), (1024, 400.0, 0.0)])
def test_what_if_gives_the_planners_own_numbers(
    tab: Tab, tmp_path: Path, workers: int, gigabits: float, latency_us: float
) -> None:
    trace = load_trace("resnet50-h200-b32")
    inputs = Inputs(traces=(("t", trace),), networks=(("n", load_network("10gbe")),))
    tab.open(write_page(tmp_path, inputs, workers=(8,)))
    choose(tab, "workers", str(workers))
    choose(tab, "bandwidth", f"{gigabits:g} Gbit/s")
    choose(tab, "startup", f"{latency_us:g} us")
    cost = Network("what-if", "ring", latency_us * 1e-6, 8e-9 / gigabits).cost(workers)
    for planner in PLANNERS:
        row = tab.page.locator(f"#what-if tr[data-planner={planner}]")
        step = step_of(planner, trace, cost)
        assert float(row.get_attribute("data-iteration")) == step.iteration_s
        assert float(row.get_attribute("data-exposed")) == step.exposed_s
        assert float(row.get_attribute("data-speedup")) == step.speedup
        assert row.locator("td").all_inner_texts()[:3] == [
            str(len(step.messages)),
            format_seconds(step.iteration_s),
            format_seconds(step.exposed_s),
        ]
    best = step_of("optimal", trace, cost)
    assert len(drawn_messages(tab, "[data-what-if=optimal]")) == len(best.messages)
    verdict = tab.page.locator("#what-if .verdict").inner_text()
    assert f"takes {format_seconds(best.iteration_s)} a step" in verdict
    assert f"a speedup of {best.speedup:.4g} on" in verdict
    tab.check()


def cost_json(cost: KnownCost) -> dict[str, Any]:
    taken = {"taken_s": cost.taken_s, "taken_per_byte_s": cost.taken_per_byte_s}
    if isinstance(cost, LinearCost):
        return {"workers": cost.workers, "startup_s": cost.startup_s, "per_byte_s": cost.per_byte_s, **taken}
    return {"workers": cost.workers, "points": cost.points, **taken}


def random_cost(chance: random.Random, scale: float, *, curved: bool) -> KnownCost:
    if not curved:
        startup_s = chance.choice([0.0, chance.random()]) * scale
        return LinearCost(2, startup_s, chance.choice([0.0, chance.random() * 1e-8]))
    sizes = sorted(chance.sample([0, 1, 4, 100, 10**4, 10**6, 10**7, 10**8], chance.randint(2, 6)))
    times_s = sorted(chance.choice([0.0, chance.random(), 0.5]) * scale for _ in sizes)
    return PiecewiseCost(2, tuple(zip(sizes, times_s, strict=True)))


@pytest.mark.parametrize("takes", [False, True], ids=["take nothing", "take from the computation"])
@pytest.mark.parametrize("curved", [False, True], ids=["straight lines", "curves"])
def test_the_pages_planners_are_pythons_on_random_models(tab: Tab, curved: bool, takes: bool) -> None:
    chance = random.Random(7)
    cases, expected = [], []
    for _ in range(300):
        count = chance.randint(1, 40)
        scale = chance.choice([1.0, 1e-3, 0.1])
        layers = [
            LayerTrace(
                f"g{place}", chance.choice([0.0, chance.random()]) * scale, chance.choice([0, 1, 5, 10**6, 3 * 10**7])
            )
            for place in range(count)
        ]
        trace = ModelTrace("random", chance.random() * scale, tuple(layers))
        cost = random_cost(chance, scale, curved=curved)
        if takes:
            taken_s = chance.choice([0.0, chance.random() * 0.3]) * scale
            cost = replace(cost, taken_s=taken_s, taken_per_byte_s=chance.choice([0.0, chance.random() * 1e-9]))
        steps = {name: step_of(name, trace, cost) for name in PLANNERS}
        model = {
            "forward_s": trace.forward_s,
            "backward_s": [layer.backward_s for layer in layers],
            "grad_bytes": [layer.grad_bytes for layer in layers],
        }
        cases.append({"model": model, "cost": cost_json(cost)})
        expected.append(
            {name: [[len(span.layers) for span in step.messages], step.iteration_s] for name, step in steps.items()}
        )
    found = tab.page.evaluate(
        "(cases) => {"
        + SCRIPT
        + """
        const bucket = {first_bytes: 2 ** 20, later_bytes: 25 * 2 ** 20};
        return cases.map(({model, cost}) => Object.fromEntries(Object.entries(PLANNERS).map(([name, planner]) => {
            const same = scaledCost(cost, cost.workers, 1, 1);
            const sizes = planner(model, same, bucket);
            const step = predictStep(model, same, sizes).iteration_s;
            // The curve over workers has the best step without its plan.
            const best = name === "optimal" ? bestStep(model, same).iteration_s : step;
            return [name, [sizes, Math.abs(best - step) <= 2e-12 * step ? step : best]];
        })));
        }""",
        cases,
    )
    if curved or takes:  # of many best plans, any
        for some in (*found, *expected):
            del some["optimal"][0]
    assert found == expected


def random_groups(chance: random.Random, names: Sequence[str]) -> list[tuple[str, ...]]:
    cuts = sorted(chance.sample(range(1, len(names)), chance.randint(0, len(names) - 1)))
    return [tuple(names[start:end]) for start, end in pairwise([0, *cuts, len(names)])]


def random_sharded_plan(chance: random.Random, trace: ModelTrace) -> MergePlan:
    """Any groups of neighbours in any order, some of them sharded, and any gathers of these."""
    groups = random_groups(chance, [layer.name for layer in trace.layers])
    kept = [group for group in groups if chance.random() < 0.8] or groups[:1]
    gathers = random_groups(chance, [name for group in kept for name in group][::-1])
    return MergePlan("random", "by hand", tuple(chance.sample(groups, len(groups))), gathers=tuple(gathers))


def random_mixed_plan(chance: random.Random, trace: ModelTrace) -> MergePlan:
    """Any groups of neighbours in any order, some of them in low precision."""
    groups = random_groups(chance, [layer.name for layer in trace.layers])
    wire = tuple(chance.choice(["", "bfloat16"]) for _ in groups)
    return MergePlan("random", "by hand", tuple(chance.sample(groups, len(groups))), wire=wire)


def test_the_pages_step_of_a_plan_with_gathers_or_low_precision_is_pythons(tab: Tab) -> None:
    chance = random.Random(11)
    cases, expected = [], []
    for number in range(300):
        layers = [
            LayerTrace(
                f"g{place}",
                chance.choice([0.0, chance.random()]),
                chance.choice([0, 5, 10**6, 3 * 10**7]),
                chance.random(),
            )
            for place in range(chance.randint(1, 20))
        ]
        trace = ModelTrace("random", sum(layer.forward_s or 0.0 for layer in layers), tuple(layers))
        cost = random_cost(chance, 1.0, curved=number % 2 == 0)
        if number % 3:
            cost = replace(cost, taken_s=chance.random() * 0.3, taken_per_byte_s=chance.random() * 1e-9)
        low = replace(random_cost(chance, 1.0, curved=number % 4 == 0), taken_s=chance.random(), workers=cost.workers)
        plan = random_mixed_plan(chance, trace) if number % 5 == 0 else random_sharded_plan(chance, trace)
        found = WhatIf("t", trace, cost, None, {}, "", {"p": plan}).to_json()
        parts = {"cost": cost_json(cost), "low": cost_json(low)}
        cases.append({"model": found["model"], "plan": found["given"][0], **parts})
        step = predict(trace, WireCost(cost, low), plan)
        expected.append([step.iteration_s, step.exposed_s, step.speedup])
    measure = """;
        return cases.map(({model, cost, low, plan}) => {
            const [full, half] = [cost, low].map((one) => scaledCost(one, one.workers, 1, 1));
            const step = predictGiven(model, full, half, plan);
            return [step.iteration_s, step.exposed_s, step.speedup];
        });
    }"""
    found = tab.page.evaluate("(cases) => {" + SCRIPT + measure, cases)
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    # Python adds up sums with fewer roundings since 3.12.
    assert [step[2] for step in found] == pytest.approx([step[2] for step in expected], rel=1e-12)


def test_what_if_has_the_step_of_a_plan_for_a_sharded_optimizer_with_its_groups_as_they_are(
    tab: Tab, tmp_path: Path
) -> None:
    cost = LinearCost(4, 1e-3, 2e-9)
    plan = find_sharded_plan(TRACE, cost)
    assert plan.gathers
    tab.open(write_page(tmp_path, Inputs(traces=(("t", TRACE),), costs=(("c", cost),), plans=(("p.json", plan),))))
    row = tab.page.locator("#what-if tr[data-planner^='p.json']")
    assert float(row.get_attribute("data-iteration")) == plan.predicted["iteration_s"]
    choose(tab, "workers", "16")
    choose(tab, "bandwidth", "2 times")
    step = predict(TRACE, scaled(cost, per_byte=0.5, workers=16), plan)
    assert float(row.get_attribute("data-iteration")) == step.iteration_s
    assert float(row.get_attribute("data-exposed")) == step.exposed_s
    assert "p.json (sharded): for a sharded optimizer, with the groups as they are" in (
        tab.page.locator("#what-if").inner_text()
    )
    tab.page.locator("#what-if-precision").select_option("bfloat16")
    assert row.count() == 0
    tab.check()


def test_the_page_scales_costs_as_python_does(tab: Tab) -> None:
    chance = random.Random(3)
    cases: list[Any] = []
    expected = []
    sizes = [0, 1, 50, 12345, 10**6, 10**9]
    for number in range(200):
        cost = replace(random_cost(chance, 1.0, curved=number % 2 == 0), workers=chance.randint(2, 9))
        workers = chance.choice([1, 2, 3, 16, 4096])
        startup, per_byte = chance.choice([0.0, 0.1, 1.0, 7.0]), chance.random()
        cases.append([cost_json(cost), workers, startup, per_byte, sizes])
        found = scaled(cost, startup=startup, per_byte=per_byte, workers=workers)
        expected.append([found(size) for size in sizes])
    measure = """;
        return cases.map(([cost, workers, startup, perByte, sizes]) => {
            const found = scaledCost(cost, workers, startup, perByte);
            return sizes.map((size) => messageTime(found, size));
        });
    }"""
    assert tab.page.evaluate("(cases) => {" + SCRIPT + measure, cases) == expected


@given(st.one_of(linear_costs, piecewise_costs()), st.integers(0, 10**9))
def test_a_cost_scaled_by_one_is_the_cost(cost: KnownCost, size: int) -> None:
    assert scaled(cost, startup=1.0, per_byte=1.0, workers=cost.workers)(size) == cost(size)


def test_the_pages_networks_are_pythons(tab: Tab) -> None:
    counts = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 100, 128, 1000, 4096]
    fields = {"latency_s": 45.26e-6, "per_byte_s": 8e-10, "reduce_per_byte_s": 1.3e-10}
    for algorithm in ALGORITHMS:
        costs = [Network("n", algorithm, **fields).cost(count) for count in counts]
        found = tab.page.evaluate(
            "([network, counts]) => {" + SCRIPT + "; return counts.map(count => networkCost(network, count)); }",
            [{"algorithm": algorithm, **fields}, counts],
        )
        assert found == [
            {"workers": cost.workers, "startup_s": cost.startup_s, "per_byte_s": cost.per_byte_s} for cost in costs
        ]


# ---- it begins with the section above


def given_inputs(kind: str, folder: Path) -> Inputs:
    match kind:
        case "curve":
            return Inputs(traces=(("t", load_trace("googlenet-h200-b64")),), costs=(("c", measured_cost()),))
        case "line":
            return Inputs(traces=(("t", TRACE),), costs=(("c", LinearCost(4, 1e-3, 2e-9)),))
        case "network":
            return Inputs(traces=(("t", TRACE),), networks=(("n", load_network("10gbe")),))
        case "benchmark":
            return Inputs(benches=(("b", bench()),))
        case _:
            return load_inputs(write_demo(folder))


@pytest.mark.parametrize("kind", ["curve", "line", "network", "benchmark", "demo"])
def test_what_if_begins_with_the_steps_of_the_section_above(tab: Tab, tmp_path: Path, kind: str) -> None:
    inputs = given_inputs(kind, tmp_path)
    (case,) = find_cases(inputs, workers=(8,))
    tab.open(write_page(tmp_path, inputs, workers=(8,)))
    names = {"ddp": "bucket"}
    above = {names.get(one.name, one.name): one.predicted for one in case.strategies if one.predicted}
    compared = [name for name in PLANNERS if name in above]
    assert {"bucket", "optimal", "wfbp"} <= set(compared)
    for name in compared:
        assert shown_s(tab, name) == above[name].iteration_s
    begun = {name: shown_s(tab, name) for name in PLANNERS}
    for slider in ("workers", "bandwidth", "startup"):
        found = tab.page.locator(f"#what-if-{slider}")
        place, last = int(found.input_value()), int(found.get_attribute("max"))
        assert 0 < place < last
        # To the right it is another step, and back the same one.
        found.fill(str(last))
        assert {name: shown_s(tab, name) for name in PLANNERS} != begun
        tab.page.get_by_role("button", name="As it was").click()
        assert {name: shown_s(tab, name) for name in PLANNERS} == begun
    tab.check()


def test_what_if_scales_the_curve_that_was_measured(tab: Tab, tmp_path: Path) -> None:
    cost = measured_cost()
    tab.open(write_page(tmp_path, Inputs(traces=(("t", TRACE),), costs=(("c", cost),))))
    output = tab.page.locator("#what-if output")
    assert output.all_inner_texts() == ["4", "as above", "as above"]
    for slider, label in (("workers", "16"), ("bandwidth", "2 times"), ("startup", "1/2")):
        choose(tab, slider, label)
    found = scaled(cost, startup=0.5, per_byte=0.5, workers=16)
    for planner in PLANNERS:
        assert shown_s(tab, planner) == step_of(planner, TRACE, found).iteration_s
    reading = tab.page.locator("#what-if .reading").inner_text()
    assert reading.startswith(f"On 16 workers a message of no bytes takes {format_seconds(found(0))}")
    assert f"{format_seconds(found(TRACE.grad_bytes))}." in reading


def test_bucket_sizes_are_those_of_the_section_above(tab: Tab, tmp_path: Path) -> None:
    small = partial(plan_bucket, first_bucket_bytes=10_000, bucket_bytes=2_000_000)
    inputs = given_inputs("line", tmp_path)
    tab.open(write_page(tmp_path, inputs, planners={**PLANNERS, "bucket": small}))
    cost = inputs.costs[0][1]
    expected = predict(TRACE, cost, small(TRACE, cost)).iteration_s
    assert expected != step_of("bucket", TRACE, cost).iteration_s
    assert shown_s(tab, "bucket") == expected


def test_what_was_predicted_otherwise_above_is_named() -> None:
    found = bench()
    (case,) = find_cases(Inputs(benches=(("b", found),)))
    what_if = find_what_if(case)
    assert what_if is not None
    assert "Above" not in what_if.note
    apart = replace(case.strategies[1], predicted=case.strategies[0].predicted)
    what_if = find_what_if(replace(case, strategies=(case.strategies[0], apart)))
    assert what_if is not None
    assert f"wfbp ({format_seconds(found['ddp'].predicted_s or 0)} there" in what_if.note


@pytest.mark.parametrize("latency_s", [0.0, 1e-9, 45e-6, 1e-3, 0.5])
@pytest.mark.parametrize("per_byte_s", [1e-14, 8e-10, 8e-9, 1e-6])
@pytest.mark.parametrize("workers", [2, 4096, 10_000])
def test_no_slider_begins_at_an_end(latency_s: float, per_byte_s: float, workers: int) -> None:
    network = Network("n", "ring", latency_s, per_byte_s)
    for networks, costs in ((("n", network),), ()), ((), (("c", network.cost(workers)),)):
        inputs = Inputs(traces=(("t", TRACE),), networks=networks, costs=costs)
        (case,) = find_cases(inputs, workers=(workers,))
        what_if = find_what_if(case)
        assert what_if is not None
        for name, slider in what_if.sliders.items():
            values = [value for _, value in slider.choices]
            assert len(set(values)) == len(values)
            # Of nothing there is no less.
            assert 0 < slider.start < len(values) - 1 or (name == "startup" and not latency_s)


# ---- controls


CLASHES = """() => {
  const panel = document.querySelector(".controls").getBoundingClientRect();
  const parts = [...document.querySelectorAll(".controls :is(select, input, button, output)")];
  const boxes = parts.map((part) => part.getBoundingClientRect());
  const names = parts.map((part) => part.id || part.getAttribute("for") || part.tagName);
  const found = [];
  boxes.forEach((a, i) => {
    if (a.left < panel.left || a.right > panel.right || !a.width) found.push(`outside: ${names[i]}`);
    boxes.slice(i + 1).forEach((b, j) => {
      const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
      if (!apart) found.push(`${names[i]} on ${names[i + 1 + j]}`);
    });
  });
  return found;
}"""


@pytest.mark.parametrize("width", [390, 800, 1440])
def test_the_selector_of_cases_covers_nothing(browser: Any, tmp_path: Path, width: int) -> None:
    long = LinearCost(4, 1e-3, 2e-9, {"network": "ten hosts of a lab with a name that is longer than any screen " * 3})
    inputs = replace(given_inputs("network", tmp_path), costs=(("a", long), ("b", measured_cost())))
    path = write_page(tmp_path, inputs, workers=(8,))
    with open_tab(browser, viewport={"width": width, "height": 900}) as tab:
        tab.open(path)
        assert tab.page.locator("#what-if-case option").count() == 3
        assert tab.page.evaluate(CLASHES) == []
        tab.page.locator("#what-if-case").select_option("1")
        assert tab.page.evaluate(CLASHES) == []
        tab.check()
