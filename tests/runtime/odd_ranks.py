"""What one rank does in the tests of unusual training: ``python -m tests.runtime.odd_ranks FOLDER SCENARIO ...``."""

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, MgwfbpError
from tests.runtime.launch import be_rank
from tests.runtime.models import make_plan
from tests.runtime.tuner_ranks import left_on, train, tuned, vectors

# Enough for the tuner to have changed buckets several times.
STEPS = 30


class Deep(nn.Sequential):
    """2 MB of gradients, which torch sends as two messages."""

    def __init__(self) -> None:
        sizes = (6, 256, 1024, 256, 3)
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        super().__init__(*(one for layer in layers for one in (layer, nn.Tanh())))


class Heads(nn.Module):
    """Three outputs that share no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, width) for width in (9, 60_000, 300)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


class Box:
    """Nothing that DDP would look into."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Boxed(Deep):
    def forward(self, x: Tensor) -> Box:
        return Box(super().forward(x))


class ReturnsWeight(Deep):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self[0].weight  # type: ignore[return-value]


def penalised(model: Any, inputs: Tensor, _: int) -> None:
    """Two calls of autograd.grad between forward and backward pass, which average nothing."""
    inputs = inputs.requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    torch.autograd.grad(output.sum(), [output, *model.parameters()], retain_graph=True)
    (output.mean() + gradient.square().mean()).backward()


def head_by_head(model: Any, inputs: Tensor, _: int) -> None:
    """A backward pass for every head: gradients are averaged when the last has ended."""
    for output in model(inputs):
        output.square().mean().backward()


def again(model: Any, inputs: Tensor, _: int) -> None:
    """A second backward pass and a third, of which torch averages nothing."""
    loss = model(inputs).square().mean()
    for _again in range(3):
        loss.backward(retain_graph=True)


def freezing(model: Any, inputs: Tensor, step: int) -> None:
    if step in (7, 20):
        model.module[2].requires_grad_(step == 20)
    model(inputs).square().mean().backward()


def thawing(model: Any, inputs: Tensor, step: int) -> None:
    if step in (0, 7):
        model.module[2].requires_grad_(step == 7)
    model(inputs).square().mean().backward()


def half_frozen() -> nn.Module:
    model = Deep()
    model[2].requires_grad_(False)
    return model


def boxed(model: Any, inputs: Tensor, _: int) -> None:
    model(inputs).inside.square().mean().backward()


def beside(make: Callable[[], nn.Module], step: Callable[[Any, Tensor, int], None], **arguments: Any) -> dict[str, Any]:
    """Train with torch's class and with ours while it tunes."""
    models: list[Any] = []
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        model: Any = wrapper(make(), **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(STEPS):
            optimizer.zero_grad()
            step(model, vectors(number)[0], number)
            optimizer.step()
        models.append(model)
    return {**compared(*models), "state": models[1].tuning.state, "reason": models[1].tuning.reason}


def compared(stock: nn.Module, ours: Any) -> dict[str, Any]:
    same = all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    return {"same": same, "steps": ours.tuning.steps}


def ways() -> dict[str, Any]:
    return {
        "autograd.grad": beside(Deep, penalised),
        "head by head": beside(Heads, head_by_head),
        "again": beside(Deep, again),
        "freezing": beside(Deep, freezing, find_unused_parameters=True),
        "thawing": beside(half_frozen, thawing),
    }


def unseen() -> dict[str, Any]:
    return beside(Boxed, boxed)


def adversaries() -> dict[str, Any]:
    """Two models in turns; the second is frozen while the first learns from it."""
    pairs: list[list[Any]] = []
    for wrapper in (StockDdp, tuned):
        torch.manual_seed(1)
        maker, judge = wrapper(nn.Linear(6, 6)), wrapper(Deep())
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (maker, judge)]
        for step in range(STEPS):
            inputs, _labels = vectors(step)
            for learns in (judge, maker):
                judge.requires_grad_(learns is judge)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                made = maker(inputs)
                judge(made.detach() if learns is judge else made).mean().backward()
                optimizers[learns is judge].step()
        pairs.append([maker, judge])
    return {name: compared(*pair) for name, pair in zip(("maker", "judge"), zip(*pairs, strict=True), strict=True)}


def observing() -> dict[str, Any]:
    model = DistributedDataParallel(ReturnsWeight(), plan=make_plan(Deep(), 3))
    with model.observe(steps=5) as seen:
        for step in range(4):
            output, weight = model(vectors(step)[0])
            (output.mean() + weight.mean()).backward()
    found: dict[str, Any] = {"steps": len(seen.timelines), "left": left_on(model)}
    model = DistributedDataParallel(Deep(), plan=make_plan(Deep(), 3))
    train(model, vectors, 2)
    with model.observe(steps=5) as seen:
        train(model, vectors, 2)
        found["nested"] = told(model)
        train(model, vectors, 2)
    found["outer"] = len(seen.timelines)
    found["no steps"] = told(model, steps=0)
    return found


def frozen_copy() -> dict[str, Any]:
    model = DistributedDataParallel(Deep(), plan=make_plan(Deep(), 3))
    model.module[2].requires_grad_(False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        copied = copy.deepcopy(model)
    losses = train(copied, vectors, 3)
    planner = copied.plan.planner if copied.plan else None
    return {"warnings": [str(one.message) for one in seen], "planner": planner, "losses": len(losses)}


def late() -> dict[str, Any]:
    """Models that are not tuned, asked for their buckets when parameters have been frozen or thawed."""
    found: dict[str, Any] = {}
    for way, make in (("thawed", half_frozen), ("frozen", Deep)):
        model = DistributedDataParallel(make(), tune=False)
        train(model, vectors, 2)
        model.module[2].requires_grad_(way == "thawed")
        plan = make_plan(model.module, 3)
        found[way] = [raised(lambda: model.replan(plan)), told(model), model.plan]  # noqa: B023 - called at once
        model.module[2].requires_grad_(way == "frozen")  # as it was
        found[f"{way} and back"] = [model.plan is not None, len(train(model, vectors, 2))]
    return found


def seen_by_some() -> dict[str, Any]:
    """What ranks are told of which one asks for what it has not observed; and whether they are in step afterwards."""
    model = DistributedDataParallel(Deep(), plan=make_plan(Deep(), 3))
    with model.observe() as nothing:
        pass
    with model.observe() as seen:
        train(model, vectors, 1)
    with model.observe(notes=("plain",)) as noted:
        train(model, vectors, 1)
    if dist.get_rank() == 1:
        seen = noted = nothing
    found: dict[str, Any] = {"trace": raised(seen.agreed_trace), "notes": raised(noted.agreed)}
    dist.all_reduce(total := torch.ones(1))
    return {**found, "in step": total.item()}


def told(model: DistributedDataParallel, **arguments: Any) -> str:
    def observe() -> None:
        with model.observe(**arguments):
            pass

    return raised(observe)


def raised(work: Callable[[], object]) -> str:
    try:
        work()
    except MgwfbpError as error:
        return str(error)
    return ""


SCENARIOS = {
    "ways": ways,
    "unseen": unseen,
    "adversaries": adversaries,
    "observing": observing,
    "frozen_copy": frozen_copy,
    "late": late,
    "seen_by_some": seen_by_some,
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
