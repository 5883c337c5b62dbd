"""What one rank does in the tests of gloo: ``python -m tests.runtime.gloo_ranks FOLDER SCENARIO ...``."""

import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import measure_allreduce
from mgwfbp.runtime.messages import gloo
from mgwfbp.runtime.reducer.handle import ReducerHandle
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp

new_group: Any = dist.new_group  # whose type has a case that does not come up here


def overtaking() -> dict[str, Any]:
    """How often a small message ends before a large one that was sent before it, here and with torch's own gloo."""
    return {"ours": _count_overtakes(None), "torch's": _count_overtakes(new_group(backend="gloo"))}


def _count_overtakes(group: Any) -> int:
    large, small = torch.zeros(2**22), torch.zeros(1)
    overtakes = 0
    for _ in range(8):
        first = dist.all_reduce(large, group=group, async_op=True)
        second = dist.all_reduce(small, group=group, async_op=True)
        assert first is not None
        assert second is not None
        second.wait()
        overtakes += not first.is_completed()
        first.wait()
    return overtakes


def manners() -> dict[str, Any]:
    """What else a process group does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = list(range(world - 1))
    world_group: Any = dist.distributed_c10d._get_default_group()
    part = new_group(ranks)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    if dist.Backend.backend_type_map[gloo.ONE_THREAD] == dist.Backend.backend_type_map["gloo"]:  # not in torch 2.11
        dist.monitored_barrier()
    total = torch.ones(1)
    if rank in ranks:
        dist.all_reduce(total, group=part)
    torch.manual_seed(rank)
    ddp = StockDdp(Mlp())
    ddp(torch.randn(4, 6)).sum().backward()
    gradients = [0.0] * world
    dist.all_gather_object(gradients, sum(one.grad.sum().item() for one in ddp.parameters() if one.grad is not None))
    cost = measure_allreduce(max_bytes=64, budget_s=0.01, max_rounds=3)
    return {
        "backend": dist.get_backend(),
        "part": dist.get_backend(part) if rank in ranks else gloo.ONE_THREAD,
        "threads": world_group._get_backend(torch.device("cpu")).options._threads,
        "queues": [queue_of(world_group), queue_of(new_group(backend="gloo"))],
        "objects": objects,
        "total": total.item(),
        "gradients": gradients,
        "source": cost.source["backend"],
        "timeout": str(gloo.group_timeout(world_group, torch.device("cpu"))),
    }


def queue_of(group: Any) -> list[Any]:
    """With which others, and how many at once, the first message of a model over this group is sent."""
    model = StockDdp(Mlp(), process_group=group)
    return list(ReducerHandle(model).queue_of(0))


def timeout() -> dict[str, Any]:
    """What a rank is told when another does not come, and how long that takes."""
    group = new_group(timeout=timedelta(seconds=1))
    start_s = time.monotonic()
    told = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            told = str(error)
    waited_s = time.monotonic() - start_s
    dist.barrier()
    return {"told": told, "waited_s": waited_s}


def again() -> dict[str, Any]:
    """Leave the group and join another one; then with a torch that lacks something, removed here alone."""
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    backends, said = [], []
    for number in range(2):
        gloo.destroy_process_group()
        if number == 1:
            del dist.distributed_c10d.ProcessGroupGloo.create_default_device
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            gloo.init_process_group(
                store=dist.distributed_c10d.PrefixStore(str(number), store), rank=rank, world_size=world
            )
        backends.append(dist.get_backend())
        said += [str(one.message) for one in seen]
        dist.barrier()
    return {"backends": backends, "said": said}


SCENARIOS = {"overtaking": overtaking, "manners": manners, "timeout": timeout, "again": again}

if __name__ == "__main__":
    be_rank(SCENARIOS)
