"""What a rank does in the tests of our class in torch's place: ``python -m tests.runtime.drop_in_ranks FOLDER ...``."""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel
from mgwfbp.runtime.reducer.handle import collectives_of
from tests.runtime.launch import be_rank
from tests.runtime.models import Mlp

KINDS: dict[str, Callable[..., Any]] = {"stock": StockDdp, "ours": DistributedDataParallel}


class Sharded(nn.Module):
    """A layer beside a parameter of which every rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        places: list[Any] = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
        self.part = nn.Parameter(sharded_tensor.rand(ChunkShardingSpec(0, places), 10, 10))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sharded()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def sharded() -> dict[str, Any]:
    """A parameter that DDP shall ignore: one at the root torch's Reducer takes all the same, one further inside not."""
    StockDdp._set_params_and_buffers_to_ignore_for_model(root := Sharded(), ["part"])
    at_root = DistributedDataParallel(root, static_graph=True, gradient_as_bucket_view=True, broadcast_buffers=False)
    StockDdp._set_params_and_buffers_to_ignore_for_model(inside := Inside(), ["inner.part"])
    ddp = DistributedDataParallel(inside)
    for _ in range(3):
        ddp(torch.ones(2, 6) * dist.get_rank()).sum().backward()
    weight: Any = inside.inner.layer.weight.grad
    return {
        "root": [at_root.tuning.state, at_root.tuning.reason, at_root.plan is None],
        "inside": [ddp.tuning.state, ddp.plan.layer_names if ddp.plan else None, weight.flatten()[0].item()],
    }


class Branches(nn.Module):
    """Two layers, of which one gets no gradient, though it takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.cut = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + torch._C._functions.UndefinedGrad()(self.cut(x))  # type: ignore[no-any-return]


def undefined() -> dict[str, Any]:
    """Gradients of both classes where autograd hands None to what watches a parameter."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        torch.manual_seed(1)
        ddp = kind(Branches(), find_unused_parameters=True)
        for _ in range(3):
            ddp(torch.ones(2, 6) * (dist.get_rank() + 1)).square().sum().backward()
        found[name] = [None if one.grad is None else one.grad.tolist() for one in ddp.parameters()]
    return found


def statistics() -> dict[str, Any]:
    """What torch says of a model that was joined and has a communication hook, where a Reducer is made anew."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        ddp = kind(Mlp())
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with ddp.join():
            for _ in range(2 + dist.get_rank()):
                ddp(torch.ones(2, 6)).sum().backward()
        said = ddp._get_ddp_logging_data()
        found[name] = {key: said.get(key) for key in ("join_uneven_inputs", "comm_hook", "world_size", "module_name")}
    return found


def _deprecated() -> dict[str, Any]:
    """Arguments of which this torch warns in its constructor."""
    return {"check_reduction": True}


def caller() -> dict[str, Any]:
    """Where warnings point to, how often they are shown, and what filters make of them."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            for _ in range(2):
                kind(Mlp(), **_deprecated())
                line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        (one,) = (each for each in seen if "check_reduction" in str(each.message))  # the second is not shown again
        with warnings.catch_warnings(record=True) as silent:
            warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
            kind(Mlp(), **_deprecated())
        found[name] = [one.filename == __file__, one.lineno - line, one.category.__name__, len(silent)]
    return found


def as_errors() -> dict[str, Any]:
    """A filter that makes an error of a warning: nothing was sent before it, and the next model trains."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        count = collectives_of(dist.group.WORLD) or (lambda: 0)  # older torch does not count ours
        before, raised = count(), ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                kind(Mlp(), **_deprecated())
            except FutureWarning as error:
                raised = str(error)
        collectives = count() - before
        ddp = kind(model := Mlp())
        ddp(torch.full((2, 6), float(dist.get_rank()))).sum().backward()
        bias: Any = model.head.bias.grad
        found[name] = ["check_reduction" in raised, collectives, bias.tolist()]
    return found


def threads() -> dict[str, Any]:
    """Two threads that wrap models at once, on a rank of their own each, leave the filters as they were."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine: Any = groups[dist.get_rank()]
    before, show = list(warnings.filters), warnings.showwarning
    seen = []

    def wrap() -> None:
        for _ in range(20):
            DistributedDataParallel(nn.Linear(2, 2), process_group=mine)
            seen.append((list(warnings.filters) == before, warnings.showwarning is show))

    running = [threading.Thread(target=wrap) for _ in range(2)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return {"seen": [all(pair) for pair in seen]}


if __name__ == "__main__":
    be_rank({one.__name__: one for one in (sharded, undefined, statistics, caller, as_errors, threads)})
