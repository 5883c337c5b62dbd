"""The handle on torch's Reducer, and what ranks talk through, in one process."""

import ctypes
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from mgwfbp.errors import PlanError
from mgwfbp.measure.clock import HostClock
from mgwfbp.measure.group_buffer import device_of, on_device, raise_readably
from mgwfbp.runtime.messages.stand_ins import MessageGroup, Script
from mgwfbp.runtime.observe.observer import Observer
from mgwfbp.runtime.reducer import support
from mgwfbp.runtime.reducer.handle import ReducerHandle, held_buckets
from mgwfbp.runtime.tune import room
from mgwfbp.units import format_bytes
from tests.runtime.models import Mlp

needs_init_sync = pytest.mark.skipif(not support._QUIET, reason="torch's class talks to other ranks here")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_of_the_users_changes_nothing_about_what_torch_can(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    expected = support.missing()
    support._misbehaviour.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert support.missing() == expected
    finally:
        torch.set_default_dtype(before)


@needs_init_sync
@pytest.mark.parametrize("way", ["plain", "unused", "hook"])
def test_freed_buckets_go_back_to_the_system_before_new_ones_are_made_in_every_way_to_change_them(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model = DistributedDataParallel(
        Mlp(), process_group=Script(), find_unused_parameters=way == "unused", **support._QUIET
    )
    if way == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    handle = ReducerHandle(model)
    old = [StorageWeakRef(bucket.buffer().untyped_storage()) for bucket in held_buckets(model)]
    are_free: list[bool] = []

    class Libc:
        def __init__(self, _: None) -> None:
            pass

        def malloc_trim(self, _: int) -> None:
            are_free.extend(bucket.expired() for bucket in old)

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    handle.set_buckets([[place] for place in range(len(handle.parameters))])
    assert are_free
    assert all(are_free)


@needs_init_sync
def test_a_plan_in_low_precision_needs_room_for_two_copies_of_its_largest_message_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = DistributedDataParallel(Mlp(), process_group=Script(), **support._QUIET)
    handle = ReducerHandle(model)
    first, *rest = range(len(handle.parameters))
    needed = 2 * sum(handle.sizes[place] for place in rest)
    monkeypatch.setattr(room, "SPARE", 0)
    monkeypatch.setattr(room, "SPARE_BYTES", 0)
    monkeypatch.setattr(room, "headroom_bytes", lambda _: needed)
    buckets = [[first], rest]
    room.check_room(handle, buckets, buckets, ("", "bfloat16"))
    monkeypatch.setattr(room, "headroom_bytes", lambda _: needed - 1)
    room.check_room(handle, buckets, buckets, ("bfloat16", ""))
    with pytest.raises(PlanError, match=f"^a message in low precision would take {format_bytes(needed)} more memory"):
        room.check_room(handle, buckets, buckets, ("", "bfloat16"))


@needs_init_sync
@pytest.mark.parametrize("spare_bytes", [1e5, 1e6])
def test_where_gradients_are_views_plans_may_follow_one_another_whose_messages_have_room(
    monkeypatch: pytest.MonkeyPatch, spare_bytes: float
) -> None:
    model = DistributedDataParallel(Mlp(), process_group=Script(), gradient_as_bucket_view=True, **support._QUIET)
    handle = ReducerHandle(model)
    monkeypatch.setattr(room, "headroom_bytes", lambda _: spare_bytes - room.SPARE_BYTES)
    held = handle.buckets()
    most_bytes, most_low_bytes = room.most_message_bytes(handle, held, "float16")
    sizes = [sum(handle.sizes[place] for place in bucket) for bucket in held]
    assert 0 < most_bytes < spare_bytes / 2
    assert most_bytes + max(sizes) < spare_bytes
    assert 2 * most_low_bytes < spare_bytes  # what a message in low precision takes on a CPU
    monkeypatch.setattr(handle.ddp, "gradient_as_bucket_view", False)
    assert room.most_message_bytes(handle, held, "float16") == pytest.approx((math.inf, 0.9 * spare_bytes / 2))
    assert room.most_message_bytes(handle, held, None) == (math.inf, math.inf)


class Alone(Script):
    """A process group of one rank."""

    def allreduce(self, tensors: list[Tensor], *_: object) -> Any:
        return self._done(tensors)


class AsTheyAre(MessageGroup):
    """Sends messages as they are."""

    def send_message(self, tensors: list[Tensor], *options: Any) -> Any:
        return self.group.allreduce(tensors, *options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_bucket_counts_as_a_message_whatever_numbers_it_holds(dtype: torch.dtype) -> None:
    group = AsTheyAre(Alone())
    group.allreduce([torch.zeros(2, dtype=dtype)])
    assert group.sent == 1
    group.allreduce([torch.zeros(2, dtype=torch.int32)])  # which parameters were used
    assert group.sent == 1


class Trainee(threading.Thread):
    """A thread that trains a model for a step, and notes where the step is said to have ended."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.ended_in: list[str] = []
        self._wait = wait
        self._model = DistributedDataParallel(nn.Linear(6, 3), process_group=Alone(), **support._QUIET)
        self._handle = ReducerHandle(self._model)
        self.observer = Observer(
            self._handle, HostClock(), lambda: self.ended_in.append(threading.current_thread().name)
        )

    def run(self) -> None:
        """Call ``wait`` in the backward pass, when the reduction has ended and nobody has been called yet."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        late = self._wait
        for _ in range(2):
            late = partial(queue, late)
        self.observer.before_forward()
        output = self._model(torch.ones(2, 6))
        self.observer.after_forward()
        output.register_hook(lambda _: queue(late))
        output.sum().backward()


@needs_init_sync
def test_a_step_ends_in_the_thread_that_trains_it_though_another_thread_is_in_a_backward_pass() -> None:
    second = Trainee(lambda: None)

    def train_second() -> None:
        second.start()
        second.join()

    first = Trainee(train_second)
    first.start()
    first.join()
    assert first.ended_in == [first.name]
    assert second.ended_in == [second.name]
    assert len(first.observer.take()) == len(second.observer.take()) == 1


class Backend:
    """What torch says of a backend."""

    def __init__(self, name: str) -> None:
        self.name = lambda: name


class Group:
    """What torch says of a process group: its backends by the kind of a device."""

    def __init__(self, **backends: str) -> None:
        self._device_types = [torch.device(kind) for kind in backends]
        self._get_backend = lambda device: Backend(backends[device.type])


@pytest.mark.parametrize(
    ("backends", "kind"),
    [
        ({}, "cpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu"),
        ({"xpu": "xccl", "cpu": "gloo"}, "cpu"),
        ({"xpu": "xccl"}, "xpu"),
    ],
)
def test_ranks_talk_on_the_host_where_the_group_can_and_else_on_its_first_device(
    backends: dict[str, str], kind: str
) -> None:
    group: Any = Group(**backends)
    assert device_of(group).type == kind


@pytest.mark.parametrize(
    ("backends", "model", "kind"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu"),
        ({"cpu": "gloo"}, "cuda", "cpu"),
        ({}, "cuda", "cpu"),
    ],
)
def test_ranks_talk_about_a_model_through_the_backend_of_its_messages_where_the_host_has_another(
    monkeypatch: pytest.MonkeyPatch, backends: dict[str, str], model: str, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())  # also where there is no GPU
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group: Any = Group(**backends)
    with on_device(torch.device(model)):
        assert device_of(group).type == kind
    assert device_of(group).type == "cpu"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gloo/transport/tcp/pair.cc:545] Read error", "a rank did not answer, it may have died"),
        ("Connection closed by peer", "a rank did not answer, it may have died"),
        ("No backend type associated with device type cpu", "this rank cannot talk to the others"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "this rank cannot talk to the others"),
    ],
)
def test_only_an_error_of_another_rank_is_put_down_to_one(text: str, says: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(Exception, match=f"^{says}: "):
        raise_readably(fail)
