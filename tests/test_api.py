"""What programs outside rely on."""

import subprocess
import sys

import mgwfbp


def test_every_public_name_exists_and_stands_once() -> None:
    assert len(set(mgwfbp.__all__)) == len(mgwfbp.__all__)
    assert all(hasattr(mgwfbp, name) for name in mgwfbp.__all__)


def test_the_planners_have_the_names_of_the_contract() -> None:
    assert list(mgwfbp.PLANNERS) == ["wfbp", "single", "bucket", "mgwfbp", "optimal"]


def test_importing_the_package_imports_no_torch_and_no_command_line() -> None:
    code = "import sys, mgwfbp; print(sorted({'torch', 'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
