"""Libraries are imported only by whoever asks for them, and a missing one is told of in one line."""

import json
import subprocess
import sys

import pytest

from tests.integrations.launch import needs

pytestmark = needs("accelerate")

LIBRARIES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers", "ray": "ray[train]"}

CODE = """
import importlib, json, sys
import mgwfbp.integrations
told = {"imported": sorted({"torch", "lightning", "accelerate", "transformers", "ray"} & set(sys.modules))}
sys.modules.update(dict.fromkeys(["lightning", "accelerate", "ray"]))  # as if they were not there
for library in ["lightning", "accelerate", "transformers", "ray"]:
    if library == "transformers":  # needs accelerate, too
        del sys.modules["accelerate"]
        sys.modules["transformers"] = None
    try:
        importlib.import_module(f"mgwfbp.integrations.{library}")
    except ImportError as error:
        told[library] = [type(error).__name__, str(error)]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What a process without these libraries is told."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=110, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_importing_the_integrations_imports_no_library(told: dict[str, list[str]]) -> None:
    assert told["imported"] == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_one_line_that_says_what_to_install(told: dict[str, list[str]], name: str) -> None:
    kind, text = told[name]
    assert kind == "IntegrationError"
    assert text.startswith(f"mgwfbp.integrations.{name} needs {name}, which cannot be imported (")
    assert text.endswith(f": pip install '{LIBRARIES[name]}'")
    assert "\n" not in text
