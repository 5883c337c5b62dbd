"""Whose a run's folder is, and what is left in it when the disk is full."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from mgwfbp import FileError, TrainingRun
from mgwfbp.run import LoggedStep, read_log
from mgwfbp.train.claim import FolderClaim, Job, make_folder
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.listener import Listener
from mgwfbp.train.writer import RunWriter
from tests.train.ranks import forked, said, started, train, weights

CONFIG = TrainConfig(
    model="tests.train.models:plain", workers=1, epochs=1, strategy="ddp", tensorboard=False, batch_size=256
)


def test_two_runs_in_one_folder_exclude_one_another(tmp_path: Path) -> None:
    first, second = (FolderClaim(tmp_path / "run") for _ in range(2))
    assert first.take() == ""
    first.sign("a job")
    with pytest.raises(FileError, match="another process is training there"):
        second.take()
    first.release()
    assert second.take() == "a job"
    second.release()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be made: Not a directory"):
        make_folder(tmp_path / "file" / "run")


def test_a_restart_goes_on_with_the_run_that_its_job_began_and_with_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def codes(config: TrainConfig, job: Job) -> list[int | None]:
        with started(train, 1, tmp_path, config, folder, False, job) as ranks:
            return ranks.wait()

    assert codes(CONFIG, Job("mine", is_restarted=False)) == [0]
    # torchrun starts a worker again that was refused: it must be refused again.
    longer = replace(CONFIG, epochs=2)
    for is_restarted in (False, True):
        assert codes(longer, Job("another", is_restarted=is_restarted)) == [1]
        assert "holds a run already" in said(folder)
    assert TrainingRun.load(folder).results is not None
    assert codes(longer, Job("mine", is_restarted=True)) == [0]
    assert weights(folder)["step"] == 2 * (1437 // 256)


def log_on_a_full_disk(folder: Path) -> None:
    writer = RunWriter(folder, Listener(), tensorboard=False)
    writer.open_logs(step=0, epoch=0)
    writer.log_step(LoggedStep(1, 0, 1.0, 1.0, 1.0, 1.0))
    size = (folder / "log.jsonl").stat().st_size
    # Room for half a line; then there is room again.
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, hard))
    writer.log_step(LoggedStep(2, 0, 1.0, 1.0, 1.0, 1.0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.log_step(LoggedStep(3, 0, 1.0, 1.0, 1.0, 1.0))


def test_a_full_disk_costs_lines_of_the_log_and_spoils_none(tmp_path: Path) -> None:
    assert forked(log_on_a_full_disk, tmp_path) == 0
    assert [line.step for line in read_log(tmp_path / "log.jsonl", LoggedStep)] == [1, 3]
