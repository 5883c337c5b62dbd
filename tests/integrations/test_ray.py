"""Ray Train with our class, on 2 ranks without a cluster."""

from typing import Any

import pytest

from tests.integrations.launch import needs, run_library

pytestmark = needs("ray")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    return run_library("tests.integrations.ray_ranks", ["loops", "example"], tmp_path_factory.mktemp("ranks"))


def test_the_example_of_ray_train_tunes_itself(ranks: list[Any]) -> None:
    assert all("settled after" in rank["example"]["tuning"] for rank in ranks)


def test_weights_are_bitwise_those_of_rays_own_preparation(ranks: list[Any]) -> None:
    for told in (rank["loops"] for rank in ranks):
        torchs, tuned, planned = told["weights"]
        assert tuned == torchs
        assert planned == torchs
        assert told["plan"]
        assert told["names"] == [f"module.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
