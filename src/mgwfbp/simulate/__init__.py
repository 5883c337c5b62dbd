"""What N workers would give: simulated training steps, sweeps over clusters, and the paper's evaluation.

Planners are passed in as functions; nothing here knows how a plan is made.
"""

from mgwfbp.simulate.cluster import Cluster, CostSource, MeasuredCluster, WireCluster
from mgwfbp.simulate.findings import Finding, Gain, find_crossing, find_gains, find_limits
from mgwfbp.simulate.limits import Limit, bandwidth_bound_s, find_limit
from mgwfbp.simulate.scenario import IDEAL, Scenario
from mgwfbp.simulate.steps import Simulation, simulate_steps
from mgwfbp.simulate.sweep import BASELINES, Grid, Strategy, SweepRow, sweep

__all__ = [
    "BASELINES",
    "IDEAL",
    "Cluster",
    "CostSource",
    "Finding",
    "Gain",
    "Grid",
    "Limit",
    "MeasuredCluster",
    "Scenario",
    "Simulation",
    "Strategy",
    "SweepRow",
    "WireCluster",
    "bandwidth_bound_s",
    "find_crossing",
    "find_gains",
    "find_limit",
    "find_limits",
    "simulate_steps",
    "sweep",
]
