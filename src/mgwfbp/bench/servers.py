"""What it costs to have a gradient averaged by its owner: `measure_servers`."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.bench.turns import slowest
from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import fit
from mgwfbp.runtime.baselines import ParameterServers

__all__ = ["measure_servers"]

ROUNDS = 3


def measure_servers(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    max_bytes: int,
    on_progress: Callable[[float], object] | None = None,
) -> PiecewiseCost:
    """Sweep the hook of strategy ``ps`` itself: messages of one size to all owners in turn, two rounds of them.

    The time of a message is its share of the burst, in which owners work at the same time, as they do in training. So
    the single link of the model stands for all owners together. The tail of a burst is part of it. All ranks must call
    it, and get the same cost.
    """
    whole_group = group or dist.group.WORLD
    if whole_group is None or whole_group.size() < 2:
        raise MeasureError("the group has 1 rank, a server needs 2 or more; start more workers")
    workers = whole_group.size()
    servers = ParameterServers({}, whole_group)
    sizes = _sizes(max_bytes)
    samples = []
    for index, size in enumerate(sizes):
        buffers = [torch.zeros(size // 4, device=device) for _ in range(2 * workers)]
        times_s = []
        for _ in range(1 + ROUNDS):  # the first sets buffers up
            dist.barrier(group=group)
            start_s = time.perf_counter()
            averaged = [servers.average(number % workers, buffer) for number, buffer in enumerate(buffers)]
            for one in averaged:
                one.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times_s.append((time.perf_counter() - start_s) / len(buffers))
        samples.append((size, slowest([median(times_s[1:])], device, group)[0]))
        if on_progress is not None:
            on_progress((index + 1) / len(sizes))
    source = {"measured": "parameter servers", "streamed": samples}
    cost = fit(samples, workers, kind="piecewise", source=source).cost
    if not isinstance(cost, PiecewiseCost):  # what kind="piecewise" asks for
        raise MeasureError("the sweep gave no curve")
    return cost


def _sizes(max_bytes: int) -> list[int]:
    """Return whole numbers of float32 a factor of four apart, the largest last."""
    largest = max(8, max_bytes // 4 * 4)
    sizes = [4]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return [*sizes, largest]
