"""What a message in low precision takes, beside what its arithmetic allocates."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
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
        for one in found if isinstance(found, tuple | list) else (found,):
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
def test_a_gpu_holds_as_much_for_a_message_as_is_said(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, world: int
) -> None:
    monkeypatch.setattr(low, "queue_collective", lambda *_: None)
    message = torch.ones(100_001)
    with Held(message) as held:
        low._average_whole(dtype, message, Ranks(world))
    said = low.extra_bytes(dtype, message.nbytes, world, torch.device("cuda"))
    assert held.now == 0
    assert held.most == pytest.approx(said, rel=0.001)
