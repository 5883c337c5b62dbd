"""A message in low precision: what it takes beside what its arithmetic allocates, and what float16 makes of numbers."""

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mgwfbp.measure import low
from mgwfbp.runtime.messages.stand_ins import Script


class Held(TorchDispatchMode):
    """How many bytes tensors hold that operations return, as a GPU allocates them: it converts without a copy."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {one.untyped_storage()._cdata for one in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        several = found if isinstance(found, tuple | list) else (found,)
        for one in filter(torch.is_tensor, several):  # and not the device of one, say
            storage = one.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return found

    def _free(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self._change(-num_bytes)

    def _change(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


class Ranks(Script):
    """A process group of which only the size counts."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world

    def size(self) -> int:
        return self._world


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_is_not_waited_for_and_holds_as_much_for_a_message_as_is_said(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, world: int
) -> None:
    monkeypatch.setattr(low, "queue_collective", lambda *_: None)
    with FakeTensorMode():
        message = torch.ones(100_001, device="cuda")
        with pytest.raises(RuntimeError):
            message[0].item()  # whoever asked what it holds would wait
        with Held(message) as held:
            low._average_whole(dtype, message, Ranks(world))
    said = low.extra_bytes(dtype, message.nbytes, world, message.device)
    assert held.now == 0
    assert held.most == pytest.approx(said, rel=0.001)


# Beyond these are numbers that round up to more than fp32 holds.
FINITE = st.floats(-(2.0**127), 2.0**127, width=32)


@given(st.lists(FINITE | st.sampled_from([math.inf, -math.inf, math.nan]), min_size=1, max_size=9), st.integers(1, 3))
def test_float16_rounds_numbers_as_if_those_that_are_not_finite_were_not_there(values: list[float], world: int) -> None:
    numbers = torch.tensor(values)
    message = torch.empty_like(numbers)
    low._raise(low._lowered(numbers, torch.float16, world), message)
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    for value, found in zip(values, message.tolist(), strict=True):
        if math.isfinite(value):
            # Half of the last of 11 bits, or of those that numbers below 2^-28 of the largest have; or of fp32's own.
            assert abs(found - value) <= max(2**-12 * 2 ** math.frexp(value)[1], 2**-39 * largest, 2.0**-150)
        else:
            assert found == value or (math.isnan(found) and math.isnan(value))
