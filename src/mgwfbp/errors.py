"""The exceptions of this package.

::

    MgwfbpError
    ├── FileError       (OSError)      a file cannot be read or written
    ├── FormatError     (ValueError)   a file is not what it should be: JSON, format, missing field
    ├── TraceError      (ValueError)   impossible layer or model
    ├── CostError       (ValueError)   impossible all-reduce cost, or samples no cost can be fitted to
    ├── NetworkError    (ValueError)   impossible or unknown network
    ├── PlanError       (ValueError)   impossible plan, unknown planner, a plan for another model or not every rank's
    ├── ShardError      (ValueError)   what a sharded optimizer cannot do, or a gradient that no rank has whole
    ├── StrategyError   (ValueError)   unknown strategy, or one that lacks something or cannot do what is asked
    ├── TimelineError   (ValueError)   impossible timeline
    ├── ResultError     (ValueError)   impossible result of a benchmark
    ├── SimulationError (ValueError)   impossible scenario or cluster
    ├── ReportError     (ValueError)   nothing to report on, or a picture that cannot be made
    ├── IntegrationError (ImportError) a library that an integration needs is not installed
    ├── MeasureError    (RuntimeError) a measurement that cannot be made or failed, on this rank or another
    ├── LabError        (RuntimeError) impossible lab, one that cannot be made on this machine, or a rank that failed
    └── TrainError      (RuntimeError) impossible training run, one that cannot start or go on, or a worker that failed

Each message is one line that says what was expected, what was found, and what to do.
"""

__all__ = [
    "CostError",
    "FileError",
    "FormatError",
    "IntegrationError",
    "LabError",
    "MeasureError",
    "MgwfbpError",
    "NetworkError",
    "PlanError",
    "ReportError",
    "ResultError",
    "ShardError",
    "SimulationError",
    "StrategyError",
    "TimelineError",
    "TraceError",
    "TrainError",
]


class MgwfbpError(Exception):
    """Everything this package raises on purpose."""


class FileError(MgwfbpError, OSError):
    """A file cannot be read or written."""


class FormatError(MgwfbpError, ValueError):
    """A file is not what it should be."""


class TraceError(MgwfbpError, ValueError):
    """A layer or a model that cannot be."""


class CostError(MgwfbpError, ValueError):
    """An all-reduce cost that cannot be, or samples to which none can be fitted."""


class NetworkError(MgwfbpError, ValueError):
    """A network that cannot be, or whose name is unknown."""


class PlanError(MgwfbpError, ValueError):
    """A plan that cannot be, an unknown planner, a plan for another model, or one that not every rank has."""


class ShardError(MgwfbpError, ValueError):
    """What a sharded optimizer cannot do, or a gradient that is used as if one rank had all of it."""


class StrategyError(MgwfbpError, ValueError):
    """An unknown strategy, or one that lacks what it needs or cannot do what is asked of it."""


class TimelineError(MgwfbpError, ValueError):
    """A timeline that cannot be."""


class ResultError(MgwfbpError, ValueError):
    """A result of a benchmark that cannot be."""


class MeasureError(MgwfbpError, RuntimeError):
    """A measurement that cannot be made, or that failed on this rank or another."""


class SimulationError(MgwfbpError, ValueError):
    """A scenario or a cluster that cannot be simulated."""


class ReportError(MgwfbpError, ValueError):
    """Nothing to report on, or a picture that cannot be made."""


class IntegrationError(MgwfbpError, ImportError):
    """A library that an integration needs is not installed."""


class LabError(MgwfbpError, RuntimeError):
    """A lab that cannot be, that cannot be made on this machine, or in which a rank failed."""


class TrainError(MgwfbpError, RuntimeError):
    """A training run that cannot be, that cannot start or go on, or in which a worker failed."""
