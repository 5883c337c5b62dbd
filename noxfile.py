"""One environment per minor version of torch, the runtime's tests in each, and the table in docs/torch-versions.md.

``make matrix`` runs them all, ``make matrix VERSIONS="2.3 2.4"`` some; rows of the table that were not run stay. An
environment takes 5 GB and is deleted once its tests have ended; what pytest reported stays in ``.matrix``.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import nox
from nox.command import CommandFailed

VERSIONS = [f"2.{minor}" for minor in range(3, 16)]

HERE = Path(__file__).parent
TABLE = HERE / "docs" / "torch-versions.md"
REPORTS = HERE / ".matrix"
# What tests/runtime imports besides torch, its torchvision and this package, in the versions of constraints.txt.
TOOLS = ("expecttest", "hypothesis", "numpy", "pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist")
ASK = "import platform, numpy, torch; print(platform.python_version(), torch.__version__, numpy.__version__)"

nox.options.default_venv_backend = "venv"


@nox.session
@nox.parametrize("torch", VERSIONS, ids=VERSIONS)
def runtime(session: nox.Session, torch: str) -> None:
    """Run the runtime's tests with one version of torch, and write its row of the table."""
    report = REPORTS / f"{torch}.xml"
    report.unlink(missing_ok=True)
    versions, result, limits = ["", "", ""], "could not be installed or run", ""
    try:
        pins = [line for line in (HERE / "constraints.txt").read_text().split() if line.partition("==")[0] in TOOLS]
        session.install("--no-cache-dir", f"torch=={torch}.*", "torchvision", *pins)
        versions = str(session.run("python", "-c", ASK, silent=True)).split()[-3:]
        session.run(
            *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"),
            *(f"--junitxml={report}", "tests/runtime"),
            env={"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"},
            success_codes=[0, 1, 2],  # failures stand in the report
        )
        result, limits = read_report(report.read_text(encoding="utf-8"))
    except CommandFailed as problem:
        session.warn(f"torch {torch}: {problem}")
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
    text = TABLE.read_text(encoding="utf-8")
    TABLE.write_text(with_row(text, torch, [*versions, result, limits]), encoding="utf-8")
    if not result[0].isdigit() or "failed" in result:
        session.error(f"torch {torch}: {result}")


def read_report(xml: str) -> tuple[str, str]:
    """Return how many tests passed, failed and were skipped, and what does not work: failures, and limits of torch.

    A test that this torch is no judge of is skipped for a reason that begins with "this torch"; other reasons (no GPU)
    are the machine's.
    """
    cases = list(ElementTree.fromstring(xml).iter("testcase"))  # noqa: S314 - pytest wrote it
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    counts = {"failed": len(failed), "passed": len(cases) - len(failed) - len(reasons), "skipped": len(reasons)}
    limits = sorted({reason for reason in reasons if reason.startswith("this torch")})
    names = sorted({f"`{case.get('name', '').partition('[')[0]}` fails" for case in failed})
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count), "; ".join(limits + names)


def with_row(text: str, version: str, cells: Sequence[str]) -> str:
    """Return a document whose only table has this row, in the order of versions; other rows stay."""
    lines = text.splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    rows = {line.split("|")[1].strip(): line for line in lines[start:end]}
    rows[version] = "| " + " | ".join([version, *(cell.replace("|", "\\|") for cell in cells)]) + " |\n"
    ordered = sorted(rows, key=lambda name: [int(part) for part in name.split(".")])
    return "".join([*lines[:start], *(rows[name] for name in ordered), *lines[end:]])
