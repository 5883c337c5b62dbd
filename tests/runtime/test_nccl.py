"""Strategies, the tuner and the observer over nccl: two emulated hosts that share a GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl needs a GPU"),
    pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root"),
]
BITS_PER_S = 10**9


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw, on links of 1 Gbit."""
    folder = tmp_path_factory.mktemp("nccl")
    rank = [sys.executable, "-m", "tests.runtime.nccl_ranks", str(folder)]
    lab = [sys.executable, "-m", "mgwfbp", "lab", "--hosts", "2", "--rate", "1gbit", "--", *rank]
    done = subprocess.run(lab, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["naive", "ps", "wfbp", "single", "bucket-5", "auto", "compiled"])
def test_training_ends_where_torchs_class_ends(ranks: list[Any], strategy: str) -> None:
    # A compiled graph computes in another order.
    allowed = 1e-4 if strategy == "compiled" else 1e-6
    assert [found[strategy] for found in ranks if not found[strategy] <= allowed] == []


def test_messages_in_low_precision_are_what_is_worked_out_by_hand_whatever_ddp_is_told(ranks: list[Any]) -> None:
    for found in (one["low precision"] for one in ranks):
        assert len(found) == 12
        for name, told in found.items():
            assert told["low"] > 0, name
            assert told["wrong"] == [], name


def test_nccl_connects_for_low_precision_before_the_first_backward_pass(ranks: list[Any]) -> None:
    for found in ranks:
        assert all(told["has met"] for told in found["low precision"].values())


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_step_that_overflows_on_one_rank_is_skipped_by_the_gradient_scalers_of_all(
    ranks: list[Any], wire: str
) -> None:
    for found in (one["scaled"][wire] for one in ranks):
        assert found["scales"] == [2.0**20] * 2 + [2.0**19] * 2
        assert found["moved"] == [True, True, False, True]
        assert found["alike"]
        assert found["finite"]


def test_the_tuner_tries_low_precision_and_settles_on_one_plan_for_all(ranks: list[Any]) -> None:
    for found in (one["tuned"] for one in ranks):
        assert found["state"][0] == "settled", found["state"]
        assert any(found["tried"])
        assert not all(found["tried"])
        assert found["knows"]
        assert found["alike"]


def test_a_message_that_is_late_writes_to_no_memory_that_was_freed_meanwhile(ranks: list[Any]) -> None:
    for found in ranks:
        assert set(found["freed"]) == {7.0}


def test_a_sharded_optimizer_ends_where_torchs_class_ends_also_where_gathers_are_late(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["sharded"] == {"in time": 0.0, "late": 0.0, "at random": 0.0}


def test_in_all_ways_to_train_a_sharded_optimizer_with_late_messages_ends_there_but_for_roundings(
    ranks: list[Any],
) -> None:
    # Fused kernels may round the ends of tensors otherwise, and a clipping norm is summed in another order.
    for found in ranks:
        assert len(found["sharded ways"]) > 20
        far = {name: error for name, error in found["sharded ways"].items() if not error < 1e-5}
        assert {name: error for name, error in far.items() if "fused" not in name or not error < 1e-4} == {}


def test_the_whole_state_is_on_the_host_and_both_kinds_of_optimizer_go_on_with_it(ranks: list[Any]) -> None:
    for found in (one["state"] for one in ranks):
        assert found["places"] == ["cpu"]
        assert max(found["differences"]) < 1e-6


def test_a_model_that_is_dropped_while_parameters_travel_leaves_no_memory_that_is_written_to(ranks: list[Any]) -> None:
    assert [found["dropped"] for found in ranks] == [True, True]


def test_a_parameter_that_a_side_stream_reads_first_is_finished_for_both_streams(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["two streams"] == [True] * len(found["two streams"])


def test_losses_of_fsdp2_are_those_of_wrapping_by_block_whatever_the_groups(ranks: list[Any]) -> None:
    for found in (one["fsdp"] for one in ranks):
        if found is None:
            pytest.skip("this torch has no public fully_shard")
        # With two ranks every sum has two terms, whatever message it travels in.
        assert found["measured"] == found["by block"]
        assert found["planned"] == found["by block"]


@pytest.mark.parametrize(("strategy", "messages"), [("naive", 6), ("ps", 6), ("wfbp", 6)])
def test_messages_are_not_seen_to_be_faster_than_the_link(ranks: list[Any], strategy: str, messages: int) -> None:
    for found in ranks:
        seen = found["observed"][strategy]
        assert seen["messages"] == messages
        # Each rank sends and gets all bytes once in a ring of two; a shaper lets a burst pass, so not quite.
        assert seen["seconds"] > 0.5 * 8 * found["bytes"] / BITS_PER_S
