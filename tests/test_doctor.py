"""What ``mgwfbp doctor`` says of a machine, here and where packages are missing, broken or old.

Such packages are real ones: modules of these names that stand first on Python's path.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mgwfbp.cli.doctor import AREAS, OLDEST_TORCH, find_all

GONE = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"


def run(folder: Path, *arguments: str, **packages: str) -> subprocess.CompletedProcess[str]:
    """Run a command beside packages with this code."""
    for name, code in packages.items():
        (folder / f"{name}.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "mgwfbp", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_area_is_tried_and_what_does_not_work_here_is_no_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    shown = [line for line in lines if not line.startswith(("What to do", " "))]
    assert list(dict.fromkeys(line.split()[0] for line in shown)) == list(AREAS)
    assert {line.split()[1] for line in shown} <= {"yes", "no", "-"}
    assert "ddp     yes  gloo: messages between processors" in lines


def test_a_missing_package_comes_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "report", matplotlib=GONE)
    assert "report  no   no matplotlib: figures as png, svg and pdf" in done.stdout
    assert "  report: pip install 'mgwfbp[report]'" in done.stdout


def test_an_area_that_was_asked_for_and_does_not_work_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "plan", "report", matplotlib="raise ImportError('half installed')")
    assert done.returncode == 1
    assert done.stdout.splitlines()[1:] == [
        *(line for line in done.stdout.splitlines() if line.startswith("plan    yes  numpy ")),
        "report  no   matplotlib is installed and cannot be imported: ImportError: half installed",
        "What to do, where you need it:",
        "  report: pip install --force-reinstall matplotlib",
    ]
    assert run(tmp_path, "doctor", "plan").returncode == 0


def test_a_package_that_ends_the_process_is_blamed_and_the_others_are_tried(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "report", "plan", matplotlib="import os; os._exit(3)")
    assert "matplotlib is installed and cannot be imported: importing it ended Python with status 3" in done.stdout
    assert "plan    yes  numpy " in done.stdout


def test_a_torch_that_is_too_old_is_named_with_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "ddp", torch="__version__ = '2.2.1'")
    assert done.returncode == 1
    assert "ddp     no   torch 2.2.1 is too old" in done.stdout
    assert "pip install 'torch>=2.3'" in done.stdout


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in project["dependencies"]


def test_an_unknown_area_is_wrong_usage(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "nose")
    assert done.returncode == 2
    assert "'nose' is not one of plan, report, ddp, gpu, models, train, lab" in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("traces",), ("doctor", "plan")])
def test_commands_that_need_no_torch_do_not_import_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(tmp_path, *arguments, torch="import os; os._exit(9)")
    assert done.returncode == 0, done.stderr


def test_commands_that_need_torch_say_so_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "measure", "backward", "--model", "resnet18", "-o", str(tmp_path / "t.json"), torch=GONE)
    assert done.returncode == 1
    assert done.stderr == (
        "mgwfbp: this command needs torch, which is not installed: pip install torch (see `mgwfbp doctor`)\n"
    )


def test_findings_stand_in_the_order_of_the_areas() -> None:
    assert [one.area for one in find_all(["report", "plan"])] == ["plan", "report"]


@pytest.mark.parametrize(("problem", "works"), [("", True), ("RuntimeError: no peer", False)])
def test_a_gpu_works_where_nccl_does(problem: str, works: bool) -> None:
    torch = {"version": "2.15.0", "lacks": [], "gpus": ["NVIDIA H200"] * 2, "backends": {"nccl": problem}}
    gpu, nccl, *_ = AREAS["gpu"]({"torch": torch})
    assert (gpu.works, gpu.what) == (True, "torch sees 2 GPUs: NVIDIA H200")
    assert (nccl.works, nccl.is_optional) == (works, False)


def test_a_torch_that_takes_no_plans_says_what_it_lacks() -> None:
    torch = {"version": "2.99.0", "lacks": ["Reducer._reset_state"], "gpus": [], "backends": {"gloo": ""}}
    takes, gloo, *_ = AREAS["ddp"]({"torch": torch})
    assert not takes.works
    assert takes.what.endswith("it lacks Reducer._reset_state")
    assert gloo.works
