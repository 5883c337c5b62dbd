"""One training step laid out in time: `Span`, `Timeline`, and the recurrence that everything else shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

from mgwfbp.cost import Cost, taken_by
from mgwfbp.costs import sharded_cost
from mgwfbp.errors import CostError, FormatError, TimelineError
from mgwfbp.lags import lags_s, message_costs, sent_with
from mgwfbp.network import Network
from mgwfbp.plan import WIRES, MergePlan
from mgwfbp.record import Fields, Record, check_count, check_items, check_real, check_text
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural, quote

__all__ = [
    "Span",
    "Timeline",
    "gather_waits",
    "predict",
    "predict_naive",
    "predict_parameter_server",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that occupies the processor or the link for a while; times from the start of the step."""

    layers: tuple[str, ...]  # gradients computed or sent; empty for the forward pass
    num_bytes: int  # bytes of these gradients
    ready_s: float  # when it could have started, had the processor or the link been free
    start_s: float
    end_s: float
    wire: str = ""  # the low precision that a message travels in, "" for that of its gradients

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_items(self.layers, str, "layers", TimelineError))
        object.__setattr__(self, "num_bytes", check_count(self.num_bytes, "num_bytes", TimelineError))
        what = f"span of {quote(self.layers)}"
        for name in ("ready_s", "start_s", "end_s"):
            object.__setattr__(self, name, check_real(getattr(self, name), f"{what}: {name}", TimelineError))
        if self.wire not in ("", *WIRES):
            raise TimelineError(f"{what}: wire is {quote(self.wire)}, expected one of {', '.join(WIRES)}")
        if not self.ready_s <= self.start_s <= self.end_s:
            raise TimelineError(
                f"{what}: ready {self.ready_s}, start {self.start_s}, end {self.end_s}, expected them in this order"
            )

    @property
    def duration_s(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s

    @property
    def wait_s(self) -> float:
        """How long it waits for the processor or the link."""
        return self.start_s - self.ready_s


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Record):
    r"""One training step: the forward pass, every gradient, every message.

    With :math:`t_c^{no}` for the communication that no computation hides (`exposed_s`), r is
    :math:`t_c^{no} / (t_f + t_b)`, the speedup :math:`S(N) = N / (1 + r)`, Eqs. (4) and (5), and the efficiency S(N)/N.
    What messages take from the computation (`taken_s`) stands between gradients as time in which none is computed, and
    counts with :math:`t_c^{no}`.

    Where parameters are gathered during the forward pass (`gathers`), time 0 is when the last message of the step
    before has ended, `iteration_s` is the period of training, and `forward` is one span up to the end of that pass: all
    that its layers waited for gathers, and lost to them, stands in front of it (`waited_s`).
    """

    FORMAT: ClassVar[str] = "mgwfbp.timeline/1"

    model: str
    planner: str  # who made the plan, or "naive", "ps"
    workers: int  # N
    forward: Span
    backward: tuple[Span, ...]  # one per gradient, in ready order
    messages: tuple[Span, ...]  # in the order in which they are sent
    gathers: tuple[Span, ...] = ()  # of parameters, during the forward pass, in their order

    def __post_init__(self) -> None:
        check_text(self.model, "model", TimelineError)
        check_text(self.planner, "planner", TimelineError)
        object.__setattr__(self, "workers", check_count(self.workers, "workers", TimelineError, minimum=1))
        for name in ("backward", "messages"):
            object.__setattr__(self, name, check_items(getattr(self, name), Span, name, TimelineError))
            if not getattr(self, name):
                raise TimelineError(f"{name}: empty, expected at least one span")
        object.__setattr__(self, "gathers", check_items(self.gathers, Span, "gathers", TimelineError))

    def __repr__(self) -> str:
        return (
            f"Timeline({quote(self.model)} by {quote(self.planner)}, {plural(self.workers, 'worker')}: "
            f"{format_seconds(self.iteration_s)} in {plural(len(self.messages), 'message')}{self._gather_words}, "
            f"{format_seconds(self.exposed_s)} exposed{self._taken_words})"
        )

    @property
    def _taken_words(self) -> str:
        return f", {format_seconds(self.taken_s)} taken from the computation" if self.takes else ""

    @property
    def _gather_words(self) -> str:
        return f" and {plural(len(self.gathers), 'gather')}" if self.gathers else ""

    @property
    def compute_s(self) -> float:
        """When the backward pass ends: t_f + t_b, what messages took from it and what the forward pass waited."""
        return self.backward[-1].end_s

    @property
    def taken_s(self) -> float:
        """What messages took from the computation."""
        return sum(later.start_s - earlier.end_s for earlier, later in pairwise((self.forward, *self.backward)))

    @property
    def takes(self) -> bool:
        """Whether messages took something from the computation, beyond rounding."""
        return self.taken_s > 1e-9 * self.compute_s

    @property
    def waited_s(self) -> float:
        """What the forward pass waited for gathers and lost to them; 0 where there are none."""
        return self.forward.wait_s if self.gathers else 0.0

    @property
    def communication_s(self) -> float:
        """How long the link is busy: t_c."""
        return sum(message.duration_s for message in (*self.gathers, *self.messages))

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of all messages."""
        return sum(message.num_bytes for message in self.messages)

    @property
    def low_bytes(self) -> int:
        """Bytes of those gradients that travel in low precision."""
        return sum(message.num_bytes for message in self.messages if message.wire)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a set of gradients as they travel: half of those in low precision."""
        return self.grad_bytes - self.low_bytes // 2

    @property
    def iteration_s(self) -> float:
        """The whole step, t_iter, Eq. (8): the later of the end of the backward pass and of the last message."""
        return max(self.compute_s, max(message.end_s for message in self.messages))

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides, t_c^no; what the forward pass waited for gathers is part of it."""
        return self.iteration_s - self.compute_s + self.waited_s

    @property
    def ratio(self) -> float:
        """The paper's r: exposed communication, and what messages took, for each second of computation."""
        lost_s = self.exposed_s + self.taken_s
        alone_s = self.compute_s - self.taken_s - self.waited_s
        if alone_s > 0:
            return lost_s / alone_s
        return float("inf") if lost_s else 0.0

    @property
    def speedup(self) -> float:
        """Samples per second of N workers over those of one, weak scaling, Eq. (5)."""
        return self.workers / (1 + self.ratio)

    @property
    def efficiency(self) -> float:
        """Speedup per worker, 1 at best."""
        return 1 / (1 + self.ratio)

    @property
    def case(self) -> int:
        """Which of the paper's cases it is (Section III-A).

        1: no message waits for the one before it. 2: some do, but the last starts as soon as it is ready, so that
        only its own time is exposed, Eq. (11). 3: the last one waits; communication is the bottleneck.
        """
        # A wait of less than one part in 10^12 is rounding.
        waits = [message.wait_s > 1e-12 * message.start_s for message in self.messages]
        if waits[-1]:
            return 3
        return 2 if any(waits) else 1

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``timeline.json``."""
        return {
            "format": self.FORMAT,
            "model": self.model,
            "planner": self.planner,
            "workers": self.workers,
            "forward": _span_json(self.forward),
            "backward": [_span_json(span) for span in self.backward],
            "messages": [_span_json(span) for span in self.messages],
            **({"gathers": [_span_json(span) for span in self.gathers]} if self.gathers else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make a timeline from the content of ``timeline.json``."""
        fields = Fields(data)
        fields.check_format(cls.FORMAT)
        return cls(
            fields["model"],
            fields["planner"],
            fields["workers"],
            _span(fields.child("forward")),
            tuple(_span(entry) for entry in fields.objects("backward")),
            tuple(_span(entry) for entry in fields.objects("messages")),
            tuple(_span(entry) for entry in fields.objects("gathers")) if "gathers" in fields else (),
        )


def _span_json(span: Span) -> dict[str, Any]:
    return {
        "layers": list(span.layers),
        "num_bytes": span.num_bytes,
        "ready_s": span.ready_s,
        "start_s": span.start_s,
        "end_s": span.end_s,
        **({"wire": span.wire} if span.wire else {}),
    }


def _span(fields: Fields) -> Span:
    values = [*(fields[name] for name in ("num_bytes", "ready_s", "start_s", "end_s")), fields.get("wire", "")]
    try:
        return Span(tuple(fields.items("layers")), *values)
    except TimelineError as error:
        raise FormatError(f"{fields.where}: {error}") from None


def predict(trace: ModelTrace, cost: Cost, plan: MergePlan) -> Timeline:
    r"""Lay one training step out in time.

    A message starts once its last gradient is ready, ``ready_s``, and the link is free, Eq. (7):

    .. math:: \tau_c^{(g)} = \max\{\tau_c^{(g-1)} + t_c^{(g-1)},\; r^{(g)}\}

    where g counts messages in the order in which they are sent, :math:`r^{(g)}` is the end of the backward step of the
    last gradient in message g, and :math:`t_c^{(g)} = T_{ar}` of its bytes. The paper writes it for one gradient a
    message; Conditions (14) to (16) carry it over to merged ones. Where messages take time from the computation,
    gradients are ready later by what those before them took, `lags_s`. A message in low precision takes what
    `low_precision_cost` says.

    A plan with gathers is laid out from the end of the last message of the step before, `Timeline`. Gathers go one
    after another from there; the forward pass runs layer by layer in the opposite of the ready order, each layer once
    its gather has ended; then come the backward pass and the messages, reduce-scatters where their parameters are
    gathered, with what `sharded_cost` says. What a gather takes from the computation it takes from the layers that the
    gather before it has brought; the first takes something only if the forward pass begins with layers that are not
    gathered.

    Ignored: jitter, and the update.

    Args:
        trace: when each gradient is ready.
        cost: what a message takes.
        plan: which gradients travel together; all of the trace's, each once.

    Returns:
        The step, with the forward pass, every gradient and every message.

    Raises:
        PlanError: where the plan is not one of these gradients.
        CostError: where the cost of a message is no number.

    >>> from mgwfbp.cost import LinearCost
    >>> from mgwfbp.trace import LayerTrace
    >>> trace = ModelTrace("toy", 3.0, tuple(LayerTrace(name, 2.0, 10) for name in "cba"))
    >>> cost = LinearCost(workers=2, startup_s=2.0, per_byte_s=0.1)
    >>> timeline = predict(trace, cost, MergePlan.of_sizes(trace, [1, 2]))
    >>> [(message.ready_s, message.start_s, message.end_s) for message in timeline.messages]
    [(5.0, 5.0, 8.0), (9.0, 9.0, 13.0)]
    >>> timeline.iteration_s, timeline.exposed_s, timeline.case
    (13.0, 4.0, 1)
    """
    plan.check_covers([layer.name for layer in trace.layers])
    gathers, forward = _forward_pass(trace, cost, plan)
    lags = lags_s(trace, cost, plan)
    row_of = {layer.name: row for row, layer in enumerate(trace.layers)}
    alone_s = _ready_s(trace, forward)
    ready_s = [ready + lag for ready, lag in zip(alone_s, lags, strict=True)]
    messages, link_free_s = [], 0.0
    kinds = zip(plan.groups, plan.wires, message_costs(cost, plan), sent_with(trace, cost, plan), strict=True)
    for group, wire, kind, (sent_row, taken_s) in kinds:
        rows = [row_of[name] for name in group]
        group_ready_s = max(ready_s[row] for row in rows)
        group_bytes = sum(trace.layers[row].grad_bytes for row in rows)
        start_s = max(link_free_s, group_ready_s, alone_s[sent_row] + taken_s)
        link_free_s = start_s + _duration_s(kind, group_bytes)
        messages.append(Span(group, group_bytes, group_ready_s, start_s, link_free_s, wire))
    return _timeline(trace, cost.workers, plan.planner, messages, lags, (gathers, forward))


def _forward_pass(trace: ModelTrace, cost: Cost, plan: MergePlan) -> tuple[tuple[Span, ...], Span]:
    """Return the gathers of a plan and the forward pass that waits for them."""
    if not plan.gathers:
        return (), Span((), 0, 0.0, 0.0, trace.forward_s)
    all_gather, link_free_s = sharded_cost(cost)[1], 0.0
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    gathers = []
    for group in plan.gathers:
        num_bytes = sum(size_of[name] for name in group)
        start_s, link_free_s = link_free_s, link_free_s + _duration_s(all_gather, num_bytes)
        gathers.append(Span(group, num_bytes, 0.0, start_s, link_free_s))
    now_s, waits = 0.0, gather_waits(trace, cost, plan, [span.end_s for span in gathers])
    for layer_s, (arrived_s, taken_s) in zip(reversed(trace.layer_forward_s), waits, strict=True):
        now_s = max(now_s, arrived_s) + taken_s + layer_s
    return tuple(gathers), Span((), 0, 0.0, max(0.0, now_s - trace.forward_s), now_s)


def gather_waits(trace: ModelTrace, cost: Cost, plan: MergePlan, ends_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return for each layer, in the order of the forward pass, when it may begin and what a gather then takes first.

    ``ends_s`` says when each gather of the plan ends.
    """
    all_gather = sharded_cost(cost)[1]
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    place_of = {name: place for place, group in enumerate(plan.gathers) for name in group}
    takes_s = {
        place: taken_by(all_gather, sum(size_of[name] for name in group)) for place, group in enumerate(plan.gathers)
    }
    if trace.layers[-1].name in place_of:
        del takes_s[0]  # nothing is computed while the first gather is under way
    places = [place_of.get(layer.name, -1) for layer in reversed(trace.layers)]
    return [(ends_s[place] if place >= 0 else 0.0, takes_s.pop(place + 1, 0.0)) for place in places]


def _ready_s(trace: ModelTrace, forward: Span) -> list[float]:
    """Return when each gradient is ready after this forward pass, where messages take nothing."""
    return list(accumulate((layer.backward_s for layer in trace.layers), initial=forward.end_s))[1:]


def _duration_s(cost: Cost, num_bytes: int) -> float:
    return check_real(cost(num_bytes), f"the cost of a message of {num_bytes} bytes", CostError)


def predict_naive(trace: ModelTrace, cost: Cost) -> Timeline:
    r"""Lay out naive S-SGD: one message per gradient, all after the backward pass, Eq. (3).

    .. math:: t_{iter} = t_f + t_b + \sum_l t_c^{(l)}

    Args:
        trace: when each gradient is ready.
        cost: what a message takes.

    Raises:
        CostError: where the cost of a message is no number.
    """
    messages, link_free_s = [], trace.compute_s
    for layer, ready_s in zip(trace.layers, trace.ready_s, strict=True):
        start_s, link_free_s = link_free_s, link_free_s + _duration_s(cost, layer.grad_bytes)
        messages.append(Span((layer.name,), layer.grad_bytes, ready_s, start_s, link_free_s))
    return _timeline(trace, cost.workers, "naive", messages, [0.0] * len(trace.layers))


def predict_parameter_server(trace: ModelTrace, network: Network, workers: int, *, servers: int = 1) -> Timeline:
    """Lay out S-SGD through parameter servers: every gradient is pushed and pulled once it is ready.

    The recurrence is that of `predict`, one gradient a message, with `Network.parameter_server_cost`.

    Args:
        trace: when each gradient is ready.
        network: the link and how it is used.
        workers: how many push and pull.
        servers: how many hold parameters.

    Raises:
        NetworkError: where there is no such number of workers or servers.
    """
    plan = MergePlan.of_sizes(trace, [1] * len(trace.layers), planner="ps")
    return predict(trace, network.parameter_server_cost(workers, servers=servers), plan)


def _timeline(
    trace: ModelTrace,
    workers: int,
    planner: str,
    messages: Sequence[Span],
    lags: Sequence[float],
    begin: tuple[tuple[Span, ...], Span] | None = None,  # gathers, and the forward pass
) -> Timeline:
    gathers, forward = begin or ((), Span((), 0, 0.0, 0.0, trace.forward_s))
    backward, before_s = [], forward.end_s
    for layer, end_s, lag_s in zip(trace.layers, _ready_s(trace, forward), lags, strict=True):
        start_s = before_s + lag_s
        backward.append(Span((layer.name,), layer.grad_bytes, start_s, start_s, end_s + lag_s))
        before_s = end_s
    return Timeline(trace.model, planner, workers, forward, tuple(backward), tuple(messages), gathers)
