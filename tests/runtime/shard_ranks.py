"""What one rank does in the tests of sharding: ``python -m tests.runtime.shard_ranks FOLDER SCENARIO ...``.

Scenarios are in the files beside this one.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from tests.runtime import (
    shard_group_ranks,
    shard_memory_ranks,
    shard_odd_ranks,
    shard_plan_ranks,
    shard_read_ranks,
    shard_state_ranks,
)
from tests.runtime.launch import be_rank
from tests.runtime.shard_ways import MODES, OPTIMIZERS, STEPS, Channels, Way, beside_torchs, difference, error_of, train


def optimizers() -> dict[str, Any]:
    return {name: beside_torchs(way) for name, way in OPTIMIZERS.items()}


def modes() -> dict[str, Any]:
    longer = ("two groups", "clipping", "accumulation")
    return {name: beside_torchs(way, steps=STEPS if name in longer else 8) for name, way in MODES.items()}


def clipped() -> dict[str, Any]:
    """How far the norm that clipping returns, and a step after it that leaves little of what was, are from torch's."""
    found = {}
    for norm_type, share in product((1.0, 2.0, float("inf")), (0.5, 1.0)):
        ends, norms = [], []
        for sharded in (False, True):
            way = Way(options={"lr": 1e4}, model=Channels, gathered=share)
            _, _, (model, optimizer) = train(way, sharded=sharded, steps=0)
            model(
                torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
            ).square().mean().backward()
            clip = optimizer.clip_grad_norm_ if sharded else partial(clip_grad_norm_, model.parameters())
            norms.append(clip(1e-2, norm_type))
            optimizer.step()
            ends.append([one.detach() for one in model.parameters()])
        norm = (norms[1] / norms[0] - 1).abs().item()
        found[f"{norm_type} {share}"] = {"norm": norm, "step": difference(ends[1], ends[0])}
    said = [error_of(partial(optimizer.clip_grad_norm_, 1.0, bad)) for bad in (0.0, -1.0, float("nan"))]
    return {**found, "said": said}


USED_MOST = {name: OPTIMIZERS[name] for name in ("SGD", "momentum", "Nesterov", "Adam", "AdamW", "RMSprop", "Adagrad")}


def in_single() -> dict[str, Any]:
    """How far from torch's DDP ours is, and torch's own with other buckets, after 15 steps in single precision."""
    found = {}
    for name, way in USED_MOST.items():
        others = replace(way, ddp={"bucket_cap_mb": 2e-4})  # 200 bytes: a bucket or more for each layer
        expected, theirs, ours = (
            train(of, sharded=sharded, steps=15)[0] for of, sharded in ((way, False), (others, False), (way, True))
        )
        found[name] = {"ours": difference(ours, expected), "torch's": difference(theirs, expected)}
    return found


def in_double() -> dict[str, Any]:
    """The optimizers that people use most, and all ways to train that have one dtype, in double precision."""
    some = USED_MOST | {name: way for name, way in MODES.items() if name not in ("16 bits", "autocast", "dtypes")}
    return {name: beside_torchs(replace(way, dtype=torch.float64), steps=7) for name, way in some.items()}


_MODULES = (
    shard_plan_ranks,
    shard_read_ranks,
    shard_state_ranks,
    shard_odd_ranks,
    shard_group_ranks,
    shard_memory_ranks,
)
SCENARIOS = {one.__name__: one for one in (optimizers, modes, clipped, in_single, in_double)} | {
    one.__name__: one for module in _MODULES for one in module.SCENARIOS
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
