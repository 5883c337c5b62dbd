"""A plan without this package at run time: the sizes that torch's own DDP takes."""

import inspect
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as StockDdp

from tests.runtime.launch import run_ranks


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(StockDdp.__init__).parameters,
    reason="this torch takes no bucket_cap_mb_list",
)
def test_torchs_own_ddp_has_the_buckets_of_the_plan_once_it_has_made_its_final_ones(tmp_path: Path) -> None:
    for told in run_ranks("tests.runtime.caps_ranks", ["caps"], tmp_path, 2):
        pairs = told["caps"]["pairs"]
        assert {len(wanted) for wanted, _ in pairs} >= {1, 3, 5, 8}
        assert [held for _, held in pairs] == [wanted for wanted, _ in pairs]
