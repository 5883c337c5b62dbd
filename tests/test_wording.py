"""What is said of one thing: "1 message", never "1 messages"."""

import re
from pathlib import Path

import pytest

import mgwfbp
from mgwfbp import BenchResult, LayerTrace, LinearCost, MergePlan, ModelTrace, PiecewiseCost, StrategyResult, predict
from mgwfbp.bench.learning import Terms
from mgwfbp.run import RunResults, TrainingRun
from tests.report.records import write_run

TRACE = ModelTrace("toy", 1.0, (LayerTrace("a", 1.0, 10),))
COST = LinearCost(1, 1.0, 1.0)
PLAN = MergePlan.of_sizes(TRACE, [1])
RESULT = StrategyResult.of_turns("ddp", [1.0], 1.0, num_messages=1)

# A number in an f-string with a word for many of them after it: only `plural` knows whether it is many.
COUNTED = re.compile(r"\}\s(messages|workers|gradients|ranks|epochs|steps|turns|points|strategies)\b")
# Numbers that are never one.
NEVER_ONE = (
    "{len(self.points)} points",  # a curve has two or more
    "{gradients} gradients",  # "161 to 604"
    "{count} workers`",  # the columns of the page's table begin with two
)


@pytest.mark.parametrize(
    "shown",
    [
        TRACE,
        COST,
        PiecewiseCost(1, ((1, 1.0), (2, 2.0))),
        PLAN,
        predict(TRACE, COST, PLAN),
        BenchResult("toy", 1, "lab", 1.0, (RESULT,)),
        Terms("single", 1, 1.0, 0.0, 0.0, 0.0),
    ],
    ids=lambda shown: type(shown).__name__,
)
def test_one_thing_is_one_thing(shown: object) -> None:
    assert not re.search(r"\b1 \w+s\b", str(shown)), str(shown)


def test_a_run_of_one_epoch_is_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    lines = (folder / "epochs.jsonl").read_text().splitlines(keepends=True)
    (folder / "epochs.jsonl").write_text(lines[0])
    assert "1 epoch so far" in repr(TrainingRun.load(folder))
    RunResults("toy", "ddp", 2, 1, 1, 0.5, 0.5, 1.0, 1.0, 1).save(folder / "results.json")
    assert "1 epoch," in repr(TrainingRun.load(folder))


def test_counted_things_are_named_by_one_function() -> None:
    root = Path(mgwfbp.__file__).parent
    found = []
    for path in [*root.rglob("*.py"), *root.rglob("*.js")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if COUNTED.search(line) and not any(words in line for words in NEVER_ONE):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
