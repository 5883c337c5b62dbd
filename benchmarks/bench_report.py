"""How long a page takes to make and to open: `make bench`. What was found: benchmarks/report.md."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from mgwfbp import LayerTrace, LinearCost, ModelTrace, load_network, load_trace
from mgwfbp.report import Inputs, build_page
from tests.report.browser import Tab, open_browser, open_tab
from tests.report.records import measured_cost

_NAMES = [f"blocks.{place}.attention.output.dense.weight" for place in range(5000)]
LARGE = ModelTrace("large", 0.02, tuple(LayerTrace(name, 1e-5, 4000) for name in _NAMES))
COST = LinearCost(4, 1e-3, 2e-9)


def inputs_of(name: str) -> Inputs:
    if name == "5000 messages":
        return Inputs(traces=(("trace.json", LARGE),), costs=(("cost.json", COST),))
    if name == "a measured curve":
        return Inputs(traces=((name, load_trace("densenet201-h200-b32")),), costs=(("cost.json", measured_cost(8)),))
    return Inputs(traces=((name, load_trace(name)),), networks=(("10gbe", load_network("10gbe")),))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.mark.parametrize("name", ["densenet201-h200-b32", "5000 messages"])
def test_making_a_page(benchmark: BenchmarkFixture, name: str) -> None:
    text = benchmark(build_page, inputs_of(name), workers=(8,))
    benchmark.extra_info["bytes"] = len(text.encode())


@pytest.mark.parametrize("name", ["densenet201-h200-b32", "5000 messages"])
def test_opening_a_page(benchmark: BenchmarkFixture, browser: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(build_page(inputs_of(name), workers=(8,)))
    with open_tab(browser) as tab:
        benchmark.pedantic(Tab.open, args=(tab, path), rounds=9, warmup_rounds=1)


@pytest.mark.parametrize("name", ["densenet201-h200-b32", "a measured curve", "5000 messages"])
def test_moving_a_slider(benchmark: BenchmarkFixture, browser: Any, tmp_path: Path, name: str) -> None:
    """Five planners for the chosen number of workers and the nineteen of the curve; two timelines, a table, a chart."""
    path = tmp_path / "report.html"
    path.write_text(build_page(inputs_of(name), workers=(8,)))
    with open_tab(browser) as tab:
        tab.open(path)
        move = "slider => { slider.value = (Number(slider.value) + 1) % 10; slider.dispatchEvent(new Event('input')); }"
        benchmark.pedantic(tab.page.locator("#what-if-workers").evaluate, args=(move,), rounds=20, warmup_rounds=2)
