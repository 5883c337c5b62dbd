"""`explain` on real ranks: whose time goes where, and nothing changed or left behind."""

from pathlib import Path
from typing import Any

import pytest

from mgwfbp.report.explanation import PARTS, TRUSTED
from tests.runtime.explain_ranks import ENOUGH, NAP_S, STEPS
from tests.runtime.launch import run_ranks

MODULE = "tests.runtime.explain_ranks"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    scenarios = ["plain", "accumulating", "no_optimizer", "no_page", "first_loader"]
    return run_ranks(MODULE, scenarios, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    scenarios = ["modes", "in_low_precision", "copying", "refused"]
    return run_ranks(MODULE, scenarios, tmp_path_factory.mktemp("more"), 2)


@pytest.fixture(scope="module")
def odd_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(MODULE, ["unobserved", "joining", "tuning"], tmp_path_factory.mktemp("odd"), 2)


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(MODULE, ["loader", "forward"], tmp_path_factory.mktemp("three"), 3)


def step_s(rank: dict[str, float]) -> float:
    return sum(rank[f"{part}_s"] for part in PARTS)


@pytest.mark.parametrize("wrapper", ["stock", "ours"])
def test_training_is_bitwise_that_without_the_call_and_nothing_is_left_behind(
    two_ranks: list[Any], wrapper: str
) -> None:
    for told in (rank["plain"] for rank in two_ranks):
        assert told[wrapper]["parameters"] == told[f"{wrapper}, not explained"]["parameters"]
        assert told[wrapper]["same hooks"] is True


@pytest.mark.parametrize("wrapper", ["stock", "ours"])
def test_all_ranks_get_one_result_and_rank_0_says_it_in_one_record_and_writes_the_page(
    two_ranks: list[Any], wrapper: str
) -> None:
    first, second = (rank["plain"][wrapper] for rank in two_ranks)
    assert first["result"] == second["result"] is not None
    assert first["printed"] == second["printed"]
    assert (first["same after JSON"], second["records"]) == (True, [])
    ((level, words),) = first["records"]
    assert level == "INFO"
    assert words.startswith(f"{first['printed']}: ")
    assert words.endswith("slow.html")
    assert words.startswith("a step takes ")
    assert "exposed communication" in words
    assert "(measured, 2 ranks, mean of 3 steps)" in words


def test_the_page_holds_the_answer_the_advice_and_predictions_where_they_are_near_enough(two_ranks: list[Any]) -> None:
    told = two_ranks[0]["plain"]["stock"]
    page, printed = told["page"], told["printed"]
    assert printed.partition(" ")[2].split(";")[0] in page
    for words in ("Exposed communication is", "rank 1", "layers.0.weight"):
        assert words in page
    # How near they are is up to the machine and what else runs on it.
    assert ("bucket_cap_mb=25" in page) == (abs(told["result"]["error"]) <= TRUSTED)


@pytest.mark.parametrize("wrapper", ["stock", "ours"])
def test_the_parts_of_every_rank_add_up_to_the_time_that_training_took(two_ranks: list[Any], wrapper: str) -> None:
    for told in (rank["plain"][wrapper] for rank in two_ranks):
        for rank in told["result"]["ranks"]:
            # Steps that were observed are some of those that ran.
            assert 0 < step_s(rank) * told["result"]["steps"] < told["took_s"]
            assert rank["median_s"] <= rank["longest_s"] <= told["took_s"]
            assert min(rank[f"{part}_s"] for part in PARTS) >= 0
            assert rank["optimizer_s"] > 0 < rank["other_s"]


@pytest.mark.parametrize("mode", ["static graph", "views", "unused parameters", "dtypes"])
def test_other_ways_to_use_ddp_are_explained_with_predictions(more_ranks: list[Any], mode: str) -> None:
    for told in (rank["modes"][mode] for rank in more_ranks):
        assert told == {"same": True, "unknown": "", "choices": 8}


@pytest.mark.parametrize(
    ("mode", "wires", "best"),
    [("some", ["bfloat16", "", "bfloat16"], "optimal+bf16"), ("all", ["float16"] * 3, "optimal+fp16")],
)
def test_messages_in_low_precision_are_explained_as_such_and_buckets_are_those_without(
    more_ranks: list[Any], mode: str, wires: list[str], best: str
) -> None:
    for told in (rank["in_low_precision"][mode] for rank in more_ranks):
        assert (told["same"], told["problem"]) == (True, "")
        result = told["result"]
        assert result["unknown"] == ""
        assert [message.get("wire", "") for message in result["timeline"]["messages"]] == wires
        sizes = [f"bucket_cap_mb={size} without wire=" for size in (1, 2, 5, 10, 25, 50)]
        assert [choice["name"] for choice in result["choices"]] == ["as it is", *sizes, best]
        assert result["choices"][0]["num_messages"] == len(wires)
        assert min(choice["step_s"] for choice in result["choices"]) >= result["bound_s"] * (1 - 1e-9)
        assert wires[0] in told["page"]


def test_predictions_are_for_all_choices_and_none_is_below_the_bound(two_ranks: list[Any]) -> None:
    result = two_ranks[0]["plain"]["stock"]["result"]
    names = [choice["name"] for choice in result["choices"]]
    assert names == ["as it is", *(f"bucket_cap_mb={size}" for size in (1, 2, 5, 10, 25, 50)), "optimal"]
    steps = [choice["step_s"] for choice in result["choices"]]
    assert min(steps) >= result["bound_s"] * (1 - 1e-9)
    assert steps[-1] <= min(steps) * (1 + 1e-9)
    assert result["messages_s"] > 0
    assert len(result["timeline"]["messages"]) == result["choices"][0]["num_messages"]


def test_a_rank_that_waits_for_data_is_named_with_that_part_and_the_others_wait_for_it(three_ranks: list[Any]) -> None:
    told = three_ranks[0]["loader"]
    assert (told["slowest"], told["behind"]) == (2, "between")
    *others, slow = told["result"]["ranks"]
    assert slow["between_s"] >= NAP_S
    assert all(rank["waiting_s"] > slow["waiting_s"] for rank in others)
    # What the others wait is not taken for communication: without that they, too, would have the nap in it.
    assert all(rank["communication_s"] == slow["communication_s"] for rank in others)
    assert "Rank 2 holds the others up" in told["page"]
    assert "num_workers" in told["page"]
    assert "slowest rank 2" in told["printed"]


def test_a_rank_that_is_slow_in_its_forward_pass_is_named_with_that_part(three_ranks: list[Any]) -> None:
    told = three_ranks[0]["forward"]
    assert (told["slowest"], told["behind"]) == (2, "forward")
    assert told["result"]["ranks"][2]["forward_s"] >= NAP_S
    assert "Rank 2 holds the others up" in told["page"]


def test_waiting_for_rank_0s_buffers_is_no_forward_pass(two_ranks: list[Any]) -> None:
    told = two_ranks[0]["first_loader"]
    assert (told["slowest"], told["behind"]) == (0, "between")
    assert told["result"]["ranks"][1]["waiting_s"] > told["result"]["ranks"][0]["waiting_s"]


def test_all_passes_of_a_step_that_accumulates_count(two_ranks: list[Any]) -> None:
    told = two_ranks[0]["accumulating"]
    assert told["result"]["ranks"][0]["forward_s"] >= 3 * NAP_S
    assert (told["slowest"], told["behind"]) == (0, "forward")
    for rank in told["result"]["ranks"]:
        assert step_s(rank) < told["took_s"] / told["result"]["steps"]


def test_without_an_optimizer_its_step_lies_between_steps(two_ranks: list[Any]) -> None:
    told = two_ranks[0]["no_optimizer"]
    assert told["same hooks"] is True
    assert told["result"]["has_optimizer"] is False
    assert {rank["optimizer_s"] for rank in told["result"]["ranks"]} == {0.0}


def test_a_page_that_cannot_be_written_is_a_warning_on_all_ranks_and_the_result_is_there(two_ranks: list[Any]) -> None:
    for rank, told in enumerate(one["no_page"] for one in two_ranks):
        assert told["same hooks"] is True
        assert told["result"] is not None
        level, words = told["records"][0]
        assert level == "WARNING"
        assert words.startswith("no page was written: rank 0 failed: ")
        assert [level for level, _ in told["records"][1:]] == ["INFO"] * (rank == 0)


def test_copies_that_are_made_meanwhile_observe_nothing(more_ranks: list[Any]) -> None:
    for told in (one["copying"] for one in more_ranks):
        assert told == {"of the twin": f"0 of {STEPS} steps observed", "done": True}


def test_what_cannot_be_explained_is_refused_on_all_ranks_in_one_line(more_ranks: list[Any]) -> None:
    first, second = (rank["refused"] for rank in more_ranks)
    assert first == second
    expected = {
        "no DDP": "expected a DistributedDataParallel",
        "no optimizer": "expected a torch.optim.Optimizer or None",
        "few steps": "steps is 2, expected 3 or more",
        "sparse": "messages cannot be observed (gradients are sparse",
        "other steps": "differs between ranks",
        "one rank": "rank 1 failed: optimizer is a object",
        "twice": "is being explained already",
    }
    assert all(words in first[name] for name, words in expected.items()), first


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("hook", "a communication hook"),
        ("builtin", "a communication hook"),
        ("sparse", "sparse"),
        ("lacking", "GradBucket.parameters"),
    ],
)
def test_where_messages_cannot_be_observed_the_parts_are_told_and_why(
    odd_ranks: list[Any], model: str, why: str
) -> None:
    for told in (rank["unobserved"][model] for rank in odd_ranks):
        assert (told["problem"], told["same hooks"]) == ("", True)
        assert why in told["result"]["unknown"]
        assert told["result"]["steps"] == STEPS
        assert told["result"]["choices"] == []
        for rank in told["result"]["ranks"]:
            assert step_s(rank) * STEPS < told["took_s"]
            assert min(rank[f"{part}_s"] for part in ("forward", "backward", "communication", "optimizer")) > 0


def test_a_hook_that_comes_after_the_call_ends_it_with_one_line(odd_ranks: list[Any]) -> None:
    for told in (rank["unobserved"] for rank in odd_ranks):
        assert "call explain after register_comm_hook" in told["registered later"]


def test_uneven_inputs_end_it_and_nobody_waits_for_ever(odd_ranks: list[Any]) -> None:
    for rank, told in enumerate(one["joining"] for one in odd_ranks):
        assert "inside join()" in told["ours"]
        assert ("inside join()" in told["stock"]) == (rank > 0)  # rank 0 had no forward pass to learn it in


def test_with_a_tuner_it_begins_when_that_has_ended(odd_ranks: list[Any]) -> None:
    for told in (rank["tuning"] for rank in odd_ranks):
        assert told["early"] == f"0 of {STEPS} steps observed, waiting for the tuner"
        assert told["steps after tuning"] == ENOUGH - 3
        assert told["wrapper"] == "tuned"
        assert told["free"] is True


def test_one_rank_has_no_communication(tmp_path: Path) -> None:
    (told,) = run_ranks(MODULE, ["loader"], tmp_path, 1)
    (rank,) = told["loader"]["result"]["ranks"]
    assert rank["communication_s"] == rank["waiting_s"] == 0
    assert rank["between_s"] >= NAP_S
    assert "1 rank" in told["loader"]["printed"]
