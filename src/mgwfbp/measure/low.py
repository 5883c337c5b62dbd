"""A message that is summed over ranks in 16 bits, as a model with ``wire=`` sends it: `average_in`.

[Note: how a message travels in low precision]
A rank converts its gradients once (the Reducer has divided them by the number of ranks, so that sums are averages). An
all-to-all gives each of the N ranks one N-th of everybody's; it adds these up in fp32, whoever came first, and converts
the sum once. An all-gather brings the sums back. So a gradient is rounded twice, whatever N is; a ring that adds up 16
bits rounds at every hop. The bytes are the same. Each sum is made by one rank only (in which order, the processor's sum
of a column decides): the result is the same on all ranks, bitwise, and what is not finite stays so on all.

Both collectives carry bytes: no backend has to know the precision.

[Note: float16 is scaled]
bfloat16 has the range of fp32. float16 ends at 65504 and loses bits below 2^-14, where a gradient that was divided by
many ranks soon is. So whoever converts multiplies by 2^k first, the power of two that brings the largest finite number
to between 2^14 and 2^15, and k travels as the last number of every row: no other collective, two bytes a row. Powers of
two round nothing. Numbers keep all bits down to 2^-28 of the largest of their message (on a CPU: of their block), and
none overflows that fp32 holds, also beside one that is not finite: that one stays what it is, and k is the others'.

On a CPU a second pass leaves out what is not finite, where there is any. On a GPU one has to leave it out in any case,
since the host does not know: a copy, for a moment, of what is multiplied afterwards.
"""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgwfbp.measure.halves import exchange, queue_collective, wait_for

__all__ = ["average_in", "extra_bytes"]

# On a CPU messages are converted, sent and summed in blocks of so many numbers.
BLOCK = 2**19


def average_in(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Sum a message over ranks, in place, as [Note: how a message travels in low precision] says.

    On a CPU it waits until the message has arrived; on a GPU everything is queued on the current stream.

    Args:
        dtype: the precision in which it travels, of 16 bits.
        message: this rank's, of fp32, already divided by the number of ranks.
        group: the ranks.
    """
    if not message.numel():
        return
    average = _average_whole if message.is_cuda else _average_on_host
    average(dtype, message, group)


def extra_bytes(dtype: torch.dtype, message_bytes: int, world: int, device: torch.device) -> int:
    """Return the memory that `average_in` takes at once, besides the message.

    On a GPU, in parts of the message and with N ranks: what is sent and what is received, a half each; a sum in fp32,
    1/N. In bfloat16 the sum is converted then, into half as much. float16 has been multiplied before, in fp32, and that
    copy of the whole message is there until it is summed.

    On a CPU blocks are converted one by one, which is a message and a block; but processes grew by up to two messages.

    >>> [extra_bytes(torch.float16, 1000, 2, torch.device(kind)) for kind in ("cpu", "cuda")]
    [2000, 2500]
    >>> extra_bytes(torch.bfloat16, 1000, 2, torch.device("cuda"))
    1750
    """
    if device.type != "cuda":
        return 2 * message_bytes
    summing = 1 + 1 / world if dtype is torch.float16 else 1.5 / world
    return math.ceil((1 + summing) * message_bytes)


def _average_whole(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Do it with two collectives, queued on the current stream; what it holds at once is counted by `extra_bytes`."""
    low = _lowered(message, dtype, group.size())
    received = torch.empty_like(low)
    queue_collective(dist.all_to_all_single, received.view(torch.uint8), low.view(torch.uint8), group)
    summed = _summed(received)
    queue_collective(dist.all_gather_into_tensor, low.view(torch.uint8), summed.view(torch.uint8), group)
    _raise(low, message)


def _average_on_host(dtype: torch.dtype, message: Tensor, group: Any) -> None:
    """Do it block by block, so that one is converted and summed while others are on the link.

    With sends and receives, all posted at once: gloo's own all-to-all leaves the link idle half of the time
    (benchmarks/wire.md).
    """
    under_way: deque[tuple[Tensor, Tensor, Tensor, list[Any]]] = deque()
    for place, block in enumerate(message.split(BLOCK)):
        low = _lowered(block, dtype, group.size())
        received = torch.empty_like(low)
        under_way.append((block, low, received, exchange(received, low, group, 2 * place)))
    gathers = []
    for place in range(len(under_way)):
        block, low, received, works = under_way.popleft()  # and what was received is freed, block by block
        wait_for(works)
        gathers.append((block, low, exchange(low, _summed(received).expand_as(low), group, 2 * place + 1)))
    for block, low, works in gathers:
        wait_for(works)
        _raise(low, block)


def _lowered(numbers: Tensor, dtype: torch.dtype, world: int) -> Tensor:
    """Return numbers in low precision, a row for each rank, each with its exponent where they are scaled.

    What is missing in the last rows is 0.
    """
    length = -(-numbers.numel() // world)
    is_scaled = dtype is torch.float16
    low = numbers.new_empty(world, length + is_scaled, dtype=dtype)
    exponent = _exponent(numbers) if is_scaled else None
    if exponent is not None:
        low[:, length] = exponent
    low[numbers.numel() // length :, :length] = 0
    for places, part in _parts(low[:, :length], numbers):
        places.copy_(part if exponent is None else part * _power(exponent))
    return low


def _raise(low: Tensor, numbers: Tensor) -> None:
    """Write rows in low precision to where numbers lie."""
    if low.dtype is not torch.float16:
        numbers.copy_(low.flatten()[: numbers.numel()])
        return
    unscale = _power(-low[:, -1:])
    for places, part in _parts(low[:, :-1] * unscale, numbers):
        part.copy_(places)


def _summed(rows: Tensor) -> Tensor:
    """Return the sum of rows, as a row."""
    if rows.dtype is torch.float16:
        total = (rows[:, :-1] * _power(-rows[:, -1:])).sum(dim=0)
    else:
        total = rows.sum(dim=0, dtype=torch.float32)
    return _lowered(total, rows.dtype, 1)[0]


def _parts(rows: Tensor, numbers: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return which places of rows are for which numbers: whole rows, and what is left."""
    whole, rest = divmod(numbers.numel(), rows.shape[1])
    filled, left = numbers[: numbers.numel() - rest], numbers[numbers.numel() - rest :]
    parts = [(rows[:whole], filled.view(whole, rows.shape[1]))]
    return [*parts, (rows[whole, :rest], left)] if rest else parts


def _exponent(numbers: Tensor) -> Tensor:
    """Return k of [Note: float16 is scaled]; from the bits of the largest number, which no processor rounds."""
    field = (_largest_finite(numbers).view(torch.int32) >> 23) & 255  # it is below 2^(field - 126)
    return 141 - field.clamp(min=15)  # at most 126: 2^-126 is no subnormal number


def _largest_finite(numbers: Tensor) -> Tensor:
    """Return the largest absolute value of what is finite, 0 where nothing is; nobody waits for a GPU."""
    if not numbers.is_cuda and (largest := _largest(numbers)).isfinite():
        return largest
    return _largest(numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


def _largest(numbers: Tensor) -> Tensor:
    lowest, highest = torch.aminmax(numbers)
    return torch.maximum(-lowest, highest)


def _power(exponent: Tensor) -> Tensor:
    """Return powers of two, exactly.

    >>> _power(torch.tensor([-126, 0, 3]))[1:]
    tensor([1., 8.])
    """
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
