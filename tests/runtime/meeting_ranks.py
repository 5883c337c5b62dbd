"""What one rank does in the tests of a group beside the model's: ``python -m tests.runtime.meeting_ranks FOLDER ...``.

One rank cannot make what messages travel through, or the group for it. After that all can, also for a copy of a model,
for which ranks agree on nothing.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgwfbp import DistributedDataParallel, MgwfbpError, ShardedOptimizer
from mgwfbp.runtime.messages import channel, gloo
from mgwfbp.runtime.reducer import handle
from mgwfbp.runtime.sharded import optimizer
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp
from tests.runtime.wire_ways import batch, compare, local_gradients, mixed_plan

PLAN = mixed_plan(Mlp())


def low_model(wires: tuple[str, ...] = PLAN.wire) -> DistributedDataParallel:
    torch.manual_seed(2)
    plan = replace(PLAN, wire=wires)
    return DistributedDataParallel(Mlp(), plan=plan, wire="bfloat16", broadcast_buffers=False)


def sharded() -> None:
    ShardedOptimizer(DistributedDataParallel(Mlp(), tune=False), torch.optim.SGD, lr=0.1)


WAYS: dict[str, Callable[[], object]] = {
    "plan": low_model,
    "replan": lambda: low_model(()).replan(PLAN),
    "sharded": sharded,
}


def no_room(*_: Any) -> Any:
    raise MemoryError("no room")


PLACES: dict[str, Callable[[pytest.MonkeyPatch, str], None]] = {
    "before": lambda patch, way: patch.setattr(
        *((optimizer, "Shards") if way == "sharded" else (handle, "WireGroup")), no_room
    ),
    "group": lambda patch, _: patch.setattr(channel, "gloo_beside", no_room),
}


def met(make: Callable[[], object]) -> list[str]:
    """What a rank raises, and from what."""
    try:
        make()
    except MgwfbpError as error:
        return [str(error), "" if error.__cause__ is None else str(error.__cause__)]
    return []


def copy_trains(model: DistributedDataParallel, step: int) -> bool:
    """Whether a copy of a model gives gradients that are worked out by hand."""
    model = copy.deepcopy(model)
    local = local_gradients(model.module, lambda of: batch(step, of))
    model(batch(step, dist.get_rank())).square().sum().backward()
    found = compare(model, local)
    return not found["wrong"] and bool(found["alike"])


def failing() -> dict[str, Any]:
    """Each way to have such a group, which fails in each place on each rank."""
    model, found = low_model(), dict[str, Any]()
    for step, (way, place, rank) in enumerate(
        (way, place, rank) for way in WAYS for place in PLACES for rank in (0, 1)
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo, "MEET_S", 0.2)
            if dist.get_rank() == rank:
                PLACES[place](patch, way)
            said = met(WAYS[way])
        found[f"{way} {place} {rank}"] = {"said": said, "copy trains": copy_trains(model, step)}
    return found


def counted_alone() -> dict[str, Any]:
    """A rank that has counted more groups than the other, whose messages failed before it sent one, say."""
    if dist.get_rank() == 1:
        for _ in range(3):
            gloo.number_beside(dist.group.WORLD)
    return {"copy trains": copy_trains(low_model(), 0)}


if __name__ == "__main__":
    be_rank({"failing": failing, "counted_alone": counted_alone})
