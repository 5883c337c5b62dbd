"""What touches private names of torch's DDP: one whose Reducer holds given buckets, and what this torch lacks for it.

[Note: how the Reducer holds a plan]
Torch's Reducer gets its buckets twice. The constructor takes them as lists of parameter indices, in the order in which
they are sent, of any dtype, device or order. After the first step it makes new ones from the order in which gradients
were ready, and takes what rank 0 broadcasts as the final word (never with ``find_unused_parameters`` alone). So:

- while torch's class makes its Reducer, it makes a `PlannedReducer` that gets the plan's buckets instead of torch's;
- when torch asks that Reducer for new buckets, a process group that only answers from a script stands in for the real
  one and "broadcasts" the plan. Nothing is sent, and the Reducer ends in the state in which it never asks again.

Forcing the second layout right after construction would be shorter, but the first step of a static graph sends its
buckets under one index, and a Reducer that has already rebuilt then shows a comm hook the wrong parameters.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as torch_distributed

from mgwfbp.errors import PlanError

__all__ = ["Listener", "PlannableParallel", "missing"]

Buckets = list[list[int]]  # indices into the Reducer's parameters, one list per message, in the order of sending
Listener = Callable[[int], Callable[[Any], None]]  # told the bytes of a message, returns who wants its future

# What is used here and in autograd_private.py, by owner. Newer settings (manual finalization, say) are looked for where
# they are used.
_NEEDED = {
    "DistributedDataParallel": (
        "_build_debug_param_to_name_mapping",
        "_build_params_for_reducer",
        "_ddp_init_helper",
        "_get_ddp_logging_data",
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
        "_set_ddp_runtime_logging_sample_rate",
        "_set_mixed_precision_param_dtype",
        "_set_optimizer_in_backward",
        "_set_static_graph",
        "_update_process_group",
    ),
    "Logger": ("_set_comm_hook_name", "_set_static_graph"),
    "GradBucket": ("parameters",),
    "torch.distributed": ("ProcessGroup", "_register_builtin_comm_hook", "_register_comm_hook"),
    "torch.nn.parallel.distributed": ("_find_tensors",),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch._C": ("_will_engine_execute_node",),
    "torch._C._distributed_c10d": ("_create_work_from_future",),
}

# Looked up, not named: on a torch without them this module can still say what is missing.
_c10d: Any = dist
_StockReducer: Any = getattr(dist, "Reducer", object)
_StockGroup: Any = getattr(dist, "ProcessGroup", object)

# Where torch keeps the hooks that treat every bucket alike.
STATELESS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

# One at a time: two threads that put a name aside and back would leave each other's there.
_LOCK = threading.Lock()


def missing() -> tuple[str, ...]:
    """Name what this torch lacks for a Reducer that holds given buckets; empty where it can.

    Names first; then, once per process, a Reducer without peers that must take three buckets of two dtypes, at birth
    and when it rebuilds.
    """
    owners: dict[str, object] = {
        "DistributedDataParallel": DistributedDataParallel,
        "Reducer": getattr(dist, "Reducer", None),
        "Logger": getattr(dist, "Logger", None),
        "GradBucket": getattr(dist, "GradBucket", None),
        "torch.distributed": dist,
        "torch.nn.parallel.distributed": torch_distributed,
        "torch.autograd.Variable": Variable,
        "torch._C": torch._C,
        "torch._C._distributed_c10d": getattr(torch._C, "_distributed_c10d", None),
    }
    names = [f"{owner}.{name}" for owner, needed in _NEEDED.items() for name in needed if not _has(owners[owner], name)]
    return tuple(names) or _misbehaviour()


def _has(owner: object, name: str) -> bool:
    return owner is not None and hasattr(owner, name)


@cache
def _misbehaviour() -> tuple[str, ...]:
    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
            self.second = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    class ToyParallel(PlannableParallel):
        def wanted_buckets(self, parameters: Sequence[nn.Parameter]) -> Buckets:
            return [[0], [3, 1], [2]] if parameters[0].dtype is torch.float64 else [[2, 0], [3], [1]]

    try:
        for keeps in (False, True):
            toy = ToyParallel(Toy(), process_group=_Script(), init_sync=False, find_unused_parameters=keeps)
            toy.check_held()
            toy.reducer._push_all_rebuilt_params()
            if toy.reducer._rebuild_buckets() == keeps:
                return (f"a Reducer that can be told to {'keep' if keeps else 'rebuild'} its buckets",)
            toy.check_held()
    except Exception as error:  # whatever torch does here, the user's training must go on
        return (f"a Reducer that holds given buckets ({type(error).__name__}: {str(error).partition(chr(10))[0]})",)
    return ()


class _Script(_StockGroup):  # type: ignore[misc]
    """A process group of one that answers broadcasts from a script and can do nothing else."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.answers: list[list[int]] = []

    def broadcast(self, tensors: list[Tensor], _: object = None) -> Any:
        """Write the next answer into the tensor."""
        tensors[0].copy_(torch.tensor(self.answers.pop(0), dtype=tensors[0].dtype))
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Say what the log shall call this group."""
        return "script"


class _Overheard(_StockGroup):  # type: ignore[misc]
    """The process group of a Reducer, with a listener at its all-reduces."""

    def __init__(self, group: Any, listener: Listener) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._listener = group, listener

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send, and tell the listener."""
        follow = self._listener(sum(tensor.nbytes for tensor in tensors))
        work = self._group.allreduce(tensors, *options)
        follow(work.get_future())
        return work

    def broadcast(self, *arguments: Any) -> Any:
        """Send: it is no message of a step."""
        return self._group.broadcast(*arguments)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Say what the real group says."""
        return str(self._group.name())


def _overheard(hook: Any, listener: Listener) -> Any:
    """Return a communication hook with a listener at it."""

    @wraps(hook)
    def told(state: object, bucket: Any) -> Any:
        follow = listener(bucket.buffer().nbytes)
        future = hook(state, bucket)
        follow(future)
        return future

    return told


class PlannedReducer(_StockReducer):  # type: ignore[misc]
    """A Reducer that gets the plan's buckets at birth and again whenever torch would make its own."""

    def __init__(
        self,
        parameters: list[Tensor],
        buckets: Buckets,
        sizes: list[int],
        group: Any,
        *args: Any,
        keeps: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(parameters, buckets, sizes, group, *args, **kwargs)
        self._buckets, self._group, self._script = buckets, group, _Script()
        self._keeps = keeps  # whether torch leaves these buckets alone, as it does where it looks for unused parameters
        self._settled = keeps  # or has rebuilt, after which it does not ask again

    def _rebuild_buckets(self) -> bool:
        if not self._settled:
            self._settled = self._rebuild_by_script()
            return self._settled
        return bool(super()._rebuild_buckets())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rebuild_by_script(self) -> bool:
        # What torch broadcasts: all indices and the number of buckets; then the size of each bucket.
        self._script.answers = [
            [*chain.from_iterable(self._buckets), len(self._buckets)],
            [len(bucket) for bucket in self._buckets],
        ]
        super()._update_process_group(self._script)
        try:
            return bool(super()._rebuild_buckets())
        finally:
            super()._update_process_group(self._group)

    def _reset_state(self) -> None:
        super()._reset_state()
        self._settled = self._keeps

    def _set_static_graph(self) -> None:
        super()._set_static_graph()
        self._keeps = self._settled = False

    def _update_process_group(self, new_process_group: Any) -> None:
        super()._update_process_group(new_process_group)
        self._group = new_process_group


@contextmanager
def _thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let all parameters require gradients for a moment: a Reducer crashes on one that does not."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _planned_reducers(parameters: list[nn.Parameter], buckets: Buckets, *, keeps: bool) -> Iterator[None]:
    """Let the Reducer that is made of exactly this list of parameters be one that holds these buckets."""
    sizes = [sum(parameters[index].nbytes for index in bucket) for bucket in buckets]
    with _LOCK:
        stock = _c10d.Reducer

        def make(of: list[Tensor], stock_buckets: Buckets, limits: list[int], *args: Any, **kwargs: Any) -> Any:
            if of is not parameters:  # another thread's
                return stock(of, stock_buckets, limits, *args, **kwargs)
            return PlannedReducer(of, buckets, sizes, *args, keeps=keeps, **kwargs)

        _c10d.Reducer = make
        try:
            yield
        finally:
            _c10d.Reducer = stock


class PlannableParallel(DistributedDataParallel):
    """Torch's class with a say in its buckets, and a Reducer that can be replaced. Its heirs touch no private name."""

    _reducible: tuple[list[nn.Parameter], list[bool]]
    _debug_names: dict[int, str]
    _builtin_hook: Any = None
    _sample_rate: int | None = None
    is_compiled = False  # whether a graph was compiled inside the forward pass
    _listener: Listener | None = None
    _connected: Any = None  # the process group of the Reducer while somebody listens; C++ alone would not keep it

    def before_reducer(self, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]) -> None:
        """Do what must be done once parameters are known and before ranks exchange anything; nothing by default."""

    def wanted_buckets(self, parameters: Sequence[nn.Parameter]) -> Buckets | None:
        """Return the buckets a new Reducer shall hold; None leaves them to torch."""
        raise NotImplementedError

    @property
    def cannot_hold(self) -> str:
        """Why no plan can be held; empty where one can."""
        if self._use_python_reducer:
            return "torch's Python reducer, which torch._dynamo.config.optimize_ddp asks for, has no buckets"
        return "all gradients are delayed by delay_all_reduce_named_params" if self._delay_all_reduce_all_params else ""

    @property
    def cannot_change(self) -> str:
        """Why no other Reducer can take the place of this one; empty where one can."""
        if self.mixed_precision is not None:
            return "with mixed_precision torch sends wrong gradients in the first step of every Reducer"
        return ""

    @property
    def in_join(self) -> bool:
        """Whether this runs inside ``with model.join():``."""
        return bool(self._join_config.enable)

    @property
    def synchronises(self) -> bool:
        """Whether gradients of a forward pass that began now would be averaged, by all ranks alike."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync and not self.in_join

    @property
    def has_hooks(self) -> bool:
        """Whether a communication hook sends the gradients."""
        return bool(self._comm_hooks) or self._builtin_hook is not None

    @property
    def is_overheard(self) -> bool:
        """Whether a listener is told of messages."""
        return self._listener is not None

    @property
    def has_settled(self) -> bool:
        """Whether the Reducer has the buckets it will keep."""
        return bool(self._has_rebuilt_buckets) or (self.find_unused_parameters and not self.static_graph)

    @property
    def has_trained(self) -> bool:
        """Whether torch has made its buckets anew, as it does after a step; not where it looks for unused ones."""
        return bool(self._has_rebuilt_buckets)

    @property
    def has_finished(self) -> bool:
        """Whether no reduction is under way; one may take several backward passes."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    @property
    def unfit_for_tuning(self) -> str:
        """Why buckets must not be changed during training; empty where they may."""
        if getattr(self, "_require_manual_backward_finalization", False):  # torch 2.15
            return "the end of a backward pass is finalized by hand"
        for hook, _ in self._comm_hooks:
            name = getattr(hook, "__qualname__", repr(hook))
            if getattr(hook, "__module__", "") != STATELESS_HOOKS or "<locals>" in name:  # a wrapper of any other
                return f"the communication hook {name} may keep state per bucket"
        if self.is_compiled:
            return "the model is compiled, and every change of buckets would compile it again"
        return self.cannot_change

    def check_finished(self) -> None:
        """Raise where a backward pass has begun and its reduction has not ended."""
        if not self.has_finished:
            raise PlanError(
                "the plan cannot be changed before the backward pass has ended, and it has not: some parameters got no "
                "gradient (find_unused_parameters=True allows that)"
            )

    def reducible(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters that the Reducer sends gradients of, and which of these gradients are sparse.

        Those that required gradients at construction: what is frozen or thawed later changes nothing, as with torch.
        """
        return self._reducible

    def held_buckets(self) -> Buckets:
        """Return the buckets that the Reducer says it holds; torch cannot say it of sparse gradients."""
        places = {id(parameter): index for index, parameter in enumerate(self.reducible()[0])}
        return [
            [places[id(parameter)] for parameter in bucket.parameters()]
            for bucket in self.reducer._get_zeros_like_grad_buckets()
        ]

    def overhear(self, listener: Listener | None) -> None:
        """Tell a listener of every message from now on, or with None nobody. Only between steps."""
        self._listener = listener
        if self.has_hooks:
            self.rebuild_reducer()  # which is told its hooks only once
        else:
            self._connect()

    def _connect(self) -> None:
        if self._listener is not None:
            self._connected = _Overheard(self.process_group, self._listener)
            self.reducer._update_process_group(self._connected)
        elif self._connected is not None:
            self.reducer._update_process_group(self.process_group)
            self._connected = None

    def check_held(self) -> None:
        """Raise unless the Reducer says that it holds exactly the wanted buckets."""
        parameters, sparse = self.reducible()
        wanted = self.wanted_buckets(parameters)
        if wanted is None:
            return
        held: object
        if any(sparse):
            # Torch cannot list the parameters of a sparse bucket before its first gradient: compare the sizes.
            expected: object = ", ".join(str(sum(parameters[index].nbytes for index in bucket)) for bucket in wanted)
            held = self._get_ddp_logging_data()["bucket_sizes"]
        else:
            expected, held = wanted, self.held_buckets()
        if held != expected:
            raise PlanError(
                f"torch {torch.__version__} holds other buckets than the plan's; train without plan= and report this"
            )

    def rebuild_reducer(self) -> None:
        """Put a new Reducer in the place of the old one, with everything that was registered there.

        Only between a backward pass and the next forward pass. Gradients stay as they are.
        """
        self.reducer._remove_autograd_hooks()
        self.logger = None  # it keeps the old Reducer
        del self.reducer
        parameters, sparse = self.reducible()
        with _thawed(parameters):
            self._ddp_init_helper(parameters, sparse, self._debug_names, self.static_graph)
        self._restore()

    def _restore(self) -> None:
        reducer: Any = self.reducer
        logger: Any = self.logger
        if self.mixed_precision is not None:
            reducer._set_mixed_precision_param_dtype(self.mixed_precision.param_dtype)
        self._connect()
        for hook, state in self._comm_hooks:
            logger._set_comm_hook_name(hook.__qualname__)
            heard = hook if self._listener is None else _overheard(hook, self._listener)
            _c10d._register_comm_hook(reducer, state, heard)
        if self._builtin_hook is not None:
            super()._register_builtin_comm_hook(self._builtin_hook)
        if self._sample_rate is not None:
            super()._set_ddp_runtime_logging_sample_rate(self._sample_rate)
        if self._lazy_init_ran and any(hasattr(one, "_in_backward_optimizers") for one in self._module_parameters):
            reducer._set_optimizer_in_backward()
        if self.static_graph:
            reducer._set_static_graph()
            logger._set_static_graph()
            # The new Reducer learns the graph again: its first step sends everything after the backward pass.
            self._static_graph_delay_allreduce_enqueued = False
        if getattr(self, "_require_manual_backward_finalization", False):  # torch 2.15
            self.require_manual_backward_finalization = True  # type: ignore[misc]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = self._reducible = super()._build_params_for_reducer()
        self.before_reducer(parameters, sparse)
        return parameters, sparse

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        # Kept: torch refuses to make it again once a parameter has been thawed.
        self._debug_names = super()._build_debug_param_to_name_mapping(parameters)
        return self._debug_names

    def _ddp_init_helper(self, parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        self._has_rebuilt_buckets = False  # a copy would take it over from another Reducer
        buckets = self.wanted_buckets(parameters)
        if buckets is None:
            super()._ddp_init_helper(parameters, *args, **kwargs)
            return
        with _planned_reducers(parameters, buckets, keeps=self.find_unused_parameters):
            super()._ddp_init_helper(parameters, *args, **kwargs)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        super()._register_builtin_comm_hook(comm_hook_type)
        self._builtin_hook = comm_hook_type

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        self._sample_rate = sample_rate
