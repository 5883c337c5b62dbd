"""Our class where torch's was: odd parameters, torch's statistics, and torch's warnings."""

from typing import Any

import pytest

from tests.runtime.launch import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks met."""
    scenarios = ["sharded", "undefined", "statistics", "caller", "as_errors", "threads"]
    return run_ranks("tests.runtime.drop_in_ranks", scenarios, tmp_path_factory.mktemp("ranks"), 2)


def test_a_model_with_a_sharded_parameter_that_is_ignored_is_wrapped_and_trained(ranks: list[Any]) -> None:
    for found in (told["sharded"] for told in ranks):
        assert found["root"] == [
            "off",
            "a parameter is a ShardedTensor, which does not say how many bytes it has",
            True,
        ]
        state, names, gradient = found["inside"]
        assert (state, sorted(names)) == ("working", ["inner.layer.bias", "inner.layer.weight"])
        assert gradient == 3.0  # of 3 steps: the mean of 0 on one rank and 2 on the other


def test_a_parameter_whose_gradient_autograd_leaves_undefined_trains_as_with_torch(ranks: list[Any]) -> None:
    for found in (told["undefined"] for told in ranks):
        assert found["ours"] == found["stock"]
        assert any(gradient for gradient in found["ours"])


def test_torchs_statistics_say_the_same_after_join_where_the_reducer_was_made_anew(ranks: list[Any]) -> None:
    for found in (told["statistics"] for told in ranks):
        assert found["ours"] == found["stock"]
        assert found["ours"]["join_uneven_inputs"]


def test_torchs_warnings_point_at_the_users_line_are_shown_once_and_heed_its_filters(ranks: list[Any]) -> None:
    for found in (told["caller"] for told in ranks):
        assert found["ours"] == found["stock"] == [True, 0, "FutureWarning", 0]


def test_a_warning_that_is_an_error_is_raised_before_ranks_exchange_anything_and_the_next_model_trains(
    ranks: list[Any],
) -> None:
    for found in (told["as_errors"] for told in ranks):
        assert found["ours"] == found["stock"] == [True, 0, [2.0, 2.0, 2.0]]


def test_models_wrapped_in_two_threads_leave_the_filters_of_warnings_alone(ranks: list[Any]) -> None:
    for found in (told["threads"] for told in ranks):
        assert found["seen"] == [True] * 40
