"""Several nccl ranks on one GPU, on emulated hosts: all-reduce times over sizes.

    python benchmarks/lab_gpu.py --output benchmarks

Needs one GPU, torch with nccl, pyroute2, and root or unprivileged user namespaces; takes two to three minutes. Writes
``lab_gpu.json`` and ``lab_gpu.md``. A run that fails is recorded as such, and the others go on.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))  # runs from a checkout too

from mgwfbp.errors import LabError  # noqa: E402
from mgwfbp.lab import Cluster, Line, parse_rate, run_lab  # noqa: E402
from mgwfbp.units import format_bytes, format_seconds  # noqa: E402

SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
TIMEOUT_S = 75  # per run; three runs stay below five minutes whatever happens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the two files")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", default="10gbit,25gbit")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: try the script without a GPU"
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options = parser.parse_args()
    rates = options.rates.split(",")
    # The last one shows what MPS is for; it comes last because it is the one that may take long.
    plans = [(rate, True) for rate in rates] + [(rates[0], False)] * (options.backend == "nccl")
    runs = []
    for rate, use_mps in plans:
        runs.append(run_once(options, rate, use_mps=use_mps))
        found = {"machine": describe_machine(), "hosts": options.hosts, "runs": runs}
        # After every run, so that what was measured is kept whatever comes.
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "lab_gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.output / "lab_gpu.md").write_text(describe(found), encoding="utf-8")
    sys.stdout.write(describe(found))
    return 0 if all("rows" in run for run in runs[: len(rates)]) else 1


def run_once(options: argparse.Namespace, rate: str, *, use_mps: bool) -> dict[str, Any]:
    lines: list[Line] = []
    cluster = Cluster(num_hosts=options.hosts, rate_bits_per_s=parse_rate(rate))
    command = [sys.executable, str(HERE / "lab_allreduce.py"), "--backend", options.backend, "--sizes", options.sizes]
    command += ["--repeats", "30", "--seconds-per-size", "2"]
    environment = {**os.environ, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    sys.stderr.write(f"{options.hosts} {options.backend} ranks at {rate}, {'with' if use_mps else 'without'} MPS ...\n")
    start_s = time.monotonic()
    run: dict[str, Any] = {"rate": rate, "use_mps": use_mps, "backend": options.backend}
    try:
        run_lab(
            cluster, command, environment=environment, on_line=lines.append, timeout_s=TIMEOUT_S, use_mps=use_mps
        ).check()
        run |= json.loads(next(line.text for line in lines if line.text.startswith("{")))
    except (LabError, StopIteration) as error:
        run["error"] = str(error) or "no result"
        run["last_lines"] = [f"{line.label} | {line.text}" for line in lines[-60:]]
        sys.stderr.write("\n".join([*run["last_lines"], run["error"], ""]))
    run["notes"] = [line.text for line in lines if line.rank is None]
    run["wall_s"] = time.monotonic() - start_s
    return run


def describe_machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        gpus = []
    return {
        "gpus": [gpu for gpu in gpus if gpu],
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def describe(found: dict[str, Any]) -> str:
    """Write what was found as a document."""
    machine, runs = found["machine"], found["runs"]
    measured = [run for run in runs if "rows" in run]
    versions = f"torch {measured[0]['torch']}, nccl {measured[0].get('nccl', '-')}" if measured else "-"
    text = [
        "# All-reduce of several nccl ranks that share one GPU, on emulated hosts",
        "",
        "*Measured*, not simulated. Written by `python benchmarks/lab_gpu.py`.",
        "",
        f"- {found['hosts']} hosts, one rank each, links of the given rate in each direction",
        f"- GPU: {', '.join(machine['gpus']) or 'none'}; {machine['cores']} cores; kernel {machine['kernel']}",
        f"- Python {machine['python']}, {versions}",
        "- a time is the median of up to 30 repeats, each of them the slowest rank's, after a small all-reduce of all",
        "- *ring* is what a ring would take if its links carried only data: 2 (N - 1) / N of the bytes, at the rate",
        "",
        *(f"- note: {note}" for run in runs for note in run["notes"]),
        "",
    ]
    titles = ["bytes", *(title(run) for run in measured)]
    text += [row(titles), row(["--:"] * len(titles))]
    for index, first in enumerate(measured[0]["rows"] if measured else []):
        cells = [cell(run, run["rows"][index], found["hosts"]) for run in measured]
        text.append(row([format_bytes(first["bytes"]), *cells]))
    text += ["", *(f"Failed: {title(run)}: {run['error']}" for run in runs if "error" in run)]
    return "\n".join(text).rstrip() + "\n"


def title(run: dict[str, Any]) -> str:
    return f"{run['rate']}{'' if run['use_mps'] else ', no MPS'}"


def cell(run: dict[str, Any], measured: dict[str, float], num_hosts: int) -> str:
    ring_s = 2 * (num_hosts - 1) / num_hosts * measured["bytes"] * 8 / parse_rate(run["rate"])
    return f"{format_seconds(measured['median_s'])} ({ring_s / measured['median_s']:.0%} of ring)"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
