"""What the README says can be done, done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(240)
def test_the_readmes_script_is_the_example_and_trains_on_two_ranks(tmp_path: Path) -> None:
    _, _, example = (ROOT / "examples" / "minimal.py").read_text().partition('"""\n\n')
    assert f"```python\n{example}```" in README
    script = tmp_path / "minimal.py"
    assert example.count("range(1000)") == 1
    script.write_text(example.replace("range(1000)", "range(3)").replace("step % 200 == 199", "step == 2"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Tuning(working, step 3")


def test_lines_of_the_readme_are_below_100_columns() -> None:
    assert [line for line in README.splitlines() if len(line) > 100] == []


def test_documents_that_the_readme_names_are_there() -> None:
    targets = {part.split(")")[0].split("#")[0] for part in README.split("](")[1:]}
    assert [target for target in targets if not (ROOT / target).exists()] == []
