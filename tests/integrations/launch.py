"""Ranks of other training libraries, which make the process group themselves, as under torchrun."""

import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgwfbp.cli.children import free_port
from mgwfbp.runtime.messages.gloo import destroy_process_group
from tests.runtime.launch import Scenario, run_ranks, run_scenarios

ROOT = Path(__file__).parents[2]


def needs(*libraries: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests whose ranks import these libraries; the tests themselves do not."""
    absent = [library for library in libraries if find_spec(library) is None]
    return [
        pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}"),
        pytest.mark.timeout(240),  # whichever test comes first waits for the ranks
    ]


def run_library(module: str, scenarios: Sequence[str], folder: Path) -> list[Any]:
    """Run ``python -m module folder scenario ...`` on 2 ranks as torchrun would, and return what each wrote."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",  # by which Lightning knows that somebody else starts the ranks
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return run_ranks(module, scenarios, folder, 2, environment)


def be_rank(scenarios: Mapping[str, Scenario]) -> None:
    """Run the scenarios that the command line names, in the folder of the test."""
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    run_scenarios(scenarios)
    if dist.is_initialized():
        destroy_process_group()


def found(tuning: Any) -> bool:
    """Whether a tuner has settled; where steps changed for long it may be looking again."""
    return bool(tuning.state == "settled" or tuning.retuned)


def digests(model: nn.Module) -> list[str]:
    """Return a digest of every parameter's bytes: equal where parameters are bitwise equal."""
    return [sha256(parameter.detach().numpy().tobytes()).hexdigest() for parameter in model.parameters()]
