"""``python -m tests.try_wheel FOLDER``: install the wheel in FOLDER into an empty environment and try it.

Torch is left out, which takes 5 GB: planning, simulation and reports do without, and a command that needs it says so.
"""

import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import mgwfbp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mgwfbp"
CASE = ("--trace", "resnet50-h200-b32", "--cost", "10gbe", "--workers", "8")


def requirements(wheel: Path, extra: str) -> list[str]:
    """Return what the wheel asks for: without an extra, or what that one adds; not torch."""
    with ZipFile(wheel) as content:
        text = content.read(f"mgwfbp-{mgwfbp.__version__}.dist-info/METADATA").decode()
    asked = [line.partition(";") for line in Parser().parsestr(text).get_all("Requires-Dist", ())]
    wanted = [name.strip() for name, _, when in asked if when.strip() == (f"extra == '{extra}'" if extra else "")]
    return [name for name in wanted if not name.startswith("torch")]


def check_content(wheel: Path) -> None:
    """Raise unless the wheel has every file of the package, and nothing beside it."""
    with ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in files}


class Environment:
    """An empty environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "empty" / "bin"
        venv.create(folder / "empty", with_pip=True)

    def install(self, *what: str) -> None:
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        pip = [str(self.bin / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *constraints, *what], check=True, timeout=600)

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run our command as its user does; return all that it says."""
        done = subprocess.run(
            [self.bin / "mgwfbp", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == status, f"mgwfbp {' '.join(arguments)}: status {done.returncode}\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout


def try_without_extras(here: Environment) -> None:
    assert here.run("--version") == f"mgwfbp {mgwfbp.__version__}\n"
    assert "resnet50-h200-b32" in here.run("traces")
    here.run("plan", *CASE, "-o", "plan.json")
    assert "optimal" in here.run("compare", *CASE)
    here.run("cost", "--network", "10gbe", "--workers", "8", "-o", "cost.json")
    here.run("simulate", "--trace", "resnet50-h200-b32", "--network", "10gbe", "--workers", "8,64")
    here.run("report", "resnet50-h200-b32", "cost.json", "plan.json", "-o", "report.html")
    assert (here.folder / "report.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    said = here.run("doctor")
    assert "plan    yes" in said
    assert "ddp     no   no torch" in said
    here.run("doctor", "ddp", status=1)
    assert "needs torch" in here.run("measure", "backward", "--model", "resnet18", status=1)
    figure = ("report", "resnet50-h200-b32", "cost.json", "--format", "svg", "-o", "figure.svg")
    assert "pip install 'mgwfbp[report]'" in here.run(*figure, status=1)


def try_with_figures(here: Environment) -> None:
    here.run("report", "resnet50-h200-b32", "cost.json", "--format", "svg", "-o", "figure.svg")
    assert "<svg" in (here.folder / "figure.svg").read_text(encoding="utf-8")
    here.run("doctor", "plan", "report")


def main(arguments: Iterable[str]) -> None:
    (folder,) = map(Path, arguments)
    wheel = folder / f"mgwfbp-{mgwfbp.__version__}-py3-none-any.whl"
    check_content(wheel)
    with tempfile.TemporaryDirectory() as empty:
        here = Environment(Path(empty))
        here.install(*requirements(wheel, ""))
        here.install("--no-deps", str(wheel))
        try_without_extras(here)
        here.install(*requirements(wheel, "report"))
        try_with_figures(here)


if __name__ == "__main__":
    main(sys.argv[1:])
