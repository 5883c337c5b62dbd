"""The tuner and the observer, on real processes, beside torch's own DDP."""

from pathlib import Path
from typing import Any

import pytest

from mgwfbp.runtime.tune.self_tuning import NOT_COUNTED
from tests.runtime.launch import TORCHS_GLOO, let_ranks_end, run_ranks
from tests.runtime.tuner_ranks import ENOUGH_STEPS

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores

RANKS = "tests.runtime.tuner_ranks"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["whole", "odd_steps", "refusals", "copies", "observed"]
    return run_ranks(RANKS, scenarios, tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def whole(two_ranks: list[Any]) -> list[Any]:
    """Models that were tuned to the end."""
    return [found["whole"] for found in two_ranks]


def test_while_it_tunes_losses_of_30_steps_are_those_of_stock_ddp(tmp_path: Path) -> None:
    # At 2 ranks a sum of two numbers does not depend on the bucket it travels in: bitwise, no tolerance.
    for found in (told["curves"] for told in run_ranks(RANKS, ["curves"], tmp_path, 2)):
        for name in ("resnet18", "transformer"):
            assert found[name]["ours"] == found[name]["stock"]
            assert len(set(found[name]["ours"])) == 30
            # By then a plan is in force, be it one that is tried or, where there is but one, the last.
            assert found[name]["tuning"].startswith(("Tuning(working, step 30: ", "Tuning(settled after "))
            assert found[name]["plan"] != "None"


def test_tuning_ends_on_all_ranks_with_the_same_plan_and_changes_nothing_that_is_computed(whole: list[Any]) -> None:
    for name, mine in whole[0].items():
        for found in (one[name] for one in whole):
            assert (found["same losses"], found["same parameters"]) == (True, True), name
            assert (found["state"], found["plan"]) == ("settled", mine["plan"]), name
            assert found["steps"] < ENOUGH_STEPS
            assert found["plan"] == found["chosen"] == found["held"]
            assert found["sizes"] is True


def test_torchs_own_buckets_take_part_and_are_kept_unless_another_plan_is_faster_beyond_doubt(
    whole: list[Any],
) -> None:
    assert len(whole[0]["wide"]["candidates"]) >= 2
    for found in whole[0].values():
        assert "ddp" in dict(found["candidates"])
        comparison = found["comparison"]
        kept = found["candidates"][0][0]
        assert (kept == "ddp") == (not comparison["is_sure"])
        assert comparison["is_sure"] == (comparison["turns"] > 0 and (comparison["gain_low"] or -1) > 0)


def test_one_record_of_rank_0_says_what_was_found(whole: list[Any]) -> None:
    first, second = whole
    for found in first.values():
        (record,) = found["records"]
        assert record.startswith("Tuning(settled after ")
        assert "exposed communication, measured, " in record
    assert all(found["records"] == [] for found in second.values())


@pytest.mark.parametrize("gloo", ["one thread", "torch's own"])
def test_when_steps_have_changed_for_long_all_ranks_tune_again_and_nothing_else_changes(
    tmp_path: Path, gloo: str
) -> None:
    variables = {TORCHS_GLOO: "yes"} if gloo == "torch's own" else {}
    ranks = [told["looks_again"] for told in run_ranks(RANKS, ["looks_again"], tmp_path, 2, variables)]
    if gloo == "one thread" and NOT_COUNTED in ranks[0]["problem"]:
        pytest.skip(
            "this torch does not count the collectives of gloo with one thread, so that steps are not watched for "
            "change over it (torch's own gloo and nccl are counted)"
        )
    for found in ranks:
        assert found["seen"] == [["working", 0], ["settled", 0], ["working", 1], ["settled", 1]]
        assert {"ddp", "bucket-1"} & set(found["names"])
        assert found["torchs"] is True  # known for the next time, too
        # Watching ended with a block of join() that was between, and began again after it.
        assert "steps are no longer watched: the model is trained inside join()" in found["in join"]
        assert (found["same"], found["left"]) == (True, [])
        assert (found["steps"], found["plan"]) == (ranks[0]["steps"], ranks[0]["plan"])


def test_a_settled_model_has_nothing_left_on_it(whole: list[Any]) -> None:
    assert [found["left"] for rank in whole for found in rank.values()] == [[]] * 14


def test_a_step_of_a_settled_model_calls_what_stock_ddp_calls_and_little_more(whole: list[Any]) -> None:
    for name, found in [(name, found) for rank in whole for name, found in rank.items() if name != "hook"]:
        calls = found["more calls"]
        assert calls.pop("DistributedDataParallel._pre_forward") == 1, name
        assert calls.pop("DistributedDataParallel._post_forward") == 1, name
        # Whether a step is one whose length counts.
        assert {name for name in calls if not name.endswith("._get_sequence_number_for_group")} <= {
            "is_grad_enabled",
            "Drift.before_forward",
            "Drift.after_forward",
            "Drift._look",
            "perf_counter",
            "StepLengths.add",  # on rank 0
            "list.append",
            "len",
        }
        assert found["fewer calls"] == {}, name


def test_steps_that_average_nothing_do_not_count_and_confuse_nobody(two_ranks: list[Any]) -> None:
    first, second = (told["odd_steps"] for told in two_ranks)
    for found in (first, second):
        assert found["same"] is True
        assert found["under join"].startswith("the model is trained inside join()")
        assert found["state"] == "settled"
    assert (first["steps"], first["plan"]) == (second["steps"], second["plan"])


def test_what_cannot_be_tuned_says_why(two_ranks: list[Any]) -> None:
    for found in (told["refusals"] for told in two_ranks):
        assert found["stateful hook"] == [
            "off",
            "the communication hook powerSGD_hook may keep state per bucket",
            [],
        ]
        assert found["mixed"] == [
            "off",
            "with mixed_precision torch sends wrong gradients in the first step of every Reducer",
            ["a Reducer"],
        ]
        assert found["sparse"] == ["off", "gradients are sparse, and as large as each batch makes them"]
        assert found["off"] == ["off", "tune=False"]
        assert found["given"] == ["off", "a plan was given"]
        assert found["alone"] == ["off", "there is one rank, and nothing to send"]
        assert found["by hand"] == ["off", "a plan was set by hand", True, []]


def test_a_copy_on_one_rank_in_the_middle_disturbs_nobody_and_begins_anew(two_ranks: list[Any]) -> None:
    first, second = (told["copies"] for told in two_ranks)
    assert first["copy"] == ["working", 0, True]
    for found in (first, second):
        assert (found["before"], found["state"]) == (13, "settled")
        assert found["settled copy"][:2] == [True, "settled"]


def test_the_observer_sees_the_messages_of_the_plan_each_after_its_gradients_and_in_turn(two_ranks: list[Any]) -> None:
    for found in (told["observed"] for told in two_ranks):
        num_gradients, num_messages = found.pop("gradients")
        assert found.pop("notes") == {
            "plain": [2, [], []],
            "gradients": [1, [num_gradients], []],
            "messages": [1, [], [num_messages]],
            "timelines": 0,
        }
        assert found.pop("nothing").startswith("nothing was observed: no step whose gradients were averaged")
        assert found.pop("while tuning").startswith("the tuner is at work (warming up): observe when it has ended")
        assert len(found) == 7
        for name, seen in found.items():
            assert seen["steps"] == 3, name
            assert seen["messages"], name
            assert seen["after their gradients"], name
            assert seen["in turn"], name
            assert seen["layers"], name
            assert seen["predicted messages"] == seen["measured messages"] > 0, name
            assert seen["left"] in ([], ["_forward_pre_hooks"]), name


@pytest.mark.parametrize("last_step", [3, 14, 60])
def test_where_a_rank_is_killed_while_the_tuner_works_the_others_end_with_an_error(
    tmp_path: Path, last_step: int
) -> None:
    first, second = let_ranks_end(RANKS, ["killed"], tmp_path, 2, {"TEST_LAST_STEP": str(last_step)})
    assert first["killed"]["told"]
    assert second is None
