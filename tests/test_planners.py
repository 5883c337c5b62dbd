"""The planners that are not exact: WFBP, SyncEASGD, buckets, the paper's Algorithm 1."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import LinearCost, MergePlan, ModelTrace, PlanError, find_plan, predict
from mgwfbp.planners import plan_bucket, plan_mgwfbp
from tests.examples import linear_costs, make_trace, traces

MIB = 2**20


def algorithm_1_as_printed(trace: ModelTrace, cost: LinearCost) -> set[int]:
    """The paper's pseudo-code, line by line, with its 1-based layers (layer L is ready first); returns M."""
    count = len(trace.layers)
    by_layer = dict(zip(range(count, 0, -1), trace.layers, strict=True))
    p = {layer: by_layer[layer].grad_bytes for layer in by_layer}
    tc = {layer: cost(p[layer]) for layer in by_layer}
    tb = {layer: by_layer[layer].backward_s for layer in by_layer}
    tau_b = {count: trace.forward_s}
    # The printed loop ends at 2 and line 13 reads tau_b[0]; 1 and 0 are the start and the end of layer 1's step.
    for layer in range(count - 1, -1, -1):
        tau_b[layer] = tau_b[layer + 1] + tb[layer + 1]

    def calculate_comm_start() -> dict[int, float]:
        tau_c = {count: tau_b[count] + tb[count]}
        for layer in range(count - 1, 0, -1):
            tau_c[layer] = max(tau_c[layer + 1] + tc[layer + 1], tau_b[layer] + tb[layer])
        return tau_c

    merged: set[int] = set()
    tau_c = calculate_comm_start()
    for layer in range(count, 1, -1):
        if tau_b[layer - 2] - tau_c[layer] < cost.startup_s:
            tc[layer] = 0.0
            p[layer - 1] += p[layer]
            tc[layer - 1] = cost(p[layer - 1])
            tau_c = calculate_comm_start()
            merged.add(layer)
    return merged


@given(traces(max_layers=12), linear_costs)
def test_mgwfbp_finds_the_set_that_the_printed_algorithm_finds(trace: ModelTrace, cost: LinearCost) -> None:
    count = len(trace.layers)
    number = {layer.name: count - index for index, layer in enumerate(trace.layers)}
    plan = plan_mgwfbp(trace, cost)
    merged = {number[name] for group in plan.groups for name in group[:-1]}
    assert merged == algorithm_1_as_printed(trace, cost)


def test_mgwfbp_follows_algorithm_1_on_a_hand_worked_example() -> None:
    # a = 2, b = 1, one byte each. g0 waits 1 < 2 for g1; g2 would come 3 later: send {g0, g1} from 2 to 6.
    # g2 can go at 6, when g3 is ready too (wait 0), g4 comes 1 later; g5 would come 5 later: send three from 7 to 12.
    # g5 goes at 12 and ends at 15.
    trace = make_trace([1, 2, 5, 6, 7, 12], [1] * 6)
    plan = find_plan(trace, LinearCost(2, 2.0, 1.0), "mgwfbp")
    assert plan.group_sizes == (2, 3, 1)
    assert plan.predicted["iteration_s"] == 15.0


def test_mgwfbp_is_not_optimal() -> None:
    # docs/optimality.md: every single wait of 2 is shorter than a = 3, but six of them are not.
    trace = make_trace([2, 4, 6, 8, 10, 12], [1] * 6)
    cost = LinearCost(2, 3.0, 1.0)
    published, best = find_plan(trace, cost, "mgwfbp"), find_plan(trace, cost, "optimal")
    assert (published.group_sizes, published.predicted["iteration_s"]) == ((6,), 21.0)
    assert best.predicted["iteration_s"] == predict(trace, cost, MergePlan.of_sizes(trace, [3, 3])).iteration_s == 18.0
    # Of the plans that end at 18 it is the one that ends first, at 20.75, if messages take a quarter longer.
    assert best.group_sizes == (1, 2, 3)


def test_wfbp_sends_each_gradient_alone_and_single_all_together() -> None:
    trace = make_trace([1, 2, 3], [4, 4, 4])
    cost = LinearCost(2, 1.0, 0.0)
    assert find_plan(trace, cost, "wfbp").group_sizes == (1, 1, 1)
    assert find_plan(trace, cost, "single").group_sizes == (3,)


def test_a_bucket_is_closed_by_the_gradient_that_fills_it() -> None:
    sizes = [MIB // 2, MIB // 2, 20 * MIB, 10 * MIB, 24 * MIB, 1]
    trace = make_trace(list(range(1, 7)), sizes)
    assert plan_bucket(trace, LinearCost(2, 0.0, 0.0)).group_sizes == (2, 2, 2)


def test_bucket_sizes_can_be_set() -> None:
    trace = make_trace(list(range(1, 6)), [10] * 5)
    planner = partial(plan_bucket, first_bucket_bytes=10, bucket_bytes=20)
    assert find_plan(trace, LinearCost(2, 0.0, 0.0), planner).group_sizes == (1, 2, 2)


def test_horovods_buffer_is_closed_before_it_overflows() -> None:
    trace = make_trace(list(range(1, 7)), [6, 5, 4, 20, 3, 3])
    planner = partial(plan_bucket, first_bucket_bytes=10, bucket_bytes=10, may_exceed=False)
    assert find_plan(trace, LinearCost(2, 0.0, 0.0), planner).group_sizes == (1, 2, 1, 2)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_a_bucket_of_no_size_is_refused(bad: int) -> None:
    trace = make_trace([1], [10])
    with pytest.raises(PlanError, match="bucket_bytes"):
        plan_bucket(trace, LinearCost(2, 0.0, 0.0), bucket_bytes=bad)


def test_an_unknown_planner_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(PlanError, match=r"'magic' is unknown.*wfbp, single, bucket, mgwfbp, optimal"):
        find_plan(make_trace([1], [1]), LinearCost(2, 0.0, 0.0), "magic")
    with pytest.raises(PlanError, match="planner 3 is unknown"):
        find_plan(make_trace([1], [1]), LinearCost(2, 0.0, 0.0), 3)  # type: ignore[arg-type]  # the point of the test


def test_every_plan_states_its_bound_and_its_gap() -> None:
    plan = find_plan(make_trace([2, 4, 6, 8, 10, 12], [1] * 6), LinearCost(2, 3.0, 1.0), "mgwfbp")
    assert plan.predicted["lower_bound_s"] == 16.0
    assert plan.predicted["gap"] == 21 / 16 - 1


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(names, names, st.lists(names, min_size=1, max_size=8, unique=True), st.randoms())
def test_a_plan_prints_its_messages_and_is_read_back(
    model: str, planner: str, layers: list[str], chance: random.Random
) -> None:
    groups: list[list[str]] = [[]]
    for layer in layers:
        if groups[-1] and chance.random() < 0.5:
            groups.append([])
        groups[-1].append(layer)
    plan = MergePlan(model, planner, tuple(map(tuple, groups)), {"iteration_s": 1.5} if len(layers) % 2 else {})
    assert MergePlan.parse(str(plan)) == plan
    assert len(str(plan).splitlines()) == 1 + plan.num_groups + bool(plan.predicted)


@given(st.lists(names, min_size=2, max_size=8, unique=True), st.randoms())
def test_a_plan_prints_its_gathers_and_is_read_back(layers: list[str], chance: random.Random) -> None:
    groups = tuple((name,) for name in layers)
    gathered = chance.sample(layers, chance.randint(1, len(layers)))
    cut = chance.randint(0, len(gathered) - 1)
    gathers = tuple(tuple(part) for part in (gathered[:cut], gathered[cut:]) if part)
    plan = MergePlan("toy", "by hand", groups, {"iteration_s": 1.0}, gathers=gathers)
    assert MergePlan.parse(str(plan)) == plan
    assert str(plan).splitlines()[len(layers) + 1].startswith("gather 1: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 is ''"),
        ("plan of toy", "expected 'plan of MODEL by PLANNER'"),
        ("plan of toy by me\nmessage 2: a", "line 2 is 'message 2: a', expected 'message 1: NAMES'"),
        ('plan of toy by me\nmessage 1: "a', "line 2: '\"a' is no name"),
        ("plan of toy by me\nmessage 1: a\npredicted: [1]", "line 3: what is predicted is [1]"),
        ("plan of toy by me", "groups: empty"),
        ("plan of toy by me\nmessage 1: a\ngather 2: a", "line 3 is 'gather 2: a', expected 'message 2: NAMES'"),
        ("plan of toy by me\nmessage 1: a\ngather 1: a\nmessage 2: b", "expected 'gather 2: NAMES'"),
        ("plan of toy by me\nmessage 1: a\ngather 1: b", "gathers: 'b' is no gradient of the plan's groups"),
    ],
)
def test_text_that_is_no_plan_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        MergePlan.parse(text)
    assert words in str(refused.value)
