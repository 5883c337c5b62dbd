"""What one rank does in the tests of several: ``python -m tests.runtime.ranks FOLDER SCENARIO``."""

import copy
import inspect
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MergePlan, MgwfbpError
from tests.runtime.launch import be_rank
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse, Strided, make_plan
from tests.runtime.modes import MODES, available, compare


def modes() -> dict[str, Any]:
    return {name: compare(mode) for name, mode in MODES.items() if available(mode)}


def problem(work: Callable[[], object]) -> list[str]:
    """Return the type and text of what a rank was told, and check that all ranks are still in step."""
    try:
        work()
    except (MgwfbpError, RuntimeError) as error:
        told = [type(error).__name__, str(error)]
    else:
        told = []
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return told


def wrong_plans() -> dict[str, Any]:
    folder = Path(sys.argv[1])
    rank = dist.get_rank()
    plan, other = make_plan(Mlp(), 3), make_plan(Mlp(), 4)
    if rank == 0:
        plan.save(folder / "good.json")
        text = (folder / "good.json").read_text()
        (folder / "torn.json").write_text(text[: len(text) // 2])
    dist.barrier()
    torch.manual_seed(rank)
    model = Mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    merged = MergePlan("dtypes", "by hand", (tuple(name for name, _ in Dtypes().named_parameters()),))
    merged_sparse = MergePlan("sparse", "by hand", (tuple(name for name, _ in Sparse().named_parameters()),))
    made = {
        "different": lambda: DistributedDataParallel(model, plan=other if rank == 2 else plan),
        "none on one": lambda: DistributedDataParallel(model, plan=None if rank == 1 else plan),
        "other model": lambda: DistributedDataParallel(model, plan=make_plan(Shared(), 3)),
        "other model on one": lambda: DistributedDataParallel(
            model, plan=make_plan(Shared(), 3) if rank == 1 else plan
        ),
        "torn": lambda: DistributedDataParallel(model, plan=folder / ("torn.json" if rank == 3 else "good.json")),
        "absent": lambda: DistributedDataParallel(model, plan=str(folder / ("no.json" if rank == 0 else "good.json"))),
        "clash": lambda: DistributedDataParallel(model, plan=plan, bucket_cap_mb=5),
        "dtypes": lambda: DistributedDataParallel(Dtypes(), plan=merged),
        "sparse": lambda: DistributedDataParallel(Sparse(), plan=merged_sparse),
    }
    told: dict[str, Any] = {name: problem(work) for name, work in made.items()}
    told["untouched"] = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ddp = DistributedDataParallel(model, plan=folder / "good.json")
    told["replan different"] = problem(lambda: ddp.replan(other if rank == 2 else plan))
    told["replan torn"] = problem(lambda: ddp.replan(folder / ("torn.json" if rank == 3 else "good.json")))
    told["replan unfinished"] = problem(lambda: _replan_unfinished(other))
    with pytest.MonkeyPatch.context() as patch:
        # As if it had been given: torch's own code for it needs a GPU.
        patch.setattr(ddp, "mixed_precision", object())
        told["replan mixed precision"] = problem(lambda: ddp.replan(other))
    with ddp.join():
        told["replan in join"] = problem(lambda: ddp.replan(other))
    told["still in force"] = ddp.plan == plan
    return told


def _replan_unfinished(plan: MergePlan) -> None:
    ddp = DistributedDataParallel(Shared(unused=True))  # an unused parameter, and nobody looks for it
    ddp(torch.ones(2, 6)).sum().backward()
    ddp.replan(make_plan(ddp.module, 3))


def manners() -> dict[str, Any]:
    """Copies, files, warnings and, last, a torch that lacks something."""
    stride_warnings = strides()  # first: torch warns of this once per process
    plan = make_plan(Mlp(), 3)
    stock, ours = StockDdp(Mlp()), DistributedDataParallel(Mlp(), plan=plan)
    result: dict[str, Any] = {
        "same names": list(stock.state_dict()) == list(ours.state_dict()),
        "loads": str(ours.load_state_dict(stock.state_dict())),
    }
    copies = {"copied": copy.deepcopy(ours), "pickled": pickle.loads(pickle.dumps(ours))}  # noqa: S301
    whole = io.BytesIO()
    torch.save(ours, whole)
    whole.seek(0)
    copies["saved"] = torch.load(whole, weights_only=False)
    for name, one in copies.items():
        result[name] = one.plan == plan and _buckets(one) == [list(group) for group in plan.groups]
        one(torch.ones(4, 6)).sum().backward()
        result[name] &= all(parameter.grad is not None for parameter in one.parameters())
    ours.replan(None)
    for _step in range(2):
        ours(torch.ones(4, 6)).sum().backward()
    result["back to stock"] = _as_torch_would(ours)
    for name, arguments in (("without a plan", {"bucket_cap_mb": 0.0005}), ("not tuned", {"tune": False})):
        plain = DistributedDataParallel(Mlp(), **arguments)
        for _step in range(2):
            plain(torch.ones(4, 6)).sum().backward()
        result[name] = _as_torch_would(plain, **({} if name == "not tuned" else arguments))
    moved = DistributedDataParallel(Mlp(), plan=plan)
    moved(torch.ones(4, 6)).sum().backward()
    moved._update_process_group(dist.new_group())  # after which torch forgets its buckets and makes new ones
    for _step in range(2):
        moved(torch.ones(4, 6)).sum().backward()
    result["another group"] = _buckets(moved) == [list(group) for group in plan.groups]
    result["compiled"] = _norm(torch.compile(DistributedDataParallel(_seeded(), plan=plan), backend="aot_eager"))
    result["compiled"] = abs(result["compiled"] / _norm(StockDdp(_seeded())) - 1) < 1e-5
    can_be_quiet = "init_sync" in inspect.signature(StockDdp.__init__).parameters
    without: dict[str, Any] = {"init_sync": False} if can_be_quiet else {}
    quiet = DistributedDataParallel(Mlp(), **without)
    result["without collectives"] = quiet.tuning.state == "working"
    return {"copies": result, "strides": stride_warnings, "fallback": fallback()}


def _as_torch_would(ddp: DistributedDataParallel, **arguments: Any) -> bool:
    """Whether a model says that it has the buckets that torch's class makes."""
    stock = StockDdp(Mlp(), **arguments)
    for _step in range(2):
        stock(torch.ones(4, 6)).sum().backward()
    assert ddp.plan is not None
    return ddp.plan.planner == "ddp" and [list(group) for group in ddp.plan.groups] == _buckets(stock)


def _seeded() -> nn.Module:
    torch.manual_seed(5)
    return Mlp()


def _norm(model: Any) -> float:
    """Take some steps and return the norm of what the gradients add up to."""
    for step in range(4):
        model(torch.arange(24.0).reshape(4, 6).sin() + step).square().sum().backward()
    return sum(parameter.grad.square().sum().item() for parameter in model.parameters()) ** 0.5  # type: ignore[no-any-return]


def _buckets(ddp: StockDdp) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [[names[id(one)] for one in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()]


def fallback() -> dict[str, Any]:
    """A torch without one of the names that are needed: removed here, in this process alone."""
    del dist.Reducer._update_process_group  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(Mlp(), plan=make_plan(Mlp(), 3))
    for _step in range(3):
        ddp(torch.ones(4, 6)).sum().backward()
    return {"warnings": [str(one.message) for one in seen], "plan": ddp.plan, "reducer": type(ddp.reducer).__name__}


def strides() -> dict[str, Any]:
    model = Strided()
    ddp = DistributedDataParallel(model, plan=make_plan(model, 3), gradient_as_bucket_view=True)
    said = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            output = ddp(torch.ones(2, 4))
            if step == 0:
                model.odd.grad = torch.zeros(4, 4).t()  # autograd adds to it and keeps its strides
            output.sum().backward()
        said.append([str(one.message) for one in seen])
    hooks = [parameter._backward_hooks for parameter in model.parameters()]
    return {"said": said, "hooks left": [*(one for one in hooks if one is not None), *ddp._forward_pre_hooks.values()]}


SCENARIOS = {"modes": modes, "wrong_plans": wrong_plans, "manners": manners}

if __name__ == "__main__":
    be_rank(SCENARIOS)
