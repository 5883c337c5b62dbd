"""Damaged files: whatever stands in them, a command gives a good result or one line, never a traceback or a warning."""

from pathlib import Path

import pytest

from tests.mutations import make_files, try_one

BATCHES, FILES_A_BATCH = 10, 30


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_files(folder)
    return folder


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_damaged_file_gives_a_whole_result_or_one_line(good: Path, batch: int) -> None:
    for seed in range(batch * FILES_A_BATCH, (batch + 1) * FILES_A_BATCH):
        outcome, wrong = try_one(good, seed)
        assert not wrong, f"seed {seed}, {outcome.arguments}: {wrong}"
