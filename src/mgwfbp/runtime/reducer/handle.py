"""A handle on the Reducer of a DDP model: the private names of torch's DDP are here.

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

[Note: a change that fails]
Memory may run out at any point of either way: then the Reducer has a part of its buckets, or the model has no Reducer.
Both ways begin by giving up what is there and need nothing of it, so that the buckets the Reducer had can be given to
it in the same way. It must be given these very buckets: a Reducer that is to make torch's own again learns a static
graph anew and waits for a broadcast of rank 0, on this rank alone.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from mgwfbp.errors import PlanError
from mgwfbp.measure.agreement import problem_of
from mgwfbp.runtime.messages.gloo import messages_at_once, number_beside
from mgwfbp.runtime.messages.sharing import Queue
from mgwfbp.runtime.messages.stand_ins import FreesFirst, NoZeros, ObservedGroup, OnMessage, Script, observed
from mgwfbp.runtime.messages.wire import WireGroup
from mgwfbp.runtime.reducer.parameters import Buckets, Parameters
from mgwfbp.runtime.rows.shards import OnGather, ShardGroup, Shards

__all__ = ["ReducerHandle", "collectives_of", "held_buckets", "when_backward_has_ended"]

# Looked up, not named: on a torch without it ``support.py`` can still say what is missing.
_c10d: Any = dist

# One at a time: two threads that put a name aside and back would leave each other's there.
_LOCK = threading.Lock()


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


def held_buckets(ddp: Any) -> list[Any]:
    """Return the buckets that a Reducer really holds, as torch's ``GradBucket``; it lists only dense ones."""
    with NoZeros():
        held: list[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return held


class ReducerHandle(Parameters):
    """What may be asked of, and done to, the Reducer of one DDP model.

    It knows the parameters, and their names, as they were when it was made: what is frozen, renamed or taken out of the
    module later changes nothing for the Reducer, as with torch. When it is made they must be those that the Reducer
    has, which ``cannot_hold`` of ``support.py`` sees to. It holds the model weakly.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self._weak = weakref.ref(ddp)
        self._debug_names = ddp._build_debug_param_to_name_mapping(self.parameters)
        self._script = Script()
        self.given: Buckets | None = None  # what we gave the Reducer; None: torch's own
        self.is_due = False  # whether they must be given in place when the next step begins
        self.problem = ""  # what failed then, and did not when it was tried again
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
        return (lambda: count() + sum(group.sent for group in beside)) if beside else count

    @property
    def is_observed(self) -> bool:
        """Whether messages are observed."""
        return self._on_message is not None

    def queue_of(self, place: int) -> Queue:
        """Return with which others a message of a step is sent in order, by its place: our threads send beside gloo's.

        nccl sends one after another.
        """
        device = self.parameters[0].device
        if device.type == "cuda":
            return Queue()
        if any(self.wires[place : place + 1]) or (
            self._shard_group is not None and self._shard_group.sends_rows(place)
        ):
            return Queue("beside")
        return Queue("", messages_at_once(self.ddp.process_group, device))

    @property
    def _finds_unused(self) -> bool:
        return bool(self.ddp.find_unused_parameters and not self.ddp.static_graph)

    def buckets(self) -> Buckets:
        """Return the buckets that the Reducer holds: those it was given, or torch's own, which it lists itself."""
        if self.given is not None:
            return self.given
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        return [[places[id(parameter)] for parameter in bucket.parameters()] for bucket in held_buckets(self.ddp)]

    def held_sizes(self) -> list[int]:
        """Return how many bytes each bucket has that the Reducer really holds; dense ones only."""
        return [bucket.buffer().nbytes for bucket in held_buckets(self.ddp)]

    @property
    def in_force(self) -> tuple[Buckets | None, tuple[str, ...]]:
        """What `set_buckets` must be called with to have again what there is now; see [Note: a change that fails]."""
        return self.buckets() if self.given is not None or self.has_settled else None, self.wires

    def set_buckets(self, buckets: Buckets | None, wires: tuple[str, ...] = ()) -> None:
        """Give the Reducer these buckets, or with None let torch make its own again; between two steps.

        ``wires`` is the precision of each, see `MergePlan.wire`. Where it fails, the Reducer has the buckets that it
        had, and the error is raised.
        """
        before = self.in_force
        buckets = self._torchs if buckets is None and self._shard_group is not None else buckets
        with _undone_by(partial(self._give, *before)):
            if wires != self.wires and buckets == self.given and buckets is not None:
                self.wires = wires
                self._connect()  # the same buckets, sent in another way
            else:
                self._give(buckets, wires)

    def _give(self, buckets: Buckets | None, wires: tuple[str, ...]) -> None:
        with torch.profiler.record_function("mgwfbp: change of buckets"):
            ddp = self.ddp
            self.given, self.wires, self.is_due = buckets, wires, False
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
        is_first = self._shard_group is None
        if is_first:
            self._torchs = self.buckets() if self.given is not None or self.has_settled else self._expected()
        self._shard_group = ShardGroup(
            self.ddp.process_group, shards, lambda ended: when_backward_has_ended(lambda: None, ended)
        )
        if is_first:
            self.set_buckets(self._torchs)
        else:  # a Reducer that was told to copy nothing back remembers that
            self.given, self.wires, self.gathers = self._torchs, (), None
            self._replace_reducer()

    def graph_became_static(self) -> None:
        """Let some parameters go without a gradient from now on, where the Reducer was told that none would."""
        if self._shard_group is not None:
            self._replace_reducer()

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

    def observe_gathers(
        self, on_gather: OnGather | None, *, waits_first: bool = False, all_reduces: bool = False
    ) -> None:
        """Call ``on_gather`` with every gather from now on, or with None nothing.

        Let forward passes wait for all gathers first, and messages be all-reduced, as with a plain optimizer.
        """
        if self._shard_group is not None:
            shards = self._shard_group.shards
            shards.on_gather, shards.waits_first, shards.all_reduces = on_gather, waits_first, all_reduces

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
            try:
                self._rebuild_in_place()
            except Exception as error:  # no rank knows of another here, and all have these buckets
                self.problem = problem_of(error)
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
        """Call ``on_message`` with every message from now on, or with None nothing. Only between steps.

        Where it fails, who was called before still is, and the error is raised.
        """
        before = self._on_message
        # A Reducer takes hooks only once.
        connect = partial(self._give, *self.in_force) if self.has_hooks else self._connect

        def observe(on_message: OnMessage | None) -> None:
            self._on_message = on_message
            connect()

        with _undone_by(partial(observe, before)):
            observe(on_message)

    def hook_was_registered(self) -> None:
        """See to it that a communication hook is shown the parameters of the present buckets, and is observed."""
        if self._shows_old or self.is_observed:
            self._give(*self.in_force)

    @property
    def _has_wire(self) -> bool:
        return self._wire_group is not None and self._wire_group.group is self.ddp.process_group

    def needs_wire(self, wires: Sequence[str]) -> bool:
        """Say whether ranks must meet, `make_wire` and `open_wire`, before messages travel in these precisions."""
        return bool(wires) and not (self._has_wire and self._wire_group.is_open)

    def make_wire(self) -> int:
        """Make what messages in low precision travel through; return a number that is new on this rank."""
        number = number_beside(self.ddp.process_group)
        self._wire_group = WireGroup(self.ddp.process_group, self.parameters[0].device)
        return number

    def open_wire(self, number: int) -> None:
        """Let ranks meet there. All must call it once all have made it, with the highest number for all.

        Where ranks do not, or one fails, it fails on the others after a while.
        """
        self._wire_group.open(number)

    def close_wire(self) -> None:
        """Forget it, where it was not made on all ranks."""
        self._wire_group = None

    def _connect(self) -> None:
        """Let the Reducer send as the plan says, and tell whoever observes."""
        group, stand_in = self.ddp.process_group, None
        if self.wires:
            if not self._has_wire:
                self._wire_group = WireGroup(group, self.parameters[0].device)
            stand_in = self._wire_group
            stand_in.take(self.wires)
        if self._shard_group is not None:
            stand_in = self._shard_group
            stand_in.take(self.given or self._torchs)
            shards = stand_in.shards
            shards.has_unused = bool(self.ddp.find_unused_parameters or self.ddp.static_graph)
            if not shards.has_unused and not any(one.is_whole for one in shards.owned):
                self.ddp.reducer._set_optimizer_in_backward()  # which copies nothing back into gradients
        if self._on_message is not None:
            stand_in = ObservedGroup(stand_in or group, self._on_message)
        if stand_in is not None or self._stand_in is not None:
            self._stand_in = stand_in
            self.ddp.reducer._update_process_group(stand_in or group)

    def _replace_reducer(self) -> None:
        """Put a new Reducer in the place of the old one, with our buckets and everything that was registered there."""
        ddp = self.ddp
        if hasattr(ddp, "reducer"):  # else the last one could not be made
            ddp.reducer._remove_autograd_hooks()
            ddp.logger = None  # it keeps the old Reducer
            del ddp.reducer
        ddp._has_rebuilt_buckets = False
        frees_first = FreesFirst(self.parameters[0].device)
        with _thawed(self.parameters), self._making_ours(), self._spread_aside(), frees_first:
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
def _undone_by(undo: Callable[[], None]) -> Iterator[None]:
    """Undo what fails inside, and raise why it failed."""
    try:
        yield
    except Exception:
        undo()
        raise


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
