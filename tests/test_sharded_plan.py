"""Plans for a sharded optimizer: the period against a simulation, plans against exhaustive search."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import Cost, LayerTrace, LinearCost, MergePlan, ModelTrace, Timeline, predict
from mgwfbp.cost import ShardedCost, sharded_cost
from mgwfbp.ranges import predict_range
from mgwfbp.report.text import draw_timeline
from tests.examples import (
    linear_costs,
    make_trace,
    partitions,
    small,
    table_costs,
    that_take,
    traces,
    whole_piecewise_costs,
)


@st.composite
def traces_with_forward(draw: st.DrawFn, max_layers: int = 6) -> ModelTrace:
    """Models whose layers say what they take in the forward pass, or do not; sums are exact where they do."""
    trace = draw(traces(max_layers=max_layers))
    if draw(st.booleans()):
        return trace
    forward_s = [float(draw(small)) for _ in trace.layers]
    layers = tuple(replace(layer, forward_s=part_s) for layer, part_s in zip(trace.layers, forward_s, strict=True))
    return ModelTrace("random", sum(forward_s), layers)


lines_or_curves = st.one_of(linear_costs, whole_piecewise_costs())
three_costs = st.builds(ShardedCost, lines_or_curves, lines_or_curves, lines_or_curves)
any_costs = st.one_of(linear_costs, whole_piecewise_costs(), table_costs(), three_costs)
taking = st.one_of(that_take(linear_costs), that_take(whole_piecewise_costs()), that_take(table_costs()))
costs_that_take = st.one_of(
    taking,
    st.builds(ShardedCost, that_take(linear_costs), that_take(whole_piecewise_costs()), that_take(linear_costs)),
)


def sharded_plan(
    trace: ModelTrace, sizes: Sequence[int], kinds: Sequence[bool], gather_sizes: Sequence[int] | None = None
) -> MergePlan:
    """Messages of so many gradients, some of them reduce-scattered; gathers like them, or cut by themselves."""
    groups = MergePlan.of_sizes(trace, sizes).groups
    if gather_sizes is None:
        gathers = [group for group, is_sharded in zip(groups, kinds, strict=True) if is_sharded]
    else:
        gathers = [*MergePlan.of_sizes(trace, gather_sizes).groups]
    return MergePlan(trace.model, "by hand", groups, gathers=tuple(group[::-1] for group in reversed(gathers)))


def simulate(trace: ModelTrace, cost: Cost, plan: MergePlan, step_s: float = 0.25) -> float:
    """The period of training, by a clock that ticks: two steps in a row, all events in the order of time.

    Every tick the processor works on one layer or waits, and so does the link on one message. The update takes no time:
    gathers start when the last message of the step before has ended. Messages take nothing from the computation.
    """
    reduce_scatter, all_gather = sharded_cost(cost)
    size_of = {layer.name: layer.grad_bytes for layer in trace.layers}
    backward = [(layer.name, round(layer.backward_s / step_s)) for layer in trace.layers]
    parts_s = trace.layer_forward_s
    forward = [(layer.name, round(part_s / step_s)) for layer, part_s in zip(trace.layers, parts_s, strict=True)][::-1]
    gathered = {name for group in plan.gathers for name in group}

    def ticks(kind: Cost, group: Sequence[str]) -> int:
        return round(kind(sum(size_of[name] for name in group)) / step_s)

    now, ends = 0, []
    for _ in range(2):
        here, ready = size_of.keys() - gathered, set[str]()
        work = [("forward", name, need) for name, need in forward] + [
            ("backward", name, need) for name, need in backward
        ]
        sends = [("gather", group, ticks(all_gather, group)) for group in plan.gathers] + [
            ("message", group, ticks(cost if group[0] in here else reduce_scatter, group)) for group in plan.groups
        ]
        while work or sends:
            # What can start or end without time passing does.
            moved = True
            while moved:
                moved = False
                if work and work[0][2] == 0 and (work[0][0] == "backward" or work[0][1] in here):
                    kind, name, _ = work.pop(0)
                    ready |= {name} if kind == "backward" else set()
                    moved = True
                if sends and sends[0][2] == 0 and (sends[0][0] == "gather" or ready.issuperset(sends[0][1])):
                    kind, group, _ = sends.pop(0)
                    here = here | set(group) if kind == "gather" else here
                    moved = True
            if not work and not sends:
                break
            if work and (work[0][0] == "backward" or work[0][1] in here):
                work[0] = (work[0][0], work[0][1], work[0][2] - 1)
            if sends and (sends[0][0] == "gather" or ready.issuperset(sends[0][1])):
                sends[0] = (sends[0][0], sends[0][1], sends[0][2] - 1)
            now += 1
        ends.append(now * step_s)
    assert ends[1] == 2 * ends[0]
    return ends[0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelTrace, Cost, MergePlan]:
    """A model in whole seconds, a cost in halves of them, and a plan in which messages and gathers differ."""
    trace = draw(traces(max_layers=5))
    parts_s = [float(draw(small)) for _ in trace.layers]
    layers = tuple(replace(layer, forward_s=part_s) for layer, part_s in zip(trace.layers, parts_s, strict=True))
    trace = ModelTrace("random", sum(parts_s), layers)
    sizes = draw(st.sampled_from([*partitions(len(layers))]))
    kinds = [draw(st.booleans()) for _ in sizes]
    names = [layer.name for layer in layers]
    groups = [names[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
    gathered = [name for group, kind in zip(groups, kinds, strict=True) if kind for name in group][::-1]
    cuts = draw(st.sampled_from([*partitions(len(gathered))]))
    gathers = [tuple(gathered[start:end]) for start, end in pairwise(accumulate(cuts, initial=0))]
    if draw(st.booleans()):
        gathers = draw(st.permutations(gathers))
    return trace, draw(any_costs), MergePlan("random", "by hand", tuple(map(tuple, groups)), gathers=tuple(gathers))


@given(cases())
@settings(max_examples=150)
def test_the_predicted_period_is_that_of_a_simulation_tick_by_tick(case: tuple[ModelTrace, Cost, MergePlan]) -> None:
    trace, cost, plan = case
    timeline = predict(trace, cost, plan)
    assert timeline.iteration_s == simulate(trace, cost, plan)
    assert timeline.exposed_s == timeline.iteration_s - trace.compute_s
    assert [span.layers for span in timeline.gathers] == list(plan.gathers)
    assert [span.layers for span in timeline.messages] == list(plan.groups)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_period_worked_out_by_hand() -> None:
    # Ready order c, b, a; the forward pass uses a, b, c. An all-reduce of M bytes takes 2 + 2 M, a half 1 + M.
    layers = (LayerTrace("c", 2.0, 1, 1.0), LayerTrace("b", 2.0, 2, 2.0), LayerTrace("a", 3.0, 1, 3.0))
    trace, cost = ModelTrace("toy", 6.0, layers), LinearCost(2, 2.0, 2.0)
    plan = MergePlan("toy", "by hand", (("c",), ("b", "a")), gathers=(("a",), ("b", "c")))
    timeline = predict(trace, cost, plan)
    assert [(span.start_s, span.end_s) for span in timeline.gathers] == [(0, 2), (2, 6)]
    # a from 2 to 5, b waits for its gather until 6, c ends at 9: 3 seconds were waited.
    assert (timeline.forward.ready_s, timeline.forward.start_s, timeline.forward.end_s) == (0, 3, 9)
    assert [(span.start_s, span.end_s) for span in timeline.backward] == [(9, 11), (11, 13), (13, 16)]
    assert [(span.ready_s, span.start_s, span.end_s) for span in timeline.messages] == [(11, 11, 13), (16, 16, 20)]
    assert (timeline.iteration_s, timeline.waited_s, timeline.exposed_s) == (20, 3, 7)
    assert (timeline.communication_s, timeline.ratio) == (2 + 4 + 2 + 4, 7 / 13)
    assert repr(timeline).endswith("20 s in 2 messages and 2 gathers, 7 s exposed)")
    # Were c all-reduced, nothing of it is gathered and its message takes 4.
    plan = replace(plan, gathers=(("a",), ("b",)))
    mixed = predict(trace, cost, plan)
    assert [(span.start_s, span.end_s) for span in mixed.gathers] == [(0, 2), (2, 5)]
    assert mixed.forward.end_s == 8
    assert [(span.start_s, span.end_s) for span in mixed.messages] == [(10, 14), (15, 19)]


def test_what_messages_and_gathers_take_from_the_computation_worked_out_by_hand() -> None:
    # As above; a message takes 1 s and half a second for each byte if all-reduced, a quarter in each half.
    layers = (LayerTrace("c", 2.0, 1, 1.0), LayerTrace("b", 2.0, 2, 2.0), LayerTrace("a", 3.0, 1, 3.0))
    trace, cost = ModelTrace("toy", 6.0, layers), LinearCost(2, 2.0, 2.0, taken_s=1.0, taken_per_byte_s=0.5)
    plan = MergePlan("toy", "by hand", (("c",), ("b", "a")), gathers=(("a",), ("b", "c")))
    timeline = predict(trace, cost, plan)
    # The second gather takes 1 + 3/4 before a, so that a ends at 6.75 and nothing waits after that.
    assert (timeline.forward.start_s, timeline.forward.end_s) == (3.75, 9.75)
    # The first message takes 1 + 1/4 before b.
    assert [(span.start_s, span.end_s) for span in timeline.messages] == [(11.75, 13.75), (18, 22)]
    assert (timeline.taken_s, timeline.exposed_s) == (1.25, 4 + 3.75)
    # Begins with a layer that is not gathered: the first gather, of b and c, takes 1.75 from it.
    plan = MergePlan("toy", "by hand", (("c", "b"), ("a",)), gathers=(("b", "c"),))
    assert predict(trace, cost, plan).forward.end_s == 1.75 + 6


@given(traces(max_layers=6), any_costs)
def test_a_timeline_without_gathers_is_as_it_was(trace: ModelTrace, cost: Cost) -> None:
    timeline = predict(trace, cost, MergePlan.of_sizes(trace, [len(trace.layers)]))
    assert "gathers" not in timeline.to_json()
    assert (timeline.forward.start_s, timeline.forward.end_s, timeline.waited_s) == (0.0, trace.forward_s, 0.0)
    assert timeline.exposed_s == timeline.iteration_s - timeline.compute_s


def test_text_shows_gathers_and_what_was_waited_for_them() -> None:
    layers = (LayerTrace("b", 2.0, 1, 2.0), LayerTrace("a", 2.0, 1, 2.0))
    plan = MergePlan("toy", "by hand", (("b",), ("a",)), gathers=(("a",), ("b",)))
    drawn = draw_timeline(predict(ModelTrace("toy", 4.0, layers), LinearCost(2, 4.0, 0.0), plan), width=36)
    assert drawn.splitlines()[:4] == [
        "by hand: 2 messages and 2 gathers, step 12 s, exposed 4 s",
        "compute   |    ffffffffbbbbBBBB    |",
        "messages  |<<<<>>>>        ====####|",
        "exposed   |!!!!                !!!!|",
    ]


def test_the_range_of_a_sharded_plan_is_known_where_that_of_its_parts_is() -> None:
    trace = make_trace([2.0], [10])
    known = LinearCost(2, 2.0, 1.0, {"fit": {"mean_error": 0.25}})
    plan = MergePlan("example", "by hand", (("g0",),), gathers=(("g0",),))
    assert predict_range(trace, known, plan) == (2.0 + 12 / 1.25, 2.0 + 12 * 1.25)
    assert predict_range(trace, ShardedCost(known, known, known), plan) == (2.0 + 24 / 1.25, 2.0 + 24 * 1.25)
    assert predict_range(trace, ShardedCost(known, LinearCost(2, 1.0, 1.0), known), plan) is None
