"""What documents say is what the code does: commands, notebooks, messages, names and links."""

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import mgwfbp
from benchmarks import convergence
from tests.documents import DOCS, NOTEBOOKS, PAGES, fresh_notebook, fresh_page

ROOT = DOCS.parent
SOURCES = sorted(Path(mgwfbp.__file__).parent.rglob("*.py"))
MARKDOWN = [path for folder in (ROOT, DOCS, ROOT / "benchmarks") for path in folder.glob("*.md")] + [
    path for name in ("api", "howto", "tutorial") for path in (DOCS / name).glob("*.md")
]
AGAIN = "run `python -m tests.documents`, and read what it changed"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_in_tutorials_print_what_the_page_shows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fresh_page(text) == text, AGAIN


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_print_what_is_stored(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert fresh_notebook(text) == text, AGAIN


def test_there_are_two_notebooks_without_anything_of_a_machine() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|usr|work|Users)/", text), path
        assert '"output_type": "error"' not in text


def literals() -> Iterator[str]:
    """Every text in the code; what is filled in is an ellipsis."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("%s", "…")


def test_every_message_of_the_page_of_limits_is_one_of_the_code() -> None:
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(messages) > 40
    known = set(literals())
    # A text may be put together of two, as a warning of its beginning and its reason.
    lost = [one for one in messages if not any(one.removesuffix(": …") in text for text in known)]
    assert not lost, lost


@pytest.mark.parametrize("name", ["convergence-2", "convergence-4", "convergence-wire-2", "convergence-wire-4"])
def test_the_tables_of_convergence_are_those_of_the_stored_runs(name: str) -> None:
    folder = ROOT / "benchmarks"
    runs = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert convergence.table(runs) in (folder / "convergence.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_api_pages() -> None:
    shown = set()
    for page in (DOCS / "api").glob("*.md"):
        module = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split()[-1]
            elif found := re.match(r"\.\. auto\w+:: ([\w.]+)", line):
                shown.add(found[1] if found[1].startswith("mgwfbp.") else f"{module}.{found[1]}")
    assert {f"mgwfbp.{name}" for name in mgwfbp.__all__} <= shown


LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files_of_the_repository(page: Path) -> None:
    for link, _, picture in LINK.findall(page.read_text(encoding="utf-8")):
        target = link or picture
        if "://" not in target:
            assert (page.parent / target).resolve().is_file(), target


def test_the_citation_has_the_version_and_both_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == mgwfbp.__version__
    assert [paper["year"] for paper in citation["references"]] == [2019, 2021]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["license"] == project["license"]


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## {mgwfbp.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def public() -> Iterator[tuple[str, object]]:
    """Every public function, class and method that is ours."""
    for name in mgwfbp.__all__:
        found = getattr(mgwfbp, name)
        yield name, found
        for part, inner in vars(found).items() if inspect.isclass(found) else ():
            if not part.startswith("_"):
                yield f"{name}.{part}", getattr(inner, "__func__", inner)


def test_a_docstring_that_lists_arguments_lists_them_all() -> None:
    lost = []
    for name, found in public():
        arguments = (inspect.getdoc(found) or "").partition("Args:\n")[2]
        if arguments and (inspect.isfunction(found) or inspect.isclass(found)):
            wanted = [
                one for one in inspect.signature(found).parameters if one not in ("self", "cls", "args", "kwargs")
            ]
            lost += [f"{name}({one})" for one in wanted if not re.search(rf"^ +[*]*{one}: ", arguments, re.MULTILINE)]
    assert not lost, lost
