"""Gradients that are reduced, and parameters that are gathered, row by row: `Shards`, which a sharded optimizer has.

[Note: rows]
The memory of every parameter is cut into as many rows as there are ranks, the last ones shorter or empty. A rank *owns*
one row of each: it alone gets that row of the averaged gradient, has the optimizer's state for it and updates it. In a
message the rows of all its tensors for one rank lie together, so that one reduce-scatter or all-gather carries it.
Which tensors share a message has no part in who owns what: messages of either kind may be grouped in any way, and
otherwise from one step to the next, and no state moves. A plan may also have messages that are all-reduced: every rank
owns all of their parameters from the start, and updates them as torch's DDP would.

[Note: nothing is read too early]
`Shards.gather` begins all all-gathers, into memory of their own, and returns. A parameter gets what was gathered when
somebody asks its module for it: the dict in which a module keeps its parameters is a `Guarded` one, which waits for the
gather that carries the parameter and copies its group. So a forward pass waits for what it uses when it uses it (also
where a module uses the parameters of another, whose own forward pass never runs), and ``parameters()``,
``state_dict()``, ``deepcopy``, pickles and averages of models see what is finished. A module that holds parameters
elsewhere besides when the optimizer is made (torch's LSTM has a list of them) waits for them when its forward pass
begins. Compiled and scripted graphs do not ask modules: their forward pass begins when all gathers have ended. What can
be read too early is a parameter that somebody else holds, or a module in a place of its own that it fills later:
``model.synchronize()`` first.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp.errors import PlanError, ShardError
from mgwfbp.measure.halves import all_gather, reduce_scatter
from mgwfbp.runtime.channel import Channel, Tensors, work_of
from mgwfbp.runtime.stand_ins import MessageGroup
from mgwfbp.units import quote

__all__ = ["Guarded", "Noted", "OnGather", "Owned", "Rows", "ShardGroup", "Shards", "is_dense"]

Buckets = Sequence[Sequence[int]]
# Called with the bytes of parameters that are gathered and what is fulfilled when they have arrived.
OnGather = Callable[[int, Tensors], "Noted | None"]


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor fills a stretch of memory, each place once.

    >>> is_dense(torch.empty(2, 3).t()), is_dense(torch.empty(2, 3)[:, :2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def memory_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's numbers in the order in which memory has them, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Rows:
    """How tensors lie in a message that holds a row for every rank.

    >>> rows = Rows([5, 2], world=2)
    >>> rows.pack([torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7])], into=torch.empty(2, 4, dtype=torch.int64))
    tensor([[1, 2, 3, 6],
            [4, 5, 0, 7]])
    """

    def __init__(self, counts: Sequence[int], world: int) -> None:
        self.counts, self._world = counts, world
        self.lengths = [-(-count // world) for count in counts]
        self.length = sum(self.lengths)  # numbers in a row
        self._fits = [count == length * world for count, length in zip(counts, self.lengths, strict=True)]

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> Tensor:
        """Make the message of flat tensors; rows that a tensor does not fill end with 0."""
        if into.is_cuda:
            return torch._chunk_cat(list(tensors), 0, self._world, out=into)  # one kernel
        for tensor, columns in zip(tensors, into.split(self.lengths, dim=1), strict=True):
            length, full = columns.shape[1], tensor.numel() // max(1, columns.shape[1])
            columns[:full].copy_(tensor[: full * length].view(full, length))
            if full < self._world:
                columns[full:].zero_()
                columns[full, : tensor.numel() - full * length].copy_(tensor[full * length :])
        return into

    def padded(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return what one row is to be concatenated of: one rank's part of each tensor, and zeros behind short ones."""
        found = []
        for part, length in zip(own, self.lengths, strict=True):
            found.append(part)
            if part.numel() < length:
                found.append(part.new_zeros(length - part.numel()))
        return found

    def unpack(self, rows: Tensor, into: Sequence[Tensor]) -> None:
        """Write a message back into flat tensors; on a GPU one kernel fills those that fill their rows."""
        whole = [
            tensor.view(self._world, length) if fits else tensor.new_empty(self._world, length)
            for tensor, length, fits in zip(into, self.lengths, self._fits, strict=True)
        ]
        torch.split_with_sizes_copy(rows, self.lengths, dim=1, out=whole)
        for tensor, part, fits in zip(into, whole, self._fits, strict=True):
            if not fits:
                tensor.copy_(part.flatten()[: tensor.numel()])


class Owned:
    """A parameter and the row of it that this rank owns: with a ``world`` of 1 all of it."""

    def __init__(self, name: str, parameter: nn.Parameter, rank: int, world: int) -> None:
        self.name, self.parameter, self.is_whole = name, parameter, world == 1
        self.memory = memory_of(parameter)
        length = -(-parameter.numel() // world)
        self._part = slice(rank * length, (rank + 1) * length)
        # A view: whoever changes it changes the parameter.
        self.row = nn.Parameter(self.memory[self._part], requires_grad=parameter.requires_grad)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's row of a tensor that has the parameter's shape, as a flat tensor."""
        return memory_of(self._laid_out(tensor.dtype).copy_(tensor))[self._part].clone()

    def in_memory(self, grad: Tensor) -> Tensor:
        """Return a gradient's numbers in the order of the parameter's, as a view where they have it."""
        is_alike = grad.stride() == self.parameter.stride()
        return memory_of(grad if is_alike else self._laid_out(grad.dtype).copy_(grad))

    def _laid_out(self, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor that lies in memory as the parameter does."""
        own = self.parameter
        return torch.empty_strided(own.shape, own.stride(), dtype=dtype, device=own.device)

    def whole(self, part: Tensor, group: Any) -> Tensor:
        """Return what the rows of all ranks make up, in the parameter's shape. All ranks must call it."""
        found, numbers = self._laid_out(part.dtype), part
        if not self.is_whole:
            rows = Rows([self.parameter.numel()], dist.get_world_size(group))
            numbers = part.new_empty(dist.get_world_size(group) * rows.length)
            dist.all_gather_into_tensor(numbers, torch.cat(rows.padded([part])), group=group)
        memory_of(found).copy_(numbers[: found.numel()])
        return found

    @property
    def has_moved(self) -> bool:
        """Whether the parameter has other memory than it had."""
        return self.parameter.data_ptr() != self.memory.data_ptr()


class SpreadGradient(torch.Tensor):
    """Stands where the gradient of a parameter was whose averaged rows the ranks have: whatever uses it fails.

    But for `torch.amp.GradScaler`, which divides this rank's row and is told of values that any rank found.
    """

    # Not the parameter: it holds its gradient, and would never end.
    of: str  # its name
    row: nn.Parameter
    group: Any

    @staticmethod
    def __new__(cls, owned: Owned, group: Any) -> "SpreadGradient":
        like = owned.parameter
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.of, made.row, made.group = owned.name, owned.row, group
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found, *scale = args
            func([one.row.grad if isinstance(one, cls) else one for one in grads], found, *scale)
            group = next(one.group for one in grads if isinstance(one, cls))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return None
        name = next(one.of for one in _tensors(args) if isinstance(one, cls))
        raise ShardError(
            f"the gradient of {name} was averaged and each rank has a row of it, so that {func} cannot be: clip with "
            "optimizer.clip_grad_norm_(), and call optimizer.zero_grad() before the next backward pass"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpreadGradient({self.of})"


def _tensors(values: Any) -> Iterator[Any]:
    """Return what lists, tuples, sets and dicts hold, and what such in them hold."""
    for one in values:
        if isinstance(one, (list, tuple, set)):
            yield from _tensors(one)
        elif isinstance(one, dict):
            yield from _tensors(one.values())
        else:
            yield one


class _Message:
    """What travels together, in either direction. What can be found once is: some models have a thousand parameters."""

    def __init__(self, owned: Sequence[Owned], group: Any) -> None:
        self.owned, self.is_whole = owned, all(one.is_whole for one in owned)
        self.memory = [one.memory for one in owned]
        self.num_bytes = sum(memory.nbytes for memory in self.memory)
        self.layout = Rows([memory.numel() for memory in self.memory], dist.get_world_size(group))
        self.own = self.layout.padded([one.row.detach() for one in owned])
        self.spread = [SpreadGradient(one, group) for one in owned]


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


class Shards:
    """The rows of a model's parameters that this rank owns, and the messages that bring rows to their owners and back.

    See [Note: rows] and [Note: nothing is read too early].
    """

    def __init__(self, owned: Sequence[Owned], group: Any, gather_group: Any) -> None:
        self.owned = owned
        self._group, self._world = group, dist.get_world_size(group)
        device = owned[0].memory.device
        self._reduces = Channel(group, device)
        self._gathers = self._reduces if gather_group is None else Channel(gather_group, device)
        self._layouts: dict[tuple[int, ...], _Message] = {}  # of messages that were sent before
        # Of the reduction that is under way; None for what was all-reduced.
        self._arrived: list[tuple[_Message, tuple[Tensor, Tensors] | None]] = []
        self._futures: list[Tensors] = []  # of the gradients that rows have now
        self.pending: dict[int, _Gather] = {}  # by the id of a parameter
        self.modules: list[nn.Module] = []  # whose parameters are guarded
        self.on_gather: OnGather | None = None  # called with every gather that is begun
        self.waits_first = False  # whether forward passes begin when all gathers have ended, to see what they take then
        self._lock = threading.RLock()

    def check(self, groups: Sequence[Sequence[str]], gathers: Sequence[Sequence[str]] = ()) -> None:
        """Raise where a message holds what all ranks update and what each updates a row of, or gathers are others."""
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
        if known.is_whole:
            self._arrived.append((known, None))
            return all_reduce()
        if sum(layout.counts) != message.numel():
            raise ShardError(
                f"a bucket has {message.numel()} numbers, expected {sum(layout.counts)}: please report this"
            )
        own, channel = message.new_empty(layout.length), self._reduces

        def job() -> None:
            rows, received = channel.scratch(message, (self._world, layout.length))
            reduce_scatter(layout.pack(message.split(layout.counts), rows), own, received, channel.group)

        future = self._reduces.send(job, [message])
        self._arrived.append((known, (own, future)))
        return work_of(future)

    def _message_of(self, places: Sequence[int]) -> "_Message":
        key = tuple(places)
        if key not in self._layouts:
            self._layouts[key] = _Message([self.owned[place] for place in key], self._group)
        return self._layouts[key]

    def hand_out(self) -> None:
        """Give each row its gradient, once the Reducer has ended; a parameter that nobody used has none."""
        arrived, self._arrived, self._futures = self._arrived, [], []
        for message, sharded in arrived:
            if sharded is None:
                continue
            own, future = sharded
            self._futures.append(future)
            parts = own.split(message.layout.lengths)
            for one, spread, part in zip(message.owned, message.spread, parts, strict=True):
                if one.parameter.grad is None:
                    one.row.grad = None
                    continue
                one.row.grad = part if part.numel() == one.row.numel() else part[: one.row.numel()]
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
        for future in self._futures:
            future.wait()  # for the current stream
        self._futures = []
        for one in self.owned:
            grad = one.parameter.grad
            if grad is None:
                one.row.grad = None
            elif one.is_whole:
                one.row.grad = one.in_memory(grad)
            elif not isinstance(grad, SpreadGradient):
                raise ShardError(
                    f"the gradient of {one.name} was not averaged by the model's backward pass: run the last one "
                    "before optimizer.step() outside of no_sync(), and set gradients to None only"
                )

    def gather(self, groups: Buckets) -> None:
        """Begin to bring the rows of all ranks together, group by group."""
        self.finish_all()
        for places in groups:
            message = self._message_of(places)
            own = torch.cat(message.own)
            rows = own.new_empty(self._world, message.layout.length)

            def job(rows: Tensor = rows, own: Tensor = own) -> None:
                all_gather(rows, own, self._gathers.group)

            arrives = self._gathers.send(job, [rows])
            noted = None if self.on_gather is None else self.on_gather(message.num_bytes, arrives)
            gather = _Gather(message, own, rows, arrives, noted)
            self.pending.update((id(one.parameter), gather) for one in message.owned)

    def finish(self, parameter: Tensor) -> None:
        """Wait for a parameter, and finish all that came with it."""
        with self._lock:
            gather = self.pending.get(id(parameter))
            if gather is None:
                return
            if gather.noted is not None:
                gather.noted.ask()
            gather.arrives.wait()
            if gather.noted is not None:
                gather.noted.get()
            if gather.rows.is_cuda:
                gather.rows.record_stream(torch.cuda.current_stream(gather.rows.device))
            with torch.no_grad():
                gather.message.layout.unpack(gather.rows, gather.message.memory)
            for one in gather.message.owned:
                del self.pending[id(one.parameter)]

    def finish_all(self) -> None:
        """Wait for all parameters."""
        for one in self.owned:
            if not self.pending:
                return
            self.finish(one.parameter)

    def guard(self, module: nn.Module) -> None:
        """See to it that nobody gets a parameter of a module, or of a module in it, before it is finished."""
        own = {id(one.parameter) for one in self.owned}
        self.modules = list(module.modules())
        for one in self.modules:
            elsewhere = [value for name, value in vars(one).items() if name not in ("_parameters", "_modules")]
            held = [found for found in _tensors(elsewhere) if id(found) in own]
            hooks = one._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Finishes)]:
                del hooks[key]  # of an optimizer before this one
            if held:
                one.register_forward_pre_hook(_Finishes(self, held))
            if one._parameters:
                one.__dict__["_parameters"] = Guarded(one._parameters, self)


class _Finishes:
    """A hook on a module's forward pass that waits for parameters. A copy of the module waits for nothing."""

    def __init__(self, shards: Shards, held: Sequence[Tensor]) -> None:
        self._shards, self._held = shards, held

    def __call__(self, *_: object) -> None:
        if self._shards.pending:
            for parameter in self._held:
                self._shards.finish(parameter)

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def _nothing(*_: object) -> None:
    """Do nothing when a forward pass begins."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class Guarded(dict[str, Any]):
    """The parameters of a module, each of which is finished before anybody gets it. Its copy is an ordinary dict."""

    def __init__(self, parameters: dict[str, Any], shards: Shards) -> None:
        super().__init__(parameters)
        self._shards = shards

    def _finish(self) -> None:
        if self._shards.pending:
            for parameter in super().values():
                self._shards.finish(parameter)

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if self._shards.pending:
            self._shards.finish(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, finished."""
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Take a parameter out, finished."""
        self._finish()
        return super().pop(name, *default)

    def items(self) -> Any:
        """Return all names and parameters, finished."""
        self._finish()
        return super().items()

    def values(self) -> Any:
        """Return all parameters, finished."""
        self._finish()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict."""
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class ShardGroup(MessageGroup):
    """The process group of a Reducer whose messages go to the owners of their rows."""

    def __init__(self, group: Any, shards: Shards, when_ended: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(group)
        self.shards, self._when_ended = shards, when_ended
        self._buckets: Buckets = ()

    def take(self, buckets: Buckets) -> None:
        """Expect these buckets in later steps; between two steps."""
        self._buckets = buckets

    def send_message(self, tensors: list[Tensor], *options: Any) -> Any:
        """Send a message to the owners of its rows."""
        place = self.shards.num_arrived
        work = self.shards.reduce(self._buckets[place], tensors[0], lambda: self.group.allreduce(tensors, *options))
        if place + 1 == len(self._buckets):
            self._when_ended(self.shards.hand_out)
        return work
