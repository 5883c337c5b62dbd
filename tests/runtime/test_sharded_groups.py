"""A sharded optimizer whose groups, states and modules others handle while it trains, beside torch's plain one."""

from typing import Any

import pytest
import torch
from torch import nn

from mgwfbp.runtime.sharded.views import Finished
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    scenarios = ["regrouped", "misgrouped", "under_modes", "inferred"]
    return run_ranks("tests.runtime.shard_ranks", scenarios, tmp_path_factory.mktemp("two"), 2)


def test_groups_may_be_edited_as_with_torchs_optimizer(two: list[Any]) -> None:
    for found in two:
        assert len(found["regrouped"]) == 30
        assert found["regrouped"] == dict.fromkeys(found["regrouped"], 0.0)


def test_groups_that_cannot_be_are_one_line_before_anything_is_updated(two: list[Any]) -> None:
    expected = {
        "a stranger": "a parameter of shape [3] is not one that the model averages gradients of",
        "to save": "a parameter of shape [3] is not one that the model averages gradients of",
        "to clip": "a parameter of shape [3] is not one that the model averages gradients of",
        "twice": "the parameter layers.0.weight is listed more than once: list it in one group",
        "no tensor": "a parameter is 'a name', expected a tensor",
        "a set": "parameters are given as a set",
        "no option": "group 0 has no 'momentum': give it, or call add_param_group(), which does",
        "added twice": "some parameters appear in more than one parameter group",
        "added": "a parameter of shape [3] is not one that the model averages gradients of",
        "unlisted": "the parameter layers.0.bias has a state and is in no group of the optimizer",
        "then": "",
    }
    for found in (rank["misgrouped"] for rank in two):
        assert (found["difference"], found["said"].pop("unchanged")) == (0.0, True)
        assert found["said"].keys() == expected.keys()
        for name, said in found["said"].items():
            assert expected[name] in said, name
        assert found["said"]["then"] == ""


def test_modes_see_of_a_module_what_they_see_with_torchs_class_and_no_parameter_is_lost(two: list[Any]) -> None:
    for found in two:
        assert found["under_modes"] == {"pretending": 0.0, "noting": 0.0}


def test_states_that_are_saved_and_loaded_in_inference_mode_go_on(two: list[Any]) -> None:
    for found in two:
        assert found["inferred"] == {"momentum": 0.0, "AdamW": 0.0, "ASGD": 0.0, "inference": 0}


def test_who_takes_a_parameter_out_of_a_groups_list_or_compares_it_waits_and_who_puts_one_in_does_not() -> None:
    waits: list[None] = []
    first, second = (nn.Parameter(torch.tensor(float(number))) for number in range(2))
    listed = Finished([first, second], lambda: waits.append(None))
    for use in (
        lambda: listed[0],
        lambda: list(listed),
        lambda: first in listed,
        lambda: listed.index(first),
        lambda: listed == [first, second],
        lambda: listed * 2,
        lambda: listed.sort(key=id),
        lambda: listed.remove(first),
        listed.pop,
    ):
        waits.clear()
        use()
        assert waits, use
    waits.clear()
    listed.append(first)
    listed.insert(0, second)
    listed += [first]
    del listed[2]
    assert listed.holds([second, first])
    assert not listed.holds([first, second])
    assert not listed.holds([second])
    assert not waits
