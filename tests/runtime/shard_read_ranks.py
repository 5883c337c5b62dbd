"""What ranks see who read parameters while they travel."""

import copy
import logging
import logging.handlers
import pickle
import random
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mgwfbp.runtime.rows.shards
from mgwfbp import DistributedDataParallel, MergePlan, ShardedOptimizer
from mgwfbp.runtime.rows.guards import Guards
from tests.runtime.holders import HOLDERS, Scaled
from tests.runtime.models import Mlp, make_plan
from tests.runtime.shard_ways import Attention, Recurrent, Way, beside_torchs, difference, sums, train


def read_everything(model: Any, optimizer: Any, step: int) -> Any:
    """Read parameters in all the ways people have, a few of them after each step."""
    module = model.module
    x = torch.ones(4, 6)
    readers: list[Callable[[], Any]] = [
        lambda: sums(model.parameters()),
        lambda: sums(model.state_dict().values()),
        lambda: sums(module.head.state_dict().values()),
        lambda: sums(copy.deepcopy(module).parameters()),
        lambda: sums(pickle.loads(pickle.dumps(module)).parameters()),  # noqa: S301 - our own
        lambda: sums([module.head(torch.ones(2, module.head.in_features))]),
        lambda: sums([module.head.weight, module.head.bias]),
        lambda: sums(dict(module.named_parameters()).values()),
        lambda: sums(dict(module.head._parameters).values()),
        lambda: sums({**module.head._parameters}.values()),
        lambda: sums((module.head._parameters | {}).values()),
        lambda: sums(nn.utils.parameters_to_vector(module.parameters()).unbind()),
        lambda: sums([torch.func.functional_call(module.eval(), dict(module.named_parameters()), (x,))]),
        lambda: sums(value for value in optimizer.state_dict()["state"][0].values() if isinstance(value, Tensor)),
        lambda: sums(one for group in optimizer.param_groups for one in group["params"]),
        lambda: sums([] + optimizer.param_groups[0]["params"]),
        lambda: sums([optimizer.param_groups[0]["params"][-1], *reversed(optimizer.param_groups[0]["params"])]),
        lambda: sums(copy.deepcopy(optimizer.param_groups[0])["params"] + optimizer.param_groups[0]["params"].copy()),
        lambda: sums(optimizer.state),
        lambda: None,
    ]
    seen = readers[step % len(readers)]()
    module.train()
    if step % 3 == 1:
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            seen = [seen, sums([model(x)])]
        model.train()
    return seen


def readers() -> dict[str, Any]:
    """What is read between steps, and an average of the model that is kept beside it."""
    found = {}
    for name, model in (("mlp", Mlp), ("attention", Attention), ("recurrent", Recurrent)):
        averages: list[AveragedModel] = []

        def between(model: Any, optimizer: Any, step: int, averages: list[AveragedModel] = averages) -> Any:
            if step == 0:
                averages.append(AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
            averages[-1].update_parameters(model.module)
            seen = read_everything(model, optimizer, step)
            if step == 10 and isinstance(model, DistributedDataParallel):
                model.replan(make_plan(model.module, 5))
            return seen, sums(averages[-1].parameters())

        ddp = {"find_unused_parameters": True} if name == "attention" else {}
        found[name] = beside_torchs(Way(optim.AdamW, {"lr": 0.01}, model=model, ddp=ddp, between=between))
    return found


@contextmanager
def late_gathers(names: tuple[str, ...] = ("all_gather",), most_s: float = 0.0) -> Iterator[None]:
    """Let messages come later than anybody would read them who does not wait: by 10 ms, or at random up to ``most_s``.

    Then by another time on each rank and in each message, some before and some after they were sent.
    """
    shards: Any = mgwfbp.runtime.rows.shards
    stock = {name: getattr(shards, name) for name in names}
    draw = random.Random(17 + dist.get_rank())

    def late(send: Callable[..., None], *args: Any) -> None:
        before_s, after_s = (draw.random() * most_s, draw.random() * most_s) if most_s else (0.01, 0.0)
        time.sleep(before_s)
        send(*args)
        time.sleep(after_s)

    for name, send in stock.items():
        setattr(shards, name, partial(late, send))
    try:
        yield
    finally:
        for name, send in stock.items():
            setattr(shards, name, send)


class Compiled(Mlp):
    """Parts of it are compiled in several ways; the compiler writes down the operations of each graph."""

    def __init__(self, way: str, graphs: list[list[str]]) -> None:
        super().__init__()

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
            return graph.forward

        self.call = super().forward
        if way in ("module", "one graph"):
            self.compile(backend=backend, fullgraph=way == "one graph")
        elif way == "a part":
            self.head.compile(backend=backend)
        else:
            self.call = torch.compile(self.call, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def evaluate(model: Any, *_: Any) -> list[float]:
    """Run the model itself while parameters travel, as people evaluate."""
    with torch.no_grad():
        return sums([model.module(torch.ones(4, 6))])


def read_scripted(model: Any, optimizer: Any, step: int) -> list[float]:
    """Read what a module has that C++ may run, each time in another way; what is fused may round otherwise."""
    module = model.module
    readers: list[Callable[[], list[Tensor]]] = [
        lambda: [module.head.weight],
        lambda: [module.forward(torch.ones(4, 6))],
        lambda: [*copy.deepcopy(module).parameters()],
        lambda: [module(torch.ones(4, 6))],
    ]
    with torch.no_grad():
        return [round(one, 3) for one in sums(readers[step % len(readers)]())]


def compiled() -> dict[str, Any]:
    """The graphs of models that are trained and evaluated in turns while parameters come late, and their ends."""
    found: dict[str, Any] = {}
    names = ["module", "a part", "method", "one graph"]
    if hasattr(torch._dynamo, "callback"):  # else nobody says that a graph is compiled
        names.append("method, not cut")
    for name in names:
        graphs: dict[bool, list[list[str]]] = {}
        ends = []
        for sharded in (False, True):
            torch.compiler.reset()
            graphs[sharded] = []
            way = Way(model=partial(Compiled, name, graphs[sharded]), between=evaluate, plain=True)
            with late_gathers(), torch._dynamo.config.patch(optimize_ddp=name != "method, not cut"):
                after, seen, _ = train(way, sharded=sharded, steps=10)
            ends.append([*after, torch.tensor(seen)])
        found[name] = {"torch's": graphs[False], "ours": graphs[True], "differences": difference(ends[1], ends[0])}
    return found


def scripted() -> dict[str, float]:
    """Models that C++ runs, and what stands for a CUDA graph, evaluated as they are while parameters come late."""

    def script_part() -> nn.Module:
        module: Any = Plain()
        module.head = torch.jit.script(module.head)
        return module  # type: ignore[no-any-return]

    def graph_part() -> nn.Module:
        module: Any = Plain()
        held = dict(module.first.named_parameters())  # whose memory a CUDA graph would have

        def replay(x: Tensor) -> Tensor:
            return nn.functional.linear(x, **held)

        replay.__module__ = "torch.cuda.graphs"
        module.first.forward = replay
        return module  # type: ignore[no-any-return]

    makers: dict[str, Callable[[], nn.Module]] = {
        "scripted": lambda: torch.jit.script(Plain()),
        "traced": lambda: torch.jit.trace(Plain(), torch.ones(4, 6)),
        "a part": script_part,
        "a CUDA graph": graph_part,
    }
    with late_gathers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch no longer likes them
        return {name: beside_torchs(Way(model=make, between=read_scripted), steps=8) for name, make in makers.items()}


class Plain(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(first=nn.Linear(6, 7), tanh=nn.Tanh(), head=nn.Linear(7, 3)))


def delays() -> dict[str, Any]:
    """Late gathers change nothing but what somebody reads who holds parameters and does not wait."""
    too_early = []

    def between(model: Any, optimizer: Any, step: int) -> Any:
        if isinstance(optimizer, ShardedOptimizer):
            held = [one.parameter for one in optimizer._shards.owned]
            before = sums(held)
            model.synchronize()
            too_early.append(before != sums(held))
        return read_everything(model, optimizer, step)

    with late_gathers():
        differences = {
            "read": beside_torchs(Way(optim.AdamW, {"lr": 0.01}, between=read_everything)),
            "only trained": beside_torchs(Way(model=Attention, ddp={"find_unused_parameters": True})),
            "held": beside_torchs(Way(between=between)),
            "recurrent": beside_torchs(Way(model=Recurrent, between=read_everything)),
        }
    return {"differences": differences, "too early": sum(too_early)}


def races() -> dict[str, Any]:
    """Messages of both kinds that are late at random change nothing, nor do plans that change meanwhile."""

    def between(model: Any, optimizer: Any, step: int) -> Any:
        if isinstance(optimizer, ShardedOptimizer) and step % 4 == 3:
            model.replan(replace(make_plan(model.module, step), gathers=make_plan(model.module, step + 1).groups))
        return read_everything(model, optimizer, step) if step % 2 else None

    ways = {
        "plans change": Way(optim.AdamW, {"lr": 0.01}, between=between),
        "clipping and accumulation": Way(optim.Adam, {"lr": 0.01}, clip=0.1, accumulate=2),
        "unused": Way(model=Attention, ddp={"find_unused_parameters": True}, between=read_everything),
        "half all-reduced": Way(gathered=0.5, between=read_everything),
    }
    with late_gathers(("all_gather", "reduce_scatter"), most_s=0.004):
        return {name: beside_torchs(way, steps=16) for name, way in ways.items()}


class Tied(nn.Module):
    """A layer whose weight another module may be given, which had none: from then on only that one is asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.head = nn.Linear(6, 6), nn.Module(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = getattr(self.other, "weight", None)
        x = self.first(x) if weight is None else nn.functional.linear(x, weight, self.first._parameters["bias"])
        return self.head(torch.tanh(x))  # type: ignore[no-any-return]


def aliased() -> dict[str, float]:
    """Modules that are given another's parameter after some steps, or the dict that they had while gathers came."""
    kept: list[Any] = []

    def tie(model: Any, _: Any, step: int) -> Any:
        module = model.module
        if step == 1:
            module.other.weight = module.first.weight
        return sums([module.other.weight]) if step > 1 else None

    def tie_a_new_one(model: Any, optimizer: Any, step: int) -> Any:
        if step == 0:
            model.module.other = nn.Module()
        return tie(model, optimizer, step)

    def put_back(model: Any, _: Any, step: int) -> Any:
        parameters = model.module.head._parameters
        if step == 1:
            kept[:] = [parameters]
        if step == 2:
            sums(model.parameters())
            vars(model.module.head)["_parameters"] = kept[0]
        return sums([model.module.head.weight])

    with late_gathers():
        return {
            edit.__name__: beside_torchs(Way(model=Tied, between=edit), steps=6)
            for edit in (tie, tie_a_new_one, put_back)
        }


class Listing(Plain):
    """Keeps all parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = list(self.parameters())


def held_otherwise() -> dict[str, float]:
    """Forward passes that begin with a parameter which they do not ask a module for, and which comes late."""
    makers: dict[str, Callable[[], nn.Module]] = {"hook": hooked}
    for name, hold in HOLDERS.items():
        makers[name] = partial(Scaled, hold)
        makers[f"{name}, inside"] = partial(Scaled, hold, is_inside=True)
    with late_gathers():
        return {name: beside_torchs(Way(model=make, between=evaluate), steps=4) for name, make in makers.items()}


def hooked() -> nn.Module:
    """A model with a hook that was there before and has a parameter of its own accord."""
    module: Any = Plain()
    scale = module.first.bias
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * scale[:6],))
    return module  # type: ignore[no-any-return]


def ordered() -> dict[str, list[int]]:
    """In which order gathers are waited for where a model waits for several at once."""
    names = ["head.weight", "first.bias", "head.bias", "first.weight"]  # no order of parameters or gradients
    x = torch.ones(4, 6)
    asked: list[int] = []

    class Asked:
        def __init__(self, *_: object) -> None:
            self.number = next(numbers)

        def ask(self) -> None:
            asked.append(self.number)

        def get(self) -> None:
            pass

    waits: dict[str, Callable[[Any], Any]] = {
        "listed": lambda model: model(x),
        "all": lambda model: model.synchronize(),
    }
    found = {}
    for name, wait in waits.items():
        model = DistributedDataParallel(Listing(), tune=False)
        plan = MergePlan("Listing", "by hand", tuple((one,) for one in names), gathers=tuple((one,) for one in names))
        optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1, plan=plan)
        model(x).sum().backward()
        numbers = count()
        optimizer._shards.on_gather = Asked
        optimizer.step()
        asked.clear()
        wait(model)
        found[name] = list(asked)
    return found


def warned() -> dict[str, list[str]]:
    """What is said of models whose forward pass begins behind gathers that others need."""
    found: dict[str, list[str]] = {}
    log = logging.getLogger("mgwfbp")
    for make in (Listing, Recurrent, Plain):
        handler = logging.handlers.BufferingHandler(100)
        handler.setLevel(logging.WARNING)
        log.addHandler(handler)
        ShardedOptimizer(DistributedDataParallel(make(), tune=False), optim.SGD, lr=0.1)
        log.removeHandler(handler)
        found[make.__name__] = [record.getMessage() for record in handler.buffer]
    return found


def interrupted() -> dict[str, Any]:
    """A thread that has waited for all parameters, and goes on only when the next ones travel."""
    torch.manual_seed(3)
    module = Plain()
    model = DistributedDataParallel(module, plan=make_plan(module, 4))
    optimizer = ShardedOptimizer(model, optim.SGD, lr=0.5)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    take_off, going_on, waits = Guards.take_off, threading.Event(), threading.Event()

    def held_up(guards: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
            going_on.wait(2.0)  # or until the main thread is where it would be too early
        take_off(guards)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with late_gathers(), mock.patch.object(Guards, "take_off", held_up):
        step()
        reader = threading.Thread(target=module.state_dict)
        reader.start()
        was_held_up = waits.wait(20.0)
        step()
        going_on.set()
        reader.join()
        with torch.no_grad():
            early = module(x)
    model.synchronize()
    with torch.no_grad():
        return {"held up": was_held_up, "right": torch.equal(early, module(x))}


SCENARIOS = (readers, delays, races, compiled, scripted, ordered, warned, aliased, held_otherwise, interrupted)
