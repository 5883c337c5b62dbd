"""What observed steps say of a model and its network: records of all ranks in, a trace and a cost out.

Used alike by the tuner, by ``observe()`` and by ``mgwfbp bench``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from mgwfbp.cost import Cost, PiecewiseCost
from mgwfbp.costs import ShardedCost, WireCost, halved, sharded_of
from mgwfbp.errors import MeasureError
from mgwfbp.fitting import SHORTEST_S, fit_quality, nearest_line, never_falling
from mgwfbp.lags import lags_s
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.observe.observer import ObservedStep
from mgwfbp.runtime.observe.steps import AgreedSteps, Gradients, Seen
from mgwfbp.timeline import Span, Timeline
from mgwfbp.trace import ModelTrace, layers_of

__all__ = [
    "Learner",
    "learn_cost",
    "learn_taken",
    "learn_trace",
    "timeline_of",
    "trace_of",
    "with_forward",
    "without_lags",
    "without_waits",
]

# No message is taken to cost less than this part of what the sweep says: then the observation is wrong.
LEAST = 0.2
# What a delay is worth in relative errors of messages: where these cannot tell a delay from a slower link (all about as
# large), it is a slower link, if there is a sweep that says what small messages take.
DELAY_PENALTY = 0.5
# Without a sweep, and with messages of one size only, this part of their time is taken for a delay.
DELAY_SHARE = 0.5
# How far an observation reaches, to sizes smaller or larger by about this factor, and how many observations it takes to
# be believed rather than the line through all of them.
REACH, BELIEVED = 2.0, 3.0
# So many observations of one size that agree within this part count up to so many times where the line is far off them.
AGREE, SCATTER, MOST = 3, 0.05, 10.0
# Larger messages that take less than this part of smaller ones are faster, and not by chance.
FALL_SEEN = 0.5
# The line is taken to be off by no less than this, however near the few sizes that were observed are to it.
LEAST_OFF = 0.02
# What a launch takes from the computation on hosts we know (20 to 250 us), and what bytes take of the time that they
# are on the link (1 to 8 %): where observed plans cannot tell, it is taken to be nearer to nothing than to this.
KNOWN_LAUNCH_S, KNOWN_SHARE = 2e-4, 0.1
# What the messages of a step take from the computation together is nothing if it is less than this part of it.
LEAST_TAKEN = 1e-4
# The standard error of a median, where that of the mean is 1.
MEDIAN_ERROR = 1.25
# The end of a backward pass varies by no less than this part from step to step.
LEAST_NOISE = 0.005
# Hooks on gradients slow a host that is busy launching kernels, but not by more than this.
MOST_SLOWED = 1.5
# Of each message of a plan its bytes, and whether it travels in low precision.
Sent = tuple[tuple[int, bool], ...]
# Larger messages than were swept or observed go on at the same slope, to a point at so many times the largest.
BEYOND = 4


def timeline_of(step: ObservedStep, gradients: Gradients, plan: MergePlan, workers: int) -> Timeline:
    """Lay out what was observed of one step, as `predict` lays out what is expected, from its forward pass on."""
    size_of = gradients.size_of
    in_order = sorted(zip(gradients.names, gradients.ready_s(step), strict=True), key=lambda moment: moment[1])
    backward, start_s = [], step.forward_s
    for name, end_s in in_order:
        backward.append(Span((name,), size_of[name], start_s, start_s, end_s))
        start_s = end_s
    messages = [
        Span(group, message.num_bytes, message.ready_s, message.start_s, message.end_s, wire)
        for group, wire, message in zip(plan.groups, plan.wires, step.messages, strict=True)
    ]
    forward = Span((), 0, 0.0, _waited_s(step), step.forward_s)
    # They begin before the forward pass does: what is before that hides for nothing.
    gathers = []
    for group, one in zip(plan.gathers, step.gathers, strict=bool(step.gathers)):
        ready_s, start_s, end_s = (max(0.0, moment_s) for moment_s in (one.ready_s, one.start_s, one.end_s))
        gathers.append(Span(group, one.num_bytes, ready_s, start_s, end_s))
    return Timeline(plan.model, plan.planner, workers, forward, tuple(backward), tuple(messages), tuple(gathers))


def with_forward(trace: ModelTrace, pieces_s: Mapping[tuple[str, ...], float], forward_s: float) -> ModelTrace:
    """Return a trace with what layers take in the forward pass, together ``forward_s``, from what groups of them take.

    What a group takes is spread over its layers as in the backward pass.
    """
    backward_s = {layer.name: layer.backward_s for layer in trace.layers}
    share = forward_s / (sum(pieces_s.values()) or 1.0)
    parts_s: dict[str, float] = {}
    for group, piece_s in pieces_s.items():
        whole_s = sum(backward_s[name] for name in group)
        for name in group:
            parts_s[name] = share * piece_s * (backward_s[name] / whole_s if whole_s else 1 / len(group))
    layers = tuple(replace(layer, forward_s=parts_s.get(layer.name, 0.0)) for layer in trace.layers)
    return replace(trace, forward_s=sum(parts_s.values()), layers=layers)


def without_waits(step: ObservedStep) -> ObservedStep:
    """Return a step as it would be had its forward pass not waited for gathers; they and messages are left out."""
    waited_s = _waited_s(step)
    ready_s = {place: moment_s - waited_s for place, moment_s in step.ready_s.items()}
    forward_s, compute_s, end_s = (one - waited_s for one in (step.forward_s, step.compute_s, step.end_s))
    return ObservedStep(forward_s, compute_s, end_s, ready_s, ())


def _waited_s(step: ObservedStep) -> float:
    return max(0.0, step.forward_s - sum(step.pieces_s)) if step.gathers else 0.0


def trace_of(steps: Sequence[ObservedStep], gradients: Gradients) -> ModelTrace:
    """Return when each gradient was ready on this rank, the median over steps."""
    by_step = [gradients.ready_s(step) for step in steps]
    return _trace(gradients, [step.forward_s for step in steps], by_step, {})


@dataclass(slots=True)
class Learner:
    """What has been learnt so far; `trace` and `cost` are what it says of the model and of the network."""

    gradients: Gradients
    workers: int
    swept: PiecewiseCost | None = None  # on an idle network, where there is such a sweep
    messages_s: dict[int, list[float]] = field(default_factory=dict)
    low_messages_s: dict[int, list[float]] = field(default_factory=dict)  # in low precision, by bytes of gradients
    _computes_s: dict[Sent, list[float]] = field(default_factory=dict)  # by a plan's messages
    _observed: tuple[ModelTrace, MergePlan] | None = None  # gradients beside the messages of a plan
    gathers_s: dict[int, list[float]] = field(default_factory=dict)
    all_reduces_s: dict[int, list[float]] = field(default_factory=dict)  # where other messages are reduce-scatters
    _pieces_s: dict[tuple[str, ...], float] = field(default_factory=dict)  # of the forward pass, by what was gathered
    _alone_s: float | None = None  # the forward pass without gathers beside it
    swept_low: PiecewiseCost | None = None  # of messages in low precision, in turns with ``swept``

    def learn(self, plan: MergePlan, seen: Seen) -> None:
        """Take over what came of a turn with this plan; of one with low precision what its messages took.

        Its gradients count only as long as none were seen beside messages as they are.
        """
        sizes = self.gradients.sizes_of(plan.groups)
        if seen.messages is not None:
            for taken_s in seen.messages.message_s:
                for size, seconds, wire in zip(sizes, taken_s, plan.wires, strict=True):
                    (self.low_messages_s if wire else self.messages_s).setdefault(size, []).append(seconds)
        if seen.gathers is not None and seen.gathers.message_s:
            by_gather = zip(*seen.gathers.message_s, strict=True)
            for size, taken_s in zip(self.gradients.sizes_of(plan.gathers), by_gather, strict=True):
                self.gathers_s.setdefault(size, []).extend(taken_s)
            pieces_s = [median(values) for values in zip(*seen.gathers.pieces_s, strict=True)]
            self._pieces_s = dict(zip(plan.gathers, pieces_s, strict=True))
            self._alone_s = None if seen.alone is None else min(median(seen.alone.forward_s), sum(pieces_s))
        sent = tuple(zip(sizes, map(bool, plan.wires), strict=True))
        for steps in (seen.plain, seen.messages):  # hooks on gradients would take from the computation too
            self._computes_s.setdefault(sent, []).extend(steps.compute_s if steps else ())
        if plan.wire and self._observed is not None:
            return
        if seen.gradients is not None and seen.plain is not None:
            slowed = median(seen.gradients.length_s) / max(median(seen.plain.length_s), 1e-12)
            trace = learn_trace(seen.gradients, self.gradients)
            self._observed = trace.scaled(1 / min(MOST_SLOWED, max(1.0, slowed))), plan

    @property
    def trace(self) -> ModelTrace:
        """When gradients are ready where no messages take from the computation, from the last plan with gradients."""
        assert self._observed is not None  # noqa: S101 - asked for only then
        return without_lags(*self._observed, self.both)

    @property
    def cost(self) -> PiecewiseCost:
        """What a message costs beside a backward pass, and takes from it, from all messages and plans so far."""
        return self._costs[0]

    @property
    def low_cost(self) -> PiecewiseCost | None:
        """That of a message in low precision; None: none was seen.

        It is learnt over what was swept, or else over what half the bytes cost as they are.
        """
        return self._costs[1] if self.low_messages_s else None

    @property
    def both(self) -> WireCost:
        """The two; where no message in low precision was seen or swept, that of half the bytes."""
        return WireCost(*self._costs)

    @property
    def _costs(self) -> tuple[PiecewiseCost, PiecewiseCost]:
        full = learn_cost({**self._expected_s, **self.messages_s}, self.workers, self.swept)
        low = self.swept_low or halved(full)
        assert isinstance(low, PiecewiseCost)  # noqa: S101 - of a curve
        return learn_taken(full, learn_cost(self.low_messages_s, self.workers, low), self._computes_s.items())

    @property
    def _expected_s(self) -> dict[int, list[float]]:
        """What messages as they are would have taken in the place of those in low precision, by bytes.

        Beside a backward pass these took so many times what they do on an idle network, and so would those. Without a
        sweep of both nothing is expected.
        """
        if self.swept is None or self.swept_low is None:
            return {}
        longer = {size: self.swept(size) / max(self.swept_low(size), SHORTEST_S) for size in self.low_messages_s}
        return {size: [longer[size] * one_s for one_s in taken_s] for size, taken_s in self.low_messages_s.items()}

    @property
    def whole_trace(self) -> ModelTrace:
        """The trace with what each layer takes in the forward pass, without waits for gathers, where that was observed.

        What a group of parameters takes is spread over its layers as in the backward pass, and together they take what
        the forward pass does without gathers beside it.
        """
        trace, beside_s = self.trace, sum(self._pieces_s.values())
        if not beside_s:
            return trace
        return with_forward(trace, self._pieces_s, beside_s if self._alone_s is None else self._alone_s)

    @property
    def gather_cost(self) -> PiecewiseCost:
        """What a gather costs, learnt over what a reduce-scatter of as many bytes does; and takes from the computation.

        That is what the forward pass takes longer than without gathers beside it: for each one as much as a message
        takes at most, and the rest for their bytes.
        """
        like = self.cost
        found = learn_cost(self.gathers_s, self.workers, like) if self.gathers_s else like
        if self._alone_s is None:
            return replace(found, taken_s=like.taken_s, taken_per_byte_s=like.taken_per_byte_s)
        taken_s, number = sum(self._pieces_s.values()) - self._alone_s, len(self._pieces_s)
        launch_s = min(like.taken_s, taken_s / number)
        all_bytes = sum(self.gradients.sizes_of(self._pieces_s))
        return replace(found, taken_s=launch_s, taken_per_byte_s=(taken_s - number * launch_s) / max(1, all_bytes))

    def learn_all_reduces(self, plan: MergePlan, seen: Seen) -> None:
        """Take over what messages took that were all-reduced."""
        for taken_s in seen.messages.message_s if seen.messages else ():
            for size, seconds in zip(self.gradients.sizes_of(plan.groups), taken_s, strict=True):
                self.all_reduces_s.setdefault(size, []).append(seconds)

    @property
    def all_reduce_cost(self) -> PiecewiseCost:
        """What an all-reduce costs: learnt over a reduce-scatter and a gather together, where any was observed."""
        both = sharded_of(self.cost, self.gather_cost).all_reduce
        assert isinstance(both, PiecewiseCost)  # noqa: S101 - of curves
        learnt = learn_cost(self.all_reduces_s, self.workers, both)
        return replace(learnt, taken_s=both.taken_s, taken_per_byte_s=both.taken_per_byte_s)

    @property
    def halves(self) -> ShardedCost:
        """The three."""
        return ShardedCost(self.all_reduce_cost, self.cost, self.gather_cost)


def learn_trace(steps: AgreedSteps, gradients: Gradients, source: Mapping[str, Any] | None = None) -> ModelTrace:
    """Return when each gradient was ready on whichever rank was the last with it, the median over steps."""
    return _trace(gradients, steps.forward_s, steps.ready_s, source or {})


def _trace(
    gradients: Gradients, forward_s: Sequence[float], by_step: Sequence[Sequence[float]], source: Mapping[str, Any]
) -> ModelTrace:
    middle_s = median(forward_s)
    ready_s = [median(moments) for moments in zip(*by_step, strict=True)]
    # Equal moments keep the order of the first step.
    order = sorted(range(len(gradients.names)), key=lambda place: (ready_s[place], by_step[0][place]))
    moments = [(gradients.names[place], ready_s[place], gradients.sizes[place]) for place in order]
    ends_s = [max(moments) for moments in by_step]
    off = MEDIAN_ERROR * stdev(ends_s) / math.sqrt(len(ends_s)) / max(median(ends_s), SHORTEST_S) if ends_s[1:] else 0.0
    about = {"measured": "observed in training", "steps": len(by_step), "off": off, **source}
    return ModelTrace(gradients.model, middle_s, layers_of(moments, middle_s), about)


def learn_cost(seen: Mapping[int, Sequence[float]], workers: int, swept: PiecewiseCost | None = None) -> PiecewiseCost:
    r"""Return what messages cost beside a running backward pass, from what they took there.

    ``seen`` holds, by bytes, the seconds of all messages of that size. Beside a backward pass a message waits for room
    on the processor, whatever its size, and its bytes go at some rate. So to the medians :math:`t_i` of the sizes
    :math:`m_i`, each seen :math:`n_i` times, a line is fitted, `nearest_line`, over the cost T that was ``swept`` on an
    idle machine, or over the bytes where there is none:

    .. math:: B(M) = d + \rho\, T(M)

    with a delay d and a ratio :math:`\rho`. What the sizes differ from it is kept near them, as a mean of logarithms:

    .. math:: \ln\frac{C(M)}{B(M)} = \frac{\sum_i w_i \ln(t_i / B(m_i))}{n_0 + \sum_i w_i}, \qquad
              w_i = n_i \exp\!\Big(-\frac{\ln^2(M/m_i)}{2 \ln^2 2}\Big)

    with :math:`n_0` `BELIEVED`: one late message must not speak for all of its size. Three or more that agree may where
    the line is no guide: they count :math:`\sigma^2/s^2` times (1 to `MOST`), where sizes are off the line by
    :math:`\sigma` and these scatter by s. The result is the nearest to that which never falls. ``source["under_load"]``
    holds the observed medians, ``source["fit"]`` how far the result is from them, and ``source["spread"]`` how far each
    point may be off: what observations are typically off the line, the less the more of them are near,
    :math:`\sigma / \sqrt{1 + \sum_i w_i / n_0}`.

    Sizes that larger ones undercut beyond noise have the time of these, `padded_sizes`, as in a fit of a sweep;
    ``source["padded"]`` lists what was observed of them.

    >>> swept = PiecewiseCost(2, ((0, 1.0), (1000, 2.0), (10**6, 1001.0)))
    >>> learnt = learn_cost({0: [11.0] * 9, 1000: [12.0] * 8 + [60.0], 10**6: [1011.0] * 9}, 2, swept)
    >>> [round(learnt(size), 6) for size in (0, 1000, 10**5, 10**6)]  # 10 s more, whatever the size
    [11.0, 12.0, 111.0, 1011.0]
    """
    shape = swept or PiecewiseCost(workers, ((0, 0.0), (10**9, 1.0)))  # a byte each nanosecond
    sizes = sorted(size for size, times in seen.items() if times and (swept is None or swept(size) > 0))
    if not sizes:
        if swept is None:
            raise MeasureError(
                "no message was observed and none was swept: nothing is known of the network; observe steps"
            )
        return swept
    shape_s = np.array([shape(size) for size in sizes])
    least_s = np.maximum(LEAST * shape_s if swept else 0.0, SHORTEST_S)
    padded = padded_sizes(seen, sizes)
    observed_s = np.maximum([padded.get(size, median(seen[size])) for size in sizes], least_s)
    counts = np.array([float(len(seen[size])) for size in sizes])
    delay_s, ratio = _line(shape_s, observed_s, counts, is_swept=swept is not None)
    grid = _grid(shape, sizes, is_swept=swept is not None)
    line_s = np.maximum(delay_s + ratio * np.array([shape(size) for size in grid]), SHORTEST_S)
    # From each size of the grid (rows) to each that was observed.
    distances = np.log(np.maximum(1, grid)[:, np.newaxis] / np.maximum(1, sizes)) / math.log(REACH)
    missed = np.log(observed_s / np.maximum(delay_s + ratio * shape_s, SHORTEST_S))
    off = max(LEAST_OFF, math.sqrt(float(np.average(missed**2, weights=counts))))
    agreement = np.array([_agreement(seen[size], off) for size in sizes])
    weights = counts * agreement * np.exp(-(distances**2) / 2)
    corrections = (weights @ missed) / (BELIEVED + weights.sum(axis=1))
    times_s = never_falling(np.maximum(line_s * np.exp(corrections), SHORTEST_S), BELIEVED + weights.sum(axis=1))
    largest, largest_s = grid[-1], float(times_s[-1])
    beyond = (BEYOND * largest, largest_s + ratio * (shape(BEYOND * largest) - shape(largest)))
    cost = PiecewiseCost(workers, (*zip(grid, times_s.tolist(), strict=True), beyond))
    kept = [(size, time_s) for size, time_s in zip(sizes, observed_s.tolist(), strict=True) if size not in padded]
    slower = [(size, median(seen[size])) for size in padded]
    spread = (off / np.sqrt(1 + weights.sum(axis=1) / BELIEVED)).tolist()
    source: dict[str, Any] = {
        "under_load": sorted([*kept, *slower]),
        "fit": fit_quality(cost, [size for size, _ in kept], [time_s for _, time_s in kept]),
        "spread": [*spread, off],
        **({"padded": slower} if slower else {}),
    }
    return replace(cost, source={**(swept.source if swept else {"measured": "observed in training"}), **source})


def padded_sizes(seen: Mapping[int, Sequence[float]], sizes: Sequence[int]) -> dict[int, float]:
    """Return the sizes that had better be padded, with what larger ones take that undercut them beyond noise.

    That is where three in four messages from a larger size to its double took less than `FALL_SEEN` of what three in
    four took from this one's half on, and there are `AGREE` of either: late messages, and sizes that wait at one place
    of the backward pass, are no fall.

    >>> padded_sizes({16: [1.6] * 3, 32: [3.2] * 3, 64: [0.16] * 3}, [16, 32, 64])
    {16: 0.16, 32: 0.16}
    >>> padded_sizes({16: [1.6] * 3, 32: [1.0] * 3, 64: [0.1]}, [16, 32, 64])
    {}
    """

    def around(low: float, high: float) -> list[float]:
        return sorted(time_s for size in sizes if low <= size <= high for time_s in seen[size])

    faster = [around(size, 2 * size) for size in sizes]
    found = {}
    for place, size in enumerate(sizes):
        own = around(size / 2, size)
        slow_s = own[len(own) // 4]
        later = [some for some in faster[place + 1 :] if len(some) >= AGREE]
        falls = [median(some) for some in later if some[3 * len(some) // 4] < FALL_SEEN * slow_s]
        if len(own) >= AGREE and falls:
            found[size] = min(falls)
    return found


def _agreement(times_s: Sequence[float], off: float) -> float:
    """Return how many times observations of one size count, where sizes are typically off the line by this part.

    >>> _agreement([1.0, 1.0], 0.5), _agreement([1.0, 1.0, 1.0], 0.5), _agreement([1.0, 1.5, 2.0], 0.2)
    (1.0, 10.0, 1.0)
    """
    if len(times_s) < AGREE:
        return 1.0
    middle_s = max(median(times_s), SHORTEST_S)
    scatter = 1.5 * median(abs(math.log(max(time_s, SHORTEST_S) / middle_s)) for time_s in times_s)
    return min(MOST, max(1.0, (off / max(scatter, SCATTER)) ** 2))


def learn_taken(
    full: PiecewiseCost, low: PiecewiseCost, observed: Iterable[tuple[Sequence[tuple[int, bool]], Sequence[float]]]
) -> tuple[PiecewiseCost, PiecewiseCost]:
    r"""Return the costs of both precisions with what a message takes from the computation, from observed plans.

    Each plan is given as its messages and the ends of the backward passes of its steps. The last message is sent when
    nothing is left to be slowed, so with n messages before the last of P bytes, and C for the end without any

    .. math:: t = C + h n + g P + h_{low} n_{low} + g_{low} P_{low}

    counted apart by precision. Of the h and g those are wanted, not negative, that are nearest to the median of each
    plan; as many steps as a plan has, so much it counts. Few plans, or plans that are alike, cannot tell them from
    noise. So those of messages as they are are drawn to 0, as strongly as if they were known to be about
    `KNOWN_LAUNCH_S` and `KNOWN_SHARE` of what a byte takes on the link, and those of low precision, as strongly, to
    them: as long as nothing else is seen, messages take alike.

    >>> plans = [([(10**6, False)] * n, [0.1 + 5e-5 * (n - 1)] * 30) for n in (2, 40, 80)]
    >>> swept = PiecewiseCost(2, ((0, 1e-4), (10**6, 1e-4)))
    >>> [(round(one.taken_s * 1e6), one.taken_per_byte_s) for one in learn_taken(swept, swept, plans)]
    [(50, 0.0), (50, 0.0)]
    """
    plans = [(sent, list(ends_s)) for sent, ends_s in observed if ends_s]
    if len(plans) < 2:
        return full, low
    total = max(sum(size for size, _ in sent) for sent, _ in plans)
    middle_s = np.array([median(ends_s) for _, ends_s in plans])
    within_s = [abs(end_s - middle) for (_, ends_s), middle in zip(plans, middle_s, strict=True) for end_s in ends_s]
    noise_s = max(1.5 * median(within_s), LEAST_NOISE * float(np.median(middle_s)), SHORTEST_S)
    weights = np.sqrt([len(ends_s) for _, ends_s in plans]) / noise_s
    scales = (KNOWN_LAUNCH_S, KNOWN_SHARE * (full(total) - full(0)) / max(1, total))
    sizes = [[[size for size, is_low in sent[:-1] if is_low == kind] for kind in (False, True)] for sent, _ in plans]
    columns = np.array([[part for some in both for part in (len(some), sum(some))] for both in sizes], dtype=np.float64)
    columns *= (*scales, *scales)
    share = weights**2 / np.sum(weights**2)
    slopes = _not_negative(
        (columns - share @ columns) * weights[:, np.newaxis], (middle_s - share @ middle_s) * weights
    )
    taken = [float(slope * scale) for slope, scale in zip(slopes, (*scales, *scales), strict=True)]
    longest_s = max(float(row @ slopes) for row in columns)
    if longest_s < LEAST_TAKEN * float(np.median(middle_s)):  # rounding, and nothing that a plan should heed
        return full, low
    return (
        replace(full, taken_s=taken[0], taken_per_byte_s=taken[1]),
        replace(low, taken_s=taken[2], taken_per_byte_s=taken[3]),
    )


# What slopes are drawn to 0: those of messages as they are, and what those in low precision differ from them by.
_PENALTIES = np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [-1.0, 0, 1.0, 0], [0, -1.0, 0, 1.0]])


def _not_negative(columns: Any, values: Any) -> Any:
    """Return the four slopes nearest to some values that are not negative, drawn by `_PENALTIES`."""
    rows, targets = np.vstack([columns, _PENALTIES]), np.concatenate([values, np.zeros(len(_PENALTIES))])

    def solve(used: tuple[int, ...]) -> tuple[float, Any]:
        slopes = np.zeros(columns.shape[1])
        slopes[list(used)] = np.linalg.lstsq(rows[:, list(used)], targets, rcond=None)[0]
        return float(np.sum((targets - rows @ slopes) ** 2)), slopes

    found = (solve(used) for number in range(5) for used in combinations(range(4), number))
    return min(((off, slopes) for off, slopes in found if min(slopes) >= 0), key=lambda one: one[0])[1]


def without_lags(trace: ModelTrace, plan: MergePlan, cost: Cost) -> ModelTrace:
    """Return what was observed beside a plan's messages as it would be without what these took from the computation."""
    lags = lags_s(trace, cost, plan)
    moments = [
        (layer.name, ready_s - lag_s, layer.grad_bytes)
        for layer, ready_s, lag_s in zip(trace.layers, trace.ready_s, lags, strict=True)
    ]
    forward_s = {layer.name: layer.forward_s for layer in trace.layers}
    return replace(trace, layers=layers_of(moments, trace.forward_s, forward_s)) if any(lags) else trace


def _line(shape_s: Any, observed_s: Any, counts: Any, *, is_swept: bool) -> tuple[float, float]:
    """Return the delay and the ratio of the line over the shape that is nearest to what was observed."""
    if is_swept:
        delay_s, ratio = nearest_line(shape_s, observed_s, counts, height_penalty=DELAY_PENALTY)
        return delay_s, max(LEAST, ratio)
    if max(shape_s) < REACH * max(min(shape_s), 1e-9):  # about one size
        taken_s, size_s = fmean(observed_s), fmean(shape_s)
        return DELAY_SHARE * taken_s, (1 - DELAY_SHARE) * taken_s / max(size_s, 1e-9)
    delay_s, ratio = nearest_line(shape_s, observed_s, counts)
    # Bytes are never free, or the largest message would be the best; at least what the largest took by the byte.
    return delay_s, ratio or LEAST * float(observed_s[-1] / shape_s[-1])


def _grid(shape: PiecewiseCost, sizes: Sequence[int], *, is_swept: bool) -> list[int]:
    """Return the sizes of the result's points: those of the sweep, those observed, and enough between them."""
    swept = [size for size, _ in shape.points] if is_swept else [0]
    first, last = max(4, swept[0]), max(*swept, *sizes, 8)
    doublings = {first << shift for shift in range((last // first).bit_length())}
    return sorted({*swept, *doublings, *sizes})
