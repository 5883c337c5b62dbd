"""A handle on the Reducer of a DDP model, and what this torch lacks for it: the private names of torch's DDP are here.

[Note: how the Reducer gets its buckets]
Torch's Reducer gets its buckets twice. Its constructor takes them as lists of parameter indices, in the order in which
they are sent, of any dtype, device or order. After the first step it makes new ones, once, from the order in which
gradients were ready, and takes what rank 0 broadcasts as the final word. (Never with ``find_unused_parameters`` alone.)
So there are two ways to give it others:

- **In place.** It is told to forget that it has made new buckets, and asked for them at once, while a process group
  that only answers from a script stands in for the real one and "broadcasts" ours. Nothing is sent; old buckets are
  freed before new ones are made; hooks, statistics and what a static graph has learnt stay; torch does not ask again.
- **A new Reducer**, whose constructor gets ours: where it never makes new ones (``find_unused_parameters``), where a
  communication hook is registered (the Reducer remembers which parameters it showed a hook for each bucket, and would
  show the old ones), and before the first step of a static graph (whose buckets are sent under one index, so that it
  would remember nonsense). The latter gets ours in place when its second step begins.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from mgwfbp.errors import PlanError
from mgwfbp.runtime.rows import OnGather, ShardGroup, Shards
from mgwfbp.runtime.stand_ins import FreesFirst, NoZeros, ObservedGroup, OnMessage, Script, observed
from mgwfbp.runtime.wire import WireGroup

__all__ = [
    "Buckets",
    "Parameters",
    "ReducerHandle",
    "cannot_hold",
    "collectives_of",
    "missing",
    "uncompiled",
    "when_backward_has_ended",
]

Buckets = list[list[int]]  # indices into the Reducer's parameters, one list per message, in the order of sending

# What is used here, by owner. Newer settings are looked for where they are used.
_NEEDED = {
    "DistributedDataParallel": (
        "_build_params_for_reducer",
        "_ddp_init_helper",
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
        "_update_process_group",
    ),
    "Logger": ("_set_comm_hook_name", "_set_static_graph", "_set_uneven_input_join"),
    "GradBucket": ("parameters",),
    "torch.distributed": ("ProcessGroup", "_compute_bucket_assignment_by_size", "_register_comm_hook"),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch._C._distributed_c10d": ("_create_work_from_future",),
}

# Looked up, not named: on a torch without it this module can still say what is missing.
_c10d: Any = dist

# One at a time: two threads that put a name aside and back would leave each other's there.
_LOCK = threading.Lock()


def uncompiled(name: str) -> str:
    """Return what a parameter is called where nothing is compiled.

    >>> uncompiled("_orig_mod.blocks._orig_mod.0.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


def when_backward_has_ended(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that is under way: before and after the Reducer finishes.

    Autograd calls what was queued in the order in which it was. The Reducer queues its own end, in which it waits for
    its messages, once it has asked for the last of them; so what is queued while it asks for a message comes before.
    """
    queue = Variable._execution_engine.queue_callback

    def first() -> None:
        before()
        queue(after)

    queue(first)


def collectives_of(group: Any) -> Callable[[], int] | None:
    """Return what says how many collectives a group has called; None where it does not count them."""
    try:
        group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    count: Callable[[], int] = group._get_sequence_number_for_group
    return count


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

    doubles = [place for place, one in enumerate(Toy().parameters()) if one.dtype is torch.float64]
    floats = [place for place in range(4) if place not in doubles]
    wanted = [[floats[2], floats[0]], doubles, [floats[1]]]
    try:
        for unused in (False, True):
            toy = DistributedDataParallel(Toy(), process_group=Script(), find_unused_parameters=unused, **_QUIET)
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
    for parameter in DistributedDataParallel._build_params_for_reducer(ddp)[0]:
        try:
            _ = parameter.nbytes
        except RuntimeError:  # torch's own DDP can be constructed with one
            return f"a parameter is a {type(parameter).__name__}, which does not say how many bytes it has"
    return ""


class Parameters:
    """The parameters that the Reducer of a DDP model sends gradients of, and their names, as they are now."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        parameters, sparse = DistributedDataParallel._build_params_for_reducer(ddp)
        self.parameters: list[nn.Parameter] = list(parameters)
        self.sparse: list[bool] = list(sparse)
        by_id = {id(parameter): uncompiled(name) for name, parameter in ddp.module.named_parameters()}
        self.names = tuple(by_id[id(parameter)] for parameter in self.parameters)
        self.sizes = tuple(parameter.nbytes for parameter in self.parameters)

    def buckets_of(self, groups: Sequence[Sequence[str]]) -> Buckets:
        """Return the buckets that hold a plan's groups."""
        places = {name: place for place, name in enumerate(self.names)}
        return [[places[name] for name in group] for group in groups]

    def groups_of(self, buckets: Buckets) -> tuple[tuple[str, ...], ...]:
        """Return the groups of a plan whose buckets these are."""
        return tuple(tuple(self.names[place] for place in bucket) for bucket in buckets)


class ReducerHandle(Parameters):
    """What may be asked of, and done to, the Reducer of one DDP model.

    It knows the parameters, and their names, as they were when the model was wrapped: what is frozen, renamed or
    taken out of the module later changes nothing for the Reducer, as with torch. It holds the model weakly.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self._weak = weakref.ref(ddp)
        self._debug_names = ddp._build_debug_param_to_name_mapping(self.parameters)
        self._script = Script()
        self.given: Buckets | None = None  # what we gave the Reducer; None: torch's own
        self.is_due = False  # whether they must be given in place when the next step begins
        self._shows_old = False  # whether a hook would be shown the parameters of earlier buckets
        self.wires: tuple[str, ...] = ()  # the precision of each bucket given; empty where all travel as they are
        self._on_message: OnMessage | None = None
        # What stands where the Reducer's process group stands, if anything; C++ alone would not keep it.
        self._wire_group: Any = None
        self._shard_group: Any = None
        self.gathers: Buckets | None = None  # in which parameters are gathered; None: as messages, the last one first
        self._torchs: Buckets = []  # where messages go to owners of rows, which must know buckets: those held before
        self._stand_in: Any = None
        self.sample_rate: int | None = None
        self.was_joined = False  # whether it was trained under join, which torch's statistics say

    @property
    def ddp(self) -> Any:
        """The model."""
        model = self._weak()
        if model is None:
            raise ReferenceError("the model of this Reducer is gone")
        return model

    @property
    def cannot_change(self) -> str:
        """Why it cannot be given others once it has trained; empty where it can."""
        if getattr(self.ddp, "mixed_precision", None) is not None:
            return "with mixed_precision torch sends wrong gradients in the first step of every Reducer"
        return ""

    @property
    def builtin_hook(self) -> Any:
        """The hook of torch's own in C++ that our class was given; torch's class does not say."""
        return getattr(self.ddp, "_builtin_hook", None)

    @property
    def has_hooks(self) -> bool:
        """Whether a communication hook sends the gradients."""
        return bool(self.ddp._comm_hooks) or self.builtin_hook is not None

    @property
    def has_settled(self) -> bool:
        """Whether torch has made its own buckets for good, or been given ours."""
        return bool(self.ddp._has_rebuilt_buckets) or self._finds_unused

    @property
    def has_finished(self) -> bool:
        """Whether no reduction is under way; one may take several backward passes."""
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    @property
    def collectives(self) -> Callable[[], int] | None:
        """What says how many collectives and messages ranks have called; None where their group does not count."""
        count = collectives_of(self.ddp.process_group)
        if count is None:
            return None
        beside = [group for group in (self._wire_group, self._shard_group) if group is not None]
        return lambda: count() + sum(group.sent for group in beside)

    @property
    def is_observed(self) -> bool:
        """Whether messages are observed."""
        return self._on_message is not None

    @property
    def _finds_unused(self) -> bool:
        return bool(self.ddp.find_unused_parameters and not self.ddp.static_graph)

    def buckets(self) -> Buckets:
        """Return the buckets that the Reducer holds: those it was given, or torch's own, which it lists itself."""
        if self.given is not None:
            return self.given
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        with NoZeros():
            held = self.ddp.reducer._get_zeros_like_grad_buckets()
        return [[places[id(parameter)] for parameter in bucket.parameters()] for bucket in held]

    def held_sizes(self) -> list[int]:
        """Return how many bytes each bucket has that the Reducer really holds; dense ones only."""
        with NoZeros():
            return [bucket.buffer().nbytes for bucket in self.ddp.reducer._get_zeros_like_grad_buckets()]

    def set_buckets(self, buckets: Buckets | None, wires: tuple[str, ...] = ()) -> None:
        """Give the Reducer these buckets, or with None let torch make its own again; between two steps.

        ``wires`` is the precision of each, see `MergePlan.wire`. Where it fails, the Reducer has the buckets that it
        had, and the error is raised.
        """
        before, wires_before = self.given, self.wires
        buckets = self._torchs if buckets is None and self._shard_group is not None else buckets
        self.wires = wires
        try:
            if wires != wires_before and buckets == before and buckets is not None:
                self._connect()  # the same buckets, sent in another way
            else:
                self._give(buckets)
        except Exception:
            self.wires = wires_before
            if before is not None or buckets is not None:
                self._give(before)
            raise

    def _give(self, buckets: Buckets | None) -> None:
        with torch.profiler.record_function("mgwfbp: change of buckets"):
            ddp = self.ddp
            self.given, self.is_due = buckets, False
            can_rebuild = not self._finds_unused and not self.has_hooks
            if buckets is not None and can_rebuild and (not ddp.static_graph or ddp._has_rebuilt_buckets):
                self._rebuild_in_place()
                self._connect()
                self._shows_old = True
            else:
                self._replace_reducer()

    def shard_with(self, shards: Shards) -> None:
        """Send messages to the owners of their rows from the next step on; between two steps.

        The Reducer gets the buckets that it has, or before its first step, which has one bucket, those that it would
        make: torch must never make others.
        """
        self._torchs = self.buckets() if self.given is not None or self.has_settled else self._expected()
        self._shard_group = ShardGroup(
            self.ddp.process_group, shards, lambda ended: when_backward_has_ended(lambda: None, ended)
        )
        self.set_buckets(self._torchs)

    @property
    def is_sharded(self) -> bool:
        """Whether a sharded optimizer has the gradients."""
        return self._shard_group is not None

    @property
    def groups_to_gather(self) -> Buckets:
        """The groups in which parameters are gathered, in their order; none where nothing is sharded."""
        if self._shard_group is None:
            return []
        owned = self._shard_group.shards.owned
        groups = self.gathers if self.gathers is not None else [bucket[::-1] for bucket in self.buckets()[::-1]]
        return [group for group in groups if not owned[group[0]].is_whole]

    def observe_gathers(self, on_gather: OnGather | None, *, waits_first: bool = False) -> None:
        """Call ``on_gather`` with every gather from now on, or with None nothing; let forward passes wait for them."""
        if self._shard_group is not None:
            self._shard_group.shards.on_gather, self._shard_group.shards.waits_first = on_gather, waits_first

    @property
    def torchs_groups(self) -> tuple[tuple[str, ...], ...]:
        """The buckets, by name, that a model with a sharded optimizer had before it, and gets where none are given."""
        return self.groups_of(self._torchs)

    def _expected(self) -> Buckets:
        """Return the buckets that torch would make if gradients were ready in the opposite order of definition."""
        first, cap = _c10d._DEFAULT_FIRST_BUCKET_BYTES, self.ddp.bucket_bytes_cap
        sizes = [first if getattr(self.ddp, "bucket_bytes_cap_default", True) else cap, cap]
        found, _ = _c10d._compute_bucket_assignment_by_size(self.parameters[::-1], sizes, self.sparse[::-1])
        last = len(self.parameters) - 1
        return [[last - place for place in bucket] for bucket in found]

    def before_forward(self) -> None:
        """Do what is due when a step of training begins."""
        if self.is_due and self.ddp._static_graph_delay_allreduce_enqueued:
            self.is_due = False
            self._rebuild_in_place()

    def settle(self) -> None:
        """Give the Reducer its buckets in place now, so that torch never makes its own."""
        if self.is_due:
            self.is_due = False
            self._rebuild_in_place()

    def _rebuild_in_place(self) -> None:
        buckets, ddp = self.given, self.ddp
        if buckets is None:
            return
        reducer = ddp.reducer
        # What torch broadcasts: all indices and the number of buckets; then the size of each bucket.
        self._script.answers = [[*chain.from_iterable(buckets), len(buckets)], [len(bucket) for bucket in buckets]]
        reducer._reset_state()
        reducer._push_all_rebuilt_params()
        reducer._update_process_group(self._script)
        try:
            with FreesFirst(self.parameters[0].device), self._spread_aside():
                has_rebuilt = reducer._rebuild_buckets()
        finally:
            self._script.answers = []
            reducer._update_process_group(self._stand_in or ddp.process_group)
        if not has_rebuilt:
            raise PlanError(f"torch {torch.__version__} takes no other buckets; train without plan= and report this")
        ddp._has_rebuilt_buckets = True

    def observe_messages(self, on_message: OnMessage | None) -> None:
        """Call ``on_message`` with every message from now on, or with None nothing. Only between steps."""
        self._on_message = on_message
        if self.has_hooks:
            self._replace_reducer()  # which is told its hooks only once
        else:
            self._connect()

    def hook_was_registered(self) -> None:
        """See to it that a communication hook is shown the parameters of the present buckets, and is observed."""
        if self._shows_old or self.is_observed:
            self._replace_reducer()

    def _connect(self) -> None:
        """Let the Reducer send as the plan says, and tell whoever observes."""
        group, stand_in = self.ddp.process_group, None
        if self.wires:
            if self._wire_group is None or self._wire_group.group is not group:
                self._wire_group = WireGroup(group)
            stand_in = self._wire_group
            stand_in.take(self.wires)
        if self._shard_group is not None:
            stand_in = self._shard_group
            stand_in.take(self.given or self._torchs)
        if self._on_message is not None:
            stand_in = ObservedGroup(stand_in or group, self._on_message)
        if stand_in is not None or self._stand_in is not None:
            self._stand_in = stand_in
            self.ddp.reducer._update_process_group(stand_in or group)

    def _replace_reducer(self) -> None:
        """Put a new Reducer in the place of the old one, with our buckets and everything that was registered there."""
        ddp = self.ddp
        ddp.reducer._remove_autograd_hooks()
        ddp.logger = None  # it keeps the old Reducer
        del ddp.reducer
        ddp._has_rebuilt_buckets = False
        with _thawed(self.parameters), self._making_ours(), self._spread_aside():
            ddp._ddp_init_helper(self.parameters, self.sparse, self._debug_names, ddp.static_graph)
        self._shows_old = False
        self._restore()
        if self.given is not None and not self._finds_unused:
            if ddp.static_graph:
                self.is_due = True
            else:
                self._rebuild_in_place()

    def _spread_aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shard_group is None else self._shard_group.shards.gradients_aside()

    @contextmanager
    def _making_ours(self) -> Iterator[None]:
        """Let the Reducer that is made of exactly our list of parameters get our buckets."""
        buckets = self.given
        if buckets is None:
            yield
            return
        sizes = [sum(self.sizes[place] for place in bucket) for bucket in buckets]
        with _LOCK:
            stock = _c10d.Reducer

            def make(of: list[Tensor], theirs: Buckets, limits: list[int], *args: Any, **kwargs: Any) -> Any:
                if of is not self.parameters:  # another thread's
                    return stock(of, theirs, limits, *args, **kwargs)
                return stock(of, buckets, sizes, *args, **kwargs)

            _c10d.Reducer = make
            try:
                yield
            finally:
                _c10d.Reducer = stock

    def _restore(self) -> None:
        ddp = self.ddp
        reducer, logger = ddp.reducer, ddp.logger
        if getattr(ddp, "mixed_precision", None) is not None:
            reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
        self._connect()
        for hook, state in ddp._comm_hooks:
            logger._set_comm_hook_name(hook.__qualname__)
            _c10d._register_comm_hook(
                reducer, state, hook if self._on_message is None else observed(hook, self._on_message)
            )
        if self.builtin_hook is not None:
            DistributedDataParallel._register_builtin_comm_hook(ddp, self.builtin_hook)
        if self.sample_rate is not None:
            DistributedDataParallel._set_ddp_runtime_logging_sample_rate(ddp, self.sample_rate)
        if self.was_joined:
            logger._set_uneven_input_join()
        if ddp._lazy_init_ran and any(hasattr(one, "_in_backward_optimizers") for one in ddp._module_parameters):
            reducer._set_optimizer_in_backward()
        if ddp.static_graph:
            reducer._set_static_graph()
            logger._set_static_graph()
            # The new Reducer learns the graph again: its first step sends everything after the backward pass.
            ddp._static_graph_delay_allreduce_enqueued = False
        if getattr(ddp, "_require_manual_backward_finalization", False):  # torch 2.15
            ddp.require_manual_backward_finalization = True


@contextmanager
def _thawed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let all parameters require gradients for a moment: a Reducer crashes on one that does not."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
