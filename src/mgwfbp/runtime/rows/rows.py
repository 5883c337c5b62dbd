"""How parameters are cut into rows, one for each rank: `Rows` of a message, and what a rank has `Owned`.

[Note: rows]
The memory of every parameter is cut into as many rows as there are ranks, the last ones shorter or empty. A rank *owns*
one row of each: it alone gets that row of the averaged gradient, has the optimizer's state for it and updates it. In a
message the rows of all its tensors for one rank lie together, so that one reduce-scatter or all-gather carries it.
Which tensors share a message has no part in who owns what: messages of either kind may be grouped in any way, and
otherwise from one step to the next, and no state moves. A plan may also have messages that are all-reduced: every rank
owns all of their parameters from the start, and updates them as torch's DDP would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.autograd.graph import get_gradient_edge

__all__ = ["Owned", "Rows", "is_dense"]

SMALL = 2**16  # numbers of which a copy costs less than a loop in Python


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
        # On a CPU `torch._chunk_cat` copies what does not fill its rows once more.
        odd = [count for count, fits in zip(counts, self._fits, strict=True) if not fits]
        self._is_copied_twice = max(odd, default=0) > SMALL
        self._has_empty = 0 in counts  # which `torch._chunk_cat` does not take, and which need no room

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> Tensor:
        """Make the message of flat tensors; rows that a tensor does not fill end with 0."""
        if self._has_empty:
            tensors = [one for one in tensors if one.numel()]
            return Rows([one.numel() for one in tensors], self._world).pack(tensors, into) if tensors else into
        if into.is_cuda or not self._is_copied_twice:
            return torch._chunk_cat(list(tensors), 0, self._world, out=into)  # on a GPU one kernel
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

    def parts(self, own: Sequence[Tensor]) -> Callable[[Tensor], Sequence[Tensor]]:
        """Return what cuts one row into parts as long as one rank's of each tensor: views, without what pads them."""
        numbers = [part.numel() for part in own]
        if numbers == self.lengths:
            return lambda row: row.split(numbers)
        cuts = [cut for count, length in zip(numbers, self.lengths, strict=True) for cut in (count, length - count)]
        return lambda row: row.split(cuts)[::2]

    def unpacker(self, into: Sequence[Tensor]) -> Callable[[Tensor], None]:
        """Return what writes a message back into these flat tensors; on a GPU two kernels whatever their number.

        Those that do not fill their rows take a way through other memory.
        """
        world = self._world
        odd = [place for place, fits in enumerate(self._fits) if not fits]
        short = [into[place] for place in odd]
        shapes = [into[place].new_empty(1).expand(world, self.lengths[place]) for place in odd]
        cuts = [
            cut for one, shape in zip(short, shapes, strict=True) for cut in (one.numel(), shape.numel() - one.numel())
        ]
        whole = [
            tensor.view(world, length) if fits else tensor
            for tensor, length, fits in zip(into, self.lengths, self._fits, strict=True)
        ]

        def unpack(rows: Tensor) -> None:
            if not odd:
                torch.split_with_sizes_copy(rows, self.lengths, dim=1, out=whole)
                return
            beside, out = rows.new_empty(sum(cuts)), list(whole)
            for place, part in zip(odd, _unflatten_dense_tensors(beside, shapes), strict=True):
                out[place] = part
            torch.split_with_sizes_copy(rows, self.lengths, dim=1, out=out)
            torch._foreach_copy_(short, beside.split(cuts)[::2])

        return unpack


class Owned:
    """A parameter and the row of it that this rank owns: with a ``world`` of 1 all of it."""

    def __init__(self, name: str, parameter: nn.Parameter, rank: int, world: int) -> None:
        self.name, self.parameter, self.is_whole = name, parameter, world == 1
        self.memory, self._laid, self._accumulates = memory_of(parameter), _laid(parameter), _accumulator_of(parameter)
        self._address = self.memory.data_ptr()
        length = -(-parameter.numel() // world)
        self._part = slice(rank * length, (rank + 1) * length)
        # A view: whoever changes it changes the parameter. Of all of it there is nothing to cut, nor of its gradient.
        row = self.memory[self._part]
        self.row = parameter if self.is_whole else nn.Parameter(row, requires_grad=parameter.requires_grad)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and the strides of the parameter, whose numbers are cut into rows in the order of memory."""
        return tuple(self.parameter.shape), self.parameter.stride()

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return what this rank has of a tensor that has the parameter's shape: as `row`, flat unless it is whole."""
        found = self._laid_out(tensor.dtype).copy_(tensor)
        return found if self.is_whole else self.row_of(memory_of(found)).clone()

    def row_of(self, numbers: Tensor) -> Tensor:
        """Return this rank's row of numbers in the order of the parameter's memory, as a view."""
        return numbers[self._part]

    def flat(self, part: Tensor) -> Tensor:
        """Return what this rank has of a tensor in the order of the parameter's memory, as a view where it is so."""
        if not self.is_whole:
            return part
        is_alike = part.stride() == self.parameter.stride()
        return memory_of(part if is_alike else self._laid_out(part.dtype).copy_(part))

    def _laid_out(self, dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Return an empty tensor that lies in memory as the parameter does, or by these strides."""
        own = self.parameter
        return torch.empty_strided(own.shape, strides or own.stride(), dtype=dtype, device=own.device)

    def whole(self, flat: Tensor, group: Any, strides: Sequence[int] | None = None) -> Tensor:
        """Return what all ranks have of a tensor together, in the parameter's shape. All ranks must call it.

        ``flat`` is what this one has, and ``strides`` are those by which it was cut, where the parameter has others.
        """
        found, numbers = self._laid_out(flat.dtype, strides), flat
        if not self.is_whole:
            rows = Rows([self.parameter.numel()], dist.get_world_size(group))
            numbers = flat.new_empty(dist.get_world_size(group) * rows.length)
            dist.all_gather_into_tensor(numbers, torch.cat(rows.padded([flat])), group=group)
        memory_of(found).copy_(numbers[: found.numel()])
        return found

    @property
    def has_moved(self) -> bool:
        """Whether the parameter has other memory than it had, which is kept, so that no other has its address."""
        return self.parameter.data_ptr() != self._address

    def follow(self) -> None:
        """Let numbers that came to where the parameter was be where it is."""
        if _laid(self.parameter) == self._laid:
            memory_of(self.parameter).copy_(self.memory)

    def cut_anew(self) -> bool:
        """Have the row in the memory where the parameter is now; False where it lies there otherwise, or did since.

        For torch forgets the Reducer's hook on a parameter that gets another dtype or device, and were it for a moment.
        """
        if _laid(self.parameter) != self._laid or _accumulator_of(self.parameter) is not self._accumulates:
            return False
        self.memory = memory_of(self.parameter)
        self._address = self.memory.data_ptr()
        if not self.is_whole:
            self.row.data = self.memory[self._part]
        return True


def _laid(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _accumulator_of(parameter: Tensor) -> Any:
    """Return what takes the gradient of a parameter in a backward pass; None of one that is frozen."""
    # Torch asks a view of it, which has no gradient where the caller has switched these off.
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(parameter).node if parameter.requires_grad else None
