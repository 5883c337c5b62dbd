"""Ranks as processes: start them, wait, and read what each wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mgwfbp.runtime.gloo import destroy_process_group, init_process_group

Scenario = Callable[[], dict[str, Any]]


def run_ranks(
    module: str, scenarios: Sequence[str], folder: Path, world: int, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``python -m module folder scenario ...`` once per rank and return what each wrote; see `be_rank`."""
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, str(folder), *scenarios],
                env={**os.environ, **place, **(environment or {})},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    try:
        for process in processes:
            process.wait(timeout=250)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [folder / f"rank{rank}.json" for rank in range(world)]
    assert all(result.exists() for result in results), "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(result.read_text()) for result in results]


def be_rank(scenarios: Mapping[str, Scenario]) -> None:
    """Join the other ranks, run the scenarios that the command line names, and write what each returns."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=20))
    run_scenarios(scenarios)
    destroy_process_group()


def run_scenarios(scenarios: Mapping[str, Scenario]) -> None:
    """Run the scenarios that the command line names, and write what each returns."""
    result = {scenario: scenarios[scenario]() for scenario in sys.argv[2:]}
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
