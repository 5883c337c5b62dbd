"""Torch's own tests of DDP with our class in torch's place: quick and telling ones; ``make torchtests`` runs all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("expecttest", reason="torch's own tests need it")
pytestmark = pytest.mark.timeout(420)  # of processes that may share their cores

SOME = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_logging_data_cpu",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_static_graph_multi_forward",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each test with each class."""
    path = tmp_path_factory.mktemp("torchs") / "found.json"
    command = [sys.executable, "-m", "tests.runtime.torchs_own", str(path), *SOME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told: dict[str, Any] = json.loads(path.read_text())
    return told


@pytest.mark.parametrize("name", SOME)
def test_what_torchs_class_passes_ours_passes(found: dict[str, Any], name: str) -> None:
    if name not in found:
        pytest.skip("this torch has no such test of its own")
    assert [found[name][wrapper]["outcome"] for wrapper in ("stock", "ours", "quick")] == ["passed"] * 3


def test_buckets_change_while_torchs_tests_run(found: dict[str, Any]) -> None:
    assert all(came["planned"]["changes"] > 0 for came in found.values())
    for wrapper in ("quick", "replanned"):
        assert found["test_ddp_logging_data_cpu"][wrapper]["changes"] > 1
        assert found["test_output_unused_in_loss_dict_module"][wrapper]["changes"] > 1


def test_the_page_of_all_tests_names_no_difference_that_is_not_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "torchs-own-tests.md").read_text(encoding="utf-8")
    assert "not known" not in page
    assert all(f"| {name} |" in page for name in SOME)
