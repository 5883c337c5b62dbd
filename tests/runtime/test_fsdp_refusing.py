"""What `fully_shard` keeps apart, and what it refuses before it measures or wraps, on real processes."""

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from tests.runtime.launch import run_ranks

pytestmark = [
    pytest.mark.timeout(300),  # of processes that may share their cores
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no public fully_shard"
    ),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    scenarios = ["dtypes", "arguments", "rootless", "parts"]
    return run_ranks("tests.runtime.fsdp_refusing_ranks", scenarios, tmp_path_factory.mktemp("two"), 2)


def test_modules_of_different_dtypes_are_planned_apart_and_train_bitwise_as_torchs(two: list[Any]) -> None:
    for found in (told["dtypes"] for told in two):
        assert found["differences"] == [0.0, 0.0]
        blocks = [f"h.{place}" for place in range(5)]
        for groups in found["groups"]:  # by a trace that knows dtypes, and by one that does not
            assert blocks in groups
            assert all(set(group) in ({"stem"}, {"head"}) for group in groups if group != blocks)


def test_a_plan_or_a_model_that_mixes_dtypes_is_one_line_before_anything_is_measured_or_wrapped(
    two: list[Any],
) -> None:
    mixes = "has trained parameters of bfloat16 and float32, and FSDP2 gathers those of one dtype together"
    remedy = "make a new plan, or put modules of different dtypes in different groups"
    for found in (told["dtypes"] for told in two):
        assert found["by hand"] == f"PlanError: the plan's group of 'stem', 'h.0' {mixes}: {remedy}"
        assert found["root"] == f"PlanError: what stays with the root {mixes}: {remedy}"
        assert found["inside"] == f"PlanError: 'h.1' {mixes}: cast it to one dtype"
        assert found["wrapped"] == []


def test_unknown_arguments_and_scalars_are_one_line_before_anything_is_measured_or_wrapped(two: list[Any]) -> None:
    for rank, found in enumerate(told["arguments"] for told in two):
        ours = "to plan with there are batch, cost, loss_fn, memory_limit, trace, for torch's fully_shard "
        assert found["typo"].startswith(f"PlanError: there is no argument 'memorylimit': {ours}")
        assert "ignored_params, mesh, mp_policy, offload_policy" in found["typo"]
        assert "reshard_after_forward" not in found["typo"]
        assert found["typo, wrapping"].startswith(f"PlanError: there is no argument 'mixed_precision': {ours}")
        assert found["name"] == "PlanError: ignored_params holds 'h.0', expected parameters of the model"
        limit = "memory_limit is [1], expected bytes, more than 0, or a size such as 40GiB"
        assert found["limit"] == f"PlanError: {'rank 0 cannot plan: ' if rank else ''}{limit}"
        assert "plan is {'a': 1}, expected an FsdpPlan or the path of one" in found["plan"]
        assert "trace is {'a': 1}, expected a ModelTrace, the path or the name of one" in found["trace"]
        assert "cost is {'a': 1}, expected a Cost or the path of one" in found["cost"]
        whole, half = "['torch.float32', 'None']", "['torch.bfloat16', 'None']"
        assert (
            found["policy"]
            == f"PlanError: mp_policy is {whole} on rank 0 and {half} on rank 1: give every rank the same"
        )
        assert found["ignored"].startswith("PlanError: ignored_params is [] on rank 0 and ['head.bias'] on rank 1")
        assert found["scalar"] == (
            "PlanError: parameter 'temperature' has no dimensions, and FSDP2 cannot shard it: give it the shape (1,), "
            "or put it in ignored_params, where no gradients are averaged"
        )
        assert found["wrapped"] == "[]"


def test_ignored_parameters_may_be_given_as_a_generator(two: list[Any]) -> None:
    for found in (told["arguments"] for told in two):
        assert found["whole"] == "['temperature', 'head.bias']"


def test_models_whose_parameters_are_all_the_roots_train_as_torchs(two: list[Any]) -> None:
    for found in (told["rootless"] for told in two):
        assert found == {"Linear": 0.0, "Alone": 0.0}


def test_the_first_rank_of_a_mesh_says_the_plan_and_what_stays_with_the_root(two: list[Any]) -> None:
    for found in (told["parts"] for told in two):
        assert [line.split(" ")[1] for line in found["said"]] == ["planned", "fully_shard"]


def test_room_on_a_device_is_what_neither_activations_nor_ignored_parameters_take() -> None:
    planning = importlib.import_module("mgwfbp.runtime.fsdp.planning")
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(5, 10, bias=False))
    sharded, ignored = 400, 200
    place = planning.Place.of(None, {"ignored_params": [model[1].weight]})
    room = [
        planning.room_beside(model, one, total, before, activations)
        for one, total, before, activations in (
            (planning.Place.of(None, {}), 10_000, sharded + ignored, 0),
            (planning.Place.of(None, {}), 10_000, sharded + ignored + 50, 1000),
            (place, 10_000, sharded + ignored + 50, 1000),
        )
    ]
    # A gradient and two states of what is ignored come on top of itself.
    assert [*room, *(one - other for one, other in pairwise(room))] == [9000, 7950, 7950 - 4 * ignored, 1050, 800]
    model[1].requires_grad_(False)
    assert planning.room_beside(model, place, 10_000, sharded + ignored + 50, 1000) == 7950 - ignored
