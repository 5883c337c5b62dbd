"""What one rank does in the tests of compiled models: ``python -m tests.runtime.compile_ranks FOLDER SCENARIO ...``."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MergePlan
from mgwfbp.runtime.reducer.compile_private import missing
from mgwfbp.runtime.strategies import parallel, plan_for
from tests.runtime.launch import be_rank


class Chain(nn.Module):
    """Five layers; ``tied`` has the last use the first one's weight, ``broken`` cannot be one graph."""

    def __init__(self, *, tied: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.broken = broken
        if tied:
            self.layers[4].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        if self.broken:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


class Watch:
    """Writes down when the backward pass of a compiled graph runs, a gradient is ready, and a message is sent."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_graphs = 0
        self.backend: Any = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph: Any, _: Any) -> Any:
        self.num_graphs += 1
        return self._boxed(graph)

    def _backward(self, graph: Any, _: Any) -> Any:
        return self._boxed(graph, lambda: self.events.append("graph"))

    def _boxed(self, graph: Any, tell: Callable[[], object] = lambda: None) -> Any:
        def run(arguments: list[Any]) -> Any:
            tell()
            return graph(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def watch(self, ddp: StockDdp) -> None:
        for name, parameter in ddp.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name.removeprefix("_orig_mod.")))
        ddp.register_comm_hook(None, self._send)

    def _ready(self, name: str, _: Tensor) -> None:
        self.events.append(name)

    def _send(
        self,
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        self.events.append("message")
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


class NoPieces(Watch):
    """A compiler that takes the whole model or nothing."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.backend

        def backend(graph: Any, inputs: Any) -> Any:
            if sum("linear" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") < 5:
                raise NotImplementedError("this compiler takes no pieces\nof a graph")
            return inner(graph, inputs)

        self.backend = backend


def steps(model: Any) -> list[Tensor]:
    """Take two steps; return what the gradients are."""
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 6, generator=data)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def compiled(
    make: Callable[..., StockDdp], *, outside: bool, watch: Watch | None = None, **kinds: bool
) -> dict[str, Any]:
    """Compile a model around DDP or inside it; say what happened in the second step, and how its gradients differ."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    expected = steps(StockDdp(Chain(**kinds)))
    torch.manual_seed(1)
    watch = watch or Watch()
    model = Chain(**kinds)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if outside:
            ddp = make(model)
            whole: Any = torch.compile(ddp, backend=watch.backend)
        else:
            whole = ddp = make(torch.compile(model, backend=watch.backend))
        watch.watch(ddp)
        found = steps(whole)
    norm = sum(one.square().sum().item() for one in expected)
    distance = sum((a - b).square().sum().item() for a, b in zip(found, expected, strict=True))
    half = len(watch.events) // 2
    return {
        "graphs": watch.num_graphs,
        "events": watch.events[half:],
        "distance": (distance / norm) ** 0.5,
        "warnings": [str(one.message) for one in seen if "plan" in str(one.message)],
    }


def plan_of(*sizes: int, prefix: str = "") -> MergePlan:
    names = [prefix + name for name in plan_for(Chain(), "wfbp").layer_names]
    groups, taken = [], 0
    for size in sizes:
        groups.append(tuple(names[taken : taken + size]))
        taken += size
    return MergePlan("chain", "by hand", tuple(groups))


def planned(*sizes: int, prefix: str = "") -> Callable[..., StockDdp]:
    return partial(DistributedDataParallel, plan=plan_of(*sizes, prefix=prefix))


def cuts() -> dict[str, Any]:
    """A model compiled around DDP, inside it, and inside it with a plan that says so."""
    return {
        "(2, 4, 4) outside": compiled(planned(2, 4, 4), outside=True),
        "(4, 2, 4) outside": compiled(planned(4, 2, 4), outside=True),
        "(2, 4, 4) inside": compiled(planned(2, 4, 4), outside=False),
        "(10,) inside": compiled(planned(10), outside=False),
        "(2, 4, 4) prefixed": compiled(planned(2, 4, 4, prefix="_orig_mod."), outside=False),
    }


def odd() -> dict[str, Any]:
    """Plans that cannot be followed to the letter, and models and compilers with oddities."""
    tied = MergePlan("tied", "by hand", plan_for(Chain(tied=True), "bucket-0.0002").groups)
    found = {
        "weight and bias apart": compiled(planned(*[1] * 10), outside=True),
        "small caps": compiled(partial(DistributedDataParallel, bucket_cap_mb=0.0001), outside=True),
        "torch's own": compiled(StockDdp, outside=True),
        "broken": compiled(planned(2, 4, 4), outside=True, broken=True),
        "tied": compiled(partial(DistributedDataParallel, plan=tied), outside=True, tied=True),
        "ps": compiled(_without_hook(partial(parallel, strategy="ps")), outside=True),
    }
    if not missing():
        found["no pieces"] = compiled(planned(2, 4, 4), outside=True, watch=NoPieces())
    return found


def _without_hook(make: Callable[..., StockDdp]) -> Callable[..., StockDdp]:
    """Keep the strategy's own hook: a Reducer takes one."""

    def made(model: nn.Module) -> StockDdp:
        ddp = make(model)
        ddp.register_comm_hook = lambda *_: None  # type: ignore[method-assign]
        return ddp

    return made


def replanned() -> dict[str, Any]:
    """A plan that changes after the model was compiled, and a compiler that is told to begin again."""
    torch._dynamo.reset()
    watch = Watch()
    ddp = DistributedDataParallel(Chain(), plan=plan_of(2, 8))
    watch.watch(ddp)
    model: Any = torch.compile(ddp, backend=watch.backend)
    steps(model)
    graphs, said = [watch.num_graphs], []
    for sizes in ((4, 2, 4), (2, 2, 2, 4)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ddp.replan(plan_of(*sizes))
        said.append([str(one.message) for one in seen])
        steps(model)
        graphs.append(watch.num_graphs)
    torch.compiler.reset()
    steps(model)
    return {"graphs": [*graphs, watch.num_graphs], "said": said}


SCENARIOS = {"cuts": cuts, "odd": odd, "replanned": replanned}

if __name__ == "__main__":
    be_rank(SCENARIOS)
