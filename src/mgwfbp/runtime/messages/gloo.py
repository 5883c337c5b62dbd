"""gloo with one worker thread, so that messages queue as the model assumes; its private names of torch are here.

Torch's gloo has two threads: two messages are in flight, share the link, and the later may overtake the earlier. The
model, like nccl, sends one message after another. Torch passes no options on to gloo, so a backend is registered that
does; groups that are made later (``dist.new_group``) are of the same kind.

[Note: the end of a process]
A finished message keeps a Python object, and gloo's thread may be the last to hold the message, so that it waits for
the interpreter's lock. If the process ends meanwhile, Python (before 3.14) ends it inside a C++ destructor, and
the process aborts with "terminate called without an active exception" after all its work is done. It takes a group
that outlives ``destroy_process_group`` because a model still holds it: about 7 of 100 ranks of torch's own DDP on a
busy machine. A moment without the lock, right before the end, is enough for gloo's threads.

``dist.destroy_process_group`` has the same need in older versions of torch (2.3 to 2.7): it waits for gloo's
threads and keeps the interpreter's lock meanwhile. Where a thread wants the lock to free the last message, both wait
for ever: in 12 of 16 runs that left torch's own gloo right after an all-reduce. `destroy_process_group` gives them that
moment.
"""

import atexit
import inspect
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp.measure.agreement import OtherRankError

__all__ = [
    "MOMENT_S",
    "ONE_THREAD",
    "destroy_process_group",
    "gloo_beside",
    "group_timeout",
    "init_process_group",
    "messages_at_once",
    "missing",
    "number_beside",
    "sends_over_gloo",
    "store_of",
]

# What dist.get_backend() calls it.
ONE_THREAD = "gloo_one_thread"

# [Note: the end of a process]
MOMENT_S = 0.05

# How long ranks that come from the same collective wait for one another before they make a group beside another.
MEET_S = 30.0

_c10d: Any = dist.distributed_c10d


def init_process_group(*, timeout: timedelta | None = None, **arguments: Any) -> None:
    """Join the other ranks as ``dist.init_process_group("gloo", ...)`` does, over gloo with one worker thread.

    Where this torch cannot, a warning says why and gloo is torch's own.
    """
    if absent := missing():
        warnings.warn(
            f"gloo has two worker threads, so that messages may overtake: torch {torch.__version__} lacks "
            f"{', '.join(absent)}",
            RuntimeWarning,
            stacklevel=2,
        )
        dist.init_process_group("gloo", timeout=timeout, **arguments)
        return
    if ONE_THREAD not in dist.Backend.backend_list:
        register: Any = dist.Backend.register_backend
        # To what asks for the kind of a backend and not for its name it is gloo, where torch can be told (not in 2.11).
        takes_kind = "_backend_type" in inspect.signature(register).parameters
        kind = {"_backend_type": dist.Backend.backend_type_map["gloo"]} if takes_kind else {}
        register(ONE_THREAD, _create, extended_api=True, devices=["cpu", "cuda"], **kind)
        atexit.register(time.sleep, MOMENT_S)
    dist.init_process_group(ONE_THREAD, timeout=timeout, **arguments)


def destroy_process_group() -> None:
    """Leave all groups as ``dist.destroy_process_group()`` does, once gloo's threads need Python no more."""
    time.sleep(MOMENT_S)
    dist.destroy_process_group()


def missing() -> tuple[str, ...]:
    """Name what this torch lacks for gloo with one thread; empty where it has it."""
    gloo = getattr(_c10d, "ProcessGroupGloo", None)
    names = [f"ProcessGroupGloo.{name}" for name in ("create_device", "create_default_device") if not _has(gloo, name)]
    if not names and not all(_has(_options_class(gloo), name) for name in ("_devices", "_threads", "_timeout")):
        names.append("ProcessGroupGloo.Options with devices, threads and a timeout")
    backend = getattr(dist, "Backend", None)
    needed = ("backend_list", "backend_type_map", "register_backend")
    return (*names, *(f"Backend.{name}" for name in needed if not _has(backend, name)))


def _has(owner: object, name: str) -> bool:
    return owner is not None and hasattr(owner, name)


def _options_class(gloo: Any) -> Any:
    return getattr(gloo, "_Options", None) or getattr(gloo, "Options", None)


def _create(given: Any, _: object) -> Any:
    """Make a group as torch does, but for the number of threads."""
    gloo = _c10d.ProcessGroupGloo
    options = _options_class(gloo)()
    options._timeout = given.timeout
    options._threads = 1
    # Torch looks at this variable only where it makes the options itself.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    for name, value in (("global_ranks_in_group", given.global_ranks_in_group), ("group_name", given.group_id)):
        if hasattr(options, name):  # since torch 2.5
            setattr(options, name, value)
    return gloo(given.store, given.group_rank, given.group_size, options)


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a group waits for its ranks, for groups made beside it; None where torch does not say."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def sends_over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether a group sends what is on a device over gloo, of either kind."""
    try:
        return str(group._get_backend(device).name()) == "gloo"
    except (AttributeError, RuntimeError):
        return False


def messages_at_once(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many messages a group sends at once: as many as gloo has threads, one after another over nccl."""
    try:
        options: Any = group._get_backend(device).options
        return int(options._threads)
    except (AttributeError, RuntimeError):
        return 1


def store_of(group: Any, name: str) -> Any:
    """Return a store that all ranks of a group share under this name; None where torch does not give it away."""
    try:
        return _c10d.PrefixStore(f"mgwfbp/{group.group_name}/{name}", _c10d._get_default_store())
    except (AttributeError, RuntimeError, ValueError):
        return None


def number_beside(group: Any) -> int:
    """Return a number for `gloo_beside` that is new on this rank: the highest over all ranks is new on all.

    It is to be counted before anything that may fail on one rank alone, so that all ranks go on counting alike.
    """
    return _counted(group, 1)


def _counted(group: Any, more: int) -> int:
    """Return the last number of this rank, once it has counted on by so many."""
    return int(store_of(group, "beside").add(f"made by rank {group.rank()}", more))


def gloo_beside(group: Any, number: int | None = None) -> Any:
    """Make a gloo group of the same ranks, that waits as long. All ranks of the group must call it, in one order.

    It ends with the last reference. ``dist.new_group`` would keep it until all groups are destroyed, and would count it
    on these ranks alone, so that groups that all ranks make later had different names on them.

    Args:
        group: whose ranks meet.
        number: the same on all ranks, which come from one collective, and never used before, see `number_beside`; None
            where each comes when it sends: then it is the rank's next one, and all have counted alike, since all came
            to calls before this one or agreed on a number since.

    Raises:
        OtherRankError: after `MEET_S`, or without a number the group's timeout, where another rank has not come.
    """
    timeout = group_timeout(group, torch.device("cpu")) or dist.default_pg_timeout
    patience = timeout if number is None else min(timeout, timedelta(seconds=MEET_S))
    if number is None:
        number = number_beside(group)
    else:  # from which all ranks count on, also those whose own was lower
        _counted(group, max(0, number - _counted(group, 0)))
    store = _c10d.PrefixStore(str(number), store_of(group, "beside"))
    # gloo would wait for the others as long as for a message.
    if store.add("here", 1) == group.size():
        store.set("all here", "yes")
    try:
        store.wait(["all here"], patience)
    except RuntimeError as error:
        raise OtherRankError(
            f"not all ranks came to make a gloo group beside {group.group_name}: one failed, or is late by "
            f"{patience.total_seconds():g} s"
        ) from error
    return _c10d.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
