"""Messages in low precision as they are to come out, worked out by hand, and a model's gradients beside that."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgwfbp import DistributedDataParallel, MergePlan
from tests.runtime.models import make_plan

BITS = {"bfloat16": 8, "float16": 11}  # of a number, the leading one included


def mixed_plan(module: nn.Module, wire: str = "bfloat16", size: int = 2) -> MergePlan:
    """A plan of small messages, every second one in low precision."""
    plan = make_plan(module, size)
    return replace(plan, wire=tuple(wire if place % 2 else "" for place in range(plan.num_groups)))


def low_names(plan: MergePlan | None) -> list[str]:
    """The gradients that a plan sends in low precision."""
    assert plan is not None
    return [name for group, wire in zip(plan.groups, plan.wires, strict=True) if wire for name in group]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss(output: Tensor, scale: float = 1.0) -> Tensor:
    return scale * output.square().sum()


def local_gradients(
    module: nn.Module, make_batch: Callable[[int], Tensor], scale: float = 1.0
) -> dict[str, list[Tensor]]:
    """What each rank's gradients are, in the order of ranks, before anything is averaged."""
    return gathered(own_gradients(module, make_batch(dist.get_rank()), scale))


def own_gradients(module: nn.Module, one_batch: Tensor, scale: float = 1.0) -> dict[str, Any]:
    """What a rank's gradients are with this batch."""
    module = copy.deepcopy(module)
    module.zero_grad()
    loss(module(one_batch), scale).backward()
    return {name: one.grad for name, one in module.named_parameters() if one.requires_grad}


def gathered(mine: dict[str, Tensor | None]) -> dict[str, list[Tensor]]:
    """The gradients of all ranks, in their order."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {name: [theirs[name] for theirs in everybody] for name in mine}


def by_hand(gradients: list[Tensor], wire: str) -> Tensor:
    """The average as low precision has it: divided, rounded to so many bits, summed in fp32, rounded again."""
    divided = torch.stack([one / len(gradients) for one in gradients])
    return rounded(rounded(divided, BITS[wire]).float().sum(0), BITS[wire]).float()


def rounded(numbers: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(numbers.double())
    return torch.ldexp(torch.round(mantissa * 2**bits), exponent - bits)


def compare(model: DistributedDataParallel, local: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Compare a model's gradients with what each message of its plan must give, and with those of all ranks."""
    flat = torch.cat([one.grad.to_dense().double().flatten() for one in model.parameters() if one.grad is not None])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    assert model.plan is not None
    alike = all(torch.equal(one, flat) for one in everybody)
    return {"wrong": wrong_names(model, local), "alike": alike, "low": len(filter_low(model.plan))}


def wrong_names(model: DistributedDataParallel, local: dict[str, list[Tensor]]) -> list[str]:
    """Name the gradients that are not what each message of the plan must give."""
    plan = model.plan
    assert plan is not None
    found = {name: one.grad for name, one in model.module.named_parameters()}
    wrong = []
    for group, wire in zip(plan.groups, plan.wires, strict=True):
        for name in group:
            grad = found[name]
            if local[name][0] is None:  # of a parameter that takes no part
                continue
            assert grad is not None
            grad = grad.to_dense() if grad.is_sparse else grad
            theirs = [one.to_dense() if one.is_sparse else one for one in local[name]]
            if wire and grad.dtype is torch.float32 and not local[name][0].is_sparse:
                same = torch.equal(grad, by_hand(theirs, wire))
            else:
                average = torch.stack(theirs).double().mean(0)
                off = float((grad.double() - average).abs().max() / (average.abs().max() + 1e-30))
                same = off < (1e-2 if grad.dtype is torch.bfloat16 else 1e-5)
            wrong += [] if same else [name]
    return wrong


def odd_numbers(rank: int, scale: float) -> Tensor:
    """What a rank has for a message of which some numbers are not finite: on one rank alone, and with both signs."""
    inf, nan = float("inf"), float("nan")
    numbers = scale * (0.5 + torch.rand(41, generator=torch.Generator().manual_seed(rank)))
    numbers[3:30:3] *= 2.0 ** -torch.arange(9)  # of which the sums need all bits that float16 keeps
    if rank == 1:
        numbers[torch.tensor([0, 13, 25, 40])] = torch.tensor([inf, -inf, nan, inf])
    if rank == 0:
        numbers[torch.tensor([5, 40])] = torch.tensor([nan, -inf])  # the last of which meets its opposite
    return numbers


def filter_low(plan: MergePlan) -> list[str]:
    return [wire for wire in plan.wires if wire]
