"""Unusual models while the tuner works: each is tuned rightly, or left alone with the reason in `tuning`."""

from typing import Any

import pytest
import torch

from tests.runtime.guard_ranks import STEPS
from tests.runtime.launch import run_ranks

RANKS = "tests.runtime.guard_ranks"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["not_tuned", "ways", "replanned_static", "generic_join", "deleted", "two_models", "subgroup"]
    return run_ranks(
        RANKS,
        [*scenarios, "captured", "hooked", "counted", "compiled_meanwhile", "beside_stock", "profiled", "elsewhere"],
        tmp_path_factory.mktemp("two"),
        2,
    )


@pytest.mark.parametrize(
    "way",
    ["renamed", "by forward", "static accumulated", "unused accumulated", "views accumulated", "inside forward"],
)
def test_ways_to_train_that_are_tuned(ranks: list[Any], way: str) -> None:
    for found in (told["ways"][way] for told in ranks):
        assert found["same"] is True
        assert found["state"] != "off", found["reason"]
        assert found["steps"] == STEPS


def test_a_model_whose_steps_never_average_anything_says_that_it_waits(ranks: list[Any]) -> None:
    for found in (told["ways"]["never synchronised"] for told in ranks):
        assert (found["same"], found["state"], found["steps"]) == (True, "working", 0)
        assert "none of 60 forward passes was followed by a step that averages gradients" in found["reason"]


def test_training_inside_join_is_stocks_and_tuning_says_why_it_waits(ranks: list[Any]) -> None:
    for found in (told["ways"]["in join"] for told in ranks):
        assert (found["same"], found["state"]) == (True, "working")  # the block is over, and it begins anew
    for found in (told["generic_join"] for told in ranks):
        assert found["inside"].startswith("the model is trained inside join()")
        assert found["state"] == "working"


def test_after_any_join_nobody_is_asked_for_data_and_plans_can_be_changed(ranks: list[Any]) -> None:
    for found in (told["generic_join"] for told in ranks):
        ours, stocks = found["asks"]
        assert ours == stocks
        assert found["replanned"] is True
        assert found["after exception"] == [True, "a plan was set by hand"]
        assert found["left"] == ["_forward_pre_hooks"] * bool(found["left"])


def test_a_step_is_counted_once_after_tuning_however_its_forward_passes_are_called(ranks: list[Any]) -> None:
    for found in (told["counted"] for told in ranks):
        seen = {"by_hand": 6, "evaluated": 6, "towers": 6, "accumulated": 6, "by_forward": 6}
        assert found in (seen, {})  # older torch does not count our group's collectives


def test_a_plan_that_a_capture_leaves_in_force_is_called_by_its_name(ranks: list[Any]) -> None:
    for found in (told["captured"] for told in ranks):
        captured = (
            "the model was captured in a CUDA graph, whose buckets cannot change; the plan that was on trial stays"
        )
        assert found["reason"] == f"{captured}: {found['planner']}"
        assert found["planner"] != "on trial"
        assert (found["same"], found["left"]) == (True, [])


def test_a_settled_model_that_is_captured_is_no_longer_watched(ranks: list[Any]) -> None:
    for found in (told["captured"] for told in ranks):
        watched, still_watched = found["watched"]
        assert not still_watched
        if watched:  # older torch does not count our group's collectives
            captured = "the model was captured in a CUDA graph, whose buckets cannot change"
            assert found["problem"] == f"steps are no longer watched: {captured}"


def test_a_hook_with_state_per_bucket_meets_no_bucket_of_a_plan_on_trial(ranks: list[Any]) -> None:
    for found in (told["hooked"] for told in ranks):
        assert found["groups"] == [True, True]  # others were tried; torch's are back
        assert found["tuning"] == ["off", "the communication hook remembering may keep state per bucket"]
        assert (found["same"], found["left"]) == (True, [])


def test_a_static_graph_takes_other_plans_though_the_next_pass_averages_nothing(ranks: list[Any]) -> None:
    assert all(told["replanned_static"]["same"] for told in ranks)


def test_a_model_that_is_deleted_is_gone_at_once(ranks: list[Any]) -> None:
    for found in (told["deleted"] for told in ranks):
        assert found == {
            "tuning": ["working", [True, True, True]],
            "settled": ["settled", [True, True, True]],
            "planned": ["off", [True, True, True]],
        }


def test_two_models_that_end_together_in_another_order_on_each_rank_wait_for_nobody(ranks: list[Any]) -> None:
    for found in (told["two_models"] for told in ranks):
        assert found["same"] is True
        assert "off" not in found["states"]


def test_a_model_that_is_compiled_while_it_is_tuned_goes_back_to_torchs_buckets(ranks: list[Any]) -> None:
    for found in (told["compiled_meanwhile"] for told in ranks):
        assert (found["state"], found["planner"], found["left"]) == ("off", "ddp", [])
        assert found["reason"].startswith("the model is compiled")


def test_a_part_of_the_ranks_tunes_by_itself(ranks: list[Any]) -> None:
    first, second = (told["subgroup"] for told in ranks)
    assert first["state"] == "settled"
    assert first == second


def test_a_model_that_shall_not_be_tuned_is_torchs_class_and_nothing_else(ranks: list[Any]) -> None:
    for found in (told["not_tuned"] for told in ranks):
        assert found == {"left": [], "handle": True, "optimizer": True}


def test_a_model_that_shall_not_be_tuned_can_train_beside_torchs_class(ranks: list[Any]) -> None:
    for found in (told["beside_stock"] for told in ranks):
        stocks, ours = found["collectives"]
        assert ours == stocks
        assert found["same"] == [True, True, True]


def test_models_that_are_torchs_class_elsewhere_are_not_counted(ranks: list[Any]) -> None:
    # By this number ranks find one another in the group's store.
    assert len({told["beside_stock"]["number"] for told in ranks}) == 1


def test_tuning_shows_in_a_profile(ranks: list[Any]) -> None:
    for found in (told["profiled"] for told in ranks):
        assert found["marks"] == ["mgwfbp: change of buckets", "mgwfbp: plan", "mgwfbp: tuning"]


SEVERAL = "the model is on several devices, which no one clock can time"
UNTIMED = "the model is on meta, where nothing can be timed"


def test_a_model_on_several_devices_or_on_one_without_a_clock_is_left_alone(ranks: list[Any]) -> None:
    for found in (told["elsewhere"] for told in ranks):
        assert (found["before"], found["after"]) == ("", SEVERAL)
        assert found.get("untimed", UNTIMED) == UNTIMED


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_two_gpus_is_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    for found in run_ranks(RANKS, ["several_devices"], tmp_path_factory.mktemp("devices"), 2):
        told = found["several_devices"]
        assert (told["same"], told["state"], told["left"]) == (True, "off", [])
        assert told["reason"] == SEVERAL


def test_tensor_parallel_models_are_tuned_though_their_parameters_leave_the_module(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for found in run_ranks(RANKS, ["tensor_parallel"], tmp_path_factory.mktemp("four"), 4):
        told = found["tensor_parallel"]
        assert told["same"] is True
        assert told["state"] != "off", told["reason"]
        assert told["steps"] == STEPS or told["state"] == "settled"
