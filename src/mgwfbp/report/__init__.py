"""Records in, what people look at out: pages, figures, text, traces for Perfetto.

Computing (`tables`, `curves`, `words`, `cases`) and drawing (`page`, `figures`, `text`) are apart: what is drawn is a
`Chart` or a `Timeline`, and either can be had without a plotting library.
"""

from mgwfbp.report.cases import Case, CaseStrategy, step_rows
from mgwfbp.report.chart import Chart, Series, Table
from mgwfbp.report.inputs import Inputs, load_inputs
from mgwfbp.report.matching import find_cases
from mgwfbp.report.page import build_page
from mgwfbp.report.perfetto import timelines_of, to_perfetto
from mgwfbp.report.text import draw_case, draw_timeline
from mgwfbp.report.words import summarize

__all__ = [
    "Case",
    "CaseStrategy",
    "Chart",
    "Inputs",
    "Series",
    "Table",
    "build_page",
    "draw_case",
    "draw_timeline",
    "find_cases",
    "load_inputs",
    "step_rows",
    "summarize",
    "timelines_of",
    "to_perfetto",
]
