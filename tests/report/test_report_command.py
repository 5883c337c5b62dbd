"""`mgwfbp report` as a user meets it."""

import json
from pathlib import Path

import pytest

from mgwfbp import FormatError, load_network
from mgwfbp.cli import run
from mgwfbp.report import load_inputs
from tests.report.records import TRACE, sweep_rows, write_all, write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_is_made_from_any_mix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["trace.json", "cost.json", "plan.json", "bench.json", "timeline.json", "sweep.json", "run"]
    assert run(["report", *names, "-o", "report.html"]) == 0
    assert capsys.readouterr().err == "wrote report.html\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "names",
    [
        ["bench.json"],
        ["run"],
        ["run/results.json"],
        ["timeline.json"],
        ["sweep.json"],
        ["cost.json"],
        ["trace.json"],
        ["trace.json", "cost.json"],
    ],
)
def test_each_input_alone_makes_a_page(folder: Path, names: list[str]) -> None:
    assert run(["report", *names, "-o", "report.html"]) == 0


def test_names_of_what_comes_with_the_package_are_inputs_too(folder: Path) -> None:
    assert run(["report", "googlenet-h200-b64", "ib-hdr", "--workers", "4,64", "-o", "report.html"]) == 0
    text = (folder / "report.html").read_text()
    assert "googlenet on 4 workers over InfiniBand HDR" in text
    assert "googlenet on 64 workers over InfiniBand HDR" in text


def test_workers_on_nodes_are_planned_with_what_both_networks_cost(folder: Path) -> None:
    nodes = ["--workers", "16", "--per-node", "8", "--inside", "nvlink3"]
    assert run(["report", "googlenet-h200-b64", "ib-hdr", *nodes, "-o", "report.html"]) == 0
    assert "googlenet on 16 workers over InfiniBand HDR, 8 a node over NVLink 3" in (folder / "report.html").read_text()
    assert run(["report", "googlenet-h200-b64", "ib-hdr", *nodes[:4], "-o", "report.html"]) == 2


def test_without_a_file_the_timelines_are_drawn_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "trace.json", "cost.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("toy on 4 workers")
    assert shown.count("messages  |") == 5


def test_the_ending_of_the_output_says_the_format(folder: Path) -> None:
    for name, beginning in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.json", b"{")):
        assert run(["report", "trace.json", "cost.json", "-o", name]) == 0
        assert (folder / name).read_bytes().startswith(beginning)
    assert json.loads((folder / "a.json").read_text())["traceEvents"]


def test_only_the_planners_asked_for_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "trace.json", "cost.json", "--planner", "bucket,optimal"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("messages  |") == 2


def test_all_figures_of_the_paper_go_into_a_folder(folder: Path) -> None:
    assert run(["report", "--figure", "all", "--format", "svg", "-o", "figures"]) == 0
    assert sorted(path.name for path in (folder / "figures").iterdir()) == [f"figure{n}.svg" for n in range(1, 10)]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 1, "nothing to show"),
        (["plan.json"], 1, "nothing to show"),
        (["none.json"], 1, "none.json: cannot be read"),
        (["nothing"], 1, "nothing: cannot be read"),
        (["trace.json", "10gbe"], 2, "--workers"),
        (["trace.json", "--network", "10gbe", "--workers", "x"], 2, "--workers"),
        (["trace.json", "cost.json", "--planner", "best"], 2, "--planner"),
        (["trace.json", "--figure", "10", "-o", "x.png"], 2, "--figure"),
        (["trace.json", "--figure", "1", "-o", "x.html"], 2, "--figure"),
        (["trace.json", "cost.json", "--format", "png"], 2, "--output"),
        (["trace.json", "-o", "x.png"], 1, "no timeline"),
        (["trace.json", "-o", "x.json"], 1, "no timeline"),
        (["trace.json", "cost.json", "-o", "no/such/folder.html"], 1, "cannot be written"),
        (["trace.json", "cost.json", "-o", "no/such/folder.png"], 1, "cannot be written"),
        (["--figure", "all", "-o", "trace.json", "--format", "png"], 1, "trace.json"),
        (["."], 1, "not the folder of a training run"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert run(["report", *arguments]) == status
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "an empty list"),
        ("[1]", "[0]: expected an object"),
        ('[{"planner": "x"}]', "[0].workers: missing"),
        ('{"format": "mgwfbp.train/1"}', "not one a report is made from"),
        ('{"format": ["a"]}', "not one a report is made from"),
        ('{"a": 1}', "format: missing"),
        ('{"rows": {"m": 1}}', "rows.m: expected a list"),
        ("3", "expected an object"),
    ],
)
def test_a_file_that_is_none_of_ours_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(FormatError) as caught:
        load_inputs([tmp_path / "odd.json"])
    assert str(caught.value).startswith(str(tmp_path / "odd.json"))
    assert words in str(caught.value)


def test_the_output_of_paper_is_read_by_model(tmp_path: Path) -> None:
    (tmp_path / "paper.json").write_text(json.dumps({"rows": {"googlenet": sweep_rows(), "resnet50": sweep_rows()}}))
    sweeps = load_inputs([tmp_path / "paper.json"]).sweeps
    assert [rows[0].model for _, rows in sweeps] == ["googlenet", "resnet50"]


def test_a_run_that_goes_on_is_an_input(tmp_path: Path) -> None:
    ((_, found),) = load_inputs([write_run(tmp_path / "run", finished=False)]).runs
    assert found.results is None


def test_a_network_file_is_an_input(tmp_path: Path) -> None:
    load_network("10gbe").save(tmp_path / "network.json")
    TRACE.save(tmp_path / "trace.json")
    assert load_inputs([tmp_path / "network.json"]).networks[0][1] == load_network("10gbe")
    names = [str(tmp_path / name) for name in ("trace.json", "network.json")]
    assert run(["report", *names, "--workers", "4", "-o", str(tmp_path / "report.html")]) == 0
