"""How Sphinx builds the site: ``make docs``.

The source folder is the repository, not ``docs``, so that a relative link means the same here and on GitHub.
Nothing is fetched when a page is opened: the theme has the reader's own fonts, and formulas become MathML, which
browsers draw themselves.
"""

import dataclasses
import inspect
import re
from typing import Any

import typer
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import mgwfbp
from mgwfbp.cli import app as commands

project = "mgwfbp"
author = "the authors of mgwfbp"
copyright = "the authors of mgwfbp, Apache-2.0"
version = release = mgwfbp.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = ["docs/conf.py", "docs/site", "**/.ipynb_checkpoints", ".*", "build", "src", "tests", "runs"]
nitpicky = True

html_theme = "furo"
html_title = f"mgwfbp {version}"
html_math_renderer = "mathml"
html_static_path = ["site/static"]
html_extra_path = ["site/extra"]  # the front page: it leads to docs/index.html
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "tango", "monokai"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # as GitHub makes them
# The stored outputs are shown; tests/test_documents.py runs the notebooks and compares.
nb_execution_mode = "off"

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Fields", "params_style")]
napoleon_use_rtype = False
# One backtick is a name of ours: a link where this site has it, else plain code.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    (
        "py:.*",
        r"mgwfbp\.(simulate\.compute|runtime\.(fsdp|learn|observe|steps))\..*",
    ),  # within, for those who read the code
    ("py:.*", r"(torch|numpy|np|os|collections|contextlib|pathlib|types|subprocess|argparse)\..*"),
]

# name with its module -> the name under which people import it
EXPORTED = {f"mgwfbp.{module}.{name}": f"mgwfbp.{name}" for name, module in mgwfbp._MODULES.items()}
# A field of a record and the comment beside it.
FIELD = re.compile(r"^    (?P<name>\w+): .*?  # (?P<comment>.+)$", re.MULTILINE)


def describe_fields(_app: Sphinx, what: str, _name: str, found: Any, _options: Any, lines: list[str]) -> None:
    """Add what the comments beside a record's fields say of them."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment: else napoleon takes what stands before a colon for a type
    if not (inspect.isclass(found) and dataclasses.is_dataclass(found)):
        return
    names = {field.name for field in dataclasses.fields(found)}
    said = [match.groups() for match in FIELD.finditer(inspect.getsource(found)) if match["name"] in names]
    if said:
        lines += ["", "Fields:", *(f"    {name}: {comment}" for name, comment in said), ""]


def show_commands(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add what every command says of itself to the page of commands."""
    if page != "docs/commands":
        return
    root: Any = typer.main.get_command(commands)
    found: dict[str, Any] = {}
    for name, command in sorted(root.commands.items()):
        parts = getattr(command, "commands", {})  # of `measure`
        found.update({f"{name} {part}": one for part, one in parts.items()} or {name: command})
    for name, command in found.items():
        context = command.make_context(f"mgwfbp {name}", [], resilient_parsing=True, terminal_width=100)
        source[0] += f"\n## {name}\n```text\n{context.get_help().strip()}\n```\n"


def shorten_signature(
    _app: Sphinx, _what: str, _name: str, _found: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show a default that is made anew each time as an ellipsis, which is Python, so that types become links."""
    return (signature.replace("<factory>", "...") if signature else signature), returns


def find_exported(app: Sphinx, _env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Lead a name with its module, as annotations have it, or a short name to where the site describes it."""
    target = node.get("reftarget", "")
    known = app.env.domains["py"].data["objects"]
    short = EXPORTED.get(target, f"mgwfbp.{target}")
    if node.get("refdomain") != "py" or short == target or short not in known:
        return None
    kind = "obj" if node["reftype"] == "obj" else known[short].objtype
    return app.env.domains["py"].resolve_xref(app.env, node["refdoc"], app.builder, kind, short, node, content)


def mathml(text: str, *, as_block: bool) -> str:
    """Return a formula as MathML; docutils knows the left and the right large bracket, not one for both sides."""
    for bracket, side in (("(", "l"), (")", "r")):
        text = text.replace(rf"\Big{bracket}", rf"\Big{side}{bracket}")
    return str(tex2mathml(text, as_block=as_block))


def visit_math(self: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    self.body.append(mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula with a line of its own."""
    self.body.append(f'<div class="math-block">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("autodoc-process-docstring", describe_fields, priority=400)  # before napoleon reads sections
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("source-read", show_commands)
    app.connect("missing-reference", find_exported)
