"""Our DistributedDataParallel beside torch's, on real processes."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mgwfbp import DistributedDataParallel, PlanError
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


def run(scenario: str, folder: Path, world: int) -> list[Any]:
    """Run a scenario of tests/runtime/ranks.py and return what each rank wrote."""
    return [found[scenario] for found in run_ranks("tests.runtime.ranks", [scenario], folder, world)]


@pytest.mark.parametrize("name", ["tune_steps", "retune_steps"])
@pytest.mark.parametrize("steps", [None, -5, 1.5, "20"])
def test_a_number_of_steps_that_is_none_is_refused_before_ranks_meet(name: str, steps: Any) -> None:
    with pytest.raises(PlanError, match=f"^{name} is .*, expected a whole number"):
        DistributedDataParallel(nn.Linear(2, 2), **{name: steps})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All modes at 2 ranks."""
    return run("modes", tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All modes at 4 ranks."""
    return run("modes", tmp_path_factory.mktemp("four"), 4)


def test_at_2_ranks_gradients_and_parameters_are_bitwise_those_of_torch(two_ranks: list[Any]) -> None:
    for found in two_ranks:
        assert len(found) > 35
        assert [mode for mode, result in found.items() if not result["bitwise"]] == []
        assert all(result["moved"] for result in found.values())


def test_at_4_ranks_gradients_and_parameters_are_those_of_torch_up_to_the_order_of_sums(four_ranks: list[Any]) -> None:
    for found in four_ranks:
        far = {mode: result for mode, result in found.items() if not result["distance"] <= result["allowed"]}
        assert far == {}


@pytest.mark.parametrize("world", [2, 4])
def test_every_message_of_every_step_is_the_plans_from_the_first_on(world: int, request: pytest.FixtureRequest) -> None:
    ranks: list[Any] = request.getfixturevalue("two_ranks" if world == 2 else "four_ranks")
    for found in ranks:
        assert {mode: result["sent"] for mode, result in found.items() if result["sent"]} == {}


@pytest.fixture(scope="module")
def wrong_plans(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 4 ranks were told about plans that cannot be run; each stayed in step with the others afterwards."""
    return run("wrong_plans", tmp_path_factory.mktemp("wrong"), 4)


@pytest.mark.parametrize("scenario", ["different", "replan different"])
def test_different_plans_are_an_error_on_every_rank_that_names_the_first_difference(
    wrong_plans: list[Any], scenario: str
) -> None:
    message = (
        "the ranks have different plans: message 0 holds 2 gradients on rank 0 and 1 on rank 2: 'layers.0.bias' comes "
        "first on rank 0 and 'head.weight' on rank 2; give every rank the same plan"
    )
    assert [told[scenario] for told in wrong_plans] == [["PlanError", message]] * 4


def test_a_rank_without_a_plan_is_an_error_on_every_rank(wrong_plans: list[Any]) -> None:
    for told in wrong_plans:
        kind, message = told["none on one"]
        assert kind == "PlanError"
        assert "rank 0 has a plan, rank 1 no plan" in message


def test_a_plan_for_another_model_is_an_error_on_every_rank(wrong_plans: list[Any]) -> None:
    for rank, told in enumerate(wrong_plans):
        assert told["other model"][0] == "PlanError"
        assert told["other model"][1].startswith(
            "the plan for 'Shared' covers 5 gradients, the model has 10 (missing: "
        )
        prefix = "" if rank == 1 else "rank 1 has no plan to run: PlanError: "
        assert told["other model on one"][1] == prefix + told["other model"][1]


@pytest.mark.parametrize(
    ("scenario", "bad_rank", "error", "text"),
    [
        ("torn", 3, "FormatError", "torn.json: not JSON (line "),
        ("replan torn", 3, "FormatError", "torn.json: not JSON (line "),
        ("absent", 0, "FileError", "no.json: cannot be read: No such file"),
    ],
)
def test_a_plan_file_that_one_rank_cannot_read_is_an_error_on_every_rank(
    wrong_plans: list[Any], scenario: str, bad_rank: int, error: str, text: str
) -> None:
    for rank, told in enumerate(wrong_plans):
        kind, message = told[scenario]
        assert kind == (error if rank == bad_rank else "PlanError")
        assert text in message
        assert message.startswith(f"rank {bad_rank} has no plan to run: {error}: ") == (rank != bad_rank)


def test_a_plan_that_torch_cannot_send_is_an_error_that_says_what_to_split(wrong_plans: list[Any]) -> None:
    for told in wrong_plans:
        assert told["dtypes"] == [
            "PlanError",
            "message 0 of the plan merges 'layers.0.weight' (float32 on cpu) with 'layers.1.weight' (float64 on cpu); "
            "a message holds one dtype on one device: split it",
        ]
        assert "merges 'embedding.weight', whose gradient is sparse, with others" in told["sparse"][1]
        assert told["clash"] == [
            "PlanError",
            "plan= and bucket_cap_mb= are both given, and each says how large buckets are",
        ]


def test_the_plan_stays_where_it_cannot_be_changed(wrong_plans: list[Any]) -> None:
    for told in wrong_plans:
        assert told["replan unfinished"][0] == "PlanError"
        assert "before the backward pass has ended" in told["replan unfinished"][1]
        assert told["replan in join"][0] == "PlanError"
        assert told["replan mixed precision"][0] == "PlanError"
        assert "give plan= at construction" in told["replan mixed precision"][1]
        assert told["still in force"]


def test_nothing_has_changed_when_a_wrong_plan_is_refused(wrong_plans: list[Any]) -> None:
    assert all(told["untouched"] for told in wrong_plans)


@pytest.fixture(scope="module")
def manners(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw of copies, warnings and a torch that lacks something."""
    return run("manners", tmp_path_factory.mktemp("manners"), 2)


def test_names_copies_files_and_compiled_models_are_those_of_torch_and_keep_the_plan(manners: list[Any]) -> None:
    for found in manners:
        assert found["copies"] == {
            "same names": True,
            "loads": "<All keys matched successfully>",
            "copied": True,
            "pickled": True,
            "saved": True,
            "back to stock": True,
            "without a plan": True,
            "not tuned": True,
            "another group": True,
            "compiled": True,
            "without collectives": True,
        }


def test_a_torch_that_lacks_a_name_trains_with_its_own_buckets_after_one_warning(manners: list[Any]) -> None:
    for found in manners:
        (warning,) = found["fallback"]["warnings"]
        assert warning.startswith("the plan is not used and DDP's own buckets are: torch ")
        assert warning.endswith(" lacks Reducer._update_process_group")
        assert (found["fallback"]["plan"], found["fallback"]["reducer"]) == (None, "Reducer")


def test_the_warning_about_strides_is_followed_by_one_that_names_the_parameters(manners: list[Any]) -> None:
    for found in manners:
        first, second, third = found["strides"]["said"]
        assert any(text.startswith("Grad strides do not match bucket view strides") for text in first)
        (ours,) = second
        assert ours.startswith("gradients of 2 of the parameters have other strides than their places in DDP's buckets")
        assert "'odd' (gradient (1, 4), bucket (4, 1))" in ours
        assert "'channels' (gradient (4, 1, 4, 4), bucket (4, 1, 1, 1))" in ours
        assert "'plain'" not in ours
        assert third == []
        assert found["strides"]["hooks left"] == []
