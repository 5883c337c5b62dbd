"""Names that a terminal would obey or cannot show, names of files that are no text, and numbers that are nothing."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mgwfbp import LayerTrace, LinearCost, MergePlan, ModelTrace, Network
from mgwfbp.cli import run
from tests.commands import ENVIRONMENT, mgwfbp
from tests.examples import make_trace

# An escape sequence, a line break and a mark that turns the direction of writing round; and how they are shown.
HOSTILE, SHOWN = "\x1b[31mred\n\u202e", r"\x1b[31mred\n\u202e"
NO_TEXT = os.fsdecode(b"\xff")
BOTH = ("--trace", "trace.json", "--cost", "cost.json")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_trace([2, 4, 6, 8, 10, 12], [1] * 6).save("trace.json")
    LinearCost(4, 3.0, 1.0).save("cost.json")


def ends(status: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command; where it fails, it does so with one line and without half a result."""
    done = mgwfbp(*arguments)
    assert done.returncode == status, done.stderr
    if status:
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done


def save_hostile() -> None:
    layers = tuple(LayerTrace(f"{HOSTILE}{index}", 1.0, 4) for index in range(3))
    ModelTrace(HOSTILE, 1.0, layers).save("trace.json")
    LinearCost(4, 3.0, 1.0, {"network": HOSTILE}).save("cost.json")
    Network(HOSTILE, "ring", 1.0, 1.0).save("network.json")
    MergePlan(HOSTILE, HOSTILE, (tuple(layer.name for layer in layers),)).save(f"{HOSTILE}.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", *BOTH),
        ("plan", *BOTH, "-o", f"{HOSTILE}-out.json"),
        ("simulate", *BOTH[:2], "--network", "network.json", "--network", "1gbe", "--workers", "2"),
        ("simulate", *BOTH[:2], "--network", "cost.json", "--plan", f"{HOSTILE}.json"),
        ("report", "trace.json", "cost.json", f"{HOSTILE}.json", "--format", "text"),
        ("report", "trace.json", "cost.json", "-o", f"{HOSTILE}.html"),
    ],
)
def test_no_name_reaches_the_terminal_raw(arguments: tuple[str, ...]) -> None:
    save_hostile()
    done = ends(0, *arguments)
    said = done.stdout + done.stderr
    assert SHOWN in said
    assert said.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("status", "arguments"),
    [
        (1, ("compare", "--trace", HOSTILE, "--cost", "cost.json")),
        (1, ("compare", "--trace", f"{HOSTILE}.json", "--cost", "cost.json")),
        (1, ("plan", *BOTH, "-o", f"{HOSTILE}/plan.json")),
        (1, ("report", "cost.json", HOSTILE)),
        (2, (HOSTILE,)),
        (2, ("plan", *BOTH, "--planner", HOSTILE)),
    ],
)
def test_no_name_breaks_the_line_of_an_error(status: int, arguments: tuple[str, ...]) -> None:
    said = ends(status, *arguments).stderr
    assert SHOWN in said
    assert said.removesuffix("\n").isprintable()


def test_files_whose_names_are_no_text_are_read_and_written() -> None:
    for name in ("trace", "cost"):
        Path(f"{name}.json").rename(f"{name}{NO_TEXT}.json")
    trace, cost, plan = (f"{name}{NO_TEXT}.json" for name in ("trace", "cost", "plan"))
    both = ("--trace", trace, "--cost", cost)
    assert ends(0, "compare", *both).stdout.count("\n") == 6
    assert "wrote plan\\udcff.json" in ends(0, "plan", *both, "-o", plan).stderr
    assert MergePlan.load(plan).group_sizes == (1, 2, 3)
    assert "plan\\udcff.json" in ends(0, "simulate", *both[:2], "--network", cost, "--plan", plan).stdout
    for output in (f"page{NO_TEXT}.html", "page.txt", "page.json"):
        ends(0, "report", trace, cost, plan, "--title", NO_TEXT, "-o", output)
        assert "cost\\udcff.json" in Path(output).read_text().replace("\\\\", "\\")
    missing = ends(1, "compare", "--trace", f"none{NO_TEXT}.json", "--cost", cost).stderr
    assert missing == "mgwfbp: 'none\\udcff.json': cannot be read: No such file or directory\n"


def test_letters_that_the_terminal_lacks_are_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "PYTHONIOENCODING", "latin-1")
    Network("網", "ring", 1.0, 1.0).save("network.json")
    networks = ("--network", "network.json", "--network", "1gbe", "--workers", "2")
    assert "\\u7db2" in ends(0, "simulate", *BOTH[:2], *networks).stdout
    page = ("report", "trace.json", "network.json", "--workers", "2", "--format", "html", "--title", "網")
    assert "<title>網</title>" in ends(0, *page).stdout  # a page says that it is UTF-8


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000])
def test_a_name_longer_than_the_system_takes_is_no_fault_of_the_output(name: str) -> None:
    said = ends(1, "simulate", *BOTH[:2], "--network", name, "--workers", "2").stderr
    assert "output cannot be written" not in said


def test_numbers_of_workers_are_refused_however_long() -> None:
    said = ends(2, "simulate", *BOTH[:2], "--network", "1gbe", "--workers", "9" * 5000).stderr
    assert len(said) < 300


def test_a_model_and_a_network_of_nothing_are_divided_by_nowhere() -> None:
    ModelTrace("m", 0.0, (LayerTrace("a.weight", 0.0, 4), LayerTrace("b.weight", 0.0, 4))).save("trace.json")
    Network("none", "ring", 0.0, 0.0).save("network.json")
    for workers in (1, 4):
        LinearCost(workers, 0.0, 0.0).save("cost.json")
        ends(0, "compare", *BOTH)
        ends(0, "report", "trace.json", "cost.json", "-o", "page.html")
    models = ("--googlenet", "trace.json", "--resnet50", "trace.json", "--modern", "trace.json")
    found = json.loads(ends(0, "paper", *models, "--network", "network.json", "--json").stdout)
    assert {gain["optimal"] for gain in found["gains"]} == {1.0}


@pytest.mark.parametrize(("ready_s", "scale"), [((0.0, 0.0), "1"), ((1e90, 1e90), "1"), ((10.0, 10.0), "1000")])
def test_a_replay_that_nobody_can_wait_for_is_refused_before_workers_start(
    capfd: pytest.CaptureFixture[str], ready_s: tuple[float, float], scale: str
) -> None:
    make_trace(list(ready_s), [4, 4]).save("trace.json")
    # Here, where torch is imported already.
    assert run(["bench", "--replay", "trace.json", "--workers", "2", "--scale", scale]) == 1
    said = capfd.readouterr()
    assert said.err.startswith("mgwfbp: trace.json: a step of it would take ")
    assert (said.out, said.err.count("\n")) == ("", 1)
