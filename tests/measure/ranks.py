"""What one rank does in the tests of several: ``python -m tests.measure.ranks FOLDER SCENARIO ...``."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgwfbp import (
    LayerTrace,
    LinearCost,
    MeasureError,
    ModelTrace,
    PiecewiseCost,
    measure_allreduce,
    measure_backward,
)
from mgwfbp.costs import ShardedCost
from mgwfbp.measure.agreement import agree_on_cost, agree_on_trace, reduce_values, together
from mgwfbp.measure.allreduce import measure_halves, measure_wire
from mgwfbp.measure.backward import plain_passes
from mgwfbp.measure.beside import Load, measure_taken
from mgwfbp.measure.halves import all_gather, reduce_scatter
from mgwfbp.measure.workload import Workload, build_workload, default_loss
from mgwfbp.runtime.messages.gloo import destroy_process_group
from tests.measure.models import SlowMiddle, tiny_transformer


def identical() -> dict[str, Any]:
    trace = agree_on_trace(measure_backward(SlowMiddle(0.001), torch.ones(2, 4), steps=2))
    cost = agree_on_cost(measure_allreduce(max_bytes=4000, budget_s=60.0, max_rounds=3))
    return {"trace": trace.to_json(), "cost": cost.to_json()}


def different_models() -> dict[str, Any]:
    width = 5 if dist.get_rank() == dist.get_world_size() - 1 else 4
    trace = measure_backward(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)), torch.ones(2, 4), steps=1)
    return {"trace": agree_on_trace(trace).to_json()}


def different_settings() -> dict[str, Any]:
    return {"cost": measure_allreduce(max_bytes=2**12 + dist.get_rank(), max_rounds=3).to_json()}


def element_types() -> dict[str, Any]:
    """What is sent, message by message: its type and its bytes."""
    send, found = dist.all_reduce, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sent: list[tuple[str, int]] = []

        def watched(message: torch.Tensor, *args: Any, sent: list[tuple[str, int]] = sent, **kwargs: Any) -> Any:
            if kwargs.get("async_op"):
                sent.append((str(message.dtype), message.numel() * message.element_size()))
            return send(message, *args, **kwargs)

        dist.all_reduce = watched  # type: ignore[assignment]  # torch's own, seen from outside
        try:
            cost = measure_allreduce(max_bytes=4000, budget_s=60.0, max_rounds=3, dtype=dtype)
        finally:
            dist.all_reduce = send
        found[str(dtype)] = {"cost": cost.to_json(), "sent": sorted(set(sent))}
    return found


def halves() -> dict[str, Any]:
    """Of all ranks, and of two of them."""
    of = partial(measure_halves, max_bytes=4000, budget_s=60.0, max_rounds=3, dtype=torch.bfloat16)
    costs, two = {"all": of().to_json()}, dist.new_group([0, 1])
    if isinstance(two, dist.ProcessGroup):  # on its members
        costs["two"] = of(two).to_json()
    dist.barrier()
    return costs


def halves_of_some() -> dict[str, Any]:
    measure = measure_allreduce if dist.get_rank() else measure_halves
    return {"cost": measure(max_bytes=2**12, max_rounds=3).to_json()}


def halves_on_a_gpu_over_gloo() -> dict[str, Any]:
    return {"cost": measure_halves(device="cuda", max_bytes=2**12).to_json()}


HALF = PiecewiseCost(3, ((4, 1e-3), (4000, 2e-3)), taken_s=1e-5)
ALL_HALVES = ShardedCost(HALF, HALF, HALF)


def beside() -> dict[str, Any]:
    """Messages beside passes of 1 s, which take longer on later ranks and in some turns; half of them travel then."""
    more_s = iter([9.0, 0.5, 0.3, 0.4])  # in the mean of three ranks twice as much
    begun = []

    def passes(begin: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        begin()()
        begun.append(begin)
        if len(begun) % 2:
            return 1.0, 1.0
        beside_s = 1.0 + next(more_s) * (1 + dist.get_rank())
        return beside_s, 2 * beside_s

    cost = measure_taken(passes, ALL_HALVES, Load(1200, 2), None, torch.device("cpu"))
    with plain_passes(SlowMiddle(0.001), torch.ones(2, 4)) as real:
        measured = measure_taken(real, ALL_HALVES, Load(4000, 3), None, torch.device("cpu"))
    return {"passes": len(begun), "cost": cost.to_json(), "measured": measured.to_json()}


def beside_fails() -> dict[str, Any]:
    """A pass that fails on one rank beside messages: what the others wait for was sent."""

    def passes(begin: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        finish = begin()
        if dist.get_rank() == 2:
            raise ValueError("no luck")
        finish()
        return 1.0, 1.0

    return {"cost": measure_taken(passes, ALL_HALVES, Load(1200, 2), None, torch.device("cpu")).to_json()}


def low_precision() -> dict[str, Any]:
    """Of all ranks, and of two of them."""
    costs, two = (
        {"all": measure_wire("float16", max_bytes=4000, budget_s=60.0, max_rounds=3).to_json()},
        dist.new_group([0, 1]),
    )
    if isinstance(two, dist.ProcessGroup):  # on its members
        costs["two"] = measure_wire(group=two, max_bytes=4000, budget_s=60.0, max_rounds=3).to_json()
    dist.barrier()
    return costs


def low_precision_of_some() -> dict[str, Any]:
    return {"cost": measure_wire(("bfloat16", "float16")[dist.get_rank() % 2], max_bytes=2**12).to_json()}


def unknown_precision() -> dict[str, Any]:
    return {"cost": measure_wire("int8", max_bytes=2**12).to_json()}


def low_precision_on_a_gpu_over_gloo() -> dict[str, Any]:
    return {"cost": measure_wire(device="cuda", max_bytes=2**12).to_json()}


def rows_by_hand() -> dict[str, Any]:
    """Each rank has rank + 1 in all places of a message of 7 numbers, and gets the sum of its row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    length = -(-7 // world)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.zeros(world, length, dtype=dtype)
        rows.flatten()[:7] = rank + 1
        own = torch.empty(length, dtype=dtype)
        reduce_scatter(rows, own, torch.empty_like(rows), dist.group.WORLD)
        whole = torch.empty_like(rows)
        all_gather(whole, own, dist.group.WORLD)
        found[str(dtype)] = [own.tolist(), whole.flatten().tolist()]
    return found


def different_types() -> dict[str, Any]:
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    return {"cost": measure_allreduce(max_bytes=2**12, max_rounds=3, dtype=dtype).to_json()}


def a_type_of_no_gradient() -> dict[str, Any]:
    return {"cost": measure_allreduce(max_bytes=2**12, dtype=torch.int64).to_json()}


def no_time() -> dict[str, Any]:
    """A network on which even the smallest messages take longer than the budget."""
    reported: list[float] = []
    cost = measure_allreduce(max_bytes=2**20, budget_s=1e-6, on_progress=reported.append)
    return {"cost": cost.to_json(), "reported": reported}


def large() -> dict[str, Any]:
    """A budget for six messages of the largest size, which is too little for the bursts of three rounds."""
    largest = 2**25
    message = torch.zeros(largest // 4)
    dist.all_reduce(message)
    started_s = time.perf_counter()
    dist.all_reduce(message)
    (message_s,) = reduce_values([time.perf_counter() - started_s], "max")
    cost = measure_allreduce(max_bytes=largest, budget_s=6 * message_s)
    return {"largest": largest, "budget_s": 6 * message_s, "isolated": cost.source["isolated"], "cost": cost.to_json()}


def sparse() -> dict[str, Any]:
    """The gradient of an embedding has a row for every token of the batch, which is another one on every rank."""
    model = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
    tokens = torch.arange(1 + dist.get_rank()).unsqueeze(0)
    return {"trace": agree_on_trace(measure_backward(model, tokens, steps=1)).to_json()}


def slowest() -> dict[str, Any]:
    """Each rank is the slowest at something else."""
    rank = dist.get_rank()
    forward_s, first_s, second_s = [(1.0, 1.0, 1.0), (2.0, 0.25, 6.0), (1.0, 4.0, 0.25)][rank]
    trace = ModelTrace("toy", forward_s, (LayerTrace("b", first_s, 8), LayerTrace("a", second_s, 4)))
    parts_s = [(0.25, 0.75), (0.5, 1.5), (1.0, 0.0)][rank]
    layers = tuple(replace(layer, forward_s=part_s) for layer, part_s in zip(trace.layers, parts_s, strict=True))
    known = replace(trace, layers=layers)
    line = LinearCost(3, [1.0, 3.0, 2.0][rank], [3.0, 1.0, 2.0][rank])
    curve = PiecewiseCost(3, ((4, [2.0, 1.0, 1.0][rank]), (8, [3.0, 3.0, 5.0][rank])))
    return {
        "trace": agree_on_trace(trace).to_json(),
        "known": agree_on_trace(known).to_json(),
        "known by some": agree_on_trace(known if rank else trace).to_json(),
        "line": agree_on_cost(line).to_json(),
        "curve": agree_on_cost(curve).to_json(),
    }


def one_fails() -> dict[str, Any]:
    def work() -> int:
        if dist.get_rank() == 1:
            raise ValueError("no luck\non this rank")
        return 1

    return {"result": together(work)}


def killed() -> dict[str, Any]:
    def die_early(fraction: float) -> None:
        if dist.get_rank() == 1 and fraction > 0.1:
            os.kill(os.getpid(), signal.SIGKILL)

    return {"cost": measure_allreduce(max_bytes=2**22, budget_s=60.0, on_progress=die_early).to_json()}


def order(model: str) -> dict[str, Any]:
    """The order of the trace and the order in which DDP's reducer saw the gradients."""
    if model == "transformer":
        workload = Workload("transformer", tiny_transformer(), torch.randn(2, 5, 32), 2, default_loss)
    else:
        workload = build_workload(model, batch_size=2, image_size=64)
    trace = measure_backward(workload.model, workload.batch, workload.loss_fn, steps=2, warmup=1)
    ddp = DistributedDataParallel(workload.model)
    for _ in range(3):
        workload.loss_fn(ddp(workload.batch)).backward()
    parameters = [name for name, parameter in workload.model.named_parameters() if parameter.requires_grad]
    logged = ddp._get_ddp_logging_data()["prev_iteration_grad_ready_order_indices"]
    return {
        "trace": [layer.name for layer in trace.layers],
        "reducer": [parameters[int(index)] for index in str(logged).replace(",", " ").split()],
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "identical": identical,
    "different_models": different_models,
    "different_settings": different_settings,
    "element_types": element_types,
    "halves": halves,
    "halves_of_some": halves_of_some,
    "beside": beside,
    "beside_fails": beside_fails,
    "low_precision": low_precision,
    "low_precision_of_some": low_precision_of_some,
    "unknown_precision": unknown_precision,
    "low_precision_on_a_gpu_over_gloo": low_precision_on_a_gpu_over_gloo,
    "halves_on_a_gpu_over_gloo": halves_on_a_gpu_over_gloo,
    "rows_by_hand": rows_by_hand,
    "different_types": different_types,
    "a_type_of_no_gradient": a_type_of_no_gradient,
    "no_time": no_time,
    "large": large,
    "sparse": sparse,
    "slowest": slowest,
    "one_fails": one_fails,
    "killed": killed,
    **{f"order:{model}": partial(order, model) for model in ("resnet18", "googlenet", "transformer")},
}


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    results = {}
    for scenario in scenarios:
        try:
            results[scenario] = SCENARIOS[scenario]()
        except MeasureError as error:
            results[scenario] = {"error": str(error)}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    destroy_process_group()


if __name__ == "__main__":
    main()
