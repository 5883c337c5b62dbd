"""Accelerate and Hugging Face's Trainer with our class, on 2 ranks."""

from typing import Any

import pytest

from tests.integrations.launch import needs, run_library

pytestmark = needs("accelerate", "transformers")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["accelerate_example", "accelerates", "preparing", "trainer_example", "trainers"]
    return run_library("tests.integrations.hugging_face_ranks", scenarios, tmp_path_factory.mktemp("ranks"))


def test_the_example_of_accelerate_tunes_itself(ranks: list[Any]) -> None:
    assert [rank["accelerate_example"] for rank in ranks] == [{"settled": True, "plan": 6}] * 2


def test_accelerate_accumulates_clips_autocasts_saves_and_loads_as_with_its_own_class(ranks: list[Any]) -> None:
    torchs, ours = ranks[0]["accelerates"]["weights"]
    assert ours == torchs
    assert ranks[1]["accelerates"]["weights"] == [torchs, ours]


def test_accelerate_wraps_what_it_would_have_wrapped_each_time_it_prepares_and_compiles_outside(
    ranks: list[Any],
) -> None:
    for told in (rank["preparing"] for rank in ranks):
        assert told["plan"]
        assert told["evaluation"] == "Sequential"
        assert told["again"] == "mgwfbp.runtime.distributed"
        assert "is not needed when a module doesn't have any parameter that requires a gradient" in told["frozen"]
        assert told["compiled"] == ["OptimizedModule", "mgwfbp.runtime.distributed"]
        assert told["the plugin stays"] == "EAGER"
        assert told["fp8"].startswith("StrategyError: fp8 of Transformer Engine cannot be used here")
        assert told["another accelerator"].startswith(
            "StrategyError: the accelerator is no plain accelerate.Accelerator"
        )


def test_the_example_of_the_trainer_tunes_itself(ranks: list[Any]) -> None:
    assert all(rank["trainer_example"]["settled"] for rank in ranks)
    assert ranks[0]["trainer_example"]["steps"] == ranks[1]["trainer_example"]["steps"]


def test_the_trainer_accumulates_clips_autocasts_and_resumes_as_with_its_own_class(ranks: list[Any]) -> None:
    for told in (rank["trainers"] for rank in ranks):
        torchs, ours = told["weights"]
        assert ours == torchs
        assert told["resumed"] == [torchs] * 2  # from our checkpoint, by either class
        assert told["names"]  # from_pretrained reads it
