"""The folder of a training run, read back."""

import json
from pathlib import Path

import pytest

from mgwfbp import FileError, FormatError, LinearCost, MergePlan, TrainError, TrainingRun, find_plan, predict
from mgwfbp.run import LoggedEpoch, LoggedStep, RunResults, log_line, read_log
from tests.examples import make_trace

RESULTS = RunResults("digits", "optimal", 2, 1, 20, 0.97, 1.0, 1500.0, 3.5, 2, {"restarts": 0})


def make_run(folder: Path) -> None:
    """A complete run, written by hand."""
    (folder / "config.json").write_text(
        json.dumps({"format": "mgwfbp.train/1", "model": "digits", "strategy": "optimal"})
    )
    (folder / "environment.json").write_text('{"torch": "2.11"}')
    trace, cost = make_trace([1.0, 2.0], [4, 8]), LinearCost(2, 0.5, 0.1)
    plan = find_plan(trace, cost)
    for name, record in {"trace": trace, "cost": cost, "plan": plan, "results": RESULTS}.items():
        record.save(folder / f"{name}.json")
    for name in ("timeline", "predicted"):
        predict(trace, cost, plan).save(folder / f"{name}.json")
    (folder / "tuning.json").write_text('{"state": "settled"}')
    steps = [LoggedStep(10, 0, 2.0, 900.0, 0.1, 0.05), LoggedStep(20, 0, 1.0, 950.0, 0.1, 0.04, 0.001)]
    (folder / "log.jsonl").write_text("".join(map(log_line, steps)))
    (folder / "epochs.jsonl").write_text(log_line(LoggedEpoch(0, 1.5, 1.0, 0.97, 1.0, 3.5)))


def test_a_complete_run_is_read_back_whole(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = TrainingRun.load(tmp_path)
    assert run.results == RESULTS
    assert run.plan is not None
    assert run.trace is not None
    assert run.cost is not None
    assert run.plan == find_plan(run.trace, run.cost)
    assert run.timeline == run.predicted == predict(run.trace, run.cost, run.plan)
    assert [(line.step, line.exposed_s) for line in run.steps] == [(10, None), (20, 0.001)]
    assert run.epochs[0].top1 == 0.97
    assert run.tuning == {"state": "settled"}
    assert "1 epoch, top-1 97.00%" in repr(run)


def test_a_run_that_has_only_begun_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "mgwfbp.train/1", "model": "digits", "strategy": "ddp"}')
    run = TrainingRun.load(tmp_path)
    assert (run.results, run.plan, run.tuning, run.steps, run.epochs) == (None, None, None, (), ())
    assert "not finished" in repr(run)


def test_the_torn_last_line_of_a_killed_run_does_not_count(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(text[:-20])
    assert [line.step for line in TrainingRun.load(tmp_path).steps] == [10]


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        ("log.jsonl", "{}\n", FormatError, "line 1: step: missing"),
        ("log.jsonl", "{\n", FormatError, "line 1: not JSON"),
        ("epochs.jsonl", log_line(LoggedEpoch(0, 1, 1, 0.5, 1, 1)).replace("0.5", "1.5"), FormatError, "top1 is 1.5"),
        ("config.json", '{"format": "mgwfbp.plan/1"}', FormatError, "expected 'mgwfbp.train/1'"),
        ("results.json", '{"format": "mgwfbp.run/1", "model": "x"}', FormatError, "strategy: missing"),
        ("plan.json", "{", FormatError, "not JSON"),
        ("environment.json", "[]", FormatError, "expected an object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, error: type[Exception], words: str) -> None:
    make_run(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(error) as caught:
        TrainingRun.load(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not the folder of a training run"):
        TrainingRun.load(tmp_path)
    with pytest.raises(FileError, match="no such folder"):
        TrainingRun.load(tmp_path / "nowhere")


def test_results_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainError, match="top1 is 97"):
        RunResults("digits", "ddp", 2, 1, 20, 97.0, 1.0, 1500.0, 3.5)
    with pytest.raises(TrainError, match="workers is 0"):
        RunResults("digits", "ddp", 0, 1, 20, 0.97, 1.0, 1500.0, 3.5)


def test_what_is_logged_is_read_back(tmp_path: Path) -> None:
    lines = tuple(LoggedStep(step, 0, 1 / step, 3.0, 0.1, 0.2, None) for step in range(1, 5))
    (tmp_path / "log.jsonl").write_text("".join(map(log_line, lines)))
    assert read_log(tmp_path / "log.jsonl", LoggedStep) == lines


def test_a_plan_of_a_run_is_a_plan(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert TrainingRun.load(tmp_path).plan == MergePlan.load(tmp_path / "plan.json")
