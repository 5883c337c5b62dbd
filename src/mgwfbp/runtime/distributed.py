"""A drop-in DistributedDataParallel that finds the best messages, or sends exactly those of a plan."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError, ShardError
from mgwfbp.measure.agreement import agree_on_plan, first_problem, on_device
from mgwfbp.plan import WIRES, MergePlan
from mgwfbp.record import check_real
from mgwfbp.runtime.messages.wire import cannot_wire
from mgwfbp.runtime.observe.observation import Observation, observing
from mgwfbp.runtime.observe.observer import Observer
from mgwfbp.runtime.observe.steps import Note
from mgwfbp.runtime.observe.strides import StrideWatch
from mgwfbp.runtime.reducer.changes import change_together, give_first
from mgwfbp.runtime.reducer.compile_private import follow_plans, notice_graphs, warn_of_old_cuts
from mgwfbp.runtime.reducer.handle import ReducerHandle
from mgwfbp.runtime.reducer.kinds import PlanLike, read_plan
from mgwfbp.runtime.reducer.parameters import Parameters
from mgwfbp.runtime.reducer.support import cannot_hold, lacks, missing
from mgwfbp.runtime.rows.compiled_modules import runs_graphs
from mgwfbp.runtime.rows.shards import Shards
from mgwfbp.runtime.tune.race import PRECISION
from mgwfbp.runtime.tune.refusals import cannot_time, unfit_hook
from mgwfbp.runtime.tune.self_tuning import SelfTuning
from mgwfbp.runtime.tune.tuning import Tuning
from mgwfbp.runtime.user_line import call_from_user_line, warn_user
from mgwfbp.trace import ModelTrace
from mgwfbp.units import quote

__all__ = ["IN_JOIN", "DistributedDataParallel"]

_NUMBERS: defaultdict[str, Iterator[int]] = defaultdict(count)  # of models, by group
NOT_USED = "the plan is not used and DDP's own buckets are:"
IN_JOIN = "the model is trained inside join(), where ranks that ran out of data do not answer"


class DistributedDataParallel(TorchDistributedDataParallel):
    """Torch's `torch.nn.parallel.DistributedDataParallel`, with every argument and method of it, and plans.

    It tunes itself: during some hundred steps it observes, plans, compares, and keeps torch's own buckets unless
    another plan was faster beyond doubt, see [Note: how the tuner decides] in ``decide.py``. `tuning` says what it does
    and has found, and a record of level INFO of the logger ``mgwfbp`` says so on rank 0 when it has. Whatever goes
    wrong in tuning ends tuning, not training.

    Averaged gradients are those of torch's class, whatever the plan: bitwise at 2 ranks; with more ranks the bucket a
    gradient travels in decides in which order it is summed.

    All ranks must have the same plan: they compare before anything is changed, and a plan that differs, cannot be read
    or is not for this model is an error on every rank. A message holds gradients of one dtype and one device; a sparse
    gradient travels alone. Where this torch cannot hold given buckets, a warning says why and the buckets are torch's
    own.

    Args:
        module: the model.
        *args: as torch's class takes them.
        plan: a `MergePlan` or the path of one, over the names of ``module.named_parameters()`` that get a gradient and
            are left to DDP's Reducer. Its messages are the Reducer's buckets from the first step on, and nothing is
            tuned: also the way to runs that repeat bitwise (``model.plan.save(path)`` on one rank keeps it).
        tune: with False, and without a plan, this is torch's class and nothing else: no hook, nothing observed, nothing
            said to other ranks, which may have torch's class but must not tune.
        tune_steps: how many steps plans may be compared in, at most; a clear difference takes a fraction of that.
        retune_steps: about how many steps may be spent, over the whole run, on looking again when steps have changed
            for long (the last time may take some 100 more); 0 to never look again.
        wire: "bfloat16" or "float16": messages *may* travel in that precision, where it shortens the step; converted,
            summed in fp32 and converted, see [Note: how a message travels in low precision] in ``measure/low.py``.
            Gradients are then no longer those of torch's class, but the same on all ranks. Without it never.
        wire_tolerance: precision is given up only where that shortens the step by more than this part of it. Rank 0's
            counts.
        **kwargs: as torch's class takes them.

    Raises:
        PlanError: on every rank, where the plan cannot be run or ranks differ.
    """

    _handle: ReducerHandle | None = None
    _observer: Observer | None = None  # of `observe` or `mgwfbp.explain`
    _builtin_hook: Any = None  # that was registered
    _shards: Shards | None = None  # of a sharded optimizer
    _explaining: Any = None  # what `mgwfbp.explain` returned, until it has ended

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: PlanLike | None = None,
        tune: bool = True,
        tune_steps: int = 1200,
        retune_steps: int = 2000,
        wire: str | None = None,
        wire_tolerance: float = PRECISION,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(TorchDistributedDataParallel.__init__).bind(self, module, *args, **kwargs).arguments
        if wire is not None and plan is None and not tune:
            raise PlanError(
                f"wire={wire!r} with tune=False and without a plan: nothing would say which messages use it"
            )
        self._wire_tolerance = check_real(wire_tolerance, "wire_tolerance", PlanError)
        if wire is None and wire_tolerance != PRECISION:
            raise PlanError(f"wire_tolerance={wire_tolerance:g} without wire=: no message may travel in low precision")
        reason = "a plan was given" if plan is not None else "" if tune else "tune=False"
        self._self_tuning = SelfTuning(reason, tune_steps, retune_steps)
        self._plan: MergePlan | None = None
        self._wire = wire
        self._is_compiled = False  # whether a graph was compiled inside the forward pass
        # With neither, torch's class may stand on other ranks, which would not answer.
        is_ours = plan is not None or tune
        self._absent = missing() if is_ours else ()
        self._asked_for: Callable[[], None] | None = partial(self._agree_on_plan, plan, given) if is_ours else None
        # Torch's warnings name the line that calls its constructor: it shall be the user's.
        call_from_user_line(partial(super().__init__, module, *args, **kwargs))
        self._asked_for = None
        if is_ours:
            # The same on all ranks: they wrap the models of one group that are ours everywhere in one order.
            self._number = next(_NUMBERS[getattr(self.process_group, "group_name", "")])
            # Ranks compare plans whatever was asked for, and so are together.
            self._begin(plan_was_given=plan is not None, together=plan is not None or given.get("init_sync", True))

    def _agree_on_plan(self, plan: PlanLike | None, given: Mapping[str, Any]) -> None:
        """Agree with the other ranks on the plan, once parameters are known and before ranks exchange anything."""
        clash = [name for name in ("bucket_cap_mb", "bucket_cap_mb_list") if given.get(name) is not None]
        requested, wire = None if self._cannot_hold else plan, self._wire

        def prepare() -> MergePlan | None:
            if requested is not None and clash:
                raise PlanError(f"plan= and {clash[0]}= are both given, and each says how large buckets are")
            if wire not in (None, *WIRES):
                raise PlanError(f"wire is {quote(wire)}, expected one of {', '.join(WIRES)}, or None")
            if wire is not None and (cannot := self._cannot_hold or cannot_wire(self)):
                raise PlanError(f"wire={wire!r} cannot be had: {cannot}")
            workers = self.process_group.size()
            return None if requested is None else read_plan(requested, Parameters(self), wire, workers)

        if reason := cannot_time(self.device):
            self._self_tuning.refuse(reason)
        # A construction without collectives was asked for, or the group may have none for this device; a plan is
        # compared all the same.
        if requested is None and (not given.get("init_sync", True) or reason):
            prepare()
            return
        tunes = self._self_tuning.is_to_begin
        with torch.profiler.record_function("mgwfbp: plan"), on_device(self.device):
            self._plan = agree_on_plan(prepare, self.process_group, tunes=tunes, wire=wire)
            failed = first_problem(self._cannot_hold, self.process_group) if tunes else None
        if failed is not None and not self._cannot_hold:  # which says it itself
            self._self_tuning.refuse(f"rank {failed[0]} cannot tune: {failed[1]}")

    @property
    def _cannot_hold(self) -> str:
        """Why no buckets can be given on this rank; empty where they can."""
        return lacks(self._absent) if self._absent else cannot_hold(self)

    def _build_params_for_reducer(self) -> Any:
        built = super()._build_params_for_reducer()
        asked_for, self._asked_for = self._asked_for, None
        if asked_for is not None:
            asked_for()
        return built

    def _begin(self, *, plan_was_given: bool, together: bool = False) -> None:
        """Do what follows every construction, be it from the constructor, a pickle or a copy, which one rank may make.

        With ``together`` all ranks do it.
        """
        if cannot := self._cannot_hold:
            if plan_was_given:
                warn_user(f"{NOT_USED} {cannot}")
            elif self._absent:
                warn_user(f"nothing is tuned and DDP's own buckets are used: {cannot}")
            self._plan = None
            self._self_tuning.refuse(cannot)
            return
        handle = self._handle = ReducerHandle(self)
        if self._plan is not None:
            with on_device(self.device):
                give_first(handle, handle.buckets_of(self._plan.groups), self._plan.wire, together=together)
        follow_plans()
        self._self_tuning.begin(handle, together=together)
        self._strides = StrideWatch(self, handle)

    @property
    def plan(self) -> MergePlan | None:
        """The messages of a step, as they are now: the plan in force, or torch's own buckets (planner ``ddp``).

        With a `ShardedOptimizer` also its gathers. None where there are no buckets (``tuning`` says why), or where
        parameters of a model with ``tune=False`` were frozen, thawed or replaced since it was wrapped.
        """
        plan, handle = self._messages, self._handle
        gathers = () if handle is None else handle.groups_of(handle.groups_to_gather)
        return plan if plan is None or plan.gathers == gathers else replace(plan, gathers=gathers, predicted={})

    @property
    def _messages(self) -> MergePlan | None:
        """The plan in force, or torch's own buckets."""
        handle, plan = self._handle, self._plan
        if plan is not None and (
            handle is None or (handle.given, handle.wires) in ((None, ()), (handle.buckets_of(plan.groups), plan.wire))
        ):
            return plan
        if missing() or cannot_hold(self):
            return None
        handle = handle or ReducerHandle(self)  # of a model that is torch's alone: only for this question
        groups = handle.groups_of(handle.buckets())
        is_tried = handle.given is not None and self._self_tuning.tuner is not None
        return MergePlan(type(self.module).__name__, "on trial" if is_tried else "ddp", groups, wire=handle.wires)

    @property
    def tuning(self) -> Tuning:
        """What the tuner is doing or has found; printable."""
        return self._self_tuning.tuning

    def observe(
        self,
        steps: int = 10,
        *,
        predict_with: tuple[ModelTrace | None, Cost] | None = None,
        notes: Sequence[Note] | None = None,
    ) -> AbstractContextManager[Observation]:
        """Observe the next steps that run inside ``with model.observe() as seen:``.

        Only steps whose gradients are averaged count, at most ``steps`` of them; others may run in between, and steps
        before torch has made its final buckets do not count. After the block ``seen.timeline`` is the measured
        `Timeline` of this rank, ``seen.trace`` its ready times, ``seen.agreed_trace()`` those of all ranks, and
        ``seen.predicted`` what `predict` gives for the plan in force with the trace and cost in ``predict_with`` (a
        trace of None stands for the observed one), or else with those that the tuner found.

        Of a model with a `ShardedOptimizer` gathers are observed too, from the second step of the block on: what the
        forward pass waited for them is part of the exposed communication, and not of the trace.

        A message is ready when the Reducer asks for it, starts once the message before it has arrived, and ends when it
        has arrived: CUDA events on a GPU, times of the host on a CPU. Not while the tuner works, which changes plans,
        and not inside of another block. Where a communication hook sends, all ranks must observe alike, between steps:
        their Reducers are made anew. Outside of the block it costs nothing.

        Args:
            steps: how many to observe.
            predict_with: a trace, or None for the observed one, and a cost.
            notes: for every step "plain", "gradients" or "messages": what is noted besides its length, where noting
                both at once would slow the step; ``seen.agreed()`` has it by note, and there is no timeline.

        Raises:
            MeasureError: where the model cannot be observed now; it says why.
        """
        return observing(self, steps, predict_with, notes)

    def replan(self, plan: PlanLike | None) -> None:
        """Change to another plan, or with None to torch's own buckets. All ranks must call it, with the same plan.

        To be called between steps: after a backward pass that averaged gradients and before the next forward pass, not
        inside ``no_sync`` or ``join``. Gradients, comm hooks and everything else that was set stay; a comm hook that
        keeps state per bucket (PowerSGD) must be able to meet other buckets. Tuning ends.

        Args:
            plan: a `MergePlan`, the path of one, or None.

        Raises:
            PlanError: on every rank, where the plan cannot be run or ranks differ; the plan in force stays.
        """
        if self._join_config.enable:
            raise PlanError("the plan cannot be changed inside join(), where ranks that ran out of data do not answer")
        if absent := missing():
            if plan is not None:
                warn_user(f"{NOT_USED} {lacks(absent)}")
            return
        if cannot := cannot_hold(self):
            raise PlanError(f"no plan can be held: {cannot}")
        handle = self._handle or ReducerHandle(self)
        if handle.cannot_change:
            raise PlanError(f"the plan cannot be changed: {handle.cannot_change}; give plan= at construction")

        def prepare() -> MergePlan | None:
            if not handle.has_finished:
                raise PlanError(
                    "the plan cannot be changed before the backward pass has ended, and it has not: some parameters "
                    "got no gradient (find_unused_parameters=True allows that)"
                )
            shards, workers = self._shards, self.process_group.size()
            found = None if plan is None else read_plan(plan, handle, self._wire, workers, is_sharded=bool(shards))
            if shards is not None:
                shards.check(*(handle.torchs_groups, ()) if found is None else (found.groups, found.gathers))
            return found

        with torch.profiler.record_function("mgwfbp: plan"), on_device(self.device):
            agreed = agree_on_plan(prepare, self.process_group)
            buckets, wires = (None, ()) if agreed is None else (handle.buckets_of(agreed.groups), agreed.wire)
            changes = (buckets, wires) != (handle.given, handle.wires)
            if changes:
                change_together(handle, buckets, wires)
        self._self_tuning.stop("a plan was set by hand")
        self._handle, self._plan = handle, agreed
        if changes:
            warn_of_old_cuts(self)
        handle.gathers = handle.buckets_of(agreed.gathers) if agreed is not None and agreed.gathers else None

    def synchronize(self) -> None:
        """Wait for all parameters that a `ShardedOptimizer` gathers; without one there is nothing to wait for.

        To be called before parameters are read or changed through a saved reference, which asks no module for them.
        """
        if self._shards is not None:
            self._shards.finish_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, as torch does, without waiting for parameters that a `ShardedOptimizer` gathers.

        What it shards has no gradient then in either case.
        """
        if self._shards is None:
            super().zero_grad(set_to_none)
        else:
            self._shards.zero_grad(set_to_none=set_to_none)

    def _shard_with(self, shards: Shards) -> None:
        """Let a `ShardedOptimizer` have the gradients."""
        handle = self._handle = self._handle or ReducerHandle(self)
        self.synchronize()  # with an optimizer before this one
        was_working = self._self_tuning.tuner is not None
        self._self_tuning.stop("a sharded optimizer was made", restore=True)
        handle.shard_with(shards)
        self._shards = shards
        shards.guard(self.module)
        shards.runs_graphs = self._is_compiled or runs_graphs(self)
        notice_graphs()
        if was_working:
            self._self_tuning.start_together(anew=True)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        handle, shards, tuning = self._handle, self._shards, self._self_tuning
        if shards is not None:
            shards.before_forward()
        if handle is not None and handle.is_due:
            handle.before_forward()
        if torch.is_grad_enabled():
            is_at_work = tuning.tuner is not None or tuning.drift is not None
            if is_at_work and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                tuning.stop_where_captured()
            if (observer := self._observer or tuning.tuner) is not None:
                observer.before_forward()
            # Also in observed steps: one rank alone may observe. `explain` works on all. The first pass of a new
            # Reducer, which a tuner may need, must average gradients where the graph is static.
            is_any_pass = self.require_backward_grad_sync or not self.static_graph
            if tuning.drift is not None and self._explaining is None and is_any_pass:
                tuning.drift.before_forward()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._shards is not None and self._shards.pending and torch.is_grad_enabled():
            self._shards.finish_all()  # what was not used; the backward pass needs the link
        if torch.is_grad_enabled():
            if (observer := self._observer or self._self_tuning.tuner) is not None:
                observer.after_forward()
            if self._self_tuning.drift is not None:
                self._self_tuning.drift.after_forward()
        return super()._post_forward(output)

    def _look_again(self) -> None:
        """Tune again; on all ranks when the same step begins."""
        if self._observer is not None:  # one rank alone may observe; tuning begins on all
            self._observer.stop()
            self._observer = None
        self._self_tuning.start_together()

    def _tuner_has_ended(self, plan: MergePlan | None) -> None:
        if plan is not None:
            self._plan = plan
        if self._explaining is not None:  # it waited for the tuner; on all ranks after the same reduction
            self._explaining.begin()

    def join_hook(self, **kwargs: Any) -> Any:
        """Return torch's join hook; tuning and watching stop, since ranks that ran out of data do not answer.

        They begin again after the block, be it of `join` or of torch's generic ``Join``.
        """
        if self._shards is not None:
            raise ShardError(
                "join() cannot be with a sharded optimizer: ranks that ran out of data would not answer it"
            )
        if self._explaining is not None:
            self._explaining.stop(IN_JOIN)
        if self._handle is None:
            return super().join_hook(**kwargs)
        self._handle.settle()
        self._handle.was_joined = True
        self._self_tuning.stop(IN_JOIN, restore=True)
        return _EndsJoin(super().join_hook(**kwargs), self, self._join_config)

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Train with uneven inputs as torch does. After the block tuning begins again, or watching for change."""
        before = self._join_config
        try:
            with super().join(*args, **kwargs) as inside:
                yield inside
        finally:
            if self._handle is not None:
                self._join_config = before  # also after an exception, where torch calls no hook
        if self._handle is not None:
            self._self_tuning.resume(IN_JOIN)  # with enable=False torch calls no hook either

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook, as torch does."""
        self._refuse_hook_with_wire()
        # Now, not when the next plan is tried: by then the hook would have met the buckets of this one. And before the
        # hook is there: with it the Reducer would have to be made anew.
        if self._handle is not None and (reason := unfit_hook(hook)):
            self._self_tuning.stop(reason, restore=True)
        super().register_comm_hook(state, hook)
        if self._handle is not None:
            self._handle.hook_was_registered()

    def _refuse_hook_with_wire(self) -> None:
        if self._shards is not None:
            raise PlanError("a communication hook says how gradients travel, and so does a sharded optimizer")
        if self._wire is not None:
            raise PlanError(
                "a communication hook (torch's own, where optimizers run in the backward pass) says how gradients "
                f"travel, and so does wire={self._wire!r}: leave one out"
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_hook_with_wire()
        super()._register_builtin_comm_hook(comm_hook_type)
        self._builtin_hook = comm_hook_type
        if self._handle is not None:
            self._handle.hook_was_registered()

    def _set_static_graph(self) -> None:
        was_static = self.static_graph
        super()._set_static_graph()
        if self._handle is not None and not was_static:
            self._handle.graph_became_static()

    def _update_process_group(self, new_process_group: Any) -> None:
        if self._shards is not None:
            raise ShardError(
                "the process group cannot be changed: a sharded optimizer has rows for the ranks of this one"
            )
        super()._update_process_group(new_process_group)  # after which torch makes its own buckets again
        self._self_tuning.stop("the process group was changed", restore=True)
        if self._handle is not None:
            self._handle.set_buckets(self._handle.given, self._handle.wires)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        if self._handle is not None:
            self._handle.sample_rate = sample_rate

    def __getstate__(self) -> Any:
        state = dict(super().__getstate__())
        # What observes this object stays with it.
        state["_forward_pre_hooks"] = OrderedDict(
            (key, hook)
            for key, hook in state["_forward_pre_hooks"].items()
            if not str(getattr(hook, "__module__", "")).startswith("mgwfbp.")
        )
        for name in ("_handle", "_observer", "_strides", "_explaining", "_shards"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.tuning.state == "off" and self._plan is None:
            return
        self._absent = missing()
        # The Reducer of a copy has those parameters that require gradients now.
        if self._plan is not None and set(self._plan.layer_names) != set(Parameters(self).names):
            self._plan = None
            warn_user(f"{NOT_USED} it is a copy's, and parameters were frozen or thawed since the plan was made")
        self._begin(plan_was_given=self._plan is not None)


class _EndsJoin(JoinHook):
    """Torch's join hook, which also ends the block for the model: torch leaves ``_join_config`` set for ever."""

    def __init__(self, hook: Any, model: DistributedDataParallel, before: Any) -> None:
        self._hook, self._model, self._before = hook, model, before

    def main_hook(self) -> None:
        """Answer the other ranks, once this one has run out of data."""
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:  # torch's signature
        """Share the last parameters, and tune again: all ranks have run out of data and are here."""
        self._hook.post_hook(is_last_joiner)
        # Else the next forward pass would ask the other ranks whether they have run out.
        self._model._join_config = self._before
        self._model._self_tuning.resume(IN_JOIN)
