"""Strategies by name, on real processes beside torch's class."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mgwfbp import LayerTrace, LinearCost, ModelTrace, StrategyError, find_plan, load_network
from mgwfbp.runtime.baselines import assign_owners
from mgwfbp.runtime.strategies import STRATEGIES, parallel, plan_for
from tests.runtime.launch import run_ranks
from tests.runtime.models import Dtypes, Mlp, Sparse

MODULE = "tests.runtime.strategy_ranks"
pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    return run_ranks(MODULE, ["averages", "naive_order", "timed_plans"], tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 4 ranks saw."""
    return run_ranks(MODULE, ["averages", "server_traffic"], tmp_path_factory.mktemp("four"), 4)


def test_at_2_ranks_every_strategy_gives_bitwise_what_torch_gives(two_ranks: list[Any]) -> None:
    for found in two_ranks:
        assert len(found["averages"]) == 12 * 4 - 1  # sparse gradients do not go through parameter servers
        assert [name for name, result in found["averages"].items() if not result["bitwise"]] == []


def test_at_4_ranks_naive_and_parameter_servers_give_what_torch_gives_up_to_the_order_of_sums(
    four_ranks: list[Any],
) -> None:
    for found in four_ranks:
        assert len(found["averages"]) == 3 * 2
        far = {name: one for name, one in found["averages"].items() if not one["distance"] <= one["allowed"]}
        assert far == {}


def test_naive_sends_gradient_by_gradient_and_nothing_before_the_backward_pass_has_ended(two_ranks: list[Any]) -> None:
    for found in two_ranks:
        for seen in found["naive_order"].values():
            events, sizes = seen["events"], seen["sizes"]
            num = len(sizes)
            assert seen["messages"] == num
            assert len(events) == 4 * num  # two steps: each gradient is ready once and sent once
            for step in (events[: 2 * num], events[2 * num :]):
                assert [kind for kind, _ in step] == ["ready"] * num + ["all_reduce"] * num
                assert [size for _, size in step[num:]] == [sizes[name] for name in reversed(sizes)]


def test_every_gradient_is_pushed_to_one_owner_and_pulled_from_it(four_ranks: list[Any]) -> None:
    by_rank = []
    for found in (rank["server_traffic"] for rank in four_ranks):
        pushed = {size: owner for kind, size, *rest in found["events"] if kind == "gather" for owner in rest}
        pulled = {size: owner for kind, size, *rest in found["events"] if kind == "scatter" for owner in rest}
        assert sorted(pushed) == sorted(found["sizes"].values())
        assert pushed == pulled
        by_rank.append(pushed)
    assert all(owners == by_rank[0] for owners in by_rank)
    held = sorted(sum(size for size, owner in by_rank[0].items() if owner == rank) for rank in range(4))
    assert held == [63, 70, 300, 1000]  # of 1000, 300, 60, 50, 20 and 3 numbers


def test_messages_to_parameter_servers_are_averaged_during_the_backward_pass(four_ranks: list[Any]) -> None:
    assert all(found["server_traffic"]["overlapped"] for found in four_ranks)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 9))
def test_owners_hold_equal_shares_up_to_one_gradient(sizes: list[int], num_owners: int) -> None:
    owners = assign_owners(sizes, num_owners)
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(num_owners)]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes)


def test_timed_strategies_and_given_plans_are_in_force(two_ranks: list[Any]) -> None:
    for found in (rank["timed_plans"] for rank in two_ranks):
        trace, cost = ModelTrace.from_json(found["trace"]), LinearCost.from_json(found["cost"])
        plans = found["plans"]
        for planner in ("mgwfbp", "optimal"):
            assert plans[planner] == find_plan(trace, cost, planner).to_json()
        assert plans["given"] == plans["optimal"]
        assert plans["naive"]["groups"] == plans["ps"]["groups"] == [[layer.name] for layer in trace.layers]
        assert plans["naive"]["predicted"] == {}  # a plan's prediction would not be naive S-SGD's


@pytest.mark.parametrize(
    "strategy", [name for name in STRATEGIES if name not in ("auto", "ddp", "mgwfbp", "optimal", "cautious")]
)
def test_a_message_has_one_dtype_and_a_sparse_gradient_travels_alone(strategy: str) -> None:
    model = Dtypes()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    plan = plan_for(model, strategy)
    assert all(len({dtypes[name] for name in group}) == 1 for group in plan.groups)
    assert plan.planner == strategy
    assert ("embedding.weight",) in plan_for(Sparse(), strategy).groups


def test_a_strategys_name_may_end_with_the_precision_in_which_it_sends() -> None:
    plan = plan_for(Mlp(), "wfbp+bf16")
    assert set(plan.wire) == {"bfloat16"}
    assert (plan.groups, plan.planner) == (plan_for(Mlp(), "wfbp").groups, "wfbp+bf16")
    layers = tuple(LayerTrace(name, 0.0, 4 * one.numel()) for name, one in reversed(list(Mlp().named_parameters())))
    trace, cost = ModelTrace("Mlp", 0.0, layers), LinearCost(2, 1e-6, 1e-6)
    assert plan_for(Mlp(), "optimal+fp16", trace=trace, cost=cost).wire == ("float16",)  # nothing hides anything
    hidden = ModelTrace("Mlp", 1e6, layers)
    assert plan_for(Mlp(), "optimal+fp16", trace=hidden, cost=cost).wire == ()


def test_a_plan_by_name_sends_only_fp32_gradients_in_low_precision() -> None:
    model = Dtypes(half=True)
    dtypes = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    for strategy in ("wfbp+bf16", "single+bf16"):
        plan = plan_for(model, strategy)
        wire_of = {name: wire for group, wire in zip(plan.groups, plan.wires, strict=True) for name in group}
        assert wire_of == {name: "bfloat16" if dtype == "torch.float32" else "" for name, dtype in dtypes.items()}
    sparse = plan_for(Sparse(), "single+bf16")
    assert dict(zip(sparse.groups, sparse.wires, strict=True))["embedding.weight",] == ""


def test_buckets_are_as_large_as_their_name_says() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(10)))  # a quarter of a MiB each
    assert plan_for(model, "bucket-0.5").group_sizes == (2, 2, 2, 2, 2)
    assert plan_for(model, "bucket").group_sizes == (4, 6)


def test_a_timed_strategy_without_trace_or_cost_is_an_error() -> None:
    with pytest.raises(StrategyError, match="strategy 'optimal' needs a trace and a cost, and no trace and cost is"):
        parallel(Mlp(), "optimal")
    with pytest.raises(StrategyError, match="no trace is given"):
        parallel(Mlp(), "mgwfbp", cost=load_network("10GbE").cost(workers=2))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "horovod",
        "ddp+int8",
        "naive+bf16",
        "ps+bf16",
        "horovod+bf16",
        "+bf16",
        "bucket-",
        "bucket-0",
        "bucket-nan",
        "bucket-inf",
        "bucket--5",
    ],
)
def test_an_unknown_strategy_is_an_error_that_lists_those_there_are(name: str) -> None:
    with pytest.raises(StrategyError, match="is unknown, expected one of auto, ddp, naive, wfbp"):
        parallel(Mlp(), name)


def test_what_a_strategy_cannot_do_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(StrategyError, match=r"'ps' cannot average the sparse gradient of 'embedding\.weight'"):
        parallel(Sparse(), "ps")
    with pytest.raises(StrategyError, match="leave out skip_all_reduce_unused_params"):
        parallel(Mlp(), "naive", find_unused_parameters=True, skip_all_reduce_unused_params=True)
