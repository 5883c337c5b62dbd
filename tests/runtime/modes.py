"""Ways to use DDP, each run with torch's class and with ours from the same start, and what came of it."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.nn.parallel.distributed import _MixedPrecision

from mgwfbp import DistributedDataParallel, MergePlan
from tests.runtime.models import Dtypes, Mlp, Shared, Sparse, make_plan

STEPS = 5


@dataclass(frozen=True)
class Mode:
    """One way to use DDP."""

    model: Callable[[], nn.Module] = Mlp
    arguments: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[StockDdp], object] | None = None  # registers a communication hook
    accumulate: int = 1  # backward passes per step, all but the last under no_sync
    uneven: bool = False  # under join, rank r has r steps fewer
    replan_after: int | None = None  # steps before another plan
    ignore: tuple[str, ...] = ()  # parameters that DDP shall ignore
    delay: tuple[str, ...] = ()  # parameters whose all-reduce torch delays
    in_backward: bool = False  # the optimizer runs inside the backward pass
    gpu: bool = False  # torch's own code for it needs streams
    drop_first: bool = False  # torch's own first step is wrong: it is taken, and forgotten
    wire: torch.dtype = torch.float32  # the coarsest dtype in which gradients are sent


def python_hook(hook: Any) -> Callable[[StockDdp], object]:
    return lambda ddp: ddp.register_comm_hook(None, hook)


def builtin_hook(name: str) -> Callable[[StockDdp], object]:
    return lambda ddp: ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))  # type: ignore[attr-defined]


def wrapped(wrapper: Any) -> Callable[[StockDdp], object]:
    return python_hook(wrapper(default_hooks.allreduce_hook))


VIEWS, STATIC, UNUSED = {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}


# With torch 2.11 over gloo the gradients of the first step are off by their own size from those in full precision, with
# torch's own buckets as with any; from the second on they are right.
HALF = {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)}


def half(**more: Any) -> Mode:
    return Mode(gpu=True, drop_first=True, wire=torch.bfloat16, **{"arguments": HALF, **more})


def shared_unused() -> nn.Module:
    return Shared(unused=True)


def dtypes_half() -> nn.Module:
    return Dtypes(half=True)


MODES = {
    "plain": Mode(),
    "views": Mode(arguments=VIEWS),
    "static": Mode(arguments=STATIC),
    "static views": Mode(arguments=STATIC | VIEWS),
    "static unused": Mode(shared_unused, STATIC),
    "static and unused": Mode(shared_unused, STATIC | UNUSED),
    "unused": Mode(shared_unused, UNUSED),
    "unused views": Mode(shared_unused, UNUSED | VIEWS),
    "unused skipped": Mode(shared_unused, UNUSED | {"skip_all_reduce_unused_params": True}),
    "frozen and shared": Mode(Shared),
    "no_sync": Mode(accumulate=3),
    "no_sync views": Mode(accumulate=3, arguments=VIEWS),
    "no_sync unused": Mode(shared_unused, UNUSED, accumulate=2),
    "dtypes": Mode(Dtypes),
    "dtypes with half": Mode(dtypes_half, wire=torch.bfloat16),
    "dtypes views": Mode(Dtypes, VIEWS),
    "dtypes static": Mode(Dtypes, STATIC),
    "dtypes unused": Mode(Dtypes, UNUSED),
    "sparse": Mode(Sparse),
    "join": Mode(uneven=True),
    "join unused": Mode(shared_unused, UNUSED, uneven=True),
    "ignored": Mode(ignore=("layers.1.weight", "layers.1.bias")),
    "delayed": Mode(delay=("layers.1.weight",)),
    "batched copies": Mode(arguments={"batched_grad_copy": True}),
    "lazy buckets": Mode(arguments={"lazy_bucket_allocation": True}),
    "optimizer in backward": Mode(gpu=True, in_backward=True),
    "gpu": Mode(gpu=True),
    "gpu dtypes": Mode(Dtypes, gpu=True),
    "hook allreduce": Mode(hook=python_hook(default_hooks.allreduce_hook)),
    "hook fp16": Mode(hook=python_hook(default_hooks.fp16_compress_hook), wire=torch.float16),
    "hook bf16": Mode(hook=python_hook(default_hooks.bf16_compress_hook), wire=torch.bfloat16),
    "hook fp16 wrapper": Mode(hook=wrapped(default_hooks.fp16_compress_wrapper), wire=torch.float16),
    "hook bf16 wrapper": Mode(hook=wrapped(default_hooks.bf16_compress_wrapper), wire=torch.bfloat16),
    "builtin allreduce": Mode(hook=builtin_hook("ALLREDUCE")),
    "builtin fp16": Mode(hook=builtin_hook("FP16_COMPRESS"), wire=torch.float16),
    "replan": Mode(replan_after=2),
    "replan at once": Mode(replan_after=0),
    "replan views": Mode(arguments=VIEWS, replan_after=2),
    "replan static": Mode(shared_unused, STATIC, replan_after=2),
    "replan unused": Mode(shared_unused, UNUSED, replan_after=2),
    "replan static and unused": Mode(shared_unused, STATIC | UNUSED, replan_after=2),
    "replan no_sync": Mode(accumulate=2, replan_after=2),
    "replan dtypes": Mode(Dtypes, replan_after=2),
    "replan sparse": Mode(Sparse, replan_after=2),
    "replan hook": Mode(hook=python_hook(default_hooks.bf16_compress_hook), wire=torch.bfloat16, replan_after=2),
    "replan builtin": Mode(hook=builtin_hook("FP16_COMPRESS"), wire=torch.float16, replan_after=2),
    "mixed precision": half(),
    "mixed precision views": half(arguments=HALF | VIEWS),
    "replan gpu": Mode(gpu=True, arguments=VIEWS, replan_after=2),
    "replan optimizer in backward": Mode(gpu=True, in_backward=True, replan_after=2),
}


def available(mode: Mode) -> bool:
    """Whether this torch has the mode's arguments, and this machine its device."""
    if mode.gpu and not torch.cuda.is_available():
        return False
    if not set(mode.arguments) <= set(inspect.signature(StockDdp.__init__).parameters):
        return False
    try:
        wrap(mode, StockDdp)
    except TypeError:  # a hook that this torch has for GPUs alone
        return False
    return True


def build(mode: Mode) -> nn.Module:
    torch.manual_seed(1)
    model = mode.model()
    if mode.ignore:
        StockDdp._set_params_and_buffers_to_ignore_for_model(model, list(mode.ignore))
    return model.cuda() if mode.gpu else model


def arguments(mode: Mode, model: nn.Module) -> dict[str, Any]:
    given = dict(mode.arguments)
    if mode.delay:
        named = dict(model.named_parameters())
        given["delay_all_reduce_named_params"] = [(name, named[name]) for name in mode.delay]
        given["param_to_hook_all_reduce"] = named["head.weight"]
    return given


def train(mode: Mode, ddp: StockDdp, plans: list[MergePlan]) -> dict[str, Tensor]:
    """Train for a few steps; return all gradients and parameters."""
    model = ddp.module
    rank, device = dist.get_rank(), next(model.parameters()).device
    if mode.in_backward:
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        optimizer = None
    else:
        # Torch does not wait for delayed gradients on a CPU: leave them out of the update.
        some = [parameter for name, parameter in model.named_parameters() if name not in mode.delay]
        optimizer = torch.optim.SGD(some, lr=0.05, momentum=0 if mode.model is Sparse else 0.9)
    data = torch.Generator().manual_seed(10 + rank)
    if mode.drop_first:
        ddp(torch.randn(8, 6, generator=data).to(device)).float().square().mean().backward()
        ddp.zero_grad()
    num_steps = STEPS - rank if mode.uneven else STEPS
    with ddp.join() if mode.uneven else nullcontext():
        for step in range(num_steps):
            if step == mode.replan_after and isinstance(ddp, DistributedDataParallel):
                ddp.replan(plans[1])
            if optimizer is not None:
                # Gradients of the step before stay where a view of a bucket must outlive a change of plan.
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(mode.accumulate):
                last = micro == mode.accumulate - 1
                with nullcontext() if last else ddp.no_sync():
                    ddp(torch.randn(8, 6, generator=data).to(device)).float().square().mean().backward()
            if optimizer is not None:
                optimizer.step()
    found = {f"value of {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in mode.delay:
            gradient = parameter.grad
            found[f"gradient of {name}"] = (gradient.to_dense() if gradient.is_sparse else gradient).clone()
    return found


def compare(mode: Mode) -> dict[str, Any]:
    """Train with torch's class and with ours; say how far apart they end, and what our Reducer sent."""
    plans = [make_plan(mode.model(), seed, leave_out=mode.ignore + mode.delay) for seed in (3, 4)]
    expected = train(mode, wrap(mode, StockDdp), plans)
    ours = wrap(mode, DistributedDataParallel, plan=plans[0])
    assert isinstance(ours, DistributedDataParallel)
    found = train(mode, ours, plans)
    assert found.keys() == expected.keys()
    assert ours.plan == plans[0 if mode.replan_after is None else 1]
    distance = max(norm_distance(found, expected, kind) for kind in ("gradient", "value"))
    moved = any(
        not torch.equal(value, parameter) for value, parameter in zip(found.values(), start(mode), strict=False)
    )
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    allowed = 1e-6 if mode.wire is torch.float32 else torch.finfo(mode.wire).eps
    return {"bitwise": same, "distance": distance, "allowed": allowed, "moved": moved, "sent": sent(mode, plans)}


def norm_distance(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> float:
    """How far apart all gradients, or all parameters, are: the norm of the difference over the norm.

    Over all of them together: a gradient that nearly cancels over the ranks has no digits of its own.
    """
    names = [name for name in expected if name.startswith(kind)]
    difference = sum((found[name].double() - expected[name].double()).square().sum().item() for name in names)
    return (difference / sum(expected[name].double().square().sum().item() for name in names)) ** 0.5 if names else 0.0


def start(mode: Mode) -> list[Tensor]:
    return [parameter.detach() for parameter in build(mode).parameters()]


def wrap(mode: Mode, kind: Callable[..., StockDdp], **more: Any) -> StockDdp:
    model = build(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that static_graph needs no find_unused_parameters
        ddp = kind(model, **arguments(mode, model), **more)
    if mode.hook is not None:
        mode.hook(ddp)
    return ddp


def sent(mode: Mode, plans: list[MergePlan]) -> str:
    """Watch every bucket of every step with a communication hook; say where it was not the plan's, if anywhere."""
    if mode.hook is not None or mode.uneven or mode.in_backward or "mixed_precision" in mode.arguments:
        return ""  # a Reducer takes one hook; join calls it outside of steps
    ddp = wrap(mode, DistributedDataParallel, plan=plans[0])
    assert isinstance(ddp, DistributedDataParallel)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    seen: list[tuple[tuple[str, ...], int]] = []

    def record(
        group: dist.ProcessGroup | None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        seen.append((tuple(names[id(parameter)] for parameter in bucket.parameters()), bucket.buffer().numel()))
        return default_hooks.allreduce_hook(group, bucket)  # type: ignore[arg-type]

    ddp.register_comm_hook(None, record)
    for step in range(3):
        if step == mode.replan_after:
            ddp.replan(plans[1])
        plan = plans[1] if mode.replan_after is not None and step >= mode.replan_after else plans[0]
        seen.clear()
        ddp(torch.randn(8, 6, device="cuda" if mode.gpu else "cpu")).float().square().mean().backward()
        sizes = {name: parameter.numel() for name, parameter in ddp.module.named_parameters()}
        wanted = [(group, sum(sizes[name] for name in group)) for group in plan.groups]
        got = [(group, size if "embedding.weight" not in group else sizes[group[0]]) for group, size in seen]
        if mode.arguments.get("skip_all_reduce_unused_params"):  # messages without a used gradient are not sent
            wanted = [(group, size) for group, size in wanted if any("unused" not in name for name in group)]
        if got != wanted:
            return f"step {step}: sent {got}, the plan is {wanted}"
    return ""
