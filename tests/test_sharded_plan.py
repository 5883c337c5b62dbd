"""Plans for a sharded optimizer: the period against a simulation, plans against exhaustive search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import (
    Cost,
    LayerTrace,
    LinearCost,
    MergePlan,
    ModelTrace,
    Timeline,
    load_network,
    load_trace,
    predict,
)
from mgwfbp.bounds import sharded_lower_bound_s
from mgwfbp.costs import ShardedCost, sharded_cost
from mgwfbp.planners import find_plan, find_sharded_plan, plan_optimal, plan_sharded, sharded
from mgwfbp.planners.slack import TIE
from mgwfbp.ranges import input_range
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


@given(traces_with_forward(max_layers=6), any_costs, st.data())
def test_gathers_of_some_layers_equal_exhaustive_search(trace: ModelTrace, cost: Cost, data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([*partitions(len(trace.layers))]))
    kinds = [data.draw(st.booleans()) for _ in sizes]
    plan = sharded_plan(trace, sizes, kinds)
    gathered = [name for group in plan.gathers for name in group]

    def period_s(gathers: Sequence[tuple[str, ...]]) -> float:
        return predict(trace, cost, replace(plan, gathers=tuple(gathers))).iteration_s

    every = [
        [tuple(gathered[start:end]) for start, end in pairwise(accumulate(cuts, initial=0))]
        for cuts in partitions(len(gathered))
    ]
    found = sharded.plan_gathers(trace, sharded_cost(cost)[1], set(gathered))
    assert [name for group in found for name in group] == gathered
    assert period_s(found) == pytest.approx(min(map(period_s, every), default=period_s(())))


def test_gathers_of_a_plan_that_all_reduces_some_have_groups_of_their_own() -> None:
    layers = (LayerTrace("a", 2.0, 5, 1.0), LayerTrace("b", 0.0, 7, 5.0), LayerTrace("c", 4.0, 1, 3.0))
    trace = ModelTrace("toy", 9.0, layers)
    cost = ShardedCost(LinearCost(2, 2.0, 1.0), LinearCost(2, 4.0, 0.25), LinearCost(2, 2.0, 0.5))
    plan = plan_sharded(trace, cost)
    assert (plan.groups, plan.gathers) == ((("a", "b"), ("c",)), (("b",), ("a",)))
    # Gathers end at 5.5 and 10, the forward pass at 11; the reduce-scatter of 12 bytes starts 2 later and takes 7, and
    # the all-reduce of c 3. Gathered together, a and b would be there at 8, and the forward pass would end at 14.
    assert predict(trace, cost, plan).iteration_s == 23.5
    assert predict(trace, cost, replace(plan, gathers=(("b", "a"),))).iteration_s == 26.0


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
    assert input_range(trace, known, plan) == (2.0 + 12 / 1.25, 2.0 + 12 * 1.25)
    assert input_range(trace, ShardedCost(known, known, known), plan) == (2.0 + 24 / 1.25, 2.0 + 24 * 1.25)
    assert input_range(trace, ShardedCost(known, LinearCost(2, 1.0, 1.0), known), plan) is None


def all_pairs(trace: ModelTrace, cost: Cost) -> Iterator[float]:
    """The periods of all ways to shard everything: any messages with any gathers."""
    cuts = [*partitions(len(trace.layers))]
    for sizes, gather_sizes in product(cuts, cuts):
        yield predict(trace, cost, sharded_plan(trace, sizes, [True] * len(sizes), gather_sizes)).iteration_s


def all_kinds(trace: ModelTrace, cost: Cost) -> Iterator[tuple[float, float]]:
    """The periods of all plans, every group sharded or all-reduced; with gathers of the same groups, and of the best.

    That `plan_gathers` finds the best is tested above.
    """

    @cache
    def best_gathers(sharded_layers: frozenset[str]) -> tuple[tuple[str, ...], ...]:
        return sharded.plan_gathers(trace, sharded_cost(cost)[1], sharded_layers)

    for sizes in partitions(len(trace.layers)):
        for kinds in product((True, False), repeat=len(sizes)):
            plan = sharded_plan(trace, sizes, kinds)
            apart = replace(plan, gathers=best_gathers(frozenset(name for group in plan.gathers for name in group)))
            yield predict(trace, cost, plan).iteration_s, predict(trace, cost, apart).iteration_s


@given(traces_with_forward(max_layers=5), any_costs)
@settings(max_examples=100)
def test_plans_are_as_short_as_exhaustive_search_finds(trace: ModelTrace, cost: Cost) -> None:
    apart_s = min(all_pairs(trace, cost))
    grouped_s, regrouped_s = map(min, zip(*all_kinds(trace, cost), strict=True))
    plan = plan_sharded(trace, cost)
    period_s, shortest_s = predict(trace, cost, plan).iteration_s, min(apart_s, grouped_s)
    if 0 < sum(plan.sharded) < plan.num_groups:
        # What is all-reduced was found with one grouping, and gathers were grouped anew after that.
        assert min(apart_s, regrouped_s) <= period_s * TIE <= shortest_s * TIE**2
    else:
        assert period_s == pytest.approx(shortest_s, rel=1e-9)
    assert plan.predicted["iteration_bound_s"] == pytest.approx(min(period_s, shortest_s), rel=1e-9)
    if apart_s <= period_s:  # of equally good plans the one that shards all
        assert all(plan.sharded)
        assert plan.predicted["all_reduced_bytes"] == 0
    assert sharded_lower_bound_s(trace, cost) <= min(shortest_s, regrouped_s) * TIE


@given(traces_with_forward(max_layers=5), costs_that_take)
@settings(max_examples=60)
def test_what_messages_take_is_planned_exactly_where_all_is_sharded_or_all_reduced(
    trace: ModelTrace, cost: Cost
) -> None:
    apart_s = min(all_pairs(trace, cost))
    reduced = [MergePlan.of_sizes(trace, sizes) for sizes in partitions(len(trace.layers))]
    reduced_s = min(predict(trace, cost, plan).iteration_s for plan in reduced)
    assert predict(trace, cost, sharded._plan_apart(trace, cost)).iteration_s == pytest.approx(apart_s, rel=1e-9)
    plan, shortest_s = plan_sharded(trace, cost), min(apart_s, *(period_s for period_s, _ in all_kinds(trace, cost)))
    assert predict(trace, cost, plan).iteration_s <= min(apart_s, reduced_s) * (1 + 1e-9)
    assert sharded_lower_bound_s(trace, cost) <= shortest_s * TIE
    assert plan.predicted["iteration_bound_s"] <= shortest_s * (1 + 1e-9)


@given(traces_with_forward(max_layers=5), any_costs, st.sampled_from([1, 2, 3]))
@settings(max_examples=80)
def test_where_pairs_are_thinned_out_plan_and_bound_lie_on_both_sides_of_the_best(
    trace: ModelTrace, cost: Cost, width: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "NARROW", width)
        patch.setattr(sharded, "WIDTH", width)
        plan = plan_sharded(trace, cost)
    apart_s = min(all_pairs(trace, cost))
    grouped_s, regrouped_s = map(min, zip(*all_kinds(trace, cost), strict=True))
    shortest_s = min(apart_s, grouped_s)
    period_s = predict(trace, cost, plan).iteration_s
    assert plan.predicted["iteration_bound_s"] <= shortest_s * (1 + 1e-9)
    # Gathers of a plan that all-reduces some gradients may have groups of their own.
    is_mixed = 0 < sum(plan.sharded) < plan.num_groups
    assert (min(apart_s, regrouped_s) if is_mixed else shortest_s) <= period_s * TIE


@given(traces_with_forward(max_layers=40), st.one_of(any_costs, costs_that_take))
@settings(max_examples=60)
def test_a_sharded_plan_is_never_worse_than_the_best_all_reduce_plan(trace: ModelTrace, cost: Cost) -> None:
    plan = find_sharded_plan(trace, cost)
    predicted = plan.predicted
    assert predicted["iteration_s"] == predict(trace, cost, plan).iteration_s
    assert predicted["iteration_s"] <= predict(trace, cost, plan_optimal(trace, cost)).iteration_s * TIE
    assert predicted["lower_bound_s"] <= predicted["iteration_s"] * TIE
    assert predicted["iteration_bound_s"] <= predicted["iteration_s"]
    assert MergePlan.parse(str(plan)) == MergePlan.from_json(plan.to_json()) == plan


@st.composite
def cases_with_a_long_forward_pass(draw: st.DrawFn) -> tuple[ModelTrace, tuple[int, ...]]:
    """A model each of whose layers takes at least half as long forwards as backwards, and a grouping."""
    steps_s = draw(st.lists(small, min_size=1, max_size=8))
    layers = tuple(
        LayerTrace(f"g{place}", float(step_s), draw(st.integers(0, 5)), step_s / 2 + draw(st.integers(0, 3)) / 2)
        for place, step_s in enumerate(steps_s)
    )
    trace = ModelTrace("random", sum(layer.forward_s or 0.0 for layer in layers), layers)
    return trace, draw(st.sampled_from([*partitions(len(layers))]))


@given(cases_with_a_long_forward_pass(), st.one_of(linear_costs, whole_piecewise_costs(), table_costs()))
@settings(max_examples=200)
def test_the_same_groups_sharded_are_never_slower_where_the_forward_pass_is_half_the_backward_pass_or_more(
    case: tuple[ModelTrace, tuple[int, ...]], cost: Cost
) -> None:
    trace, sizes = case
    period_s = predict(trace, cost, sharded_plan(trace, sizes, [True] * len(sizes))).iteration_s
    assert period_s <= predict(trace, cost, MergePlan.of_sizes(trace, sizes)).iteration_s


def test_a_short_forward_pass_can_make_sharding_slower_than_all_reducing() -> None:
    # The all-reduce of the first gradient is hidden behind the backward pass; sharded, half of it is exposed.
    layers = (LayerTrace("b", 0.0, 4, 0.0), LayerTrace("a", 8.0, 0, 0.0))
    trace, cost = ModelTrace("toy", 0.0, layers), LinearCost(2, 0.0, 2.0)
    all_sharded = sharded_plan(trace, (1, 1), (True, True))
    assert predict(trace, cost, all_sharded).iteration_s == 8 + 4
    plan = find_sharded_plan(trace, cost)
    assert (plan.gathers, plan.predicted["iteration_s"], plan.predicted["all_reduced_bytes"]) == ((), 8.0, 4)


@pytest.mark.parametrize(("sizes", "period_s"), [([3, 1, 1, 2, 2, 1], 10), ([3, 3, 3, 5], 15)])
def test_which_groups_to_shard_is_the_problem_of_splitting_numbers_into_equal_sums(
    sizes: list[int], period_s: float
) -> None:
    half_s = sum(sizes) / 2
    layers = [LayerTrace(f"g{place}", 0.0, size, 0.0) for place, size in enumerate(sizes)]
    trace = ModelTrace("sums", half_s, (*layers, LayerTrace("last", half_s, 0, half_s)))
    cost = ShardedCost(LinearCost(2, 0.0, 1.0), LinearCost(2, 0.0, 0.0), LinearCost(2, 0.0, 1.0))
    assert find_sharded_plan(trace, cost).predicted["iteration_s"] == period_s


@pytest.mark.parametrize(
    ("model", "network", "workers"), [("resnet50-h200-b32", "10GbE", 4), ("googlenet-h200-b64", "25GbE", 4)]
)
def test_recorded_models_are_planned_nearly_exactly(model: str, network: str, workers: int) -> None:
    trace, cost = load_trace(model), load_network(network).cost(workers)
    predicted = find_sharded_plan(trace, cost).predicted
    assert predicted["iteration_s"] <= 1.001 * predicted["iteration_bound_s"]
    assert predicted["iteration_s"] < 0.95 * find_plan(trace, cost).predicted["iteration_s"]
    assert 0 <= predicted["gap"] < 0.1
