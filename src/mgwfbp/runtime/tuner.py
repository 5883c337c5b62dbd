"""The tuner: finds the best messages for a model while it trains.

[Note: how the tuner works]
Everything happens at the end of backward passes, in ordinary training steps, on all ranks after the same step:

1. After a few steps the ready times of gradients and the times of messages are observed under torch's own buckets, and
   the network is swept once.
2. In up to three rounds a plan is made by the exact planner, run and observed; what its messages really took corrects
   the cost (`cost_under_load`), until the plan stays the same.
3. The plans of the rounds, the paper's, two bucket sizes and torch's own buckets take turns, and what is measured
   decides: the model only proposes.

The tuner is a generator. Where it says ``yield`` a training step goes by, so its code reads in the order of events.
What one rank sees is told to all before anything is decided, so all decide alike; what goes wrong on one ends tuning on
all.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MeasureError, MgwfbpError
from mgwfbp.measure.agreement import agree_on_trace, gather, problem_of
from mgwfbp.measure.allreduce import measure_allreduce
from mgwfbp.plan import MergePlan
from mgwfbp.planners import find_plan, plan_bucket
from mgwfbp.runtime.agreement import agree_on_plan
from mgwfbp.runtime.kinds import Kind, check_kinds, split_by_kind
from mgwfbp.runtime.load import agreed_time_s, cost_under_load
from mgwfbp.runtime.moments import moments_of
from mgwfbp.runtime.observer import Gradients, sends, trace_of
from mgwfbp.runtime.torch_private import PlannableParallel
from mgwfbp.runtime.tuning import Candidate, Tuning
from mgwfbp.runtime.watch import SeenStep, StepWatch
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace

__all__ = ["TunableParallel", "Tuner", "two_sizes"]

_log = logging.getLogger("mgwfbp")

# Steps before anything is measured: memory is allocated, kernels are chosen, torch makes its buckets.
WARMUP_STEPS = 4
# Of a plan that is observed: each a step with nothing, one with hooks on gradients, one with an ear on its messages.
OBSERVED_TURNS = 2
CHOSEN_TURNS = 1  # of the plan that is kept, so that what is said of it is what it does
MAX_ROUNDS = 3
SWEEP_BUDGET_S = 1.0
BUCKET_MIB = (1, 2, 5, 10, 25, 50)
FAR = 4  # sizes are far from each other where one is so many times the other
# First all candidates take turns, then the two best and torch's own buckets: (turns, measured steps of a turn).
FIRST_HEAT, LAST_HEAT = (2, 2), (2, 3)
# Hooks on gradients slow a host that is busy launching kernels, but not by more than this.
MOST_SLOWED = 1.5


class TunableParallel(PlannableParallel):
    """What the tuner needs of a model."""

    def install(self, plan: MergePlan) -> None:
        """Put an agreed plan in force, without asking other ranks."""
        raise NotImplementedError

    def on_device(self) -> AbstractContextManager[object]:
        """Talk to other ranks from the model's GPU, which need not be the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class _GiveUpError(MgwfbpError):
    """Tuning cannot go on; raised on all ranks alike."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """What all ranks saw of a plan."""

    trace: ModelTrace
    messages_s: Mapping[int, list[float]]  # seconds of messages, by bytes
    exposed_s: float  # from the last gradient to the end of the step


class Tuner:
    """Tunes a model during its first steps; see [Note: how the tuner works]."""

    def __init__(
        self,
        model: TunableParallel,
        named: Sequence[tuple[str, nn.Parameter]],
        kinds: Mapping[str, Kind],
        on_end: Callable[[Tuning], object],
    ) -> None:
        self._model, self._kinds, self._on_end = model, kinds, on_end
        self._names = tuple(name for name, _ in named)
        sizes = tuple(parameter.nbytes for _, parameter in named)
        self._gradients = Gradients(type(model.module).__name__, self._names, sizes)
        self._group = model.process_group
        self._default: MergePlan | None = None
        self.tuning = Tuning("working", "warming up")
        moments = moments_of(model.device)
        parameters = [parameter for _, parameter in named]
        self._watch = StepWatch(model, parameters, moments, self._step_has_ended, self._is_blind)
        self._work = self._tune()
        next(self._work)  # to where it waits for the first step

    def stop(self, reason: str) -> Tuning:
        """End without a result and leave nothing behind."""
        self._work.close()
        self._watch.stop()
        self.tuning = replace(self.tuning, state="off", reason=reason)
        return self.tuning

    def _step_has_ended(self) -> None:
        started_s = time.perf_counter()
        self.tuning = replace(self.tuning, steps=self.tuning.steps + 1)
        ended = False
        try:
            with self._model.on_device():
                next(self._work)
        except StopIteration:
            self._watch.stop()
            ended = True
        except _GiveUpError as error:
            self.stop(str(error))
            if self._default is not None:
                self._model.install(self._default)
            ended = True
        finally:
            self._spent(time.perf_counter() - started_s)
        if ended:
            self._has_ended()

    def _is_blind(self) -> None:
        unseen = "no backward pass from what the model returns (tensors in tuples, lists, dicts) reaches its parameters"
        self.stop(self._model.unfit_for_tuning or unseen)
        self._has_ended()

    def _has_ended(self) -> None:
        if dist.get_rank(self._group) == 0:
            _log.info("%s", self.tuning)
        self._on_end(self.tuning)

    def _spent(self, seconds: float) -> None:
        self.tuning = replace(self.tuning, spent_s=self.tuning.spent_s + seconds)

    def _says(self, reason: str) -> None:
        self.tuning = replace(self.tuning, reason=reason)

    def _tune(self) -> Generator[None, None, None]:
        yield from _steps(WARMUP_STEPS)
        while not self._model.has_settled:
            yield
        self._tell(self._check_fitness)
        held = self._tell(lambda: [[self._names[place] for place in bucket] for bucket in self._model.held_buckets()])
        default = self._agreed(MergePlan(self._gradients.model, "ddp", tuple(tuple(group) for group in held[0])))
        self._model.install(default)
        self._default = default

        self._says("observing torch's own buckets")
        seen = yield from self._observe(default, OBSERVED_TURNS)
        self._says("sweeping the network")
        swept = self._sweep()
        trace, messages_s = seen.trace, {size: list(times) for size, times in seen.messages_s.items()}
        tried = {default.groups: ("ddp", default)}
        cost = cost_under_load(swept, messages_s)
        for number in range(1, MAX_ROUNDS + 1):
            plan = self._planned(trace, cost, "optimal")
            if plan.groups in tried:
                break
            self._says(f"observing plan {number}")
            tried[plan.groups] = (f"optimal {number}", plan)
            self._model.install(plan)
            seen = yield from self._observe(plan, OBSERVED_TURNS)
            trace = seen.trace
            _add(messages_s, seen.messages_s)
            cost = cost_under_load(swept, messages_s)
        candidates = self._candidates(tried, trace, cost)
        self._says(f"comparing {len(candidates)} plans")
        candidates = yield from self._race(candidates, *FIRST_HEAT)
        # Few steps: what disturbs some of them must not decide who goes on.
        candidates.sort(key=lambda one: sum(sorted(one.steps_s)[: len(one.steps_s) // 2]))
        best = candidates[:2] if len(candidates) > 1 else []
        best += [one for one in candidates[2:] if one.plan == default]
        finalists = yield from self._race(best, *LAST_HEAT)
        finalists.sort(key=lambda one: one.step_s)
        candidates = finalists + [one for one in candidates if one not in best]

        self._says(f"observing {candidates[0].name}")
        self._model.install(candidates[0].plan)
        seen = yield from self._observe(candidates[0].plan, CHOSEN_TURNS)
        _add(messages_s, seen.messages_s)
        self._settle(candidates, seen, cost_under_load(swept, messages_s))

    def _settle(self, candidates: Sequence[Candidate], seen: _Observed, cost: PiecewiseCost) -> None:
        chosen = candidates[0]
        default = next(one for one in candidates if one.plan == self._default)
        self.tuning = replace(
            self.tuning,
            state="settled",
            reason=f"{chosen.name} was the fastest",
            candidates=tuple(candidates),
            messages_before=default.plan.num_groups,
            before_s=default.step_s,
            predicted_s=predict(seen.trace, cost, chosen.plan).iteration_s,
            exposed_s=seen.exposed_s,
            trace=seen.trace,
            cost=cost,
        )

    def _check_fitness(self) -> None:
        if reason := self._model.unfit_for_tuning:
            raise _GiveUpError(reason)

    def _tell(self, work: Callable[[], Any]) -> list[Any]:
        """Do local work on all ranks and return every rank's result; a failure on one ends tuning on all."""
        problem, result = "", None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = problem_of(error)
        said = [json.loads(text) for text in gather(json.dumps([problem, result]), self._group)]
        for other_problem, _ in said:
            if other_problem:
                raise _GiveUpError(other_problem)
        return [result for _, result in said]

    def _agreed(self, plan: MergePlan) -> MergePlan:
        """Return the plan if all ranks have it: they computed it from the same numbers."""

        def checked() -> MergePlan:
            check_kinds(plan, self._kinds)
            return plan

        agree_on_plan(checked, self._group)
        return plan

    def _planned(self, trace: ModelTrace, cost: PiecewiseCost, planner: Any) -> MergePlan:
        return self._agreed(split_by_kind(find_plan(trace, cost, planner), self._kinds))

    def _sweep(self) -> PiecewiseCost:
        largest = max(4096, sum(self._gradients.sizes))
        # Where one rank has no room for it, nobody sweeps.
        self._tell(lambda: torch.empty(largest + 8, dtype=torch.uint8, device=self._model.device).nbytes)
        try:
            return measure_allreduce(self._group, self._model.device, max_bytes=largest, budget_s=SWEEP_BUDGET_S)
        except MeasureError as error:  # on all ranks alike; where one has died training cannot go on either
            raise _GiveUpError(str(error)) from error

    def _observe(self, plan: MergePlan, turns: int) -> Generator[None, None, _Observed]:
        """Watch the steps of the plan in force, in turns: nothing but their length, their gradients, their messages."""
        hooked = self._model.has_hooks  # then listening needs a new Reducer, and is not begun anew for a step
        self._watch.listen(hooked)
        yield  # new buckets are allocated, a static graph is learnt
        self._watch.take()
        for _ in range(turns):
            yield
            self._watch.watches_gradients = True
            yield
            self._watch.watches_gradients = False
            self._watch.listen(True)
            yield
            self._watch.listen(hooked)
        steps = self._watch.take()
        self._watch.listen(False)
        return self._combine(steps, plan)

    def _combine(self, steps: list[SeenStep], plan: MergePlan) -> _Observed:
        sizes = [sum(self._gradients.size_of[name] for name in group) for group in plan.groups]
        plain, watched, heard = steps[::3], steps[1::3], steps[2::3]

        def mine() -> dict[str, Any]:
            if not all(sends(step, sizes) for step in heard):
                raise _GiveUpError("messages were seen that the plan does not have")
            return {
                "plain_s": [step.end_s for step in plain],
                "watched_s": [step.end_s for step in watched],
                "exposed_s": [step.end_s - max(step.ready_s.values(), default=step.end_s) for step in watched],
                "messages": [
                    [(one.end_s - one.start_s, one.start_s > one.ready_s) for one in step.messages[: len(sizes)]]
                    for step in heard
                ],
                "trace": trace_of(watched, self._gradients, {"measured": "observed in training"}).to_json(),
            }

        said = self._tell(mine)
        plain_s, watched_s = (
            median(max(times) for times in zip(*(one[kind] for one in said), strict=True))
            for kind in ("plain_s", "watched_s")
        )
        trace = agree_on_trace(ModelTrace.from_json(said[dist.get_rank(self._group)]["trace"]), self._group)
        messages_s: dict[int, list[float]] = {}
        for by_rank in zip(*(one["messages"] for one in said), strict=True):
            for size, same_message in zip(sizes, zip(*by_rank, strict=True), strict=True):
                queued = all(waited for _, waited in same_message)
                seconds = agreed_time_s([taken_s for taken_s, _ in same_message], queued=queued)
                messages_s.setdefault(size, []).append(seconds)
        # Of the rank that computes longest: the others also wait for its gradients.
        exposed_s = median(min(times) for times in zip(*(one["exposed_s"] for one in said), strict=True))
        slowed = min(MOST_SLOWED, max(1.0, watched_s / plain_s))
        return _Observed(_faster(trace, slowed), messages_s, max(0.0, exposed_s))

    def _candidates(
        self, tried: Mapping[Any, tuple[str, MergePlan]], trace: ModelTrace, cost: PiecewiseCost
    ) -> list[Candidate]:
        """Return what shall be compared: each partition once, torch's own buckets first."""
        found = dict(tried)

        def add(name: str, plan: MergePlan) -> None:
            found.setdefault(plan.groups, (name, plan))

        add("optimal", self._planned(trace, cost, "optimal"))
        add("mgwfbp", self._planned(trace, cost, "mgwfbp"))
        buckets, predicted_s = {}, {}
        for mib in BUCKET_MIB:
            planner = partial(plan_bucket, first_bucket_bytes=mib * 2**20, bucket_bytes=mib * 2**20)
            plan = self._planned(trace, cost, planner)
            if plan.groups not in found:
                buckets[mib], predicted_s[mib] = plan, predict(trace, cost, plan).iteration_s
        for mib in two_sizes(predicted_s):
            add(f"bucket {mib} MiB", buckets[mib])
        return [Candidate(name, plan, predict(trace, cost, plan).iteration_s) for name, plan in found.values()]

    def _race(
        self, candidates: Sequence[Candidate], turns: int, counted: int
    ) -> Generator[None, None, list[Candidate]]:
        """Measure candidates in turns, and return them with their steps."""
        mine: list[list[float]] = [[] for _ in candidates]
        places = list(range(len(candidates)))
        for turn in range(turns):
            # There and back again: what drifts, drifts for all alike.
            for place in places if turn % 2 == 0 else reversed(places):
                self._model.install(candidates[place].plan)
                yield from _steps(1 + counted)
                mine[place] += [step.end_s for step in self._watch.take()[-counted:]]
        slowest = [
            [max(times) for times in zip(*by_rank, strict=True)]
            for by_rank in zip(*self._tell(lambda: mine), strict=True)
        ]
        measured = []
        for candidate, steps_s in zip(candidates, slowest, strict=True):
            all_s = (*candidate.steps_s, *steps_s)
            measured.append(replace(candidate, steps_s=all_s, step_s=median(all_s)))
        return measured


def two_sizes(predicted_s: Mapping[int, float]) -> list[int]:
    """Return the bucket size that is predicted to be the fastest, and the fastest of those far from it.

    Two neighbours would be right or wrong together: where the model errs, a size far away may not.

    >>> two_sizes({1: 4.0, 2: 3.5, 5: 2.0, 10: 2.1, 25: 3.0})
    [5, 25]
    """
    ranked = sorted(predicted_s, key=lambda size: (predicted_s[size], size))
    far = [size for size in ranked[1:] if max(size, ranked[0]) >= FAR * min(size, ranked[0])]
    return [*ranked[:1], *(far or ranked[1:])[:1]]


def _steps(count: int) -> Iterator[None]:
    """Let steps go by."""
    for _ in range(count):
        yield


def _add(messages_s: dict[int, list[float]], more_s: Mapping[int, Sequence[float]]) -> None:
    for size, times in more_s.items():
        messages_s.setdefault(size, []).extend(times)


def _faster(trace: ModelTrace, factor: float) -> ModelTrace:
    """Return the trace without what the hooks that observed it cost."""
    layers = tuple(replace(layer, backward_s=layer.backward_s / factor) for layer in trace.layers)
    return replace(trace, forward_s=trace.forward_s / factor, layers=layers)
