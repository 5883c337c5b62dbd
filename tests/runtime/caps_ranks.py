"""What one rank does in the tests of torch's own DDP with a plan's sizes: ``python -m tests.runtime.caps_ranks``."""

import random
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import MergePlan, measure_backward
from mgwfbp.runtime.reducer.handle import ReducerHandle
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp


def caps() -> dict[str, Any]:
    """Give torch's own class the sizes of random plans, and list what the plans say and what its Reducer holds."""
    trace = measure_backward(Mlp(), torch.ones(4, 6), lambda output: output.sum(), steps=2, warmup=1)
    chance = random.Random(0)
    pairs = []
    for number in range(24):
        cuts = sorted(chance.sample(range(1, len(trace.layers)), chance.randrange(len(trace.layers))))
        plan = MergePlan.of_sizes(trace, [b - a for a, b in zip([0, *cuts], [*cuts, len(trace.layers)], strict=True)])
        arguments: dict[str, Any] = {"bucket_cap_mb_list": plan.bucket_cap_mb_list(trace)}
        is_static = number % 3 == 1
        ddp = StockDdp(Mlp(), **arguments, static_graph=is_static, gradient_as_bucket_view=number % 3 == 2)
        for _step in range(3 if is_static else 2):
            ddp(torch.ones(4, 6)).sum().backward()
        handle = ReducerHandle(ddp)
        pairs.append([plan.groups, [[handle.names[place] for place in bucket] for bucket in handle.buckets()]])
    return {"pairs": pairs}


if __name__ == "__main__":
    be_rank({"caps": caps})
