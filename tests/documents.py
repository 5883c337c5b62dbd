"""Commands in documents and cells of notebooks, run again: ``python -m tests.documents`` writes what they print today.

In a page that is run, a block of ``console`` holds commands behind ``$`` and what they print, stdout and stderr
together, and a block of ``python`` that begins with a comment such as ``# first.py`` is that file. All of a page runs
in one empty folder, from top to bottom. What was measured stands in other blocks (``text``), and is not run.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "tutorial" / name for name in ("first-plan.md", "cluster.md")]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")


def fresh_page(text: str) -> str:
    """Run a page's commands and return it with what they print."""
    with tempfile.TemporaryDirectory() as folder:
        return BLOCK.sub(lambda found: f"```{found[1]}\n{_fresh_block(found[1], found[2], Path(folder))}```", text)


def _fresh_block(kind: str, block: str, folder: Path) -> str:
    if kind == "python":
        if name := FILE.match(block):
            (folder / name[1]).write_text(block, encoding="utf-8")
        return block
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"$ {command}\n{_run(command, folder)}" for command in commands)


def _run(command: str, folder: Path) -> str:
    """Run a command as a reader would who has the package, and only it, on the path."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("mgwfbp", "-m mgwfbp "), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n', encoding="ascii")
        program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}"
    return done.stdout


def fresh_notebook(text: str) -> str:
    """Run a notebook in an empty folder and return it with what its cells print, and nothing of this machine."""
    notebook = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        # However the kernel cuts a cell's output into pieces, it is one.
        NotebookClient(notebook, timeout=100, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    notebook.metadata = nbformat.from_dict({"language_info": {"name": "python"}, "kernelspec": KERNEL})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    return str(nbformat.writes(notebook, indent=1)) + "\n"


KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fresh_page(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path in NOTEBOOKS:
        path.write_text(fresh_notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
