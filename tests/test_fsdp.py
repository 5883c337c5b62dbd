"""FSDP2's step as a graph of what waits for what, and its planner beside all plans there are."""

from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgwfbp import LayerTrace, LinearCost, ModelTrace, PiecewiseCost, PlanError, load_network, load_trace
from mgwfbp.cost import Cost
from mgwfbp.costs import sharded_cost
from mgwfbp.fsdp import FsdpPlan, fsdp_lower_bound_s, predict_fsdp, units_of, units_of_names
from mgwfbp.planners.fsdp import EXHAUSTED, PREFETCHES, plan_fsdp

times = st.integers(0, 6).map(float)
COST = LinearCost(workers=2, startup_s=1.0, per_byte_s=0.5)


@st.composite
def models(draw: st.DrawFn, most: int = 5) -> ModelTrace:
    number = draw(st.integers(1, most))
    names = [f"m{place}x.w" for place in range(number)]
    if draw(st.booleans()):
        names.append("rest")  # the root's own
    layers = [LayerTrace(name, draw(times), draw(st.integers(1, 8)), draw(times)) for name in names]
    return ModelTrace("toy", sum(layer.forward_s or 0.0 for layer in layers), tuple(layers))


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    if draw(st.booleans()):
        return LinearCost(draw(st.integers(2, 4)), draw(times), draw(times) / 4)
    points = [(0, 1.0)]
    for size in (4, 9, 30):
        points.append((size, points[-1][1] + draw(times)))
    return PiecewiseCost(draw(st.integers(2, 4)), tuple(points))


def all_plans(trace: ModelTrace, prefetches: tuple[int, ...] = PREFETCHES) -> list[FsdpPlan]:
    names = [unit.name for unit in units_of(trace) if unit.name]
    found = []
    for number in range(len(names)):
        for cuts in combinations(range(1, len(names)), number):
            borders = (0, *cuts, len(names))
            groups = tuple(tuple(names[a:b]) for a, b in pairwise(borders))
            for reshard in product((False, True), repeat=len(groups)):
                found += [FsdpPlan("toy", groups, reshard, p, q) for p in prefetches for q in prefetches]
    return found


def by_graph(trace: ModelTrace, cost: Cost, plan: FsdpPlan) -> float:
    """The step as the longest path through everything that waits for something else, from torch's rules one by one."""
    reduce_scatter, all_gather = sharded_cost(cost)
    units = {unit.name: unit for unit in units_of(trace)}
    groups = ([("",)] if "" in units else []) + list(plan.groups)
    reshard = ([False] if "" in units else []) + list(plan.reshard)
    size = [sum(units[name].num_bytes for name in group) for group in groups]
    last, p, q = len(groups) - 1, plan.forward_prefetch, plan.backward_prefetch
    ends: dict[tuple[str, int], float] = {}
    starts: dict[tuple[str, int], float] = {}

    def run(what: str, place: int, takes_s: float, *after_s: float) -> None:
        starts[what, place] = max((0.0, *after_s))
        ends[what, place] = starts[what, place] + takes_s

    for place, group in enumerate(groups):
        allowed = starts.get(("forward", place - 1 - p), 0.0)
        run("gather", place, all_gather(size[place]), ends.get(("gather", place - 1), 0.0), allowed)
        takes_s = sum(units[name].forward_s for name in group)
        run("forward", place, takes_s, ends["gather", place], ends.get(("forward", place - 1), 0.0))
    # What the host asks the link for, in its order.
    asked: list[tuple[str, int]] = []
    for place in range(last, -1, -1):
        wanted = range(place, max(-1, place - q - 1), -1)
        asked += [("again", one) for one in wanted if reshard[one] and ("again", one) not in asked]
        asked.append(("send", place))
    done = ends["forward", last]
    before_on_link = dict(zip(asked[1:], asked, strict=False))

    def end_of(what: str, place: int) -> float:
        if (what, place) in ends:
            return ends[what, place]
        link_s = end_of(*before_on_link[what, place]) if (what, place) in before_on_link else done
        if what == "send":
            run(what, place, reduce_scatter(size[place]), link_s, end_of("backward", place))
        elif what == "again":
            # Asked for when the backward pass of the group q before it begins, or when its own turn comes.
            asker = min(last, place + q)
            begun_s = start_of(asker) if asker > place else end_of("backward", place + 1) if place < last else done
            run(what, place, all_gather(size[place]), link_s, begun_s)
        return ends[what, place]

    def start_of(place: int) -> float:
        end_of_backward(place)
        return starts["backward", place]

    def end_of_backward(place: int) -> float:
        if ("backward", place) not in ends:
            waits = [done if place == last else end_of_backward(place + 1)]
            waits += [end_of("again", place)] if reshard[place] else []
            waits += [end_of("send", place + 2)] if place + 2 <= last else []
            run("backward", place, sum(units[name].backward_s for name in groups[place]), *waits)
        return ends["backward", place]

    for place in range(last, -1, -1):
        end_of_backward(place)
    return max(ends["backward", 0], *(end_of("send", place) for place in range(last + 1)))


@settings(max_examples=60)
@given(models(4), costs(), st.data())
def test_a_step_is_the_longest_path_through_what_waits_for_what(
    trace: ModelTrace, cost: Cost, data: st.DataObject
) -> None:
    plan = data.draw(st.sampled_from(all_plans(trace)))
    step = predict_fsdp(trace, cost, plan)
    assert step.iteration_s == pytest.approx(by_graph(trace, cost, plan), rel=1e-12, abs=1e-12)
    assert step.compute_s == pytest.approx(trace.compute_s)
    assert step.iteration_s >= fsdp_lower_bound_s(trace, cost) * (1 - 1e-12)


@settings(max_examples=25, deadline=None)
@given(models(4), costs(), st.floats(0.0, 1.0))
def test_small_models_get_the_best_of_all_plans_that_fit(trace: ModelTrace, cost: Cost, share: float) -> None:
    steps = [predict_fsdp(trace, cost, plan) for plan in all_plans(trace)]
    needed = [step.memory_bytes for step in steps]
    limit = int(min(needed) + share * (max(needed) - min(needed)))
    found = plan_fsdp(trace, cost, memory_limit=limit)
    best_s = min(step.iteration_s for step in steps if step.memory_bytes <= limit)
    assert predict_fsdp(trace, cost, found).iteration_s == pytest.approx(best_s, rel=1e-9)
    assert predict_fsdp(trace, cost, found).memory_bytes <= limit
    assert found.predicted["iteration_s"] == pytest.approx(best_s, rel=1e-9)
    anything = plan_fsdp(trace, cost)
    assert predict_fsdp(trace, cost, anything).iteration_s == pytest.approx(min(s.iteration_s for s in steps), rel=1e-9)
    with pytest.raises(PlanError, match="the least is"):
        plan_fsdp(trace, cost, memory_limit=min(needed) - 1)


@pytest.mark.parametrize("seed", range(6))
def test_larger_models_get_a_plan_near_the_best_of_all(seed: int) -> None:
    from random import Random

    rng = Random(seed)
    number = EXHAUSTED + 1
    layers = [LayerTrace(f"m{n}x.w", rng.uniform(1, 4), rng.randint(1, 9), rng.uniform(0.5, 2)) for n in range(number)]
    trace = ModelTrace("toy", sum(layer.forward_s or 0.0 for layer in layers), tuple(layers))
    steps = [predict_fsdp(trace, COST, plan) for plan in all_plans(trace)]
    for limit in (None, sorted(step.memory_bytes for step in steps)[len(steps) // 20]):
        best_s = min(step.iteration_s for step in steps if limit is None or step.memory_bytes <= limit)
        found = plan_fsdp(trace, COST, memory_limit=limit)
        assert best_s <= predict_fsdp(trace, COST, found).iteration_s * (1 + 1e-9)
        assert predict_fsdp(trace, COST, found).iteration_s <= 1.03 * best_s


@pytest.mark.parametrize("model", ["bert-h200-b32", "gpt2-h200-b8", "vit_b_16-h200-b32", "resnet50-h200-b32"])
@pytest.mark.parametrize("network", ["10gbe", "25gbe", "100gbe"])
def test_recorded_models_are_planned_within_3_per_cent_of_what_no_plan_undercuts(model: str, network: str) -> None:
    trace, cost = load_trace(model), load_network(network).cost(4)
    plan = plan_fsdp(trace, cost)
    names = [unit.name for unit in units_of(trace) if unit.name]
    by_block = FsdpPlan(trace.model, tuple((name,) for name in names), (True,) * len(names))
    step_s = predict_fsdp(trace, cost, plan).iteration_s
    bound_s = fsdp_lower_bound_s(trace, cost)
    assert bound_s * (1 - 1e-12) <= step_s <= 1.03 * bound_s
    assert step_s <= predict_fsdp(trace, cost, by_block).iteration_s
    assert plan.predicted["lower_bound_s"] == min(bound_s, step_s)


def test_memory_is_the_share_of_everything_and_what_is_whole_at_the_worst_moment() -> None:
    # 2 workers, groups of 10, 20, 30 bytes; a share of 4 times 60 bytes is 120.
    layers = [LayerTrace(f"{name}.w", 1.0, size, 1.0) for name, size in (("c", 30), ("b", 20), ("a", 10))]
    trace = ModelTrace("toy", 3.0, tuple(layers))
    kept = FsdpPlan("toy", (("a",), ("b",), ("c",)), (False, False, False))
    # Backward of c: a and b are kept, c, its gradients, and a copy of these.
    assert predict_fsdp(trace, COST, kept).memory_bytes == 120 + 10 + 20 + 3 * 30
    gone = FsdpPlan("toy", (("a",), ("b",), ("c",)), (True, True, True))
    # Backward of b beside the copy of c's gradients, with a prefetched; backward of c with b prefetched is more.
    assert predict_fsdp(trace, COST, gone).memory_bytes == 120 + max(3 * 20 + 30 + 10, 3 * 30 + 20)
    assert predict_fsdp(trace, COST, gone, states=0).memory_bytes == 60 + 110


def test_units_are_blocks_attention_is_one_and_what_blocks_are_in_is_the_roots() -> None:
    attention = ["attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight"]
    assert set(units_of_names(attention).values()) == {"attention"}
    vit = {unit.name for unit in units_of(load_trace("vit_b_16-h200-b32"))}
    assert vit == {"", "conv_proj", "encoder.ln", "heads.head"} | {
        f"encoder.layers.encoder_layer_{number}" for number in range(12)
    }
    assert units_of_names(["features.1.conv.0.0.w", "features.1.conv.0.1.w", "features.1.conv.1.w", "features.2.c.w"])[
        "features.1.conv.0.0.w"
    ] in ("features.1", "features.1.conv.0")
    resnet = [unit.name for unit in units_of(load_trace("resnet50-h200-b32"))]
    assert resnet[:3] == ["conv1", "bn1", "layer1.0"]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "h1", "h2", "0", "1"]), min_size=1, max_size=4), max_size=12))
def test_units_never_lie_in_one_another(paths: list[list[str]]) -> None:
    names = sorted({".".join([*path, "w"]) for path in paths} | {"w"})
    units = {unit for unit in units_of_names(names).values() if unit}
    assert not [(one, other) for one in units for other in units if other.startswith(f"{one}.")]
    for name, unit in units_of_names(names).items():
        assert not unit or name.startswith(f"{unit}.")


def test_a_plan_is_read_as_it_was_written_and_bad_ones_are_one_line(tmp_path: Path) -> None:
    plan = FsdpPlan("toy", (("a", "b"), ("c",)), (True, False), 2, 1, {"iteration_s": 1.0})
    plan.save(tmp_path / "plan.json")
    assert FsdpPlan.load(tmp_path / "plan.json") == plan
    trace = ModelTrace("toy", 1.0, tuple(LayerTrace(f"{name}.w", 1.0, 4) for name in "cba"))
    for bad, words in (
        (lambda: FsdpPlan("toy", ((),), (True,)), "empty"),
        (lambda: FsdpPlan("toy", (("a",), ("a",)), (True, True)), "stands twice"),
        (lambda: FsdpPlan("toy", (("a",),), ()), "one for each"),
        (lambda: FsdpPlan("toy", (("a",),), (True,), 0), "forward_prefetch"),
        (
            lambda: predict_fsdp(trace, COST, FsdpPlan("toy", (("a",), ("b",)), (True, True))),
            "'c' is in the model only",
        ),
        (lambda: predict_fsdp(trace, COST, FsdpPlan("toy", (("b",), ("a", "c")), (True, True))), "uses first"),
    ):
        with pytest.raises(PlanError, match=words):
            bad()
