"""Find which gradients to merge into one message so that a data-parallel training step is shortest.

>>> import mgwfbp
>>> trace = mgwfbp.ModelTrace("toy", 1.0, (mgwfbp.LayerTrace("b", 1.0, 4), mgwfbp.LayerTrace("a", 1.0, 4)))
>>> cost = mgwfbp.load_network("10GbE").cost(workers=8)
>>> mgwfbp.find_plan(trace, cost)
MergePlan('toy' by 'optimal': 2 gradients in 2 messages, 1+1)
"""

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost, load_cost
from mgwfbp.errors import (
    CostError,
    FileError,
    FormatError,
    LabError,
    MgwfbpError,
    NetworkError,
    PlanError,
    TimelineError,
    TraceError,
)
from mgwfbp.fit import Fit, fit
from mgwfbp.network import Network, load_network
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, find_plan
from mgwfbp.timeline import Span, Timeline, lower_bound_s, predict, predict_naive, predict_parameter_server
from mgwfbp.trace import LayerTrace, ModelTrace

__all__ = [
    "PLANNERS",
    "Cost",
    "CostError",
    "FileError",
    "Fit",
    "FormatError",
    "LabError",
    "LayerTrace",
    "LinearCost",
    "MergePlan",
    "MgwfbpError",
    "ModelTrace",
    "Network",
    "NetworkError",
    "PiecewiseCost",
    "PlanError",
    "Span",
    "Timeline",
    "TimelineError",
    "TraceError",
    "find_plan",
    "fit",
    "load_cost",
    "load_network",
    "lower_bound_s",
    "predict",
    "predict_naive",
    "predict_parameter_server",
]

__version__ = "0.1.0"
