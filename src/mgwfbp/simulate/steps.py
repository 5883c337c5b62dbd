"""Training steps of N workers: `simulate_steps`, and what came out of it, `Simulation`."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mgwfbp.cost import Cost
from mgwfbp.costs import sharded_cost
from mgwfbp.errors import SimulationError
from mgwfbp.lags import lags_s, message_costs, sent_with
from mgwfbp.plan import MergePlan
from mgwfbp.record import check_real
from mgwfbp.simulate.compute import Computation, draw_computation
from mgwfbp.simulate.contention import Times, computed_s, finished_s
from mgwfbp.simulate.forward import GatheredForward
from mgwfbp.simulate.scenario import IDEAL, Scenario
from mgwfbp.timeline import Span, Timeline, gather_waits
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural, quote

__all__ = ["Link", "Simulation", "send_messages", "simulate_steps"]


def simulate_steps(
    trace: ModelTrace, cost: Cost, plan: MergePlan, scenario: Scenario = IDEAL, *, overlap: bool = True
) -> "Simulation":
    r"""Simulate training steps of ``cost.workers`` workers.

    A message starts once its last gradient is ready on the slowest worker and the link is free:

    .. math:: \tau_c^{(g)} = \max\{\tau_c^{(g-1)} + t_c^{(g-1)},\; \max_w r_w^{(g)}\}

    which with equal workers is Eq. (7): without jitter the result equals `predict`, bit for bit. What messages take
    from the computation, `lags_s`, they take from every worker's. Where parameters are gathered, time 0 is the end of
    the last message of the step before, the forward pass of each worker waits for gathers (`GatheredForward`), and a
    step is the period of training. ``overlap=False`` holds all messages back until the
    backward pass has ended everywhere, which is naive S-SGD, Eq. (3). What else can happen is in the `Scenario`. For a
    given plan neither more jitter nor a slower link ever makes the mean step faster.

    Args:
        trace: the computation of one worker.
        cost: what a message takes, and on how many workers.
        plan: which gradients travel together.
        scenario: jitter, stragglers, contention, messages in flight, how many steps.
        overlap: whether messages are sent during the backward pass.

    Raises:
        PlanError: where the plan is not one of these gradients.
        SimulationError: where a step has no length that can be told.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> cost = LinearCost(workers=2, startup_s=2.0, per_byte_s=0.1)
    >>> plan = MergePlan.of_sizes(trace, [1, 2])
    >>> simulate_steps(trace, cost, plan).mean_iteration_s
    13.0
    >>> simulate_steps(trace, cost, plan, Scenario(contention=2.0)).mean_iteration_s  # 3 s of message 1 hide 1.5 s
    14.5
    >>> simulate_steps(trace, cost, plan, Scenario(jitter=0.1, steps=100))
    Simulation('toy' by 'by hand', 2 workers: 100 steps, 13.49 s in 2 messages, 4 s exposed)
    """
    return send_messages(draw_computation(trace, cost.workers, scenario), cost, plan, overlap=overlap)


@dataclass(slots=True)
class Link:
    """All that passes from one message to the next: the state of the simulation, an entry per step in every array.

    [Note: clock and work] Ready times count computation only. With contention the clock runs ahead of them: while a
    message is under way it advances by ``contention`` for each second of computation. Messages start in order and end
    in order, so between the starts of two messages the link is busy first, until the end of the earlier, and idle then;
    ``work_s`` is how much computation fits before the last start.
    """

    in_flight: int
    contention: float
    start_s: Times  # of the last message
    end_s: Times  # of the last message
    work_s: Times  # computation done by start_s
    ends_s: deque[Times] = field(default_factory=deque)  # of the messages that may still be in flight

    def ready_at(self, ready_s: Times) -> Times:
        """Return when, by the clock, this much computation is done; not before the last start."""
        if self.contention == 1.0:
            return ready_s
        return finished_s(np.maximum(ready_s - self.work_s, 0.0), self.start_s, self.end_s, self.contention)

    def send(self, ready_s: Times, startup_s: float, message_s: float) -> None:
        """Send a message of ``message_s``, ``startup_s`` of it start-up, when it is ready and may start."""
        ready_at_s = self.ready_at(ready_s)
        if self.in_flight == 1:
            start_s = np.maximum(self.end_s, ready_at_s)
            end_s = start_s + message_s
        else:
            start_s = np.maximum(self.start_s, ready_at_s)
            if len(self.ends_s) == self.in_flight:
                start_s = np.maximum(start_s, self.ends_s.popleft())
            end_s = np.maximum(start_s + startup_s, self.end_s) + (message_s - startup_s)
            self.ends_s.append(end_s)
        if self.contention != 1.0:
            self.work_s = self.work_s + computed_s(start_s - self.start_s, self.end_s - self.start_s, self.contention)
        self.start_s, self.end_s = start_s, end_s


def send_messages(
    computation: Computation, cost: Cost, plan: MergePlan, *, overlap: bool = True, startup: bool = True
) -> "Simulation":
    """Simulate the communication beside a computation that is already drawn; ``startup=False``: T(0) takes nothing."""
    trace, scenario = computation.trace, computation.scenario
    plan.check_covers([layer.name for layer in trace.layers])
    gathers, alone_s = _gather(computation, cost, plan, startup=startup)
    lag_s = np.array([0.0, *lags_s(trace, cost, plan)])[:, np.newaxis] * overlap
    ready_s = alone_s + lag_s
    num_steps = ready_s.shape[1]
    starts_s, ends_s, works_s = (np.empty((plan.num_groups, num_steps)) for _ in range(3))
    # Without overlap the link opens only when the last gradient is there; that is all the difference.
    opens_s = np.zeros(num_steps) if overlap else ready_s[-1]
    link = Link(scenario.in_flight, scenario.contention, opens_s, opens_s, opens_s)
    messages = zip(_messages(trace, plan), message_costs(cost, plan), sent_with(trace, cost, plan), strict=True)
    for index, ((last, num_bytes), kind, (row, taken_s)) in enumerate(messages):
        sent_s = alone_s[row + 1] + taken_s * overlap
        startup_s, message_s = _times_of(kind, num_bytes, startup=startup)
        link.send(np.maximum(ready_s[last], sent_s), startup_s, message_s)
        starts_s[index], ends_s[index], works_s[index] = link.start_s, link.end_s, link.work_s
    check_real(float(ends_s[-1].max()), f"the last message's end in a step of {quote(trace.model)}", SimulationError)
    return Simulation(computation, plan, starts_s, ends_s, works_s, alone_s, lag_s, gathers)


def _gather(
    computation: Computation, cost: Cost, plan: MergePlan, *, startup: bool
) -> tuple[tuple[Span, ...], NDArray[np.float64]]:
    """Return the gathers of a plan, and when the slowest worker has each gradient ready after them."""
    if not plan.gathers:
        return (), computation.ready_s
    trace, scenario, all_gather = computation.trace, computation.scenario, sharded_cost(cost)[1]
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    # All are ready when the step starts, and nothing else is under way until the last of them has ended.
    nothing_s = np.zeros(1)
    link, gathers = Link(scenario.in_flight, 1.0, nothing_s, nothing_s, nothing_s), []
    for group in plan.gathers:
        num_bytes = sum(size_of[name] for name in group)
        link.send(nothing_s, *_times_of(all_gather, num_bytes, startup=startup))
        gathers.append(Span(group, num_bytes, 0.0, link.start_s.item(), link.end_s.item()))
    arrived_s, taken_s = zip(*gather_waits(trace, cost, plan, [span.end_s for span in gathers]), strict=True)
    forward = GatheredForward(trace.layer_forward_s[::-1], arrived_s, taken_s)
    return tuple(gathers), draw_computation(trace, computation.workers, scenario, forward).ready_s


def _times_of(cost: Cost, num_bytes: int, *, startup: bool) -> tuple[float, float]:
    """Return the start-up time of a message and all of its time, without the former where it takes nothing."""
    startup_s, message_s = cost(0), cost(num_bytes)
    return (startup_s, message_s) if startup else (0.0, message_s - startup_s)


def _messages(trace: ModelTrace, plan: MergePlan) -> Iterable[tuple[int, int]]:
    """Walk over the messages: the row of the gradient that is ready last, and the bytes."""
    row_of = {layer.name: row for row, layer in enumerate(trace.layers, 1)}
    for group in plan.groups:
        rows = [row_of[name] for name in group]
        yield max(rows), sum(trace.layers[row - 1].grad_bytes for row in rows)


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """Simulated steps: when the slowest worker had each gradient, when each message was under way.

    Arrays have a row per gradient or message and a column per step; without jitter all steps are the same and there is
    one column for all of them. Times are seconds from the start of the step.
    """

    computation: Computation
    plan: MergePlan
    starts_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]
    works_s: NDArray[np.float64]  # computation done when each message starts
    ready_s: NDArray[np.float64]  # as the computation's, after what the forward pass waits for gathers
    lag_s: NDArray[np.float64]  # what messages have taken from it before each gradient; first the forward pass, 0
    gathers: tuple[Span, ...] = ()  # the same in every step

    def __repr__(self) -> str:
        gathers = f" and {plural(len(self.gathers), 'gather')}" if self.gathers else ""
        return (
            f"Simulation({quote(self.computation.trace.model)} by {quote(self.plan.planner)}, "
            f"{plural(self.workers, 'worker')}: {plural(self.computation.scenario.steps, 'step')}, "
            f"{format_seconds(self.mean_iteration_s)} in {plural(self.plan.num_groups, 'message')}{gathers}, "
            f"{format_seconds(self.mean_exposed_s)} exposed)"
        )

    @property
    def workers(self) -> int:
        """How many workers take part."""
        return self.computation.workers

    @cached_property
    def compute_s(self) -> NDArray[np.float64]:
        """When the backward pass ends on the slowest worker, for each step."""
        compute_s: NDArray[np.float64] = self._by_clock((self.ready_s + self.lag_s)[-1:])[0]
        return compute_s

    @cached_property
    def waited_s(self) -> NDArray[np.float64]:
        """What the slowest worker's forward pass waits for gathers and loses to them, for each step."""
        waited_s: NDArray[np.float64] = np.maximum(self.ready_s[0] - self.computation.ready_s[0], 0.0)
        return waited_s

    @cached_property
    def iteration_s(self) -> NDArray[np.float64]:
        """The whole step, for each step: the later of the end of the backward pass and of the last message."""
        iteration_s: NDArray[np.float64] = np.maximum(self.compute_s, self.ends_s.max(axis=0))
        return iteration_s

    @property
    def mean_iteration_s(self) -> float:
        """The mean step."""
        return float(self.iteration_s.mean())

    @property
    def mean_compute_s(self) -> float:
        """The mean end of the backward pass on the slowest worker."""
        return float(self.compute_s.mean())

    @property
    def taken_s(self) -> float:
        """What messages take from the computation of a step."""
        return float(self.lag_s[-1, 0])

    @property
    def mean_exposed_s(self) -> float:
        """The mean of the communication that no computation hides; what the forward pass waits is part of it."""
        return float((self.iteration_s - self.compute_s + self.waited_s).mean())

    @property
    def ratio(self) -> float:
        """How much longer the mean step is than the computation of one undisturbed worker, as a fraction of that."""
        single_s = self.computation.trace.compute_s
        if single_s:
            return (self.mean_iteration_s - single_s) / single_s
        return float("inf") if self.mean_iteration_s else 0.0

    @property
    def speedup(self) -> float:
        """Samples per second over those of one undisturbed worker, weak scaling, Eq. (5)."""
        return self.workers / (1 + self.ratio)

    @property
    def efficiency(self) -> float:
        """Speedup per worker, 1 at best."""
        return 1 / (1 + self.ratio)

    def quantile_s(self, fraction: float) -> float:
        """Return the step that this fraction of the steps does not exceed."""
        return float(np.quantile(self.iteration_s, fraction))

    def timeline(self, step: int = 0) -> Timeline:
        """Lay one step out in time; the computation shown is, gradient by gradient, that of the slowest worker."""
        trace, steps, ready_s = self.computation.trace, self.computation.scenario.steps, self.ready_s
        if not 0 <= step < steps:
            raise SimulationError(f"step {step} was not simulated, expected 0 to {steps - 1}")
        column = step if ready_s.shape[1] > 1 else 0
        # Gradients come one after the other, also where rounding has it otherwise.
        ends_s = np.maximum.accumulate(self._by_clock(ready_s + self.lag_s)[:, column]).tolist()
        starts_s = self._by_clock(ready_s[:-1] + self.lag_s[1:])[:, column].tolist()
        backward = [
            Span((layer.name,), layer.grad_bytes, start_s, start_s, end_s)
            for layer, start_s, end_s in zip(trace.layers, map(max, starts_s, ends_s[:-1]), ends_s[1:], strict=True)
        ]
        messages = [
            Span(group, num_bytes, min(ends_s[last], start_s), start_s, end_s, wire)
            for group, wire, (last, num_bytes), start_s, end_s in zip(
                self.plan.groups,
                self.plan.wires,
                _messages(trace, self.plan),
                self.starts_s[:, column].tolist(),
                self.ends_s[:, column].tolist(),
                strict=True,
            )
        ]
        forward = Span((), 0, 0.0, float(self.waited_s[column]), ends_s[0])
        whose = (trace.model, self.plan.planner, self.workers)
        return Timeline(*whose, forward, tuple(backward), tuple(messages), self.gathers)

    def _by_clock(self, ready_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when, by the clock, so much computation is done. [Note: clock and work]."""
        contention = self.computation.scenario.contention
        if contention == 1.0:
            return ready_s
        by_clock_s = ready_s.copy()
        for start_s, end_s, done_s in zip(self.starts_s, self.ends_s, self.works_s, strict=True):
            later_s = finished_s(np.maximum(ready_s - done_s, 0.0), start_s, end_s, contention)
            by_clock_s = np.where(ready_s > done_s, later_s, by_clock_s)
        return by_clock_s
