"""Parameters that get other memory, another dtype or another device once a sharded optimizer has cut them into rows."""

from typing import Any

import pytest
import torch
from torch import nn

from mgwfbp.runtime.rows.rows import Owned
from tests.runtime.launch import run_ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    return run_ranks("tests.runtime.shard_ranks", ["moved", "converted"], tmp_path_factory.mktemp("two"), 2)


def test_rows_are_cut_anew_where_parameters_get_other_memory_even_while_they_travel(two: list[Any]) -> None:
    for found in two:
        assert len(found["moved"]) == 6
        assert found["moved"] == dict.fromkeys(found["moved"], 0.0)


def test_a_module_is_converted_as_a_whole_with_gradients_that_nobody_can_read(two: list[Any]) -> None:
    kinds = {
        "half": ("torch.float16", "cpu", True),
        "double": ("torch.float64", "cpu", True),
        "and back": ("torch.float32", "cpu", True),
        "to": ("torch.bfloat16", "cpu", True),
        "elsewhere": ("torch.float32", "meta", True),
        "empty": ("torch.float32", "meta", True),
        "shared": ("torch.float32", "cpu", True),
    }
    for found in (rank["converted"] for rank in two):
        assert {name: one["kinds"] for name, one in found.items()} == {
            name: [list(kind)] for name, kind in kinds.items()
        }
        for one in found.values():
            assert one["error"] == ""
            assert "was averaged and each rank has a row of it" in one["reading"]


def test_a_step_of_a_module_that_was_converted_is_refused_and_one_of_memory_that_is_shared_is_none(
    two: list[Any],
) -> None:
    for found in (rank["converted"] for rank in two):
        assert found.pop("shared")["step"] == ""
        for one in found.values():
            assert "is another, or has another dtype, device or strides, than when" in one["step"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_are_cut_anew_also_where_gradients_are_switched_off(mode: Any) -> None:
    parameter, elsewhere = nn.Parameter(torch.arange(4.0)), torch.arange(4.0)
    with mode():
        owned = Owned("weight", parameter, 1, 2)
        parameter.data = elsewhere
        assert owned.has_moved
        assert owned.cut_anew()
    assert owned.row.tolist() == [2.0, 3.0]
