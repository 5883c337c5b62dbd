"""Why a training run is slow: `explain` observes some steps on all ranks, and rank 0 writes a page with advice.

[Note: the parts of a step]
A step goes from averaged gradients to averaged gradients. Every moment that is noted ends a part. The part between
steps ends when a forward pass begins, exposed communication when gradients are averaged, and so on; so parts add up to
the step whatever the loop does, several passes for one reduction among it. Buffers that rank 0 broadcasts before a
forward pass are exposed communication too.

Ranks leave a reduction together. Its messages end when the last rank has sent its own: what the rank that works longest
has of exposed time is communication, and what another rank has more of it, in the same step, it waited.
"""

import json
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mgwfbp.cost import PiecewiseCost
from mgwfbp.errors import MeasureError
from mgwfbp.files import show_path, write_text
from mgwfbp.measure.agreement import broadcast_text, gather, on_device, problem_of, reduce_values, together
from mgwfbp.measure.allreduce import measure_allreduce, measure_wire
from mgwfbp.measure.clock import Moment, clock_for
from mgwfbp.measure.hooks import GradientHooks
from mgwfbp.report.explanation import OWN, Explanation, RankParts, Wrapper
from mgwfbp.report.explanation_page import build_explanation_page
from mgwfbp.runtime.breakdown import NotedMessages, note_of, parts_of_rank
from mgwfbp.runtime.distributed import IN_JOIN
from mgwfbp.runtime.distributed import DistributedDataParallel as OurDistributedDataParallel
from mgwfbp.runtime.observe.observer import ObservedStep, Observer, weakly
from mgwfbp.runtime.observe.steps import Gradients, Seen
from mgwfbp.runtime.reducer.handle import ReducerHandle, when_backward_has_ended
from mgwfbp.runtime.reducer.support import cannot_hold, missing
from mgwfbp.units import plural, quote

__all__ = ["Explaining", "explain"]

WARMUP_STEPS = 5
# The end of a backward pass is learnt from about so many of the gradients: one of them takes part in every pass.
HOOKED = 8
# How long messages of other sizes are timed at the end, in each precision.
SWEEP_S = 0.5

_log = logging.getLogger("mgwfbp")


def explain(
    model: DistributedDataParallel,
    optimizer: Optimizer | None = None,
    page: str | os.PathLike[str] = "slow.html",
    steps: int = 30,
) -> "Explaining":
    """Find out where the time of training goes; to be called on every rank, once, before the training loop.

    After 5 steps to warm up, ``steps`` steps are observed: loading data, forward and backward pass, communication,
    waiting for slower ranks, the optimizer. A step is one whose gradients are averaged. Then all ranks tell one another
    what they saw and send messages of several sizes for about half a second; rank 0 writes the page and one record of
    level INFO of the logger ``mgwfbp``; and everything is taken off the model. Nothing waits meanwhile, and what is
    computed does not change. A failure is a warning of that logger on all ranks; training goes on.

    Where messages travel in low precision, ``wire=``, they are sent in both precisions then, for about a second:
    ``bucket_cap_mb`` is predicted for a model without ``wire=``, and our class for one that may use both.

    Where messages cannot be observed (a communication hook sends them, gradients are sparse, this torch lacks
    something) the parts are reported all the same, steps of the optimizer are counted, and no buckets are predicted.
    A model of ours is observed once its tuner has ended.

    Args:
        model: a model in torch's DistributedDataParallel or in ours, with its communication hook if it gets one.
        optimizer: its optimizer; with None the optimizer's step counts to what lies between steps.
        page: where rank 0 writes the page.
        steps: how many steps to observe, 3 or more; the same on all ranks.

    Returns:
        An object whose ``result`` is None until all ranks have agreed, and then the `Explanation`; it prints as that.

    Raises:
        MeasureError: on every rank, where the model cannot be observed; it says why.
    """
    if not isinstance(model, DistributedDataParallel):
        raise MeasureError(f"model is a {type(model).__name__}, expected a DistributedDataParallel; wrap it first")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def prepare() -> str:
        _check(model, optimizer, parameters, steps)
        return _why_unobserved(model, optimizer)

    with on_device(parameters[0].device if parameters else None):
        why = together(prepare, model.process_group)
        alike = [float(steps), float(bool(why))]
        lowest, highest = (reduce_values(alike, how, model.process_group) for how in ("min", "max"))
    if lowest != highest:
        raise MeasureError("steps=, or what can be observed of the model, differs between ranks; call explain alike")
    return Explaining(model, optimizer, page, steps, why)


def _check(model: Any, optimizer: object, parameters: Sequence[Tensor], steps: int) -> None:
    if not isinstance(steps, int) or steps < 3:
        raise MeasureError(f"steps is {quote(steps)}, expected 3 or more")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise MeasureError(f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer or None")
    if len({parameter.device for parameter in parameters}) != 1:
        raise MeasureError("cannot explain: the parameters are on several devices, which no one clock can time")
    clock_for(parameters[0].device)
    if any(isinstance(hook, _Hook) for hook in model._forward_pre_hooks.values()):
        raise MeasureError("the model is being explained already: wait until that has ended")
    if getattr(model, "_observer", None) is not None:
        raise MeasureError("the model is being observed: leave that block first")
    if getattr(model, "_shards", None) is not None:
        raise MeasureError(
            "cannot explain: a sharded optimizer gathers parameters in the forward pass, and what that waits for them "
            "would be taken for computation; model.observe() tells the two apart"
        )


def _why_unobserved(model: Any, optimizer: object) -> str:
    """Say why messages cannot be observed; empty where they can."""
    why = ", ".join(missing()) or cannot_hold(model)
    if not why and (model._comm_hooks or model._get_ddp_logging_data().get("comm_hook")):
        why = "a communication hook sends them"
    if not why and any(ReducerHandle(model).sparse):
        why = "gradients are sparse, and as large as each batch makes them"
    if why and optimizer is None:
        raise MeasureError(f"messages cannot be observed ({why}), and steps are counted by the optimizer's: give it")
    return why


class _Hook:
    """A hook on the model; with a copy or a pickle of the model goes one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


class Explaining:
    """Observes steps until there are enough of them, then explains them; see [Note: the parts of a step].

    The model's hooks keep it alive, so it ends its work whether or not somebody keeps it.
    """

    def __init__(
        self, model: Any, optimizer: Optimizer | None, page: str | os.PathLike[str], steps: int, why: str
    ) -> None:
        self.result: Explanation | None = None
        self.problem = ""  # why there is no result, or no page
        self._model, self._group, self._why = weakref.ref(model), model.process_group, why
        self._page, self._path, self._num_steps = page, Path(page).absolute(), steps
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._trained[0].device
        self._name = type(model.module).__name__
        self._wrapper: Wrapper = "torch"
        self._clock = clock_for(self._device)
        self._reducer: ReducerHandle | None = None
        self._observer: Observer | None = None
        self._has_begun = self._has_optimizer = self._is_in_backward = False
        self._first: int | None = None  # the number of steps before those that count
        self._steps: list[list[tuple[str, Moment]]] = []  # of each the moments that end parts
        self._marks: list[tuple[str, Moment]] = []
        self._gradient_hooks: GradientHooks | None = None
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._before_forward)),
            model.register_forward_hook(_Hook(self._after_forward)),
        ]
        if model.broadcast_buffers and model.modules_buffers:  # for which ranks wait for rank 0
            self._hooks.append(model.module.register_forward_pre_hook(_Hook(self._after_buffers)))
        if optimizer is not None:
            self._has_optimizer = True
            self._hooks.append(optimizer.register_step_pre_hook(weakly(self._before_update)))
            self._hooks.append(optimizer.register_step_post_hook(weakly(self._after_update)))
        self._is_ours = isinstance(model, OurDistributedDataParallel)
        if self._is_ours:
            model._explaining = self
        if not self._is_ours or model.tuning.state != "working":
            self.begin()

    def __str__(self) -> str:
        if self.result is not None:
            return str(self.result)
        waits = "" if self._has_begun else ", waiting for the tuner"
        done = 0 if self._first is None else len(self._steps) - self._first
        return self.problem or f"{done} of {plural(self._num_steps, 'step')} observed{waits}"

    __repr__ = __str__

    def begin(self) -> None:
        """Begin to observe, between two steps and on all ranks after the same one; our class calls it."""
        if self._has_begun:
            return
        model: Any = self._model()
        self._has_begun = True
        if self._is_ours:
            self._wrapper = "tuned" if model.tuning.state == "settled" else "mgwfbp"
        if not self._why:
            self._reducer = getattr(model, "_handle", None) or ReducerHandle(model)
            self._observer = Observer(self._reducer, self._clock, weakly(self._step_has_ended))
            if self._is_ours:
                model._observer = self._observer
        some = [*self._trained[:: max(1, len(self._trained) // HOOKED)], self._trained[-1]]
        self._gradient_hooks = GradientHooks(some, weakly(self._gradient_is_ready))
        self._mark("")

    def stop(self, problem: str = "") -> None:
        """Take everything off the model; with a problem there is no result, and a warning says why."""
        for hook in self._hooks:
            hook.remove()
        if self._gradient_hooks is not None:
            self._gradient_hooks.remove()
        if self._observer is not None:
            self._observer.stop()
        model: Any = self._model()
        if self._is_ours and model is not None:
            if model._observer is self._observer:
                model._observer = None
            model._explaining = None
        self._has_begun, self._hooks, self._steps, self._marks = False, [], [], []
        self._observer, self._reducer, self._trained = None, None, []  # whoever keeps this keeps no model
        if problem:
            self.problem = problem
            _log.warning("nothing is explained: %s", problem)

    def _mark(self, part: str) -> None:
        self._marks.append((part, self._clock.now()))

    def _before_forward(self, model: Any, *_: object) -> None:
        if not self._has_begun or not torch.is_grad_enabled():
            return
        if reason := self._why_not_any_more(model):
            self.stop(reason)
            return
        self._is_in_backward = False  # of one that failed
        self._mark("between")
        if self._observer is not None and not self._is_ours:
            self._observer.before_forward()

    def _after_buffers(self, *_: object) -> None:
        if self._has_begun and torch.is_grad_enabled() and self._marks[-1][0] == "between":
            self._mark("exposed")
            if self._observer is not None:
                self._observer.before_forward()  # the pass begins only now

    def _after_forward(self, *_: object) -> None:
        if not self._has_begun or not torch.is_grad_enabled():
            return
        self._mark("forward")
        if self._observer is not None and not self._is_ours:
            self._observer.after_forward()

    def _why_not_any_more(self, model: Any) -> str:
        """Say what has happened to the model since; empty where it can still be observed. The same on all ranks."""
        if model._join_config.enable:
            return IN_JOIN
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the model was captured in a CUDA graph, in which nothing can be noted"
        if self._observer is not None and model._comm_hooks:
            return "a communication hook was registered; call explain after register_comm_hook"
        return ""

    def _gradient_is_ready(self, *_: object) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            when_backward_has_ended(lambda: self._mark("backward"), self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        self._is_in_backward = False
        self._mark("exposed")

    def _before_update(self, *_: object) -> None:
        if self._has_begun:
            self._mark("other")

    def _after_update(self, *_: object) -> None:
        if self._has_begun:
            self._mark("optimizer")
            if self._observer is None:  # else the end of a reduction is that of a step
                self._step_has_ended()

    def _step_has_ended(self) -> None:
        if self._observer is not None and self._marks[-1][0] != "exposed":
            self._mark("backward")  # none of the gradients that are hooked took part
        self._steps.append(self._marks)
        count = len(self._steps)
        has_settled = self._reducer is None or self._reducer.has_settled
        if self._first is None and count >= WARMUP_STEPS and has_settled:
            self._first = count
        if self._first is not None and count == self._first + self._num_steps:
            self._end()
            return
        if self._first is not None and self._observer is not None:
            note = note_of(count - self._first)
            self._observer.note(gradients=note == "gradients", messages=note == "messages")
        self._marks = []
        self._mark("")  # what was done here is no part of a step

    def _end(self) -> None:
        result: Explanation | None = None
        problem = ""
        is_first = dist.get_rank(self._group) == 0
        with torch.profiler.record_function("mgwfbp: explaining"), on_device(self._device):
            try:
                result = self._agree()
                self.result = result
                together(lambda: self._write(result) if is_first else None, self._group)
            except Exception as error:  # whatever it is, training goes on
                problem = problem_of(error)
        self.stop("" if result is not None else problem)
        if result is not None and problem:
            self.problem = problem
            _log.warning("no page was written: %s", problem)
        if result is not None and is_first:
            _log.info("%s%s", result, "" if problem else f": {show_path(self._page)}")

    def _write(self, result: Explanation) -> None:
        write_text(self._path, build_explanation_page(result))

    def _agree(self) -> Explanation:
        """Tell the other ranks what was seen here, and return what rank 0 makes of it; the same on all ranks.

        All that a rank does on its own is done by `together`: what fails there, fails on all.
        """
        group, is_first = self._group, dist.get_rank(self._group) == 0
        parts, observed = together(self._read, group)
        plain = [place for place in range(self._num_steps) if not observed or note_of(place) == "plain"]
        least_s = reduce_values([parts[place]["exposed"] for place in plain], "min", group)
        mine = parts_of_rank([parts[place] for place in plain], least_s)
        ranks = tuple(RankParts(*json.loads(said)) for said in gather(json.dumps(mine), group))
        found = Explanation(self._name, self._wrapper, self._has_optimizer, len(plain), ranks, self._why)
        if observed and len(ranks) > 1:
            try:
                found = self._predict(found, observed, [sum(step.values()) for step in parts])
            except MeasureError as error:  # on all ranks: what is known of the parts is told all the same
                found = replace(found, unknown=str(error))
        text = broadcast_text(together(lambda: found.dumps() if is_first else "", group), 0, group)
        return together(lambda: Explanation.from_json(json.loads(text)), group)

    def _predict(self, found: Explanation, observed: Sequence[ObservedStep], lengths_s: list[float]) -> Explanation:
        """Agree on gradients and messages; rank 0 adds what other buckets would give."""
        group, workers, reducer = self._group, len(found.ranks), self._reducer
        assert reducer is not None  # noqa: S101 - something was observed
        noted = together(
            lambda: NotedMessages.of(
                observed, lengths_s, reducer, Gradients(self._name, reducer.names, reducer.sizes), workers
            ),
            group,
        )
        seen = Seen(**{note: steps.agreed(group) for note, steps in noted.steps.items()})
        timeline = broadcast_text(noted.timeline, found.slowest, group)
        # What the buckets in force say of other sizes is little, and of another precision nothing.
        swept = _sweep(noted, group, self._device)
        is_first = dist.get_rank(group) == 0
        return together(lambda: noted.predict(found, seen, *swept, timeline) if is_first else found, group)

    def _read(self) -> tuple[list[dict[str, float]], list[ObservedStep]]:
        """Return the parts of every step, and what the observer noted of it."""
        self._clock.wait()
        parts = []
        alone = dist.get_world_size(self._group) == 1  # what follows the backward pass is copying then
        for marks in self._steps[self._first :]:
            parts.append(dict.fromkeys((*OWN, "exposed"), 0.0))
            for (_, begin), (part, end) in pairwise(marks):
                parts[-1]["backward" if alone and part == "exposed" else part] += max(
                    0.0, self._clock.between_s(begin, end)
                )
        observed = self._observer.take()[self._first :] if self._observer is not None else []
        if self._observer is not None and len(observed) != len(parts):
            raise MeasureError(f"{plural(len(observed), 'step')} of {len(parts)} could be observed")
        return parts, observed


def _sweep(
    noted: NotedMessages, group: dist.ProcessGroup, device: torch.device
) -> tuple[PiecewiseCost, PiecewiseCost | None]:
    """Measure what messages take as they are, and in low precision where some travel so. All ranks must call it."""
    if noted.wire is None:
        return measure_allreduce(group, device, max_bytes=noted.largest_bytes, budget_s=SWEEP_S), None
    both = measure_wire(noted.wire, group, device, max_bytes=noted.largest_bytes, budget_s=2 * SWEEP_S)
    assert isinstance(both.full, PiecewiseCost)  # noqa: S101 - a sweep gives curves
    assert isinstance(both.low, PiecewiseCost)  # noqa: S101 - two of them
    return both.full, both.low
