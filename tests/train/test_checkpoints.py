"""Checkpoints that are whole, and those that are not."""

import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from mgwfbp import FileError, FormatError
from mgwfbp.train.checkpoints import Checkpoint, CheckpointFolder
from mgwfbp.train.rng import capture_rng, restore_rng, seed_rng
from tests.train.ranks import equal, forked

CPU = torch.device("cpu")


def make(step: int, num_weights: int = 1000) -> Checkpoint:
    return Checkpoint(
        step=step,
        epoch=1,
        batch=2,
        model={"weight": torch.randn(num_weights)},
        optimizer={"state": {0: {"momentum_buffer": torch.randn(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        scaler={},
        rng=(capture_rng(CPU), capture_rng(CPU)),
        loss_sum=1.5,
        seconds=2.5,
        plan=None,
        is_tuned=False,
        config={"lr": 0.1, "clip_norm": None},
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=3)


def test_a_checkpoint_comes_back_bitwise(store: CheckpointFolder) -> None:
    saved = make(7)
    store.save(saved)
    loaded = store.load(7)
    assert all(equal(getattr(saved, name), getattr(loaded, name)) for name in Checkpoint.__slots__)


def test_the_last_k_are_kept_and_nothing_else(store: CheckpointFolder, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000001.x.tmp").write_text("of a process that was killed")
    for step in (5, 10, 15, 20, 25):
        store.save(make(step))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}.{end}" for step in (15, 20, 25) for end in ("json", "pt")]


def test_without_any_there_is_none(store: CheckpointFolder) -> None:
    assert store.newest() == (None, [])


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "foreign":
        torch.save({"state_dict": {}}, path)
    elif how == "unsealed":
        path.with_suffix(".json").unlink()
    elif how == "other seal":
        path.with_suffix(".json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("torn", "torn"),
        ("empty", "torn: 0 bytes"),
        ("flipped", "damaged: its checksum"),
        ("foreign", "torn"),
        ("unsealed", "not finished or is not ours"),
        ("other seal", "format: missing"),
    ],
)
def test_what_is_not_whole_is_refused_and_the_one_before_is_used(
    store: CheckpointFolder, tmp_path: Path, how: str, words: str
) -> None:
    for step in (5, 10):
        store.save(make(step))
    damage(store.path(10), how)
    found, problems = store.newest()
    assert found is not None
    assert found.step == 5
    assert len(problems) == 1
    assert words in problems[0]
    assert "step-00000010" in problems[0]
    assert "\n" not in problems[0]
    # Going on from there, the damaged one does not count as one of the last k, and goes.
    CheckpointFolder(tmp_path / "checkpoints", keep=1).save(make(6))
    assert CheckpointFolder(tmp_path / "checkpoints", keep=1).steps() == [6]


class Evil:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("it ran",)


def test_a_sealed_file_with_code_in_it_is_refused_and_the_code_not_run(
    store: CheckpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(make(5))
    foreign = make(10)
    object.__setattr__(foreign, "model", {"weight": Evil()})
    store.save(foreign)
    found, problems = store.newest()
    assert found is not None
    assert found.step == 5
    assert "not a checkpoint" in problems[0]
    assert "it ran" not in capsys.readouterr().out


def save_on_a_full_disk(folder: Path, said: Path) -> None:
    store = CheckpointFolder(folder, keep=1)
    store.save(make(5))
    # From here on no file may grow beyond 100 kB: what a write meets on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.save(make(10, num_weights=1_000_000))
    except FileError as error:
        said.write_text(str(error))


def test_a_full_disk_loses_no_earlier_checkpoint(tmp_path: Path) -> None:
    folder, said = tmp_path / "checkpoints", tmp_path / "said.txt"
    assert forked(save_on_a_full_disk, folder, said) == 0
    assert "the checkpoint of step 10 is not saved" in said.read_text()
    assert "File too large" in said.read_text()
    assert "\n" not in said.read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005.json", "step-00000005.pt"]
    found, problems = CheckpointFolder(folder, keep=1).newest()
    assert found is not None
    assert (found.step, problems) == (5, [])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is not saved") as caught:
        CheckpointFolder(tmp_path / "file" / "checkpoints", keep=1).save(make(1))
    assert "\n" not in str(caught.value)


def test_a_step_that_is_not_there_is_an_error(store: CheckpointFolder) -> None:
    with pytest.raises(FormatError, match="not finished or is not ours"):
        store.load(3)


def test_all_random_generators_go_on_where_they_were() -> None:
    def draw() -> list[object]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), float(torch.randn(())), np.random.rand()]

    seed_rng(3)
    draw()
    state = capture_rng(CPU)
    first = draw()
    restore_rng(state, CPU)
    assert draw() == first
