"""What one rank does in the tests of `explain`: ``python -m tests.runtime.explain_ranks FOLDER SCENARIO ...``."""

import copy
import gc
import io
import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp

import mgwfbp
from mgwfbp import DistributedDataParallel, MeasureError, MergePlan
from mgwfbp.runtime.messages.stand_ins import ObservedGroup
from tests.runtime.launch import be_rank
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse
from tests.runtime.tuner_ranks import tuned, vectors

STEPS = 9
ENOUGH = STEPS + 8  # five to warm up, and some after the end
NAP_S = 0.1


class Napping(Mlp):
    """Sleeps in every forward pass on some rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank:
            time.sleep(NAP_S)
        return super().forward(x)


class Records(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, record.getMessage()))


def ours(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, tune=False)


def hooks_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Count everything that could be left behind."""
    gc.collect()
    return {
        "model": [len(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)],
        "module": [len(hooks) for hooks in (model.module._forward_pre_hooks, model.module._forward_hooks)],
        "optimizer": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        "parameters": [one._backward_hooks is None for one in model.parameters()],
        "group": sum(isinstance(one, ObservedGroup) for one in gc.get_objects()),
        "attributes": sorted(name for name, value in vars(model).items() if value is not None),
    }


def train(
    model: Any,
    *,
    explained: bool = True,
    naps_on: int | None = None,
    num_steps: int = ENOUGH,
    passes: int = 1,
    gives_optimizer: bool = True,
    page: Path | None = None,
    clip: bool = False,
) -> dict[str, Any]:
    """Train for some steps, with or without the call, and tell what came of it."""
    page = page or Path(sys.argv[1]) / "slow.html"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = hooks_of(model, optimizer)
    logger, records = logging.getLogger("mgwfbp"), Records()
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    it = None
    if explained:
        it = mgwfbp.explain(model, optimizer if gives_optimizer else None, page, steps=STEPS)
    begun_s = time.perf_counter()
    for number in range(num_steps):
        if dist.get_rank() == naps_on:
            time.sleep(NAP_S)
        optimizer.zero_grad()
        for some in range(passes):
            with model.no_sync() if some + 1 < passes else nullcontext():
                model(vectors(number * passes + some)[0]).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    took_s = time.perf_counter() - begun_s
    logger.removeHandler(records)
    told: dict[str, Any] = {
        "parameters": [one.detach().flatten().tolist() for one in model.parameters()],
        "same hooks": (left := hooks_of(model, optimizer)) == before,
        "hooks": left,
        "records": records.said,
        "took_s": took_s,
    }
    if it is not None:
        again = None if it.result is None else type(it.result).from_json(it.result.to_json())
        told |= {
            "printed": str(it),
            "problem": it.problem,
            "result": None if it.result is None else it.result.to_json(),
            "same after JSON": again == it.result,
            "slowest": None if it.result is None else it.result.slowest,
            "behind": None if it.result is None else it.result.behind_part,
            "page": page.read_text(encoding="utf-8") if page.exists() else "",
        }
    return told


def build(wrapper: Any, make: Callable[[], nn.Module] = Mlp) -> Any:
    torch.manual_seed(1)
    return wrapper(make())


def last_rank() -> int:
    return dist.get_world_size() - 1


def plain() -> dict[str, Any]:
    """The same training with and without the call, in torch's class and in ours."""
    told: dict[str, Any] = {}
    for name, wrapper in (("stock", StockDdp), ("ours", ours)):
        told[name] = train(build(wrapper), clip=True)
        told[f"{name}, not explained"] = train(build(wrapper), explained=False, clip=True)
    return told


def modes() -> dict[str, Any]:
    """Other ways to use torch's class."""
    told = {}
    for name, wrapper, make in (
        ("static graph", partial(StockDdp, static_graph=True), Mlp),
        ("views", partial(StockDdp, gradient_as_bucket_view=True), Mlp),
        ("unused parameters", partial(StockDdp, find_unused_parameters=True), partial(Shared, unused=True)),
        ("dtypes", StockDdp, Dtypes),
    ):
        found, other = train(build(wrapper, make)), train(build(wrapper, make), explained=False)
        told[name] = {
            "same": found["parameters"] == other["parameters"] and found["same hooks"],
            "unknown": found["result"]["unknown"] if found["result"] else found["problem"],
            "choices": len(found["result"]["choices"]),
        }
    return told


def in_low_precision() -> dict[str, Any]:
    """Our class with a plan of which some messages, or all, travel in low precision."""
    names = [name for name, _ in Mlp().named_parameters()][::-1]
    told = {}
    for name, wire in (("some", ("bfloat16", "", "bfloat16")), ("all", ("float16",) * 3)):
        plan = MergePlan("Mlp", "by hand", (tuple(names[:2]), tuple(names[2:5]), tuple(names[5:])), wire=wire)
        wrapper = partial(DistributedDataParallel, plan=plan, wire=wire[0])
        found, other = train(build(wrapper)), train(build(wrapper), explained=False)
        told[name] = {
            "same": all(found[what] == other[what] for what in ("parameters", "hooks")),
            "problem": found["problem"],
            "result": found["result"],
            "page": found["page"],
        }
    return told


def tuning() -> dict[str, Any]:
    """Our class, which tunes itself first."""
    model = build(tuned)
    it = mgwfbp.explain(model, None, Path(sys.argv[1]) / "tuned.html", steps=STEPS)
    early = str(it)
    ended = None
    for number in range(600):
        model(vectors(number)[0]).square().mean().backward()
        if ended is None and model.tuning.state != "working":
            ended = number
        if it.result is not None or it.problem:
            break
    return {
        "early": early,
        "steps after tuning": None if ended is None else number - ended,
        "wrapper": it.result.wrapper if it.result is not None else it.problem,
        "free": model._observer is None and model._explaining is None,
    }


def loader() -> dict[str, Any]:
    return train(build(StockDdp), naps_on=last_rank())


def first_loader() -> dict[str, Any]:
    """Rank 0 is late; the others wait for its buffers before their forward pass."""
    return train(build(StockDdp), naps_on=0)


def forward() -> dict[str, Any]:
    return train(build(ours, lambda: Napping(last_rank())))


def accumulating() -> dict[str, Any]:
    return train(build(StockDdp, lambda: Napping(0)), passes=3)


def no_optimizer() -> dict[str, Any]:
    return train(build(StockDdp), gives_optimizer=False)


def no_page() -> dict[str, Any]:
    return train(build(StockDdp), page=Path(sys.argv[1]) / "nowhere" / "slow.html")


def unobserved() -> dict[str, Any]:
    """Models whose messages cannot be observed."""
    hooked, builtin = build(StockDdp), build(ours)
    hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
    later = build(StockDdp)
    told = {"hook": train(hooked), "builtin": train(builtin), "sparse": train(build(StockDdp, Sparse))}
    library: Any = dist
    bucket = library.GradBucket
    try:
        del library.GradBucket  # a torch that lacks something
        told["lacking"] = train(build(StockDdp))
    finally:
        library.GradBucket = bucket
    it = mgwfbp.explain(later, None, Path(sys.argv[1]) / "slow.html", steps=STEPS)
    later.register_comm_hook(None, default_hooks.allreduce_hook)
    later(vectors(0)[0]).square().mean().backward()
    return {**told, "registered later": it.problem}


def joining() -> dict[str, Any]:
    """Uneven inputs: rank 0 has none at all, then as many as the others."""
    told = {}
    for name, wrapper in (("stock", StockDdp), ("ours", ours)):
        model = build(wrapper)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        it = mgwfbp.explain(model, optimizer, Path(sys.argv[1]) / "slow.html", steps=STEPS)
        with model.join():
            for number in range(3 * dist.get_rank()):
                model(vectors(number)[0]).square().mean().backward()
        model._join_config = type(model._join_config).construct_disabled_join_config()  # torch leaves it set
        if wrapper is ours:
            for number in range(ENOUGH):
                model(vectors(number)[0]).square().mean().backward()
        told[name] = it.problem
    return told


def copying() -> dict[str, Any]:
    """Copies and pickles that are made meanwhile observe nothing, and stay usable."""
    model = build(StockDdp)
    it = mgwfbp.explain(model, None, Path(sys.argv[1]) / "slow.html", steps=STEPS)
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    for number in range(ENOUGH):
        twin(vectors(number)[0]).square().mean().backward()
    seen_of_twin = str(it)
    for number in range(ENOUGH):
        model(vectors(number)[0]).square().mean().backward()
    return {"of the twin": seen_of_twin, "done": it.result is not None}


def refused() -> dict[str, Any]:
    model, page = build(StockDdp), Path(sys.argv[1]) / "slow.html"
    sparse = build(StockDdp, Sparse)
    rank = dist.get_rank()

    def problem(call: Callable[[], object]) -> str:
        try:
            call()
        except MeasureError as error:
            return str(error)
        return ""

    told = {
        "no DDP": problem(lambda: mgwfbp.explain(model.module, None, page)),
        "no optimizer": problem(lambda: mgwfbp.explain(model, object(), page)),  # type: ignore[arg-type]
        "few steps": problem(lambda: mgwfbp.explain(model, None, page, steps=2)),
        "sparse": problem(lambda: mgwfbp.explain(sparse, None, page)),
        "other steps": problem(lambda: mgwfbp.explain(model, None, page, steps=5 + rank)),
        "one rank": problem(lambda: mgwfbp.explain(model, object() if rank else None, page)),  # type: ignore[arg-type]
    }
    mgwfbp.explain(model, None, page)
    return {**told, "twice": problem(lambda: mgwfbp.explain(model, None, page))}


if __name__ == "__main__":
    be_rank(
        {
            one.__name__: one
            for one in (
                plain,
                modes,
                in_low_precision,
                tuning,
                loader,
                first_loader,
                forward,
                accumulating,
                no_optimizer,
                no_page,
                unobserved,
                joining,
                copying,
                refused,
            )
        }
    )
