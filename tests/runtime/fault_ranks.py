"""What one rank does in the tests of faults: ``python -m tests.runtime.fault_ranks FOLDER SCENARIO ...``.

Each fault happens on one rank alone, while the tuner works; beside it the same training with torch's own class.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import DistributedDataParallel, PlanError
from mgwfbp.measure.clock import HostClock
from mgwfbp.measure.hooks import GradientHooks
from mgwfbp.runtime import distributed
from mgwfbp.runtime.messages import channel, gloo
from mgwfbp.runtime.messages.gloo import store_of
from mgwfbp.runtime.observe import learn as learn_module
from mgwfbp.runtime.observe import observer as observe_module
from mgwfbp.runtime.observe.steps import PackedSteps
from mgwfbp.runtime.reducer.kinds import check_kinds
from mgwfbp.runtime.reducer.support import missing
from mgwfbp.runtime.tune import decide as decide_module
from mgwfbp.runtime.tune import room, self_tuning
from mgwfbp.runtime.tune import tuner as tuner_module
from tests.runtime.launch import be_rank
from tests.runtime.models import make_plan
from tests.runtime.modes import norm_distance
from tests.runtime.odd_ranks import Deep
from tests.runtime.tuner_ranks import left_on, tuned, vectors

STEPS = 40  # by then the tuner has changed buckets several times
SETTLED_STEPS = 160  # by then it has settled
ARMED = 12  # the step from which faults happen that have no other place: the tuner is at work
WARM = 5  # a step before the tuner has begun to plan
ODD = 1  # the rank on which faults happen, where nothing else is said

_odd = ODD


def is_odd() -> bool:
    return dist.get_rank() == _odd


@contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """Let faults happen on this rank."""
    global _odd
    before, _odd = _odd, rank
    try:
        yield
    finally:
        _odd = before


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


class NotThisTimeError(Exception):
    """What a user's hook or callback raises in a backward pass."""


def exception_before_gradients(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank's backward pass fails before it has a gradient; it goes on with the next batch."""
    if is_odd() and next(_COUNT) % 4 == 0:
        output = model(next(batches))
        output.register_hook(_raise)
        with pytest.raises(NotThisTimeError):
            output.square().mean().backward()
    usual(model, batches)


def exception_after_gradients(model: Any, batches: Iterator[Tensor]) -> None:
    """A rank's backward pass fails when all gradients are averaged, sooner or later after that; not the last one."""
    number = next(_COUNT)
    output = model(next(batches))
    if is_odd() and number % 2 == 0:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        late: Callable[[], Any] = _raise
        for _ in range(1 + number % 4 // 2):
            late = functools.partial(queue, late)
        output.register_hook(lambda _: queue(late))
        with pytest.raises(NotThisTimeError):
            output.square().mean().backward()
    else:
        output.square().mean().backward()


def _raise(_: Any = None) -> None:
    raise NotThisTimeError


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
_step = 0  # of the training that runs


def all_batches() -> Iterator[Tensor]:
    number = 0
    while True:
        yield vectors(number)[0]
        number += 1


def train(
    wrapper: Callable[..., Any], step: Step, mode: str = "plain", steps: int = STEPS
) -> tuple[Any, dict[str, Tensor]]:
    """Train for so many reductions; return the model and its parameters."""
    global _COUNT, _step
    _COUNT, _step = iter(range(10**6)), 0
    torch.manual_seed(1)
    arguments, hook = MODES[mode]
    model = wrapper(Deep(), **arguments)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = all_batches()
    for _step in range(steps):
        optimizer.zero_grad()
        step(model, batches)
        optimizer.step()
    return model, {f"value of {name}": value.detach().clone() for name, value in model.module.named_parameters()}


# Arguments of the model, and a communication hook.
MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "views": ({"gradient_as_bucket_view": True}, None),
    "unused": ({"find_unused_parameters": True}, None),
    "static": ({"static_graph": True}, None),
    "hook": ({}, default_hooks.allreduce_hook),
    "static hook": ({"static_graph": True}, default_hooks.allreduce_hook),
}


@functools.cache
def stocks(step: Step, mode: str = "plain", steps: int = STEPS) -> dict[str, Tensor]:
    """Return the parameters that torch's class ends with."""
    return train(StockDdp, step, mode, steps)[1]


Fault = Callable[[pytest.MonkeyPatch], None]


def beside(
    step: Step = usual, fault: Fault | None = None, mode: str = "plain", steps: int = STEPS, **arguments: Any
) -> dict[str, Any]:
    """Train with torch's class, and with ours and the fault; say how far apart they end, and what ours says."""
    expected = stocks(step, mode, steps)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        ours, found = train(functools.partial(tuned, **arguments), step, mode, steps)
    return {
        "bitwise": all(torch.equal(found[name], value) for name, value in expected.items()),
        "distance": norm_distance(found, expected, "value"),
        "state": ours.tuning.state,
        "reason": ours.tuning.reason,
        "problem": ours.tuning.problem,
        "steps": ours.tuning.steps,
        "planner": ours.plan.planner,
        "left": left_on(ours) if ours.tuning.state != "working" else [],
        "low": [one.name for one in ours.tuning.candidates if one.plan.wire],
    }


def steps() -> dict[str, Any]:
    """Steps that one rank does differently, as stock DDP allows."""
    return {way.__name__: beside(way) for way in WAYS}


WAYS: list[Step] = [
    dummy_loss,
    skipped_backward,
    caught_exception,
    exception_before_gradients,
    exception_after_gradients,
    loss_used_twice,
    extra_forward,
]


def steps_in_other_modes() -> dict[str, Any]:
    """The same where a Reducer gets its buckets, or sends them, in another way."""
    ways = [dummy_loss, skipped_backward, exception_before_gradients, exception_after_gradients]
    return {
        # Torch's own static graph cannot have a dummy loss in its first step.
        mode: {way.__name__: beside(way, mode=mode, steps=30) for way in ways[mode == "static" :]}
        for mode in ("views", "unused", "static", "hook")
    }


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

    def moments(patch: pytest.MonkeyPatch) -> None:
        """Whatever is noted of a step fails, in the forward pass, in the backward pass and at its end."""
        patch.setattr(HostClock, "now", raise_from(ARMED, OSError("no time"), HostClock.now))

    def noting(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(observe_module, "GradientHooks", raise_at(0, MemoryError("no hooks"), GradientHooks))

    def unpacking(patch: pytest.MonkeyPatch) -> None:
        unpacked = PackedSteps.unpacked

        def fail(packed: PackedSteps, world: int) -> Any:
            if _step > ARMED:
                raise OverflowError("too many numbers")
            return unpacked(packed, world)

        patch.setattr(PackedSteps, "unpacked", fail)  # which rank 0 alone calls

    stages = [construction, rebuild_fails, second_rebuild, planner, learning, clock, reading, packing, unfit]
    return {stage.__name__: beside(fault=stage) for stage in [*stages, moments, noting, unpacking]}


def warming_up(patch: pytest.MonkeyPatch) -> None:
    """Something fails while the tuner waits for torch's own buckets."""
    patch.setattr(HostClock, "now", raise_from(WARM, OSError("no time"), HostClock.now))


def beginning(patch: pytest.MonkeyPatch) -> None:
    """One rank cannot be tuned when all begin to plan: it was compiled, say."""
    patch.setattr(tuner_module, "unfit_for_tuning", lambda *_: "it was compiled meanwhile" if is_odd() else "")


def agreement(patch: pytest.MonkeyPatch) -> None:
    """The device has no memory left for what ranks tell one another, from when tuning began."""
    for name in ("tensor", "zeros", "empty", "frombuffer"):
        make = getattr(torch, name)
        fail = raise_from(WARM, torch.cuda.OutOfMemoryError("CUDA out of memory."), make)

        def on_device(*given: Any, make: Any = make, fail: Any = fail, **named: Any) -> Any:
            return (fail if "device" in named else make)(*given, **named)

        patch.setattr(torch, name, on_device)


def early_faults() -> dict[str, Any]:
    """Faults before the first plan, and in what ranks tell one another, on either rank of the first two."""
    found = {}
    for rank in (0, 1):
        with on_rank(rank):
            stages = [warming_up, beginning, agreement]
            found.update({f"{stage.__name__} {rank}": beside(fault=stage) for stage in stages})
    return found


def raise_from(step: int, error: Exception, original: Callable[..., Any], times: int = 10**6) -> Callable[..., Any]:
    """Return what fails on the odd rank from this step on, so many times."""
    left = iter(range(times))

    def maybe(*arguments: Any, **named: Any) -> Any:
        if is_odd() and _step >= step and next(left, None) is not None:
            raise error
        return original(*arguments, **named)

    return maybe


def no_memory(times: int, *, makes: bool = True) -> Fault:
    """Torch has no memory for buckets so many times, the old ones being gone: in a new Reducer, and in one it has."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        missing()  # makes Reducers, once
        error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        give_up = raise_from(ARMED, error, lambda: None, times)
        rebuild: Any = dist.Reducer._rebuild_buckets  # type: ignore[attr-defined]
        make: Any = StockDdp._ddp_init_helper

        def fail_to_rebuild(reducer: Any) -> Any:
            has_rebuilt = rebuild(reducer)
            if has_rebuilt:
                give_up()
            return has_rebuilt

        def fail_to_make(*arguments: Any) -> Any:
            give_up()
            return make(*arguments)

        patch.setattr(dist.Reducer, "_rebuild_buckets", fail_to_rebuild)  # type: ignore[attr-defined]
        if makes:
            patch.setattr(StockDdp, "_ddp_init_helper", fail_to_make)

    return fault


def changes() -> dict[str, Any]:
    """A change of buckets that fails, by way of training, rank and how often; twice: going back fails once too."""
    found = {}
    for mode in MODES:
        for rank, times in ((0, 1), (1, 2)):
            with on_rank(rank):
                found[f"{mode} {rank} {times}"] = beside(fault=no_memory(times), mode=mode, steps=30)
    return found


def late_rebuild() -> dict[str, Any]:
    """With a static graph and a hook, a new Reducer gets its buckets in place when its second step begins."""
    return beside(fault=no_memory(1, makes=False), mode="static hook", steps=30)


def watching() -> dict[str, Any]:
    """The store of the group cannot be had when steps shall be watched."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self_tuning, "store_of", raise_at(0, RuntimeError("no store"), store_of))

    return beside(fault=fault, steps=SETTLED_STEPS)


def wire() -> dict[str, Any]:
    """The group beside the model's, through which low precision travels, cannot be made."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(gloo, "MEET_S", 0.2)
        patch.setattr(channel, "gloo_beside", raise_at(0, RuntimeError("no group"), gloo.gloo_beside))

    return beside(fault=fault, steps=70, wire="bfloat16")


def wire_without_room() -> dict[str, Any]:
    """One rank has no memory for any message in low precision beside the one that is converted."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(room, "headroom_bytes", lambda _: -1e9 if is_odd() else 0.0)

    return beside(fault=fault, steps=SETTLED_STEPS, wire="bfloat16")


def replanned() -> dict[str, Any]:
    """A plan that is set by hand, for which one rank has no memory."""
    found: dict[str, Any] = {"errors": [], "messages": []}

    def step(model: Any, batches: Iterator[Tensor]) -> None:
        usual(model, batches)
        if isinstance(model, StockDdp) and not isinstance(model, DistributedDataParallel):
            return
        if _step == ARMED:
            try:
                model.replan(make_plan(model.module, 3))
            except PlanError as error:
                found["errors"].append(str(error))
            found["messages"].append(model.plan.num_groups)

    for mode in ("plain", "unused", "static", "hook"):
        found[mode] = beside(step, no_memory(1), mode, steps=20)
    return found


def looking_again() -> dict[str, Any]:
    """A tuner that cannot begin again on one rank: it fails there, or is refused."""

    def failing(patch: pytest.MonkeyPatch, _: Any) -> None:
        patch.setattr(StockDdp, "_ddp_init_helper", raise_at(0, MemoryError("no room"), StockDdp._ddp_init_helper))

    def refused(_: pytest.MonkeyPatch, model: Any) -> None:
        model._is_compiled = is_odd()

    found = {}
    for fault in (failing, refused):
        model, _ = train(tuned, usual, "hook", 4)
        model._self_tuning.stop("a test")
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, model)
            model._look_again()
        for number in range(15):
            model(vectors(number)[0]).square().mean().backward()
        found[fault.__name__] = [model.tuning.state, model.tuning.reason, left_on(model)]
    return found


if __name__ == "__main__":
    one_by_one = [
        changes,
        late_rebuild,
        watching,
        wire,
        wire_without_room,
        replanned,
        looking_again,
        steps_in_other_modes,
    ]
    be_rank({scenario.__name__: scenario for scenario in [steps, faults, early_faults, *one_by_one]})
