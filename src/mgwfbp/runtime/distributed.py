"""A drop-in DistributedDataParallel that finds the best messages, or sends exactly those of a plan."""

import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from mgwfbp.cost import Cost
from mgwfbp.errors import MeasureError, PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.agreement import agree_on_plan
from mgwfbp.runtime.compile_private import follow_plans, uncompiled, warn_of_old_cuts
from mgwfbp.runtime.kinds import check_kinds, kinds_of
from mgwfbp.runtime.moments import moments_of
from mgwfbp.runtime.observer import Gradients, Observation
from mgwfbp.runtime.strides import StrideWatch
from mgwfbp.runtime.torch_private import missing
from mgwfbp.runtime.tuner import TunableParallel, Tuner
from mgwfbp.runtime.tuning import Tuning
from mgwfbp.runtime.watch import SeenStep, StepWatch
from mgwfbp.trace import ModelTrace

__all__ = ["DistributedDataParallel"]

PlanLike = MergePlan | str | os.PathLike[str]

_TO_BEGIN = Tuning("working", "not begun")  # of a model that is being made and shall tune itself


class DistributedDataParallel(TunableParallel):
    """Torch's `torch.nn.parallel.DistributedDataParallel`, with every argument and method of it, and plans.

    It tunes itself: during about the first 100 steps it measures, plans, tries, and keeps what was the fastest, see
    [Note: how the tuner works] in ``tuner.py``. `tuning` says what it does and has found, and a record of level INFO of
    the logger ``mgwfbp`` says so on rank 0 when it has. ``tune=False`` leaves torch's own buckets alone.

    ``plan`` is a `MergePlan` or the path of one, over the names of ``module.named_parameters()`` that get a gradient
    and are left to DDP's Reducer. Its messages are the Reducer's buckets from the first step on, and nothing is tuned:
    also the way to runs that repeat bitwise (``model.plan.save(path)`` keeps what the tuner found).

    Averaged gradients are those of torch's class, whatever the plan: bitwise at 2 ranks; with more ranks the bucket a
    gradient travels in decides in which order it is summed.

    All ranks must have the same plan: they compare before anything is changed, and a plan that differs, cannot be read
    or is not for this model is an error on every rank. A message holds gradients of one dtype and one device; a sparse
    gradient travels alone. Where this torch cannot hold given buckets, a warning says why and the buckets are torch's
    own.
    """

    def __init__(
        self, module: nn.Module, *args: Any, plan: PlanLike | None = None, tune: bool = True, **kwargs: Any
    ) -> None:
        given = inspect.signature(TorchDistributedDataParallel.__init__).bind(self, module, *args, **kwargs).arguments
        self._plan: MergePlan | None = None
        self._watch: StrideWatch | None = None
        self._tuner: Tuner | None = None
        self._requested = _unless_missing(plan)
        self._clash = [name for name in ("bucket_cap_mb", "bucket_cap_mb_list") if given.get(name) is not None]
        # A plan that this torch cannot hold was still meant to be the last word.
        reason = "a plan was given" if plan is not None else "" if tune else "tune=False"
        self._tuning = Tuning("off", reason) if reason else _TO_BEGIN
        # init_sync=False asks for a construction without collectives; a plan is compared even then.
        self._compares = self._requested is not None or given.get("init_sync", True)
        super().__init__(module, *args, **kwargs)
        if self._requested is not None and self.cannot_hold:
            _warn_unused(self.cannot_hold)
        del self._requested, self._clash, self._compares
        self._finish()

    @property
    def plan(self) -> MergePlan | None:
        """The plan in force; None while the buckets are torch's own."""
        return self._plan

    @property
    def tuning(self) -> Tuning:
        """What the tuner is doing or has found; printable."""
        return self._tuning if self._tuner is None else self._tuner.tuning

    @contextmanager
    def observe(
        self, steps: int = 10, *, predict_with: tuple[ModelTrace | None, Cost] | None = None
    ) -> Iterator[Observation]:
        """Measure the timelines of the next steps that run inside ``with model.observe() as seen:``.

        Only steps whose gradients are averaged count, at most ``steps`` of them; others may run in between, and the
        first after a change of buckets does not count. After the block ``seen.timeline`` is the measured `Timeline` of
        this rank, ``seen.trace`` the ready times, and ``seen.predicted`` the timeline that `predict` gives for the plan
        in force with the trace and cost in ``predict_with`` (a trace of None stands for the observed one), or else with
        those that the tuner found.

        A message is ready when the Reducer asks for it, starts once the message before it has arrived, and ends when it
        has arrived: CUDA events on a GPU, times of the host on a CPU. Not while the tuner works, which changes plans,
        and not inside of another block. Where a communication hook sends, all ranks must observe alike, between steps:
        their Reducers are made anew. Outside of the block it costs nothing.
        """
        if steps < 1:
            raise MeasureError(f"steps is {steps}, expected 1 or more")
        if self._tuner is not None:
            raise MeasureError(f"the tuner is at work ({self.tuning.reason}): observe when it has ended, or tune=False")
        if self.is_overheard:
            raise MeasureError("the model is being observed already: leave that block first")
        parameters, sparse = self.reducible()
        if self.cannot_hold or any(sparse):
            raise MeasureError(f"cannot observe: {self.cannot_hold or 'gradients are sparse'}")
        if self.has_hooks and self.cannot_change:  # a Reducer is told its hooks only once
            raise MeasureError(f"cannot observe a model with a communication hook: {self.cannot_change}")
        seen = Observation()
        had_settled: list[bool] = []  # of every step: the first one of a Reducer is unlike the others
        watch: StepWatch | None = None

        def step_has_ended() -> None:
            had_settled.append(self.has_settled)
            if watch is not None and sum(had_settled) >= steps:
                watch.stop()

        watch = StepWatch(self, parameters, moments_of(self.device), step_has_ended)
        try:
            watch.listen(True)
            watch.watches_gradients = True
            yield seen
        finally:
            watch.stop()
        # Only now: reading a step waits for the GPU, and the host would no longer run ahead of it.
        taken = [step for step, settled in zip(watch.take(), had_settled, strict=True) if settled]
        self._fill(seen, taken, parameters, predict_with)

    def _fill(
        self,
        seen: Observation,
        steps: Sequence[SeenStep],
        parameters: Sequence[nn.Parameter],
        predict_with: tuple[ModelTrace | None, Cost] | None,
    ) -> None:
        names = self._names(parameters)
        gradients = Gradients(
            type(self.module).__name__, tuple(names), tuple(parameter.nbytes for parameter in parameters)
        )
        groups = tuple(tuple(names[place] for place in bucket) for bucket in self.held_buckets())
        plan = self._plan or MergePlan(gradients.model, "ddp", groups)
        if predict_with is None and self.tuning.cost is not None:
            predict_with = (self.tuning.trace, self.tuning.cost)
        seen.fill(steps, gradients, plan, dist.get_world_size(self.process_group), predict_with)

    def install(self, plan: MergePlan) -> None:
        """Put a plan in force that all ranks have agreed on; what `replan` does once they have, and the tuner."""
        changed = self._plan is None or plan.groups != self._plan.groups
        self._plan = plan
        if changed:
            self.rebuild_reducer()
            self.check_held()
            warn_of_old_cuts(self)

    def replan(self, plan: PlanLike | None) -> None:
        """Change to another plan, or with None to torch's own buckets. All ranks must call it, with the same plan.

        To be called between steps: after a synchronised backward pass and before the next forward pass, not inside
        ``no_sync`` or ``join``. Gradients, comm hooks and everything else that was set stay; a comm hook that keeps
        state per bucket (PowerSGD) must be able to meet other buckets. With ``static_graph`` the first step after it
        sends its messages after the backward pass, as the first step of all does.
        """
        self._stop_tuner("a plan was set by hand")
        if self.in_join:
            raise PlanError("the plan cannot be changed inside join(), where ranks that ran out of data do not answer")

        def prepare() -> MergePlan | None:
            self.check_finished()
            return self._prepare(plan, *self.reducible())

        if plan is not None and (plan := _unless_missing(plan)) is None:
            return
        if self.cannot_hold:
            raise PlanError(f"no plan can be held: {self.cannot_hold}")
        if self.cannot_change:
            raise PlanError(f"the plan cannot be changed: {self.cannot_change}; give plan= at construction")
        with self.on_device():
            agreed = agree_on_plan(prepare, self.process_group)
        if agreed is not None:
            self.install(agreed)
        elif self._plan is not None:
            self._plan = None
            self.rebuild_reducer()
            warn_of_old_cuts(self)

    def before_reducer(self, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]) -> None:
        """Agree on the plan; called by the constructor, before torch's own first exchange with other ranks."""
        if not self.__dict__.get("_compares", False):
            # The Reducer of a copy has those parameters that require gradients now.
            if self._plan is not None and set(self._plan.layer_names) != set(self._names(parameters)):
                self._plan = None
                _warn_unused("it is a copy's, and parameters were frozen or thawed since the plan was made")
            return
        requested = None if self.cannot_hold else self._requested

        def prepare() -> MergePlan | None:
            if requested is not None and self._clash:
                raise PlanError(f"plan= and {self._clash[0]}= are both given, and each says how large buckets are")
            return self._prepare(requested, parameters, sparse)

        with self.on_device():
            self._plan = agree_on_plan(prepare, self.process_group, tunes=self._tuning == _TO_BEGIN)

    def wanted_buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[int]] | None:
        """Return the plan as indices into the Reducer's parameters."""
        if self._plan is None:
            return None
        places = {name: index for index, name in enumerate(self._names(parameters))}
        return [[places[name] for name in group] for group in self._plan.groups]

    def __getstate__(self) -> Any:
        state = dict(super().__getstate__())
        # What watches this object stays with it; a copy of a model that is being tuned begins anew.
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            state[hooks] = OrderedDict((key, hook) for key, hook in state[hooks].items() if not _is_ours(hook))
        if self._tuner is not None:
            state["_plan"], state["_tuning"] = None, _TO_BEGIN
        return {**state, "_watch": None, "_tuner": None, "_listener": None, "_connected": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_plan": _unless_missing(state["_plan"])})
        self._finish()

    def _finish(self) -> None:
        """Do what follows every construction, be it from the constructor, a pickle or a copy."""
        if self._tuning == _TO_BEGIN:
            self._start_tuner()
        if self.cannot_hold:
            return
        follow_plans()
        self.check_held()
        named = self.module.named_parameters()
        self._watch = StrideWatch(self, [(name, parameter) for name, parameter in named if parameter.requires_grad])

    def _start_tuner(self) -> None:
        parameters, sparse = self.reducible()
        reason = self.cannot_hold
        if dist.get_world_size(self.process_group) == 1:
            reason = "there is one rank, and nothing to send"
        elif any(sparse):
            reason = "gradients are sparse, and as large as each batch makes them"
        elif not reason and (absent := missing()):
            reason = f"torch {torch.__version__} lacks {', '.join(absent)}"
            warnings.warn(f"nothing is tuned and DDP's own buckets are used: {reason}", RuntimeWarning, stacklevel=4)
        if reason:
            self._tuning = Tuning("off", reason)
        else:
            named = list(zip(self._names(parameters), parameters, strict=True))
            self._tuner = Tuner(self, named, kinds_of(named, sparse), self._tuner_has_ended)

    def _tuner_has_ended(self, tuning: Tuning) -> None:
        self._tuner, self._tuning = None, tuning

    def _stop_tuner(self, reason: str) -> None:
        if self._tuner is not None:
            self._tuner_has_ended(self._tuner.stop(reason))

    def _prepare(
        self, plan: PlanLike | None, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]
    ) -> MergePlan | None:
        """Read a plan and check that this model's gradients can be sent as it says."""
        if plan is None:
            return None
        loaded = plan if isinstance(plan, MergePlan) else MergePlan.load(plan)
        if any(name != uncompiled(name) for name in loaded.layer_names):  # made for the compiled model
            loaded = replace(loaded, groups=tuple(tuple(map(uncompiled, group)) for group in loaded.groups))
        named = zip(self._names(parameters), parameters, strict=True)
        check_kinds(loaded, kinds_of(named, sparse))
        return loaded

    def _names(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        by_parameter = {id(parameter): uncompiled(name) for name, parameter in self.module.named_parameters()}
        return [by_parameter[id(parameter)] for parameter in parameters]


def _is_ours(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), (StrideWatch, StepWatch))


def _unless_missing(plan: PlanLike | None) -> PlanLike | None:
    """Return the plan where this torch can hold one; else warn, and return None."""
    if plan is not None and (absent := missing()):
        _warn_unused(f"torch {torch.__version__} lacks {', '.join(absent)}")
        return None
    return plan


def _warn_unused(reason: str) -> None:
    warnings.warn(f"the plan is not used and DDP's own buckets are: {reason}", RuntimeWarning, stacklevel=4)
