"""The page, in a real browser: what a reader sees and does."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import (
    PLANNERS,
    LayerTrace,
    LinearCost,
    ModelTrace,
    ReportError,
    Timeline,
    find_plan,
    predict,
)
from mgwfbp.planners import find_sharded_plan
from mgwfbp.report import Inputs, build_page, load_inputs
from mgwfbp.units import format_bytes, format_seconds
from tests.report.browser import Tab, drawn_messages, find_browser, open_tab, write_page
from tests.report.records import TRACE, write_all, write_run

COST = LinearCost(4, 1e-3, 2e-9)


def planned(trace: ModelTrace = TRACE, cost: LinearCost = COST) -> Inputs:
    return Inputs(traces=(("trace.json", trace),), costs=(("cost.json", cost),))


def step_of(planner: str, trace: ModelTrace = TRACE, cost: LinearCost = COST) -> Timeline:
    return predict(trace, cost, find_plan(trace, cost, planner))


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


def test_a_timeline_shows_gathers_beside_messages_and_counts_what_was_waited_for_them(tab: Tab, tmp_path: Path) -> None:
    plan = find_sharded_plan(TRACE, COST)
    step = predict(TRACE, COST, plan)
    tab.open(write_page(tmp_path, replace(planned(), plans=(("p.json", plan),))))
    assert len(drawn_messages(tab, "[data-step^='p.json']")) == len(step.messages) + len(step.gathers)
    title = tab.page.locator(".step:has([data-step^='p.json']) h4").inner_text()
    assert f"messages and {len(step.gathers)} gathers" in title
    assert f"exposed {format_seconds(step.exposed_s)} " in title
    # Both exposed parts are marked: what the forward pass waits, and messages after the backward pass.
    assert 0 < step.waited_s < step.exposed_s
    assert tab.page.locator("[data-step^='p.json'] path.mark").count() == 2
    assert tab.page.locator("[data-step=optimal] path.mark").count() == 1
    tab.check()


def test_gathers_are_told_before_messages_by_keys_by_pointing_and_in_the_table(tab: Tab, tmp_path: Path) -> None:
    plan = find_sharded_plan(TRACE, COST)
    gathers = predict(TRACE, COST, plan).gathers
    tab.open(write_page(tmp_path, replace(planned(), plans=(("p.json", plan),))))
    picture = tab.page.locator("[data-step^='p.json'] svg")
    tooltip = tab.page.locator("#tooltip")
    picture.focus()
    told = []
    for _ in range(len(gathers) + 1):
        picture.press("ArrowRight")
        told.append(tooltip.inner_text().splitlines()[0].partition(":")[0])
    numbered = [f"gather {number} of {len(gathers)}" for number in range(1, len(gathers) + 1)]
    assert told == [*numbered, f"message 1 of {len(plan.groups)}"]
    picture.press("ArrowLeft")
    start, end, takes = map(format_seconds, (gathers[-1].start_s, gathers[-1].end_s, gathers[-1].duration_s))
    assert tooltip.inner_text().splitlines()[1] == f"start {start}, end {end}, takes {takes}"
    box = picture.bounding_box()
    tab.page.mouse.move(box["x"] + 74, box["y"] + 4 + 22 + 5 + 11)  # the first moment, on the lane of messages
    assert tooltip.inner_text().startswith(f"gather 1 of {len(gathers)}: ")
    details = tab.page.locator(".step:has([data-step^='p.json']) details")
    details.locator("summary").click()
    first = details.locator("tbody tr").first
    assert first.locator("th").inner_text() == "gather 1"
    assert details.locator("tbody tr").count() == len(gathers) + len(plan.groups)
    tab.check()


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


# ---- size, names, screens


def test_a_timeline_of_5000_messages_opens_fast_and_stays_small(tab: Tab, tmp_path: Path) -> None:
    layers = tuple(LayerTrace(f"blocks.{place}.attention.output.dense.weight", 1e-5, 4000) for place in range(5000))
    path = write_page(tmp_path, planned(ModelTrace("large", 0.02, layers)))
    assert path.stat().st_size < 8_000_000
    times_s = [3.0]
    while times_s[-1] >= 3 and len(times_s) < 20:  # the machine may be busy with something else
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


UNMARKED = """() => {
  // Tables that are cut without room for a scrollbar.
  const tables = [...document.querySelectorAll(".table")].filter((table) => table.scrollWidth > table.clientWidth);
  const unmarked = tables.filter((table) => table.offsetHeight === table.clientHeight);
  return [tables.length, unmarked.map((table) => table.innerText.slice(0, 60))];
}"""


@pytest.mark.parametrize("is_phone", [False, True])
def test_a_table_that_is_cut_has_a_scrollbar(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_phone: bool
) -> None:
    inputs = write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = write_page(tmp_path, load_inputs(inputs))
    kind = browser.browser_type
    seen = kind.launch(executable_path=find_browser(), args=["--no-sandbox"], ignore_default_args=["--hide-scrollbars"])
    with open_tab(seen, viewport={"width": 500, "height": 800}, is_mobile=is_phone, has_touch=is_phone) as tab:
        tab.open(path)
        cut, unmarked = tab.page.evaluate(UNMARKED)
        assert cut > 2
        assert unmarked == []
    seen.close()


def test_tables_beside_one_another_fit_on_a_desk(browser: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    with open_tab(browser, viewport={"width": 1440, "height": 900}) as tab:
        tab.open(write_page(tmp_path, load_inputs(runs)))
        cut = "all => all.filter((table) => table.scrollWidth > table.clientWidth).map((table) => table.innerText)"
        assert tab.page.locator("#runs .table").evaluate_all(cut) == []


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
