"""The page, in a real browser: what a reader sees and does."""

import random
import re
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import (
    PLANNERS,
    LayerTrace,
    LinearCost,
    ModelTrace,
    Network,
    ReportError,
    Timeline,
    find_plan,
    load_network,
    load_trace,
    predict,
)
from mgwfbp.network import ALGORITHMS
from mgwfbp.report import Inputs, build_page, load_inputs
from mgwfbp.units import format_bytes, format_seconds
from tests.report.browser import Tab, open_browser, open_tab
from tests.report.records import TRACE, write_all

COST = LinearCost(4, 1e-3, 2e-9)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with open_tab(browser) as opened:
        yield opened


def write_page(folder: Path, inputs: Inputs, **options: Any) -> Path:
    path = folder / "report.html"
    path.write_text(build_page(inputs, **options), encoding="utf-8")
    return path


def planned(trace: ModelTrace = TRACE, cost: LinearCost = COST) -> Inputs:
    return Inputs(traces=(("trace.json", trace),), costs=(("cost.json", cost),))


def step_of(planner: str, trace: ModelTrace = TRACE, cost: LinearCost = COST) -> Timeline:
    return predict(trace, cost, find_plan(trace, cost, planner))


def drawn_messages(tab: Tab, where: str) -> list[tuple[float, float, float]]:
    """Left, top and width of every message that is drawn, in the picture's own pixels."""
    paths = tab.page.locator(f"{where} path.message").evaluate_all("all => all.map(path => path.getAttribute('d'))")
    found = [re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path) for path in paths]
    return sorted((float(left), float(top), float(width)) for some in found for left, top, width in some)


def test_a_page_of_everything_opens_without_a_network_and_without_a_complaint(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = write_page(tmp_path, load_inputs(inputs))
    for options in ({}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}):
        with open_tab(browser, **options) as tab:
            tab.open(path)
            tab.check()
            titles = tab.page.locator("h3").all_inner_texts()
            for words in ("What a step is made of", "Speedup", "All-reduce", "Top-1", "Training loss", "Sizes"):
                assert any(title.startswith(words) for title in titles), (words, titles)
            # Under every picture the table of its numbers.
            figures = tab.page.locator("figure").count()
            assert figures == tab.page.locator("figure:has(table), figure:has(details)").count() > 8
            assert tab.page.locator("main > p.lead").first.inner_text().startswith("toy on 4 workers over 1 Gbit lab")


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_timeline_shows_as_many_messages_as_its_plan(tab: Tab, tmp_path: Path, planner: str) -> None:
    tab.open(write_page(tmp_path, planned()))
    shown = drawn_messages(tab, f"[data-step='{planner}']")
    step = step_of(planner)
    assert len(shown) == len(step.messages)
    # Lengths are to scale, but for the gap between two.
    widths = [width for _, _, width in shown]
    scale = max(widths) / max(span.duration_s for span in step.messages)
    assert widths == pytest.approx([span.duration_s * scale for span in step.messages], abs=1.0)


def test_pointing_at_a_message_says_what_it_carries_and_when(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, planned()))
    step = step_of("mgwfbp")
    place = len(step.messages) - 1
    span = step.messages[place]
    left, top, width = drawn_messages(tab, "[data-step=mgwfbp]")[place]
    picture = tab.page.locator("[data-step=mgwfbp] svg")
    picture.scroll_into_view_if_needed()
    # Scrolling hides what was pointed at; the browser says so a frame later.
    tab.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = picture.bounding_box()
    tab.page.mouse.move(box["x"] + left + width / 2, box["y"] + top + 8)
    words = tab.page.locator("#tooltip").inner_text().splitlines()
    count = len(span.layers)
    carried = f"{count} gradient{'s' * (count > 1)}, {format_bytes(span.num_bytes)}"
    assert words[0] == f"message {place + 1} of {len(step.messages)}: {carried}"
    assert words[1] == (
        f"ready {format_seconds(span.ready_s)}, start {format_seconds(span.start_s)}, end {format_seconds(span.end_s)}"
    )
    late_s = span.end_s - max(span.start_s, step.compute_s)
    assert words[2] == (
        f"waits {format_seconds(span.wait_s)}, takes {format_seconds(span.duration_s)}, "
        f"{format_seconds(late_s)} of it exposed"
    )
    assert words[3 : 3 + min(6, count)] == list(span.layers[:6])
    tab.page.mouse.move(1, 1)
    assert tab.page.locator("#tooltip").is_hidden()
    tab.check()


def test_the_keyboard_reaches_every_message(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, planned()))
    tab.page.locator("[data-step=wfbp] svg").focus()
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    assert TRACE.layers[2].name in tab.page.locator("#tooltip").inner_text()


def test_dragging_looks_closer_and_the_button_shows_all_again(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, planned()))
    whole = drawn_messages(tab, "[data-step=wfbp]")
    box = tab.page.locator("[data-step=wfbp] svg").bounding_box()
    tab.page.mouse.move(box["x"] + 300, box["y"] + 15)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 500, box["y"] + 15, steps=3)
    tab.page.mouse.up()
    assert len(drawn_messages(tab, "[data-step=wfbp]")) < len(whole)
    tab.page.get_by_role("button", name="Show whole steps").click()
    assert drawn_messages(tab, "[data-step=wfbp]") == whole
    tab.check()


def test_the_exposed_part_is_marked_where_computation_ends(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, planned()))
    step = step_of("single")
    (message,) = drawn_messages(tab, "[data-step=single]")
    exposed = tab.page.locator("[data-step=single] path.exposed.even").get_attribute("d")
    assert float(re.findall(r"M([\d.]+)", exposed)[0]) == pytest.approx(message[0], abs=0.1)
    assert f"exposed {format_seconds(step.exposed_s)}" in tab.page.locator("[data-step=single]").inner_text()


def test_predicted_stands_above_measured(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    tab.open(write_page(tmp_path, load_inputs(inputs)))
    plots = tab.page.locator("section.case").first.locator("[data-step=ddp]")
    assert plots.evaluate_all("all => all.map(plot => plot.dataset.how)") == ["predicted", "measured"]
    tops = [plots.nth(place).bounding_box()["y"] for place in range(2)]
    assert tops[0] < tops[1]


def test_messages_are_listed_when_asked_for(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_page(tmp_path, planned()))
    tab.page.get_by_text("messages of wfbp").click()
    rows = tab.page.locator("details[open] tbody tr")
    rows.nth(len(TRACE.layers) - 1).wait_for()  # they are made once it has opened, a moment after the click
    assert rows.count() == len(TRACE.layers)
    assert rows.nth(2).locator("td").all_inner_texts()[-1] == TRACE.layers[2].name


# ---- what if


def choose(tab: Tab, name: str, value: float) -> None:
    """Move a slider to where its label says the value."""
    slider = tab.page.locator(f"#what-if-{name}")
    for place in range(int(slider.get_attribute("max")) + 1):
        slider.fill(str(place))
        shown = tab.page.locator(f"output[for=what-if-{name}]").inner_text().split()[0]
        if float(shown) == value:
            return
    pytest.fail(f"{name} has no setting {value}")


@pytest.mark.parametrize(("workers", "gigabits", "latency_us"), [(4, 1.0, 50.0), (64, 25.0, 5.0), (1024, 400.0, 0.0)])
def test_what_if_gives_the_planners_own_numbers(
    tab: Tab, tmp_path: Path, workers: int, gigabits: float, latency_us: float
) -> None:
    trace = load_trace("resnet50-h200-b32")
    inputs = Inputs(traces=(("t", trace),), networks=(("n", load_network("10gbe")),))
    tab.open(write_page(tmp_path, inputs, workers=(8,)))
    choose(tab, "workers", workers)
    choose(tab, "bandwidth", gigabits)
    choose(tab, "latency", latency_us)
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


def test_what_if_begins_with_the_case_itself_and_returns_to_it(tab: Tab, tmp_path: Path) -> None:
    tab.open(
        write_page(tmp_path, Inputs(traces=(("t", TRACE),), networks=(("n", load_network("10gbe")),)), workers=(8,))
    )
    step = step_of("optimal", TRACE, load_network("10gbe").cost(8))
    row = tab.page.locator("#what-if tr[data-planner=optimal]")
    assert float(row.get_attribute("data-iteration")) == step.iteration_s
    choose(tab, "workers", 512)
    assert float(row.get_attribute("data-iteration")) != step.iteration_s
    tab.page.get_by_role("button", name="As it was").click()
    assert float(row.get_attribute("data-iteration")) == step.iteration_s


def test_the_pages_planners_are_pythons_on_random_models(tab: Tab) -> None:
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
        cost = LinearCost(
            2, chance.choice([0.0, chance.random()]) * scale, chance.choice([0.0, chance.random() * 1e-8])
        )
        steps = {name: step_of(name, trace, cost) for name in PLANNERS}
        cases.append(
            {
                "model": {
                    "forward_s": trace.forward_s,
                    "backward_s": [layer.backward_s for layer in layers],
                    "grad_bytes": [layer.grad_bytes for layer in layers],
                },
                "cost": {"workers": 2, "startup_s": cost.startup_s, "per_byte_s": cost.per_byte_s},
            }
        )
        expected.append(
            {name: [[len(span.layers) for span in step.messages], step.iteration_s] for name, step in steps.items()}
        )
    script = (resources.files("mgwfbp.report") / "page" / "planner.js").read_text()
    bucket = "{first_bytes: 2 ** 20, later_bytes: 25 * 2 ** 20}"
    found = tab.page.evaluate(
        "(cases) => {"
        + script
        + f"""
        return cases.map(({{model, cost}}) => Object.fromEntries(Object.entries(PLANNERS).map(([name, planner]) => {{
            const sizes = planner(model, cost, {bucket});
            return [name, [sizes, predictStep(model, cost, sizes).iteration_s]];
        }})));
        }}""",
        cases,
    )
    assert found == expected


def test_the_pages_networks_are_pythons(tab: Tab) -> None:
    script = (resources.files("mgwfbp.report") / "page" / "planner.js").read_text()
    counts = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 100, 128, 1000, 4096]
    fields = {"latency_s": 45.26e-6, "per_byte_s": 8e-10, "reduce_per_byte_s": 1.3e-10}
    for algorithm in ALGORITHMS:
        costs = [Network("n", algorithm, **fields).cost(count) for count in counts]
        found = tab.page.evaluate(
            "([network, counts]) => {" + script + "; return counts.map(count => networkCost(network, count)); }",
            [{"algorithm": algorithm, **fields}, counts],
        )
        assert found == [
            {"workers": cost.workers, "startup_s": cost.startup_s, "per_byte_s": cost.per_byte_s} for cost in costs
        ]


# ---- size, names, screens


def test_a_timeline_of_5000_messages_opens_fast_and_stays_small(tab: Tab, tmp_path: Path) -> None:
    layers = tuple(LayerTrace(f"blocks.{place}.attention.output.dense.weight", 1e-5, 4000) for place in range(5000))
    path = write_page(tmp_path, planned(ModelTrace("large", 0.02, layers)))
    assert path.stat().st_size < 8_000_000
    times_s = []
    for _ in range(3):  # the machine may be busy with something else
        began = time.monotonic()
        tab.open(path)
        times_s.append(time.monotonic() - began)
    assert len(drawn_messages(tab, "[data-step=wfbp]")) == 5000
    assert min(times_s) < 3
    tab.check()


@pytest.mark.parametrize(
    ("times_s", "cost"),
    [
        ((0.0, 0.0), LinearCost(4, 0.0, 0.0)),
        ((0.0, 0.0), LinearCost(2**20, 1e3, 1e3)),
        ((0.0, 1.0), LinearCost(1, 0.0, 0.0)),
        ((1e-9, 0.0), LinearCost(4, 1e-3, 0.0)),
        ((1e5, 0.0, 1e5), LinearCost(4, 0.0, 1e-9)),
    ],
)
def test_extreme_models_are_drawn_without_a_complaint(
    tab: Tab, tmp_path: Path, times_s: tuple[float, ...], cost: LinearCost
) -> None:
    layers = tuple(LayerTrace(f"g{place}", time_s, place * 10**9) for place, time_s in enumerate(times_s))
    tab.open(write_page(tmp_path, planned(ModelTrace("extreme", times_s[0], layers), cost)))
    assert "NaN" not in tab.page.locator("main").inner_html()
    assert "Infinity" not in tab.page.locator("main").inner_html()
    tab.check()


HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!-- <script>",
    "]]>\"'`${window.hacked = 3}",
    "\u2028\u2029\u202e\\u003c",
    "javascript:window.hacked=4",
    "&lt;b&gt;",
)


def test_hostile_names_are_text_and_nothing_else(tab: Tab, tmp_path: Path) -> None:
    layers = tuple(LayerTrace(name, 1e-3, 1000) for name in HOSTILE)
    model = "</title></script><svg onload='window.hacked = 5'><script>window.hacked = 6</script>"
    trace = ModelTrace(model, 0.001, layers, {"device": HOSTILE[0], "date": HOSTILE[1]})
    cost = LinearCost(4, 1e-3, 2e-9, {"network": HOSTILE[1]})
    inputs = Inputs(traces=((HOSTILE[0], trace),), costs=((HOSTILE[1], cost),))
    tab.open(write_page(tmp_path, inputs))
    for details in tab.page.locator("details").all():
        details.locator("summary").click()
    tab.page.locator("[data-step=single] svg").focus()
    tab.page.keyboard.press("ArrowRight")
    words = tab.page.locator("#tooltip").inner_text()
    assert HOSTILE[0] in words
    assert HOSTILE[1] in words
    assert model in tab.page.locator("h1").inner_text()
    assert model in tab.page.title()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.locator("script").count() == 2
    assert tab.page.locator("img, iframe, object, embed, a, b, svg[onload]").count() == 0
    tab.check()


OVERLAPS = """() => {
  const clashes = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter((text) => !text.classList.contains("on-lane"));
    const boxes = texts.map((text) => text.getBoundingClientRect());
    const frame = svg.getBoundingClientRect();
    boxes.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1) clashes.push(`cut: ${texts[i].textContent}`);
      boxes.slice(i + 1).forEach((b, j) => {
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2) {
          clashes.push(`${texts[i].textContent} / ${texts[i + 1 + j].textContent}`);
        }
      });
    });
  }
  return clashes;
}"""


@pytest.mark.parametrize("width", [390, 768, 1200])
def test_on_every_screen_nothing_sticks_out_and_no_two_labels_overlap(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    inputs = write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = write_page(tmp_path, load_inputs([*inputs, "googlenet-h200-b64", "10gbe"]), workers=(8,))
    with open_tab(browser, viewport={"width": width, "height": 800}) as tab:
        tab.open(path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") == width
        assert tab.page.evaluate(OVERLAPS) == []
        # Pictures follow the window.
        tab.page.set_viewport_size({"width": 1000, "height": 800})
        tab.page.wait_for_function("document.querySelector('svg.timeline').viewBox.baseVal.width > 900")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 1000
        assert tab.page.evaluate(OVERLAPS) == []


def test_a_dark_screen_gets_a_dark_page_and_paper_a_light_one(browser: Any, tmp_path: Path) -> None:
    path = write_page(tmp_path, planned())
    ground = "getComputedStyle(document.body).backgroundColor"
    with open_tab(browser, color_scheme="dark") as tab:
        tab.open(path)
        dark = tab.page.evaluate(ground)
        tab.page.emulate_media(media="print", color_scheme="dark")
        assert tab.page.evaluate(ground) == "rgb(255, 255, 255)" != dark
        assert not tab.page.locator("p.hint").first.is_visible()
        assert tab.page.pdf().startswith(b"%PDF")


# ---- without a browser


def test_nothing_to_show_is_said_in_one_line() -> None:
    with pytest.raises(ReportError, match="nothing to show"):
        build_page(Inputs())


def test_the_page_is_the_same_for_the_same_records() -> None:
    assert build_page(planned()) == build_page(planned())


def test_the_page_asks_nothing_of_anybody() -> None:
    text = build_page(planned())
    assert "http://www.w3.org/2000/svg" in text  # a name, not an address
    assert not re.search(r"(src|href)=[\"']?https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
