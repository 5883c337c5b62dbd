"""Find which gradients to merge into one message so that a data-parallel training step is shortest.

>>> import mgwfbp
>>> trace = mgwfbp.ModelTrace("toy", 1.0, (mgwfbp.LayerTrace("b", 1.0, 4), mgwfbp.LayerTrace("a", 1.0, 4)))
>>> cost = mgwfbp.load_network("10GbE").cost(workers=8)
>>> mgwfbp.find_plan(trace, cost)
MergePlan('toy' by 'optimal': 2 gradients in 2 messages, 1+1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mgwfbp.cost import Cost, LinearCost, PiecewiseCost, load_cost
from mgwfbp.errors import (
    CostError,
    FileError,
    FormatError,
    LabError,
    MeasureError,
    MgwfbpError,
    NetworkError,
    PlanError,
    ReportError,
    ResultError,
    SimulationError,
    StrategyError,
    TimelineError,
    TraceError,
    TrainError,
)
from mgwfbp.fitting import Fit, fit
from mgwfbp.network import Network, load_network
from mgwfbp.plan import MergePlan
from mgwfbp.planners import PLANNERS, find_plan
from mgwfbp.results import BenchResult, StrategyResult
from mgwfbp.run import TrainingRun
from mgwfbp.simulate import Cluster, Scenario, Simulation, simulate_steps
from mgwfbp.timeline import Span, Timeline, lower_bound_s, predict, predict_naive, predict_parameter_server
from mgwfbp.trace import LayerTrace, ModelTrace, load_trace, recorded_traces

if TYPE_CHECKING:
    from mgwfbp.measure.allreduce import measure_allreduce
    from mgwfbp.measure.backward import measure_backward
    from mgwfbp.runtime.distributed import DistributedDataParallel

__all__ = [
    "PLANNERS",
    "BenchResult",
    "Cluster",
    "Cost",
    "CostError",
    "DistributedDataParallel",
    "FileError",
    "Fit",
    "FormatError",
    "LabError",
    "LayerTrace",
    "LinearCost",
    "MeasureError",
    "MergePlan",
    "MgwfbpError",
    "ModelTrace",
    "Network",
    "NetworkError",
    "PiecewiseCost",
    "PlanError",
    "ReportError",
    "ResultError",
    "Scenario",
    "Simulation",
    "SimulationError",
    "Span",
    "StrategyError",
    "StrategyResult",
    "Timeline",
    "TimelineError",
    "TraceError",
    "TrainError",
    "TrainingRun",
    "find_plan",
    "fit",
    "load_cost",
    "load_network",
    "load_trace",
    "lower_bound_s",
    "measure_allreduce",
    "measure_backward",
    "predict",
    "predict_naive",
    "predict_parameter_server",
    "recorded_traces",
    "simulate_steps",
]

__version__ = "0.1.0"

# Names that need torch, and where they are: imported when they are first asked for.
_WITH_TORCH = {
    "DistributedDataParallel": "mgwfbp.runtime.distributed",
    "measure_allreduce": "mgwfbp.measure.allreduce",
    "measure_backward": "mgwfbp.measure.backward",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'mgwfbp' has no attribute {name!r}")
