"""What one rank does in the tests of faults: ``python -m tests.runtime.fault_ranks FOLDER SCENARIO ...``.

Each fault happens on one rank alone, while the tuner works; beside it the same training with torch's own class.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp.measure.clock import HostClock
from mgwfbp.runtime import decide as decide_module
from mgwfbp.runtime import distributed
from mgwfbp.runtime import learn as learn_module
from mgwfbp.runtime import tuner as tuner_module
from mgwfbp.runtime.kinds import check_kinds
from mgwfbp.runtime.steps import PackedSteps
from tests.runtime.launch import be_rank
from tests.runtime.modes import norm_distance
from tests.runtime.odd_ranks import Deep
from tests.runtime.tuner_ranks import left_on, tuned, vectors

STEPS = 40  # by then the tuner has changed buckets several times
ODD = 1  # the rank on which it happens


def is_odd() -> bool:
    return dist.get_rank() == ODD


Step = Callable[[Any, Iterator[Tensor]], None]


def usual(model: Any, batches: Iterator[Tensor]) -> None:
    model(next(batches)).square().mean().backward()


def dummy_loss(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank with nothing valid in its batch takes a loss of zero from all parameters."""
    output, number = model(next(batches)), next(_COUNT)
    if is_odd() and number % 3 == 0:
        (0 * sum(parameter.sum() for parameter in model.parameters())).backward()
    else:
        output.square().mean().backward()


def skipped_backward(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank does not like a loss and takes the next batch."""
    output = model(next(batches))
    if is_odd() and next(_COUNT) % 4 == 0:
        output = model(next(batches))
    output.square().mean().backward()


def caught_exception(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank's forward pass fails; it goes on with the next batch."""
    if is_odd() and next(_COUNT) % 4 == 0:
        with pytest.raises(RuntimeError):
            model(next(batches)[:, :3])  # of another shape than the model takes
    usual(model, batches)


def loss_used_twice(model: Any, batches: Iterator[Tensor]) -> None:
    loss = model(next(batches)).square().mean()
    loss.backward(retain_graph=True)
    if is_odd() and next(_COUNT) % 3 == 0:
        loss.backward()


def extra_forward(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank looks at an example between two steps, with and without gradients."""
    if is_odd():
        model(next(batches))
        with torch.no_grad():
            model(next(batches))
    usual(model, batches)


_COUNT: Iterator[int] = iter(())


def all_batches() -> Iterator[Tensor]:
    number = 0
    while True:
        yield vectors(number)[0]
        number += 1


def train(wrapper: Callable[..., Any], step: Step) -> tuple[Any, dict[str, Tensor]]:
    """Train for so many reductions; return the model and its parameters."""
    global _COUNT
    _COUNT = iter(range(10**6))
    torch.manual_seed(1)
    model = wrapper(Deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = all_batches()
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, batches)
        optimizer.step()
    return model, {f"value of {name}": value.detach().clone() for name, value in model.module.named_parameters()}


@functools.cache
def stocks(step: Step) -> dict[str, Tensor]:
    """Return the parameters that torch's class ends with."""
    return train(StockDdp, step)[1]


def beside(step: Step = usual, fault: Callable[[pytest.MonkeyPatch], None] | None = None) -> dict[str, Any]:
    """Train with torch's class, and with ours and the fault; say how far apart they end, and what ours says."""
    expected = stocks(step)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        ours, found = train(tuned, step)
    return {
        "bitwise": all(torch.equal(found[name], value) for name, value in expected.items()),
        "distance": norm_distance(found, expected, "value"),
        "state": ours.tuning.state,
        "reason": ours.tuning.reason,
        "steps": ours.tuning.steps,
        "planner": ours.plan.planner,
        "left": left_on(ours) if ours.tuning.state != "working" else [],
    }


def steps() -> dict[str, Any]:
    """Steps that one rank does differently, as stock DDP allows."""
    ways: list[Step] = [dummy_loss, skipped_backward, caught_exception, loss_used_twice, extra_forward]
    return {way.__name__: beside(way) for way in ways}


def raise_at(call: int, error: Exception, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what fails the given time it is called, on the odd rank."""
    calls = iter(range(10**6))

    def maybe(*arguments: Any, **named: Any) -> Any:
        if is_odd() and next(calls) == call:
            raise error
        return original(*arguments, **named)

    return maybe


def rebuild_fails(patch: pytest.MonkeyPatch, call: int = 1) -> None:
    """Torch has no memory for other buckets, after it has given up the old ones; the first time they are its own."""
    real: Any = dist.Reducer._rebuild_buckets  # type: ignore[attr-defined]
    calls = iter(range(10**6))

    def rebuild(reducer: Any) -> Any:
        has_rebuilt = real(reducer)
        if has_rebuilt and is_odd() and next(calls) == call:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return has_rebuilt

    patch.setattr(dist.Reducer, "_rebuild_buckets", rebuild)  # type: ignore[attr-defined]


def faults() -> dict[str, Any]:
    """Faults in every stage of tuning."""

    def planner(patch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError("no plan today")

        patch.setattr(decide_module, "find_plan", fail)  # which rank 0 alone calls

    def learning(patch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise FloatingPointError("no cost today")

        patch.setattr(learn_module, "learn_cost", fail)

    def clock(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(HostClock, "between_s", raise_at(50, OSError("the clock stopped"), HostClock.between_s))

    def reading(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(tuner_module, "check_kinds", raise_at(1, KeyError("no such parameter"), check_kinds))

    def packing(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PackedSteps, "of", raise_at(1, MemoryError("no room for numbers"), PackedSteps.of))

    def unfit(patch: pytest.MonkeyPatch) -> None:
        calls = iter(range(10**6))
        patch.setattr(
            tuner_module,
            "unfit_for_tuning",
            lambda *_: "it was compiled meanwhile" if is_odd() and next(calls) == 2 else "",
        )

    def second_rebuild(patch: pytest.MonkeyPatch) -> None:
        rebuild_fails(patch, 2)

    def construction(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(distributed, "missing", lambda: ("what it has elsewhere",) if is_odd() else ())

    stages = [construction, rebuild_fails, second_rebuild, planner, learning, clock, reading, packing, unfit]
    return {stage.__name__: beside(fault=stage) for stage in stages}


if __name__ == "__main__":
    be_rank({"steps": steps, "faults": faults})
