"""Runs that are killed, stopped and resumed end as if nothing had happened."""

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mgwfbp import TrainingRun
from mgwfbp.train.config import TrainConfig
from tests.train.ranks import equal, logged_step, said, started, train, train_to_end, wait_until, weights

CONFIG = TrainConfig(
    model="tests.train.models:tiny",
    strategy="wfbp",
    workers=2,
    epochs=4,
    log_steps=1,
    checkpoint_steps=5,
    keep=2,
    tensorboard=False,
)
NUM_STEPS = 4 * (1437 // 64)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sharded"])
def config(request: pytest.FixtureRequest) -> TrainConfig:
    return replace(CONFIG, shard_optimizer=request.param)


@pytest.fixture(scope="module")
def uninterrupted(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return train_to_end(config, tmp_path_factory.mktemp("uninterrupted") / "run")


def test_a_run_killed_at_five_random_points_and_resumed_ends_bitwise_as_an_uninterrupted_one(
    tmp_path: Path, config: TrainConfig, uninterrupted: TrainingRun
) -> None:
    folder, draw, num_kills = tmp_path / "run", random.Random(), 0
    # The first before anything was saved. A run that is killed late, on a busy machine, has not ended meanwhile.
    points = [draw.randrange(1, 5), *sorted(draw.sample(range(6, NUM_STEPS - 5), 4))]
    for point in points:
        with started(train, 2, tmp_path, config, folder, True, None, point + 5) as ranks:
            wait_until(lambda point=point: logged_step(folder) >= point)  # type: ignore[misc]
            victim = ranks.processes[draw.randrange(2)]
            assert victim.is_alive()
            victim.kill()
            num_kills += 1
            victim.join(10)
            assert victim.exitcode == -signal.SIGKILL
    run = train_to_end(config, folder, resume=True)
    assert num_kills == 5
    assert said(folder).count("going on after step") >= 3, (points, said(folder))
    assert equal(weights(folder), weights(uninterrupted.folder)), points
    assert [(line.train_loss, line.top1, line.valid_loss) for line in run.epochs] == [
        (line.train_loss, line.top1, line.valid_loss) for line in uninterrupted.epochs
    ]
    assert [line.step for line in run.steps] == [line.step for line in uninterrupted.steps]


def test_sigterm_to_one_rank_stops_all_after_the_same_step_and_a_resumed_run_ends_the_same(
    tmp_path: Path, config: TrainConfig, uninterrupted: TrainingRun
) -> None:
    folder = tmp_path / "run"
    with started(train, 2, tmp_path, config, folder, False) as ranks:
        wait_until(lambda: logged_step(folder) >= 13)
        ranks.processes[1].terminate()
        assert ranks.wait() == [0, 0]
    stopped = TrainingRun.load(folder)
    assert stopped.results is None
    assert (folder / "interrupted.json").exists()
    step = weights(folder)["step"]
    assert 13 <= step < NUM_STEPS
    assert stopped.steps[-1].step == step
    run = train_to_end(config, folder, resume=True)
    assert run.results is not None
    assert run.results.steps == NUM_STEPS
    assert not (folder / "interrupted.json").exists()
    assert equal(weights(folder), weights(uninterrupted.folder))


def test_a_torn_checkpoint_is_refused_with_a_line_and_the_one_before_it_is_used(
    tmp_path: Path, config: TrainConfig, uninterrupted: TrainingRun
) -> None:
    folder = tmp_path / "run"
    with started(train, 2, tmp_path, config, folder, False) as ranks:
        wait_until(lambda: len(list((folder / "checkpoints").glob("step-*.json"))) >= 2)
        ranks.kill()
    newest = sorted((folder / "checkpoints").glob("step-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    run = train_to_end(config, folder, resume=True)
    assert f"{newest}: torn" in said(folder)
    assert "the one before it is used" in said(folder)
    assert run.results is not None
    assert equal(weights(folder), weights(uninterrupted.folder))


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do_and_can_be_lengthened(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    first = TrainConfig(model="tests.train.models:plain", workers=1, strategy="ddp", epochs=1, tensorboard=False)
    before = train_to_end(first, folder)
    again = train_to_end(first, folder, resume=True)
    assert (before.epochs, before.results) == (again.epochs, again.results)
    longer = TrainConfig(model=first.model, workers=1, strategy="ddp", epochs=2, tensorboard=False)
    run = train_to_end(longer, folder, resume=True)
    assert [line.epoch for line in run.epochs] == [0, 1]
    assert "not as before: epochs was 1, is 2" in said(folder)
