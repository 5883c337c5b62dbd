"""Whether a Reducer can be given buckets: `missing` says what this torch lacks for it, `cannot_hold` a model."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from mgwfbp.runtime.messages.stand_ins import Script
from mgwfbp.runtime.reducer.handle import ReducerHandle, held_buckets

__all__ = ["cannot_hold", "lacks", "missing"]

# What is used in ``handle.py``, ``observer.py`` and here, by owner. Newer settings are looked for where they are used.
_NEEDED = {
    "DistributedDataParallel": (
        "_build_params_for_reducer",
        "_ddp_init_helper",
        "_get_ddp_logging_data",
        "_pre_forward",
        "_post_forward",
        "_register_builtin_comm_hook",
        "_set_ddp_runtime_logging_sample_rate",
    ),
    "Reducer": (
        "_check_reducer_finalized",
        "_get_zeros_like_grad_buckets",
        "_push_all_rebuilt_params",
        "_rebuild_buckets",
        "_remove_autograd_hooks",
        "_reset_state",
        "_set_optimizer_in_backward",
        "_update_process_group",
    ),
    "Logger": ("_set_comm_hook_name", "_set_static_graph", "_set_uneven_input_join"),
    "GradBucket": ("parameters",),
    "torch.distributed": ("ProcessGroup", "_compute_bucket_assignment_by_size", "_register_comm_hook"),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch._C": ("_current_graph_task_id",),
    "torch._C._distributed_c10d": ("_create_work_from_future",),
}


def missing() -> tuple[str, ...]:
    """Name what this torch lacks for a Reducer that is given buckets; empty where it can.

    Names first; then, once per process, a Reducer without peers that must take three buckets of two dtypes, in both
    ways.
    """
    owners: dict[str, object] = {
        "DistributedDataParallel": DistributedDataParallel,
        "Reducer": getattr(dist, "Reducer", None),
        "Logger": getattr(dist, "Logger", None),
        "GradBucket": getattr(dist, "GradBucket", None),
        "torch.distributed": dist,
        "torch.autograd.Variable": Variable,
        "torch._C": torch._C,
        "torch._C._distributed_c10d": getattr(torch._C, "_distributed_c10d", None),
    }
    names = [f"{owner}.{name}" for owner, needed in _NEEDED.items() for name in needed if not _has(owners[owner], name)]
    return tuple(names) or _misbehaviour()


def _has(owner: object, name: str) -> bool:
    return owner is not None and hasattr(owner, name)


def lacks(names: Sequence[str]) -> str:
    """Return the words for what this torch lacks."""
    return f"torch {torch.__version__} lacks {', '.join(names)}"


class _Toy(nn.Module):
    """Parameters of two dtypes, whatever the defaults are."""

    def __init__(self) -> None:
        super().__init__()
        floats = [torch.zeros(2, dtype=torch.float32, device="cpu") for _ in range(3)]
        self.first = nn.ParameterList([nn.Parameter(one) for one in floats])
        self.second = nn.Parameter(torch.zeros(3, dtype=torch.float64, device="cpu"))


@cache
def _misbehaviour() -> tuple[str, ...]:
    try:
        doubles = [place for place, one in enumerate(_Toy().parameters()) if one.dtype is torch.float64]
        floats = [place for place in range(4) if place not in doubles]
        wanted = [[floats[2], floats[0]], doubles, [floats[1]]]
        for unused in (False, True):
            toy = DistributedDataParallel(_Toy(), process_group=Script(), find_unused_parameters=unused, **_QUIET)
            handle = ReducerHandle(toy)
            for buckets in (wanted, wanted[::-1]):
                handle.set_buckets(buckets)
                if handle.buckets() != buckets:
                    return (f"a Reducer that holds the buckets it is given (find_unused_parameters={unused})",)
    except Exception as error:  # whatever torch does here, the user's training must go on
        return (f"a Reducer that takes buckets ({type(error).__name__}: {str(error).partition(chr(10))[0]})",)
    return ()


# Arguments that keep a toy model from talking to other ranks, as far as this torch has them.
_QUIET: dict[str, Any] = {
    name: False for name in ("init_sync",) if name in DistributedDataParallel.__init__.__code__.co_varnames
}


def cannot_hold(ddp: DistributedDataParallel) -> str:
    """Say why the Reducer of a model cannot be given buckets; empty where it can."""
    if getattr(ddp, "_use_python_reducer", False):
        return "torch's Python reducer, which torch._dynamo.config.optimize_ddp asks for, has no buckets"
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "all gradients are delayed by delay_all_reduce_named_params"
    parameters, sparse = DistributedDataParallel._build_params_for_reducer(ddp)
    for parameter in parameters:
        try:
            _ = parameter.nbytes
        except RuntimeError:  # torch's own DDP can be constructed with one
            return f"a parameter is a {type(parameter).__name__}, which does not say how many bytes it has"
    # The handle of our class was made with the Reducer; else a handle is made of the parameters as they are now.
    if hasattr(ddp, "reducer") and getattr(ddp, "_handle", None) is None and _are_others(ddp, parameters, any(sparse)):
        return "parameters were frozen, thawed or replaced since the model was wrapped: wrap it again"
    return ""


def _are_others(ddp: Any, parameters: Sequence[nn.Parameter], has_sparse: bool) -> bool:
    """Say whether the Reducer has other parameters than these: to take them for its own would crash the process."""
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] != len(parameters):
        return True
    if has_sparse:  # torch lists no buckets of such a model
        return False
    held = {id(parameter) for bucket in held_buckets(ddp) for parameter in bucket.parameters()}
    return held != {id(parameter) for parameter in parameters}
