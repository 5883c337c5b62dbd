"""Parameter servers: what a gradient costs that its owner averages, and what a step of such gradients takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from mgwfbp.bench.turns import slowest
from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import Sample, fit
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.baselines import ParameterServers, assign_owners
from mgwfbp.timeline import Span, Timeline, predict
from mgwfbp.trace import ModelTrace

__all__ = ["ServerCosts", "measure_servers", "predict_servers"]

ROUNDS = 3
# Messages of a burst for every owner, small and large ones.
LONG, SHORT, SMALL_BYTES = 8, 2, 2**18


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """What a gradient costs that is pushed to its owner and pulled."""

    shared: Cost  # its share of a burst in which all owners are at work
    alone: Cost | None  # one owner at work; None where all owners share one queue


def measure_servers(
    device: torch.device, *, max_bytes: int, on_progress: Callable[[float], object] = lambda _: None
) -> ServerCosts:
    """Sweep the hook of strategy ``ps`` itself. All ranks must call it, and get the same costs."""
    world = dist.group.WORLD
    if world is None or world.size() < 2:
        raise MeasureError("the group has 1 rank, a server needs 2 or more; start more workers")
    workers = world.size()
    servers = ParameterServers({}, world)
    sizes = _sizes(max_bytes)
    alone: list[Sample] = []
    shared: list[Sample] = []
    for index, size in enumerate(sizes):
        # Long bursts, as training's: what their first and last message take must not count for all.
        per_owner = LONG if size <= SMALL_BYTES else SHORT
        buffers = [torch.zeros(size // 4, device=device) for _ in range(per_owner * workers)]
        rounds = [
            (_burst_s(servers, buffers[:1], device), _burst_s(servers, buffers, device))
            for _ in range(1 + ROUNDS)  # the first sets buffers up
        ]
        first_s, burst_s = slowest([median(one) for one in zip(*rounds[1:], strict=True)], device)
        alone.append((size, first_s))
        if servers.num_queues == 1:  # each further message adds the same
            shared.append((size, max(0.0, burst_s - first_s) / (len(buffers) - 1)))
        else:
            shared.append((size, burst_s / len(buffers)))
        on_progress((index + 1) / len(sizes))
    return ServerCosts(
        _curve(shared, workers, "all servers"),
        _curve(alone, workers, "one server") if servers.num_queues > 1 else None,
    )


def _burst_s(servers: ParameterServers, buffers: Sequence[torch.Tensor], device: torch.device) -> float:
    """Have messages averaged by the owners in turn; return how long it takes."""
    dist.barrier()
    start_s = time.perf_counter()
    averaged = [servers.average(number % servers.size, buffer) for number, buffer in enumerate(buffers)]
    for one in averaged:
        one.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def _sizes(max_bytes: int) -> list[int]:
    """Return whole numbers of float32 a factor of four apart, the largest last."""
    largest = max(8, max_bytes // 4 * 4)
    sizes = [4]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return [*sizes, largest]


def _curve(samples: Sequence[Sample], workers: int, what: str) -> PiecewiseCost:
    cost = fit(samples, workers, kind="piecewise", source={"measured": what, "samples": list(samples)}).cost
    if not isinstance(cost, PiecewiseCost):  # what kind="piecewise" asks for
        raise MeasureError("the sweep gave no curve")
    return cost


def predict_servers(trace: ModelTrace, costs: ServerCosts, plan: MergePlan) -> Timeline:
    """Lay out a step whose gradients go through their owners.

    Two things hold it up: the links, which all owners share (the recurrence of `predict`, a gradient taking its share
    of a burst), and, where there is more than one queue, each owner's, in which gradients follow one another (the same
    recurrence for every owner, a gradient taking what it takes alone). Each is a bound; the later is the prediction.
    """
    by_links = predict(trace, costs.shared, plan)
    if costs.alone is None:
        return by_links
    sizes = [message.num_bytes for message in by_links.messages]
    free_s = [0.0] * costs.shared.workers
    messages = []
    for message, owner in zip(by_links.messages, assign_owners(sizes, costs.shared.workers), strict=True):
        start_s = max(free_s[owner], message.ready_s)
        free_s[owner] = start_s + costs.alone(message.num_bytes)
        messages.append(Span(message.layers, message.num_bytes, message.ready_s, start_s, free_s[owner]))
    by_queues = replace(by_links, messages=tuple(messages))
    return max(by_links, by_queues, key=lambda timeline: timeline.iteration_s)
