"""Gradients that are reduced, and parameters that are gathered, row by row: `Shards`, which a sharded optimizer has.

See [Note: rows] in ``rows.py`` and [Note: nothing is read too early] in ``guards.py``.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp.errors import PlanError, ShardError
from mgwfbp.measure.halves import GATHER, REDUCE, all_gather, reduce_scatter, tag_of
from mgwfbp.runtime.messages.channel import Channel, Tensors, work_of
from mgwfbp.runtime.messages.stand_ins import MessageGroup
from mgwfbp.runtime.rows.guards import Guards
from mgwfbp.runtime.rows.modes_private import without_modes
from mgwfbp.runtime.rows.rows import Owned, Rows
from mgwfbp.runtime.rows.spread import SpreadGradient
from mgwfbp.units import quote

__all__ = ["Noted", "OnGather", "ShardGroup", "Shards"]

Buckets = Sequence[Sequence[int]]
# Called with the bytes of parameters that are gathered and what is fulfilled when they have arrived.
OnGather = Callable[[int, Tensors], "Noted | None"]


class _Message:
    """What travels together, in either direction. What can be found once is: some models have a thousand parameters."""

    def __init__(self, owned: Sequence[Owned], group: Any) -> None:
        self.owned, self.is_whole = owned, all(one.is_whole for one in owned)
        self.memory = [one.memory for one in owned]
        self.num_bytes = sum(memory.nbytes for memory in self.memory)
        self.layout = Rows([memory.numel() for memory in self.memory], dist.get_world_size(group))
        rows = [one.row_of(one.memory) for one in owned]
        self.own, self.parts_of = self.layout.padded(rows), self.layout.parts(rows)
        self.unpack = self.layout.unpacker(self.memory)
        self.ids = [id(one.parameter) for one in owned]
        self.spread = [SpreadGradient(one, group) for one in owned]

    def own_of(self, bucket: Tensor) -> Tensor:
        """Return this rank's row of a bucket whose gradients are averaged."""
        numbers = bucket.split(self.layout.counts)
        return torch.cat(self.layout.padded([one.row_of(part) for one, part in zip(self.owned, numbers, strict=True)]))


class Noted(Protocol):
    """Who notes when a gather was waited for."""

    def ask(self) -> None:
        """Note that the forward pass needs what is gathered."""

    def get(self) -> None:
        """Note that it has it."""


@dataclass(frozen=True)
class _Gather:
    """Parameters that are being gathered."""

    message: _Message
    own: Tensor  # held as long as another stream may read it
    rows: Tensor
    arrives: Tensors
    noted: "Noted | None"
    stream: "torch.cuda.Stream | None"  # that called `gather`; parameters are finished on it


def _wait_for(pending: dict[int, _Gather]) -> None:
    """Let memory that nobody waits for any more be free only once it was written to: another stream does."""
    for gather in pending.values():
        if gather.stream is not None:
            with torch.cuda.stream(gather.stream):
                gather.arrives.wait()


class Shards:
    """The rows of a model's parameters that this rank owns, and the messages that bring rows to their owners and back.

    See [Note: rows] and [Note: nothing is read too early]. ``number`` is as for `gloo_beside`.
    """

    def __init__(self, owned: Sequence[Owned], group: Any, gather_group: Any, number: int | None = None) -> None:
        self.owned = owned
        self._group, self._world, self._device = group, dist.get_world_size(group), owned[0].memory.device
        self._reduces = Channel(group, self._device, number)
        self._gathers = self._reduces if gather_group is None else Channel(gather_group, self._device)
        self._layouts: dict[tuple[int, ...], _Message] = {}  # of messages that were sent before
        # Of the reduction that is under way: what says this rank's row of it; None where every rank owns all.
        self._arrived: list[tuple[_Message, Callable[[], Tensor] | None]] = []
        self._is_due = False  # whether rows shall get their gradients when the backward pass under way has ended
        self._sent: list[Tensors] = []  # what stands for its reduce-scatters
        self._futures: list[Tensors] = []  # and for those of the gradients that rows have now
        self.pending: dict[int, _Gather] = {}  # by the id of a parameter
        self._guards: Guards | None = None
        self._others: list[nn.Parameter] = []  # of the module, frozen ones say
        self.runs_graphs = False  # whether some of the model is a graph, and asks nobody for parameters
        self.on_gather: OnGather | None = None  # called with every gather that is begun
        # Whether a backward pass may leave parameters without a gradient. Where it may not, nobody reads what the
        # Reducer copies back into gradients, and it need not.
        self.has_unused = True
        # Whether forward passes begin when all gathers have ended, and messages are all-reduced: to see what steps take
        # then. Rows get the same gradients, but for the order of sums.
        self.waits_first = self.all_reduces = False
        self._num_sent = 0
        self._lock = threading.RLock()
        weakref.finalize(self, _wait_for, self.pending).atexit = False

    def check(self, groups: Sequence[Sequence[str]], gathers: Sequence[Sequence[str]] = ()) -> None:
        """Raise where a message holds what all ranks update and what each updates a row of, or gathers are others."""
        if self._world == 1:  # which owns all of what any plan gathers
            return
        is_whole = {one.name: one.is_whole for one in self.owned}
        wrong = [name for group in gathers for name in group if is_whole[name]]
        if wrong or (gathers and sum(map(len, gathers)) < len(self.owned) - sum(is_whole.values())):
            raise PlanError(
                "the plan gathers other parameters than those that the sharded optimizer shards: give it to a new one, "
                "as plan="
            )
        for number, group in enumerate(groups):
            others = [name for name in group if is_whole[name] != is_whole[group[0]]]
            if others:
                raise PlanError(
                    f"message {number} holds {quote(group[0])} and {quote(others[0])}, and the plan of the sharded "
                    "optimizer all-reduces one of them and shards the other: part them"
                )

    def reduce(self, places: Sequence[int], message: Tensor, all_reduce: Callable[[], Any]) -> Any:
        """Bring the rows of a bucket's gradients to their owners; return what the Reducer waits for.

        ``all_reduce`` sends those of which every rank owns all.
        """
        known = self._message_of(places)
        layout = known.layout
        if known.is_whole or self.all_reduces:
            self._arrived.append((known, None if known.is_whole else partial(known.own_of, message)))
            return all_reduce()
        if sum(layout.counts) != message.numel():
            raise ShardError(
                f"a bucket has {message.numel()} numbers, expected {sum(layout.counts)}: please report this"
            )
        own, channel, tag = message.new_empty(layout.length), self._reduces, self._next_tag(REDUCE)

        def job() -> None:
            rows, received = channel.scratch(message, (self._world, layout.length))
            reduce_scatter(layout.pack(message.split(layout.counts), rows), own, received, channel.group, tag)

        channel.keep(message)
        self._sent.append(channel.send(job, [message]))
        self._arrived.append((known, lambda: own))
        return work_of(self._sent[-1])

    def _next_tag(self, kind: int) -> int:
        """Return what this message alone is tagged with: where a rank skips one, no other is taken for it."""
        self._num_sent += 1
        return tag_of(self._num_sent, kind)

    def _message_of(self, places: Sequence[int]) -> "_Message":
        key = tuple(places)
        if key not in self._layouts:
            self._layouts[key] = _Message([self.owned[place] for place in key], self._group)
        return self._layouts[key]

    def all_were_sent(self) -> Callable[[], None]:
        """Return what must be called once the Reducer has ended; see `_hand_out_late` for where it cannot be."""
        self._is_due = True
        return self._hand_out

    def _hand_out_late(self) -> None:
        """Do what was due where a backward pass raised after it, in a callback of the user's: autograd calls nobody."""
        if self._is_due:
            self._hand_out(is_late=True)

    def _hand_out(self, *, is_late: bool = False) -> None:
        """Give each row its gradient; a parameter that nobody used, or that was given None since, has none."""
        arrived, self._arrived, self._is_due = self._arrived, [], False
        self._futures, self._sent = self._sent, []
        for message, own in arrived:
            if own is None:
                continue
            for one, spread, part in zip(message.owned, message.spread, message.parts_of(own()), strict=True):
                if (self.has_unused or is_late) and one.parameter.grad is None:
                    one.row.grad = None
                    continue
                one.row.grad = part
                one.parameter.grad = spread

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Let parameters have no gradient where they have rows of one: a Reducer moves gradients into new buckets."""
        grads = [(one.parameter, one.parameter.grad) for one in self.owned]
        spread = [(parameter, grad) for parameter, grad in grads if isinstance(grad, SpreadGradient)]
        for parameter, _ in spread:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in spread:
                parameter.grad = grad

    @property
    def num_arrived(self) -> int:
        """How many messages of the reduction that is under way were sent."""
        return len(self._arrived)

    def take_gradients(self) -> None:
        """Let rows have the gradients that their parameters have now: none where they were set to None."""
        self._hand_out_late()
        for future in self._futures:
            future.wait()  # for the current stream
        self._futures = []
        for one in self.owned:
            grad = one.parameter.grad
            if grad is None:
                one.row.grad = None
            elif not (one.is_whole or isinstance(grad, SpreadGradient)):
                raise ShardError(
                    f"the gradient of {one.name} was not averaged by the model's backward pass: run the last one "
                    "before optimizer.step() outside of no_sync(), and set gradients to None only"
                )

    def gather(self, groups: Buckets) -> None:
        """Begin to bring the rows of all ranks together, group by group."""
        with self._lock:  # another thread may be about to take off what stood there for the gathers before
            self.finish_all()
            guards = self._guards if groups else None
            if guards is not None:
                guards.put_on(self, all_first=self.runs_graphs)
            for places in groups:
                self._begin_gather(self._message_of(places))
            if guards is not None:
                for one in guards.scripted:
                    self.finish(one)

    def _begin_gather(self, message: "_Message") -> None:
        own = torch.cat(message.own)
        rows, tag = own.new_empty(self._world, message.layout.length), self._next_tag(GATHER)
        arrives = self._gathers.send(lambda: all_gather(rows, own, self._gathers.group, tag), [rows])
        noted = None if self.on_gather is None else self.on_gather(message.num_bytes, arrives)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        gather = _Gather(message, own, rows, arrives, noted, stream)
        self.pending.update(dict.fromkeys(message.ids, gather))

    def before_forward(self) -> None:
        """Wait for all parameters where the model's forward pass that begins asks for none, or shall be observed."""
        self._hand_out_late()
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ShardError(
                "the model is captured in a CUDA graph, which would run before parameters are gathered: capture "
                "modules inside of it with torch.cuda.make_graphed_callables, or use a plain optimizer"
            )
        if self.pending and (self.runs_graphs or self.waits_first):
            self.finish_all()

    def finish(self, parameter: Tensor) -> None:
        """Wait for a parameter, and finish all that came with it."""
        if id(parameter) not in self.pending:  # where another thread is at it, it is
            return
        with self._lock:
            gather = self.pending.get(id(parameter))
            if gather is None:
                return
            if gather.noted is not None:
                gather.noted.ask()
            # On the stream that the optimizer ran on, whoever asks first: others that read parameters wait for that
            # one, as they would with any optimizer, and do not know of the one that asked.
            asking = None if gather.stream is None else torch.cuda.current_stream(gather.rows.device)
            on_stream = nullcontext() if gather.stream is None else torch.cuda.stream(gather.stream)
            with on_stream, torch.no_grad(), without_modes():
                gather.arrives.wait()
                gather.message.unpack(gather.rows)
                if moved := [one for one in gather.message.owned if one.has_moved]:
                    if gather.stream is not None and asking is not None:
                        gather.stream.wait_stream(asking)  # which may still be copying what was there before
                    for one in moved:
                        one.follow()
            if gather.stream is not None:
                torch.cuda.current_stream(gather.rows.device).wait_stream(gather.stream)
            if gather.noted is not None:
                gather.noted.get()
            for place in gather.message.ids:
                del self.pending[place]
            if not self.pending and self._guards is not None:
                self._guards.take_off()

    def finish_all(self) -> None:
        """Wait for all parameters, in the order in which they arrive."""
        for gather in list(self.pending.values()):
            self.finish(gather.message.owned[0].parameter)

    def check_memory(self, module: nn.Module) -> None:
        """Cut rows anew where parameters of the module have other memory; nothing is under way then.

        Raises:
            ShardError: where one is no longer the one that rows were cut of, or lies in memory otherwise.
        """
        moved = {place for place, one in enumerate(self.owned) if one.has_moved}
        wrong = next((self.owned[place].name for place in sorted(moved) if not self.owned[place].cut_anew()), None)
        if moved:
            self._layouts = {key: message for key, message in self._layouts.items() if moved.isdisjoint(key)}
        if wrong is None and self._guards is not None and self._guards.have_changed:
            held = set(map(id, module.parameters()))
            wrong = next((one.name for one in self.owned if id(one.parameter) not in held), None)
            if wrong is None:  # they are in other modules now
                self.guard(module)
        if wrong is not None:
            raise ShardError(
                f"the parameter {wrong} is another, or has another dtype, device or strides, than when the optimizer "
                "was made: move and convert models before DistributedDataParallel, and load weights in place (without "
                "assign=True)"
            )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients of what is sharded; of other parameters set them to 0, where they shall not be None."""
        for one in self.owned:
            one.parameter.grad = None
        for parameter in self._others:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def guard(self, module: nn.Module) -> None:
        """See to it that nobody gets a parameter of a module, or of a module in it, before it is finished."""
        own = {id(one.parameter) for one in self.owned}
        self._others = [parameter for parameter in module.parameters() if id(parameter) not in own]
        self._guards = Guards(module, self.pending, own)

    @property
    def waits_early(self) -> str:
        """As `Guards.waits_early`, of the module that is guarded."""
        return "" if self._guards is None else self._guards.waits_early


class ShardGroup(MessageGroup):
    """The process group of a Reducer whose messages go to the owners of their rows."""

    def __init__(self, group: Any, shards: Shards, when_ended: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(group)
        self.shards, self._when_ended = shards, when_ended
        self._buckets: Buckets = ()

    def take(self, buckets: Buckets) -> None:
        """Expect these buckets in later steps; between two steps."""
        self._buckets = buckets

    def sends_rows(self, place: int) -> bool:
        """Say whether a message, by its place in the step, goes to the owners of its rows, and is not all-reduced."""
        return not (self.shards.all_reduces or self.shards.owned[self._buckets[place][0]].is_whole)

    def send_message(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send a message to the owners of its rows."""
        place = self.shards.num_arrived
        work = self.shards.reduce(self._buckets[place], tensors[0], lambda: self.group.allreduce(tensors, *options))
        if place + 1 == len(self._buckets):
            self._when_ended(self.shards.all_were_sent())
        return work
