"""When a model tunes itself: `SelfTuning` has a `Tuner` work, then a `Drift` watch for change, then a `Tuner` again."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from mgwfbp.errors import MeasureError, PlanError
from mgwfbp.measure.agreement import on_device, problem_of, try_together
from mgwfbp.measure.clock import clock_for
from mgwfbp.record import check_count
from mgwfbp.runtime.messages.gloo import store_of
from mgwfbp.runtime.observe.observer import weakly
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.tune.drift import Drift
from mgwfbp.runtime.tune.race import Limits
from mgwfbp.runtime.tune.refusals import cannot_time, unfit_for_tuning
from mgwfbp.runtime.tune.tuner import Tuner
from mgwfbp.runtime.tune.tuning import Tuning

__all__ = ["NOT_COUNTED", "SelfTuning"]

NOT_COUNTED = "this torch does not count the collectives of the group"
_NO_LONGER = "steps are no longer watched: "
_TO_BEGIN = Tuning("working", "not begun")


class SelfTuning:
    """The tuner of a model while it works, the watch for change once it has settled, or the reason for neither.

    It calls the model's ``_tuner_has_ended``, and ``_look_again`` when steps have changed for long. A copy or a pickle,
    which goes with one of the model, begins anew where a tuner was at work, and never looks again: its place in the
    group's store is the original's.
    """

    tuner: Tuner | None = None
    drift: Drift | None = None
    _settled: Tuning | None = None  # what was found last
    _watches = 0  # begun so far, on all ranks alike

    def __init__(self, reason: str, tune_steps: int, retune_steps: int) -> None:
        self._tuning = Tuning("off", reason) if reason else _TO_BEGIN  # of the last tuner; not of one at work
        self._tune_steps = check_count(tune_steps, "tune_steps", PlanError)
        self._retune_steps = check_count(retune_steps, "retune_steps", PlanError)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_tuning": self._tuning, "_settled": self._settled, "_tune_steps": self._tune_steps}
        return {**kept, "_retune_steps": 0}

    @property
    def tuning(self) -> Tuning:
        """What the tuner is doing or has found."""
        if self.tuner is not None:
            return self.tuner.tuning
        return self._tuning if self.drift is None else replace(self._tuning, problem=self.drift.problem)

    @property
    def is_to_begin(self) -> bool:
        """Whether the model shall be tuned."""
        return self._tuning == _TO_BEGIN

    def refuse(self, reason: str) -> None:
        """Tune nothing, for this reason, where something should have been."""
        if self.is_to_begin:
            self._tuning = Tuning("off", reason)

    def begin(self, reducer: ReducerHandle, *, together: bool) -> None:
        """Tune the model of this Reducer, where it shall be tuned; with ``together`` on all ranks or on none."""
        self._reducer = reducer
        if self.is_to_begin and together and dist.get_world_size(reducer.ddp.process_group) > 1:
            self.start_together()
        elif self.is_to_begin:
            self._start()

    def start_together(self, *, anew: bool = False) -> None:
        """Tune from the next step on, where that can be begun on all ranks, which must call it together.

        Where the model was tuned before the tuner looks again, or with ``anew`` knows nothing of that.
        """
        model = self._reducer.ddp

        def start() -> None:
            self._start(anew=anew)
            if self.tuner is None:  # it was refused
                raise PlanError(self._tuning.reason)

        with on_device(model.device):
            _, failed, _ = try_together(start, model.process_group)
        if failed is not None:
            self._give_up(failed[1])

    def _give_up(self, reason: str) -> None:
        """Tune nothing, for this reason, which may be another rank's."""
        if self.tuner is not None:
            self._end(self.tuner.stop(reason))
        else:
            self._tuning = Tuning("off", reason)

    def _start(self, *, anew: bool = False) -> None:
        """Tune from the next step on, or say why not; this rank alone."""
        reducer, before = self._reducer, None if anew else self._settled
        self.drift, self._tuning = None, _TO_BEGIN
        if dist.get_world_size(reducer.ddp.process_group) == 1:
            self.refuse("there is one rank, and nothing to send")
        elif any(reducer.sparse):
            self.refuse("gradients are sparse, and as large as each batch makes them")
        elif reason := cannot_time(reducer.parameters[0].device) or unfit_for_tuning(reducer):
            self.refuse(reason)  # before there is an observer: some models get a new Reducer for one
        else:
            limits = Limits(steps=min(self._tune_steps, self._retune_steps) if before else self._tune_steps)
            self.tuner = Tuner(reducer, weakly(self._end), limits, before)

    def stop(self, reason: str, *, restore: bool = False) -> None:
        """End tuning, with ``restore`` with the buckets that the tuner began with; or end watching for change."""
        if self.tuner is not None:
            self._end(self.tuner.stop(reason, restore=restore))
        elif self.drift is not None:
            self.drift = None
            self._tuning = replace(self._tuning, problem=f"{_NO_LONGER}{reason}")

    def stop_where_captured(self) -> None:
        """End tuning, or watching, where the model is captured in a CUDA graph: nothing may wait for a device there."""
        on_trial = self.tuner.on_trial if self.tuner is not None else None
        stays = f"; the plan that was on trial stays: {on_trial.planner}" if on_trial is not None else ""
        self.stop(f"the model was captured in a CUDA graph, whose buckets cannot change{stays}")

    def resume(self, reason: str) -> None:
        """Go on with what was stopped for this reason, tuning or watching; all ranks must call it together."""
        if self._tuning.reason == reason:
            self.start_together()
        elif self._tuning.problem == f"{_NO_LONGER}{reason}":
            self._tuning = replace(self._tuning, problem="")
            self._watch()

    def _end(self, tuning: Tuning) -> None:
        plan = tuning.plan or (self.tuner.on_trial if self.tuner is not None else None)
        self.tuner, self._tuning = None, tuning
        if self._settled is not None:  # these were steps of looking again
            self._retune_steps -= tuning.steps - self._settled.steps
        if tuning.state == "settled":
            self._settled = tuning
            self._watch()
        self._reducer.ddp._tuner_has_ended(plan)

    def _watch(self) -> None:
        """Watch for change from now on, where the tuner may look again; all ranks after the same reduction."""
        if self._retune_steps <= 0:
            return
        self._watches += 1
        try:
            self._begin_to_watch()
        except Exception as error:
            # This rank then tallies nothing, so that rank 0 never counts all ranks at one place, and nobody begins; and
            # rank 0 itself never calls.
            self._tuning = replace(self._tuning, problem=f"steps are not watched for change: {problem_of(error)}")

    def _begin_to_watch(self) -> None:
        model = self._reducer.ddp
        group, collectives = model.process_group, self._reducer.collectives
        store = store_of(group, f"{model._number}/{self._watches}")
        if collectives is None:
            raise MeasureError(NOT_COUNTED)
        if store is None:
            raise MeasureError("this torch does not give away the store of the group")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        wait = clock_for(model.device).wait
        self.drift = Drift(store, rank, world, collectives, weakly(model._look_again), wait=wait)
