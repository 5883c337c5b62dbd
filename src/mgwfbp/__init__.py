"""Find which gradients to merge into one message so that a data-parallel training step is shortest.

>>> import mgwfbp
>>> trace = mgwfbp.ModelTrace("toy", 1.0, (mgwfbp.LayerTrace("b", 1.0, 4), mgwfbp.LayerTrace("a", 1.0, 4)))
>>> cost = mgwfbp.load_network("10GbE").cost(workers=8)
>>> mgwfbp.find_plan(trace, cost)
MergePlan('toy' by 'optimal': 2 gradients in 2 messages, 1+1)
"""

# A name is imported when it is first asked for, with what it needs (numpy, torch). So the package itself is there at
# once, and the command line can say what Ctrl-C does before anything else is imported.
TYPE_CHECKING = False  # as in typing, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from mgwfbp.bounds import lower_bound_s
    from mgwfbp.cost import Cost, LinearCost, PiecewiseCost
    from mgwfbp.costs import load_cost
    from mgwfbp.errors import (
        CostError,
        FileError,
        FormatError,
        IntegrationError,
        LabError,
        MeasureError,
        MgwfbpError,
        NetworkError,
        PlanError,
        ReportError,
        ResultError,
        ShardError,
        SimulationError,
        StrategyError,
        TimelineError,
        TraceError,
        TrainError,
    )
    from mgwfbp.fitting import Fit, fit
    from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, predict_fsdp
    from mgwfbp.measure.allreduce import measure_allreduce
    from mgwfbp.measure.backward import measure_backward
    from mgwfbp.network import Network, load_network
    from mgwfbp.plan import MergePlan
    from mgwfbp.planners import PLANNERS, find_plan
    from mgwfbp.results import BenchResult, StrategyResult
    from mgwfbp.run import TrainingRun
    from mgwfbp.runtime.distributed import DistributedDataParallel
    from mgwfbp.runtime.explain import explain
    from mgwfbp.runtime.fsdp.wrap import fully_shard, plan_fully_shard
    from mgwfbp.runtime.sharded.optimizer import ShardedOptimizer
    from mgwfbp.simulate import Cluster, Scenario, Simulation, simulate_steps
    from mgwfbp.timeline import Span, Timeline, predict, predict_naive, predict_parameter_server
    from mgwfbp.trace import LayerTrace, ModelTrace, load_trace, recorded_traces

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
    "FsdpPlan",
    "IntegrationError",
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
    "ShardError",
    "ShardedOptimizer",
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
    "explain",
    "find_plan",
    "fit",
    "fsdp_lower_bound_s",
    "fully_shard",
    "load_cost",
    "load_network",
    "load_trace",
    "lower_bound_s",
    "measure_allreduce",
    "measure_backward",
    "plan_fully_shard",
    "predict",
    "predict_fsdp",
    "predict_naive",
    "predict_parameter_server",
    "recorded_traces",
    "simulate_steps",
]

__version__ = "0.1.0"

# module -> what of it is public
_HOMES = {
    "bounds": "lower_bound_s",
    "cost": "Cost LinearCost PiecewiseCost",
    "costs": "load_cost",
    "errors": " ".join(name for name in __all__ if name.endswith("Error")),
    "fitting": "Fit fit",
    "fsdp": "FsdpPlan fsdp_lower_bound_s predict_fsdp",
    "measure.allreduce": "measure_allreduce",
    "measure.backward": "measure_backward",
    "network": "Network load_network",
    "plan": "MergePlan",
    "planners": "PLANNERS find_plan",
    "results": "BenchResult StrategyResult",
    "run": "TrainingRun",
    "runtime.distributed": "DistributedDataParallel",
    "runtime.explain": "explain",
    "runtime.fsdp.wrap": "fully_shard plan_fully_shard",
    "runtime.sharded.optimizer": "ShardedOptimizer",
    "simulate": "Cluster Scenario Simulation simulate_steps",
    "timeline": "Span Timeline predict predict_naive predict_parameter_server",
    "trace": "LayerTrace ModelTrace load_trace recorded_traces",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'mgwfbp' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"mgwfbp.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
