"""Ranks as processes: start them, wait, and read what each wrote."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgwfbp.runtime.messages.gloo import destroy_process_group, init_process_group
from tests.forking import run_module

Scenario = Callable[[], dict[str, Any]]
TORCHS_GLOO = "TEST_TORCHS_GLOO"


def run_ranks(
    module: str, scenarios: Sequence[str], folder: Path, world: int, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``python -m module folder scenario ...`` once per rank and return what each wrote; see `be_rank`."""
    found = let_ranks_end(module, scenarios, folder, world, variables)
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    assert None not in found, "\n".join(log.read_text()[-3000:] for log in logs)
    return found


def let_ranks_end(
    module: str, scenarios: Sequence[str], folder: Path, world: int, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """The same for ranks that may be killed, None for each that wrote nothing, with more in their environment."""
    run_module(module, scenarios, folder, world, timeout_s=250, variables=variables)
    results = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(result.read_text()) if result.exists() else None for result in results]


def be_rank(scenarios: Mapping[str, Scenario]) -> None:
    """Join the other ranks, run the scenarios that the command line names, and write what each returns.

    Over gloo with one thread, or with `TORCHS_GLOO` in the environment over torch's own.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torchs: Callable[..., None] = partial(dist.init_process_group, "gloo")
    join = torchs if TORCHS_GLOO in os.environ else init_process_group
    join(init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=20))
    run_scenarios(scenarios)
    destroy_process_group()


def run_scenarios(scenarios: Mapping[str, Scenario]) -> None:
    """Run the scenarios that the command line names, and write what each returns."""
    result = {scenario: scenarios[scenario]() for scenario in sys.argv[2:]}
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
