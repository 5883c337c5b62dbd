"""Lightning's Trainer and Fabric with our class, on 2 ranks."""

from typing import Any

import pytest

from tests.integrations.launch import needs, run_library

pytestmark = needs("lightning")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["example", "fabric_example", "ways", "checkpoints", "fabric"]
    return run_library("tests.integrations.lightning_ranks", scenarios, tmp_path_factory.mktemp("ranks"))


def test_the_example_of_the_trainer_tunes_itself_and_the_strategy_tells_after_fit(ranks: list[Any]) -> None:
    for told in (rank["example"] for rank in ranks):
        assert told["settled"]
        assert told["plan"] == 6
    assert ranks[0]["example"]["steps"] == ranks[1]["example"]["steps"]


def test_the_example_of_fabric_tunes_itself(ranks: list[Any]) -> None:
    assert [rank["fabric_example"] for rank in ranks] == [{"settled": True, "plan": 6}] * 2


@pytest.mark.parametrize("way", ["plain", "accumulation, clipping and autocast", "manual"])
def test_weights_are_bitwise_those_of_lightnings_own_strategy(ranks: list[Any], way: str) -> None:
    torchs, ours = ranks[0]["ways"][way]
    assert ours == torchs
    assert ranks[1]["ways"][way] == [torchs, ours]


def test_a_checkpoint_of_either_class_goes_on_with_either_to_the_same_weights(ranks: list[Any]) -> None:
    for told in (rank["checkpoints"] for rank in ranks):
        assert told["names"]  # as the LightningModule has them
        torchs_with_torchs = told["resumed"][0]
        assert told["resumed"] == [torchs_with_torchs] * 4
        assert told["plan"] == [True, "a plan was given"]


def test_fabric_accumulates_saves_and_loads_as_with_its_own_strategy(ranks: list[Any]) -> None:
    for told in (rank["fabric"] for rank in ranks):
        torchs, ours = told["weights"]
        assert ours == torchs
