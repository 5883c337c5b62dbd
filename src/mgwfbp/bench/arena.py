"""One model on which every strategy can take its turn: `Arena`; and a tuner that is to end its work: `settle`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mgwfbp.bench.contenders import HOOKED, Contender, hook_mib
from mgwfbp.bench.turns import Step
from mgwfbp.errors import MeasureError
from mgwfbp.measure.workload import Workload, run_to_loss
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.strategies import parallel
from mgwfbp.runtime.tune.decide import GATHERS
from mgwfbp.runtime.tune.race import Limits
from mgwfbp.runtime.tune.tuning import Tuning
from mgwfbp.trace import ModelTrace
from mgwfbp.units import plural

__all__ = ["Arena", "settle"]

# What a tuner takes besides comparing: it observes some plans before and after that, and ends a turn that it has begun.
BESIDES_COMPARING = 300


def settle(
    model: DistributedDataParallel,
    step: Step,
    tune_steps: int,
    on_steps: Callable[[int], object] = lambda _: None,
) -> Tuning:
    """Train until the model's tuner, which may compare plans in so many steps, has settled or given up.

    Raises:
        MeasureError: it is at work after more steps than it can need.
    """
    most = math.ceil((1 + GATHERS) * tune_steps) + BESIDES_COMPARING
    for _ in range(most):
        if model.tuning.state != "working":
            return model.tuning
        step()
        on_steps(1)
    raise MeasureError(f"the tuner is still at work after {plural(most, 'step')}: {model.tuning}")


class Arena:
    """A model wrapped once for all plans, which are changed between turns, and once for every strategy with a hook.

    And once more for all plans in each precision that messages may travel in. All wrappers hold the same parameters: a
    Reducer that did not run the forward pass does not look at gradients. All ranks must call every method alike.
    """

    def __init__(self, workload: Workload, trace: ModelTrace, *, tune: bool = False, **ddp_arguments: Any) -> None:
        self._workload, self._trace, self._ddp_arguments = workload, trace, ddp_arguments
        self._planned = DistributedDataParallel(workload.model, tune=tune, **ddp_arguments)
        self._wired: dict[str, DistributedDataParallel] = {}  # by precision
        self._hooked: dict[str, DistributedDataParallel] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._workload.model.parameters()).device

    def tune(self, on_steps: Callable[[int], object] = lambda _: None, wire: str | None = None) -> Tuning:
        """Train until the tuner has settled, if it was asked to tune; before any strategy enters.

        With ``wire`` a wrapper of its own tunes, whose messages may travel so.
        """
        if wire is not None:
            self._wired[wire] = DistributedDataParallel(self._workload.model, wire=wire, **self._ddp_arguments)
        model = self._planned if wire is None else self._wired[wire]
        tune_steps = self._ddp_arguments.get("tune_steps", Limits().steps)
        return settle(model, lambda: self.step(model), tune_steps, on_steps)

    def enter(self, contender: Contender) -> Step:
        """Make a strategy the one in force and return its step."""
        model = self.model_for(contender)
        if contender.by_torch:
            self.step(model)  # torch sends one message in a Reducer's first step and makes buckets in the second
        return lambda: self.step(model)

    def enter_alone(self) -> Step:
        """Return a step without any communication."""

        def step() -> None:
            with self._planned.no_sync():
                self.step(self._planned)

        return step

    def way(self, contender: Contender) -> Callable[[], Step]:
        """Return what makes the strategy the one in force when its turn has come."""
        return lambda: self.enter(contender)

    def model_for(self, contender: Contender) -> DistributedDataParallel:
        """Return the wrapped model, with the contender's messages."""
        if hook_mib(contender.strategy) is not None:
            return self._with_torchs_hook(contender.strategy)
        if contender.wire is not None:
            return self._in_low_precision(contender.wire, contender.plan)
        if contender.strategy in HOOKED:
            if contender.strategy not in self._hooked:
                self._hooked[contender.strategy] = parallel(
                    self._workload.model, contender.strategy, trace=self._trace, **self._ddp_arguments
                )
            return self._hooked[contender.strategy]
        self._planned.replan(None if contender.by_torch else contender.plan)
        return self._planned

    def _in_low_precision(self, wire: str, plan: MergePlan) -> DistributedDataParallel:
        if wire not in self._wired:
            self._wired[wire] = DistributedDataParallel(
                self._workload.model, plan=plan, wire=wire, **self._ddp_arguments
            )
        self._wired[wire].replan(plan)
        return self._wired[wire]

    def _with_torchs_hook(self, strategy: str) -> DistributedDataParallel:
        """Return torch's own DDP with buckets of some size and its hook that sends in bf16."""
        if strategy not in self._hooked:
            model = DistributedDataParallel(
                self._workload.model, tune=False, bucket_cap_mb=hook_mib(strategy), **self._ddp_arguments
            )
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            self._hooked[strategy] = model
        return self._hooked[strategy]

    def step(self, model: nn.Module) -> None:
        """Do one training step without the update: from the forward pass to averaged gradients."""
        # As optimizers do by default; what another wrapper's buckets hold must not be added to.
        model.zero_grad(set_to_none=True)
        run_to_loss(model, self._workload.batch, self._workload.loss_fn).backward()
