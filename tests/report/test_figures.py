"""Figures that matplotlib draws: files of the right kind that show what the chart says."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mgwfbp import LayerTrace, LinearCost, ModelTrace, Network, find_plan, predict
from mgwfbp.planners import find_sharded_plan
from mgwfbp.report.inputs import Inputs
from mgwfbp.report.matching import find_cases
from mgwfbp.report.paper import FIGURES, Figure, Panel, paper_figure
from mgwfbp.report.tables import breakdown_chart
from tests.report.records import TRACE, bench

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_a_figure_is_a_file_of_its_format(form: str) -> None:
    from mgwfbp.report.figures import render_figure

    content = render_figure(paper_figure(3), form)  # type: ignore[arg-type]
    assert content.startswith(BEGINNINGS[form])


@pytest.mark.parametrize("number", FIGURES)
def test_every_figure_of_the_paper_is_drawn_alike_twice(number: int) -> None:
    from mgwfbp.report.figures import render_figure

    figure = paper_figure(number)
    assert render_figure(figure, "svg") == render_figure(figure, "svg")


@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduced", "sharded"])
def test_a_drawn_timeline_has_a_rectangle_for_every_message_and_for_what_is_exposed(is_sharded: bool) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    from mgwfbp.report.figures import EXPOSED, GRADIENTS, MESSAGES, draw_timelines

    cost = LinearCost(4, 1e-3, 2e-9)
    step = predict(TRACE, cost, find_sharded_plan(TRACE, cost) if is_sharded else find_plan(TRACE, cost, "mgwfbp"))
    axes = Canvas().subplots()
    draw_timelines([("toy", step)], axes)

    def rectangles(colors: tuple[str, str]) -> int:
        wanted = [to_rgba(color) for color in colors]
        patches = [patch for patch in axes.patches if isinstance(patch, PathPatch) and patch.get_facecolor() in wanted]
        return sum(np.asarray(patch.get_path().codes).tolist().count(Path.MOVETO) for patch in patches)

    assert rectangles(MESSAGES) == len(step.gathers) + len(step.messages)
    waited_for = [span for span in step.gathers if span.start_s < step.waited_s]
    assert bool(waited_for) == is_sharded
    assert rectangles(EXPOSED) == len(waited_for) + sum(span.end_s > step.compute_s for span in step.messages)
    assert rectangles(GRADIENTS) == len(step.backward)


def test_drawn_bars_are_as_long_as_the_chart_says() -> None:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Rectangle

    from mgwfbp.report.figures import draw_chart

    (case,) = find_cases(Inputs(benches=(("b", bench()),)))
    chart = breakdown_chart(case)
    axes = Canvas().subplots()
    draw_chart(chart, axes)
    widths = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert widths == [y for series in chart.series for _, y in series.points]


def test_names_with_dollars_are_drawn_as_they_are() -> None:
    from mgwfbp.report.figures import render_figure

    trace = ModelTrace("$\\frac{$ <&>", 0.1, (LayerTrace("$x", 0.1, 10),))
    cost = LinearCost(2, 0.1, 0.0)
    step = predict(trace, cost, find_plan(trace, cost))
    figure = Figure(trace.model, (Panel("$_^", timelines=(("$\\undefined$", step),)),), "$")
    assert render_figure(figure, "svg")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from mgwfbp.cli import run; "
        "sys.exit(run(['report', '--figure', '1', '-o', 'x.png']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("mgwfbp: figures need matplotlib")
    assert "mgwfbp[report]" in done.stderr


def test_steps_of_nothing_and_names_that_no_font_has_are_drawn_without_a_warning() -> None:
    from mgwfbp.report.figures import render_figure

    layers = (LayerTrace("a", 0.0, 4),)
    trace, cost = ModelTrace("m", 0.0, layers), LinearCost(2, 0.0, 0.0)
    step = predict(trace, cost, find_plan(trace, cost))
    steps = Panel("\x1b[31m", timelines=(("網\n\ue000", step),))
    network = Network("\x07", "ring", 0.0, 0.0)
    for figure in (Figure("\x1b", (steps,)), paper_figure(5, Inputs(networks=(("n", network),)))):
        assert render_figure(figure, "png").startswith(BEGINNINGS["png"])
