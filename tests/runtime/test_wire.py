"""Messages in low precision, on real processes, beside the same arithmetic done by hand."""

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 and 3 ranks saw."""
    scenarios = ["modes", "changes", "accumulated", "scaled", "branches", "tuned", "nan_while_tuning"]
    scenarios += ["extremes", "odd_numbers_apart", "refused", "joined", "groups", "alone", "late", "failed"]
    return run_ranks("tests.runtime.wire_ranks", scenarios, tmp_path_factory.mktemp("wire"), request.param)


def test_a_gradient_is_converted_summed_in_fp32_and_converted_and_all_ranks_have_the_same(ranks: list[Any]) -> None:
    for found in (told["modes"] for told in ranks):
        for kind in ("dtypes", "halves", "sparse"):  # gradients that cannot travel so, and a model that says so
            asked = found.pop(f"{kind}, asked for")
            assert set(found.pop(f"{kind}, said")) == {name for name in asked if asked[name] == "torch.float32"}
        assert len(found) == 12
        for name, steps in found.items():
            for step in steps:
                assert step["low"] > 0, name
                assert (step["wrong"], step["alike"]) == ([], True), name


def test_messages_of_many_blocks_are_what_is_worked_out_by_hand_with_four_ranks(tmp_path: Path) -> None:
    for found in (told["blocks"] for told in run_ranks("tests.runtime.wire_ranks", ["blocks"], tmp_path, 4)):
        assert set(found) == {"bfloat16", "float16"}
        for wire, told in found.items():
            assert min(told["blocks"]) > 20
            assert [(step["wrong"], step["alike"]) for step in told["steps"]] == [([], True)] * 3, wire


def test_precision_changes_between_steps_and_other_collectives_do_not_mix_with_messages(ranks: list[Any]) -> None:
    for found in (told["changes"] for told in ranks):
        low = {name: told["low"] for name, told in found.items() if isinstance(told, dict)}
        assert low["none"] == low["torch's own"] == 0
        assert low["some"] == low["again"] == low["after others"] == low["all"] // 2 > 0
        assert low["one message"] == 1
        for name, told in found.items():
            if isinstance(told, dict):
                assert (told["wrong"], told["alike"]) == ([], True), name
        assert found["observed"] == [low["all"], low["all"]]


def test_gradients_that_were_accumulated_are_converted_once_when_they_are_sent(ranks: list[Any]) -> None:
    for found in (told["accumulated"] for told in ranks):
        assert set(found) == {"plain", "views", "unused", "static", "static, views"}
        for name, steps in found.items():
            assert [(one["wrong"], one["alike"]) for one in steps] == [([], True)] * 2, name
            assert all(one["low"] > 0 for one in steps)


def test_a_step_that_overflows_on_one_rank_is_skipped_by_the_gradient_scalers_of_all(ranks: list[Any]) -> None:
    for found in (told["scaled"] for told in ranks):
        for wire in ("bfloat16", "float16"):
            # 2^20 times a gradient is more than fp16 holds as it is: nothing but the third step may overflow.
            assert found[wire]["scales"] == [2.0**20] * 2 + [2.0**19] * 4
            assert found[wire]["moved"] == [True, True, False, True, True, True]
            assert found[wire]["alike"]
            assert found[wire]["finite"]


def test_parameters_that_only_some_ranks_use_have_the_gradients_of_stock_ddp_but_for_rounding(ranks: list[Any]) -> None:
    for found in (told["branches"] for told in ranks):
        for told in found.values():
            assert told["unlike"] == []
            assert told["count"] >= 4 * 4
            assert told["worst"] < 2**-6


def test_what_is_not_a_number_on_one_rank_is_so_on_all_while_plans_are_tried(ranks: list[Any]) -> None:
    for found in (told["nan_while_tuning"] for told in ranks):
        assert found["state"][0] == "settled", found["state"]
        assert len(found["hit"]) >= 2
        assert all(found["hit"])
        assert found["clean"]


def test_the_tuner_tries_low_precision_and_says_what_travels_so(ranks: list[Any]) -> None:
    for found in (told["tuned"] for told in ranks):
        assert found["state"][0] == "settled", found["state"]
        assert any(found["tried"])
        assert not all(found["tried"])
        assert found["knows"]
        assert "in bfloat16)" in found["words"] or "as they are)" in found["words"]
        assert found["plans"] == len(ranks)
        assert found["exact"] == ["settled", {}]  # precision is not given up for less than a million steps
        assert found["doubles"] == ["settled", False]  # which travel as they are, so that nothing was learnt
        assert found["gradients"] == {"wrong": [], "alike": True, "low": 0}


def test_what_is_not_finite_on_one_rank_is_so_on_all_and_nothing_overflows_that_fp32_holds(ranks: list[Any]) -> None:
    for found in (told["extremes"] for told in ranks):
        for wire in ("bfloat16", "float16"):
            assert found[f"{wire} nan"] == ["0.0", "nan", "0.0"]
            assert found[f"{wire} inf"] == ["0.0", "inf", "0.0"]
            assert found[f"{wire} cancels"] == found[f"{wire} nothing"] == ["0.0", "0.0", "0.0"]
            for name, average in (("too large", 2.0**120 / len(ranks)), ("tiny", 2.0**-100)):
                assert float(found[f"{wire} {name}"][1]) == pytest.approx(average, rel=2**-7, abs=0)
        assert found["float16 large"] == ["0.0", "60000.0", "0.0"]
        # bfloat16 begins at 2^-133; of float16, which is scaled, only fp32's own bits are lost.
        assert float(found["float16 tiniest"][1]) == pytest.approx(2.0**-140, rel=2**-7, abs=0)


def test_other_numbers_of_a_message_are_what_they_are_without_one_that_is_not_finite(ranks: list[Any]) -> None:
    for found in (told["odd_numbers_apart"] for told in ranks):
        assert len(found) == 12
        for name, told in found.items():
            assert told == {"wrong": [], "finite": 41 - 5, "alike": True}, name


def test_wrong_use_is_one_line_on_every_rank(ranks: list[Any]) -> None:
    for rank, found in enumerate(told["refused"] for told in ranks):
        assert found["without"].startswith("the plan sends messages in bfloat16, and the model was made without wire=")
        assert "was made with wire='float16': make it with wire='bfloat16'" in found["another"]
        assert found["unknown"] == "wire is 'int8', expected one of bfloat16, float16, or None"
        assert found["differ"] == (
            "the ranks have different plans: message 0 travels as it is on rank 0 and travels in bfloat16 on rank 1; "
            "give every rank the same plan"
        )
        expected = "the plan sends messages in bfloat16" if rank else "rank 1 has no plan to run: PlanError: the plan"
        assert found["one rank"].startswith(expected)
        assert found["tuners"] == "wire is bfloat16 on rank 0 and None on rank 1; give all the same"
        assert found["unknown, without collectives"] == found["unknown"]
        assert found["hook"].endswith("and so does wire='bfloat16': leave one out")
        assert found["in backward"].startswith("wire='bfloat16' cannot be had: optimizers run in the backward pass")
        assert found["idle"].startswith("wire='bfloat16' with tune=False and without a plan")
        assert found["replan"].startswith("the plan sends messages in bfloat16")
        assert found["tolerance"] == "wire_tolerance is -1, expected a finite number of 0 or more"
        assert found["idle tolerance"].startswith("wire_tolerance=0.05 without wire=")


def test_ranks_that_ran_out_of_data_answer_for_messages_in_low_precision(ranks: list[Any]) -> None:
    assert [told["joined"] for told in ranks] == [{"wrong": [[]] * (2 + 3 * rank)} for rank in range(len(ranks))]


def test_the_group_of_the_thread_that_sends_ends_with_the_model_and_is_in_the_way_of_no_other(ranks: list[Any]) -> None:
    for found in (told["groups"] for told in ranks):
        assert [(step["wrong"], step["alike"]) for step in found["gradients"]] == [([], True)] * 2
        assert found["ended"] >= 3  # the thread that sends, and those of gloo


def test_a_rank_by_itself_gives_up_no_precision(ranks: list[Any], tmp_path: Path) -> None:
    for told in [*ranks, *run_ranks("tests.runtime.wire_ranks", ["alone"], tmp_path, 1)]:
        assert told["alone"] == {wire: {"unlike": [], "said": []} for wire in ("bfloat16", "float16")}


def test_a_rank_that_comes_late_to_its_first_messages_is_waited_for_as_long_as_the_group_waits(
    ranks: list[Any],
) -> None:
    for found in (told["late"]["gradients"] for told in ranks):
        assert [(step["wrong"], step["alike"]) for step in found] == [([], True)] * 2


def test_messages_count_as_collectives_so_that_ranks_that_are_not_at_one_step_do_not_begin_to_tune(
    ranks: list[Any],
) -> None:
    counted = {told["groups"]["counted"] for told in ranks}
    assert len(counted) == 1
    if None in counted:
        pytest.skip("this torch does not count the collectives of a group, so steps are not watched for change")
    assert counted.pop() >= 4  # messages of the plan


def test_where_a_backward_pass_fails_on_one_rank_the_others_wait_no_longer_than_their_group(ranks: list[Any]) -> None:
    assert [told["failed"]["error"] for told in ranks] == ["RuntimeError"] * (len(ranks) - 1) + ["ArithmeticError"]
