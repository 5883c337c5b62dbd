"""What one rank does in the tests of odd ways to use `fully_shard`: ``python -m tests.runtime.fsdp_odd_ranks``."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mgwfbp
from mgwfbp import FsdpPlan, LinearCost, ModelTrace
from mgwfbp.errors import PlanError
from mgwfbp.fsdp import precision_of, predict_fsdp
from mgwfbp.measure.backward import measure_backward
from mgwfbp.measure.modules import unit_names
from mgwfbp.planners.fsdp_by_hand import plan_by_block
from tests.runtime.fsdp_planning_ranks import COST, trace_of
from tests.runtime.fsdp_ranks import PLANS, Block, Blocks, difference, events_of, heard, plan_of, stock, told, whole
from tests.runtime.launch import be_rank

# Messages are so slow that as few of them as may be are planned.
SLOW = LinearCost(workers=2, startup_s=1.0, per_byte_s=1e-9)


class Again(nn.Module):
    """A block that runs again behind the others, a list whose modules run twice, and a head that the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.h = nn.ModuleList(Block() for _ in range(5))
        self.parts = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self.parts
        x = self.stem(x)
        for place in (0, 1, 2, 3, 4, 1):
            x = self.h[place](x)
        for _ in range(2):
            for first, second in parts:
                x = second(torch.tanh(first(x)))
        return self.norm(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(part).square().mean() for part in x.chunk(2)]).sum()


def learn(model: Any, loss_fn: Any, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Return losses and parameters."""
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = loss_fn(model(torch.rand(6, 4, generator=data)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, whole(model)


def again() -> dict[str, Any]:
    """What is planned of modules that run again, what is said, and what is learnt beside torch's."""
    torch.manual_seed(3)
    model = Again()
    for block in model.h:
        torch.distributed.fsdp.fully_shard(block)
    expected = learn(torch.distributed.fsdp.fully_shard(model), model.loss)
    torch.manual_seed(3)
    model = Again()
    given: dict[str, Any] = {"batch": torch.rand(6, 4), "loss_fn": model.loss, "cost": SLOW}
    planned = mgwfbp.plan_fully_shard(model, **given, memory_limit="1 GiB")
    lines, ours = heard(partial(mgwfbp.fully_shard, model, **given, memory_limit="1 GiB"))
    torch.manual_seed(3)
    model = Again()
    gone = mgwfbp.fully_shard(model, replace(planned.plan, reshard=(True,) * len(planned.plan.groups)))
    return {
        "kept": difference(learn(ours, ours.loss), expected),
        "resharded": difference(learn(gone, model.loss), expected),
        "plan": planned.plan.to_json(),
        "trace": planned.trace.to_json(),
        "said": lines,
    }


class Predicting(Blocks):
    """A head that runs again behind the forward pass of its group, whose output is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.further = nn.LayerNorm(6), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.h:
            x = block(x)
        first = self.head(self.norm(x))
        self.second = self.head(self.further(x))
        return first  # type: ignore[no-any-return]

    def loss(self, output: Tensor) -> Tensor:
        return torch.stack([one.square().mean() for one in (output, self.second)]).sum()


def predicting() -> dict[str, Any]:
    """What is learnt by what wraps a head with the norm before it, resharded, were it not that it runs again."""
    torch.manual_seed(3)
    model = Predicting()
    trace = measure_backward(model, torch.rand(6, 4), model.loss, steps=1, warmup=0)
    plan = plan_by_block(trace)
    for block in model.h:
        torch.distributed.fsdp.fully_shard(block)
    expected = learn(torch.distributed.fsdp.fully_shard(model), model.loss)
    torch.manual_seed(3)
    model = mgwfbp.fully_shard(Predicting(), replace(plan, reshard=(True,) * len(plan.groups)))
    return {"difference": difference(learn(model, model.loss), expected), "groups": plan.groups}


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


class Shift(nn.Module):
    """Returns what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(8, 6))

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {"shifts": (self.table[: len(x)],)}


class Read(Blocks):
    """Weights that are read while their modules do not run: by the model, by the loss, and a view that one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.shift(x)["shifts"][0]
        for block in self.h:
            x = block(x)
        return self.head(x).mean() + x @ self.stem.weight  # type: ignore[no-any-return]

    def loss(self, output: Tensor) -> Tensor:
        return loss_of(output) + self.head.bias.square().sum()


class Stopped(Blocks):
    """Blocks that are trained and run without gradients, before, between and behind others."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.h[0](self.stem(x))
        x = self.h[1](x)
        with torch.no_grad():
            shift = self.h[2](x)
        x = self.head(self.h[3](x + shift))
        with torch.no_grad():
            shift = self.h[4](torch.cat([x, x], -1))
        return x + shift[:, :3]  # type: ignore[no-any-return]


def elsewhere() -> dict[str, Any]:
    """What is learnt by such models where every group is resharded, what is said, and what FSDP2 then does."""
    found: dict[str, Any] = {}
    for kind in (Read, Stopped):
        torch.manual_seed(3)
        model: Any = kind()
        loss_fn = getattr(model, "loss", loss_of)
        for block in model.h:
            torch.distributed.fsdp.fully_shard(block)
        expected = learn(torch.distributed.fsdp.fully_shard(model), loss_fn)
        torch.manual_seed(3)
        model = kind()
        loss_fn = getattr(model, "loss", loss_of)
        plan = mgwfbp.plan_fully_shard(model, batch=torch.rand(6, 4), loss_fn=loss_fn, cost=COST).plan
        names = [name for group in plan.groups for name in group]
        each = replace(plan, groups=tuple((name,) for name in names), reshard=(True,) * len(names))
        lines, model = heard(partial(mgwfbp.fully_shard, model, each))
        error = difference(learn(model, loss_fn), expected)
        found[kind.__name__] = {"plan": each.to_json(), "said": lines, "difference": error, "events": events_of(model)}
    return found


def meshes() -> dict[str, Any]:
    """Replicas of shards in a mesh of half of the ranks, and of all: plans of their own, and such as are made."""
    found: dict[str, Any] = {}
    parts = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("tensor", "replicate", "shard"))["replicate", "shard"]
    replica = parts.get_local_rank("replicate")
    given = plan_of(Blocks, *((7,), (3, 4))[replica])
    found["other plans"] = told(lambda: mgwfbp.fully_shard(Blocks(), given, mesh=parts))
    every = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, mesh in (("parts", parts), ("all", every)):
        # What ranks know differs: where messages are dear groups are larger.
        cost = LinearCost(mesh.size(1), (1e-9, 1.0)[replica], 1e-9)
        torch.manual_seed(3)
        expected = learn(stock(Blocks(), mesh=mesh), loss_of)
        planned = mgwfbp.plan_fully_shard(Blocks(), mesh=mesh, trace=trace_of(Blocks()), cost=cost)
        torch.manual_seed(3)
        ours = mgwfbp.fully_shard(Blocks(), mesh=mesh, trace=trace_of(Blocks()), cost=cost)
        error = difference(learn(ours, loss_of), expected)
        found[name] = {"groups": planned.plan.groups, "difference": error}
    torch.manual_seed(3)
    measured = mgwfbp.fully_shard(Blocks(), mesh=every, batch=torch.rand(6, 4), loss_fn=loss_of)
    found["measured"] = difference(learn(measured, loss_of), expected)
    return found


class Mixed(Blocks):
    """The blocks are frozen in 16 bits, what is around them is trained in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.h.bfloat16().requires_grad_(False)


def arguments() -> dict[str, Any]:
    """What is planned with arguments of torch's."""
    both = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    offload = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    torch.manual_seed(3)
    model, mixed = Blocks(), Mixed()
    trace = trace_of(model)
    layers = tuple(layer for layer in trace.layers if not layer.name.startswith("h."))
    within = {"within": layers[-1].name, "share": 0.0, "next": layers[0].name}
    frozen = [{"name": name, "bytes": one.nbytes, **within} for name, one in mixed.h.named_parameters(prefix="h")]
    of_mixed = ModelTrace("toy", trace.forward_s, layers, {"frozen": frozen})
    ways: dict[str, tuple[nn.Module, ModelTrace, dict[str, Any]]] = {
        "plain": (model, trace, {"reshard_after_forward": None, "mp_policy": None}),
        "offloaded": (model, trace, {"offload_policy": offload}),
        "ignored": (model, trace, {"ignored_params": {*model.h[1].parameters(), model.head.weight}}),
        "mixed": (mixed, of_mixed, {"mp_policy": both}),
        "as stored": (mixed, of_mixed, {}),
    }
    found: dict[str, Any] = {}
    for name, (one, its, given) in ways.items():
        planned = mgwfbp.plan_fully_shard(one, trace=its, cost=COST, memory_limit="1 MiB", **given)
        by_hand = replace(plan_by_block(planned.trace), predicted=planned.plan.predicted)
        step = predict_fsdp(planned.trace, COST, by_hand, precision=precision_of(by_hand))
        sizes = {group[0]: size for group, size in zip(step.groups, step.group_bytes, strict=True)}
        gathers = {group[0]: end - start for group, (start, end) in zip(step.groups, step.gathers_s, strict=True)}
        precision = planned.plan.predicted["precision"]
        found[name] = {"memory": step.memory_bytes, "sizes": sizes, "gathers": gathers, "precision": precision}
    plan = mgwfbp.plan_fully_shard(model, trace=trace, cost=COST)[0]
    others = {"same": Blocks(), "in 16 bits": Blocks().bfloat16(), "frozen": Mixed().float()}
    found["warned"] = {
        name: [line for line in heard(partial(mgwfbp.fully_shard, one, plan))[0] if line.startswith("WARNING")]
        for name, one in others.items()
    }
    ours = mgwfbp.fully_shard(model, trace=trace, cost=COST, reshard_after_forward=None)
    return {**found, "wrapped": isinstance(ours, torch.distributed.fsdp.FSDPModule)}


class Adapted(Blocks):
    """Blocks of which the first ones are frozen, behind a stem that is trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.h[:3]:
            block.requires_grad_(False)


def reached() -> dict[str, Any]:
    """What FSDP2 does where the backward pass goes on from trained groups to frozen ones, to the root's stem."""
    planned = mgwfbp.plan_fully_shard(Adapted(), batch=torch.rand(6, 4), loss_fn=loss_of, cost=COST)
    groups = tuple((f"h.{place}",) for place in range(5))
    plan = FsdpPlan("toy", groups, (True,) * 5, predicted=planned.plan.predicted, root=("stem", "head"))
    return {"events": events_of(mgwfbp.fully_shard(Adapted(), plan))}


class Checkpointed(Blocks):
    """Blocks that are computed again in the backward pass, all of them or every second one."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for place, block in enumerate(self.h):
            x = block(x) if place % self.each else checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def checkpointed() -> dict[str, Any]:
    """What is learnt where activations are computed again, by plans that are given and one that is made."""
    found = {}
    for each in (1, 2):
        torch.manual_seed(3)
        expected = learn(stock(Checkpointed(each)), loss_of)
        ways: dict[str, dict[str, Any]] = {name: {"plan": plan} for name, plan in PLANS[Blocks].items()}
        for name, given in {**ways, "made": {"batch": torch.rand(6, 4), "loss_fn": loss_of, "cost": COST}}.items():
            torch.manual_seed(3)
            found[f"{name}, {each}"] = difference(
                learn(mgwfbp.fully_shard(Checkpointed(each), **given), loss_of), expected
            )
    return found


def on_meta() -> dict[str, Any]:
    """A model that gets its memory, and then its parameters, after it was wrapped."""
    torch.manual_seed(3)
    state = {name: one.clone() for name, one in Blocks().state_dict().items()}

    def filled(model: Any) -> Any:
        model.to_empty(device="cpu")
        states.set_model_state_dict(model, state, options=states.StateDictOptions(full_state_dict=True))
        return model

    with torch.device("meta"):
        theirs, ours = Blocks(), Blocks()
    expected = learn(filled(stock(theirs)), loss_of)
    trace = trace_of(Blocks())
    plan = mgwfbp.plan_fully_shard(ours, trace=trace, cost=COST)[0]
    mgwfbp.fully_shard(ours, trace=trace, cost=COST)
    was_meta = all(one.is_meta for one in ours.parameters())
    same = plan == mgwfbp.plan_fully_shard(Blocks(), trace=trace, cost=COST)[0]
    return {"difference": difference(learn(filled(ours), loss_of), expected), "was_meta": was_meta, "same": same}


class Distilled(Blocks):
    """A probe whose output is left out, and a frozen teacher that runs without gradients behind what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.teacher = nn.Linear(6, 2), Blocks().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x) * self.scale
        for place, block in enumerate(self.h):
            y = block(y)
            if place == 1:
                self.probe(y)
        with torch.no_grad():
            expected = self.teacher(x)
        return self.head(y) - expected  # type: ignore[no-any-return]


def silent() -> dict[str, Any]:
    """What is learnt by plans for ever less memory, where modules return nothing that a gradient reaches."""
    torch.manual_seed(3)
    model = Distilled()
    for block in (*model.h, *model.teacher.h):
        torch.distributed.fsdp.fully_shard(block)
    expected = learn(torch.distributed.fsdp.fully_shard(model), loss_of)
    torch.manual_seed(3)
    planned = mgwfbp.plan_fully_shard(Distilled(), batch=torch.rand(6, 4), loss_fn=loss_of, cost=SLOW)
    most, plans = planned.plan.predicted["memory_bytes"], list[FsdpPlan]()
    for percent in range(60, 101, 5):
        with contextlib.suppress(PlanError):  # where none fits
            limit = most * percent // 100
            made = mgwfbp.plan_fully_shard(Distilled(), trace=planned.trace, cost=SLOW, memory_limit=limit).plan
            plans += [] if made in plans else [made]
    found = []
    for plan in plans:
        torch.manual_seed(3)
        found.append(difference(learn(mgwfbp.fully_shard(Distilled(), plan), loss_of), expected))
    merged = [
        any(is_gone and len(group) > 1 for group, is_gone in zip(plan.groups, plan.reshard, strict=True))
        for plan in plans
    ]
    by_block = plan_by_block(planned.trace)
    step = predict_fsdp(planned.trace, SLOW, by_block)
    again = [group[0] for group, span in zip(step.groups, step.gathers_again_s, strict=True) if span]
    together = ("h.0", "h.1", "probe")
    groups = (together, *((one,) for one in sorted(unit_names(Distilled()) - {*together})))
    wrong = replace(planned.plan, groups=groups, reshard=(True,) * len(groups), root=(), idle=())
    try:
        refused = str(mgwfbp.fully_shard(Distilled(), wrong) and "")
    except PlanError as error:
        refused = str(error)
    return {
        "differences": found,
        "merged": merged,
        "again": again,
        "no_gradient": list(planned.trace.source["no_gradient"]),
        "refused": refused,
    }


def compiled() -> dict[str, float]:
    """What is learnt where every block is a graph of its own, compiled in place or put around it."""
    found = {}
    ways: dict[str, Callable[[Any, int], Any]] = {
        "in place": lambda blocks, place: blocks[place].compile(backend="eager", fullgraph=True),
        "around": lambda blocks, place: blocks.__setitem__(
            place, torch.compile(blocks[place], backend="eager", fullgraph=True)
        ),
    }
    for name, compile_block in ways.items():
        learnt = []
        for wrap in (stock, partial(mgwfbp.fully_shard, batch=torch.rand(6, 4), loss_fn=loss_of, cost=COST)):
            torch.manual_seed(3)
            model = Blocks()
            for place in range(len(model.h)):
                compile_block(model.h, place)
            learnt.append(learn(wrap(model), loss_of))
        found[name] = difference(*learnt)
    return found


def evaluated() -> dict[str, Any]:
    """What an evaluation leaves behind where all groups are kept, and what the next one computes with."""
    model = mgwfbp.fully_shard(Blocks(), plan_of(Blocks, 1, 2, 3, 1, reshard=False))
    x = torch.rand(6, 4)
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x).abs().sum().item()
        left = sum(not hasattr(one, "full_tensor") for one in model.parameters())
        for one in model.parameters():
            one.zero_()
        return {"before": before, "whole": left, "after": model(x).abs().sum().item()}


SCENARIOS = {
    one.__name__: one
    for one in (
        again,
        predicting,
        elsewhere,
        meshes,
        arguments,
        reached,
        checkpointed,
        on_meta,
        silent,
        compiled,
        evaluated,
    )
}

if __name__ == "__main__":
    be_rank(SCENARIOS)
