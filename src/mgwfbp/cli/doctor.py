"""``mgwfbp doctor``: what of this package works on this machine, and what to do about the rest."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import mgwfbp
from mgwfbp.cli.machine import processor
from mgwfbp.cli.output import print_line
from mgwfbp.errors import LabError
from mgwfbp.lab import Cluster, run_lab
from mgwfbp.lab.mps import find_control
from mgwfbp.units import plural, quote

__all__ = ["OLDEST_TORCH", "Finding", "doctor", "find_all"]

OLDEST_TORCH = (2, 3)
# How long packages may take to import: torch takes a minute from a cold disk.
IMPORT_S = 180.0
LAB_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that works here, or does not."""

    area: str  # one of `AREAS`
    works: bool
    what: str  # in words
    remedy: str = ""  # what to do where it does not work
    is_optional: bool = False  # whether the area is of use without it


Packages = Mapping[str, Mapping[str, Any]]  # what `probe` says of each


def doctor(
    areas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[AREA]...",
            help="What you need: plan, report, ddp, gpu, models, train or lab. All if none is named.",
        ),
    ] = None,
) -> None:
    """Say what works on this machine, and what to do about the rest.

    Packages are imported and tried, in a process of their own; a lab of two hosts is made. The exit status is 0, or 1
    if an AREA that was named does not work.
    """
    for name in areas or ():
        if name not in AREAS:
            raise typer.BadParameter(f"{quote(name)} is not one of {', '.join(AREAS)}", param_hint="AREA")
    print_line(
        f"mgwfbp {mgwfbp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}, "
        f"{processor()}, {plural(os.cpu_count() or 1, 'core')}"
    )
    findings = find_all(areas or list(AREAS))
    for one in findings:
        mark = "yes" if one.works else "-" if one.is_optional else "no"
        print_line(f"{one.area:8}{mark:5}{one.what}")
    remedies = list(dict.fromkeys(f"{one.area}: {one.remedy}" for one in findings if one.remedy and not one.works))
    if remedies:
        print_line("What to do, where you need it:")
    for remedy in remedies:
        print_line(f"  {remedy}")
    if areas and not all(one.works or one.is_optional for one in findings):
        raise typer.Exit(1)


def find_all(areas: Sequence[str]) -> list[Finding]:
    """Try what these areas need and return what was found, in the order of `AREAS`."""
    wanted = [name for name in AREAS if name in areas]
    packages = _probe(dict.fromkeys(package for name in wanted for package in NEEDS[name]))
    return [finding for name in wanted for finding in AREAS[name](packages)]


def _probe(names: Iterable[str]) -> Packages:
    """Import packages in a process of its own; one that ends the process is blamed, and the others are asked again."""
    left, answers = list(names), {}
    while left:
        command = [sys.executable, "-P", "-m", "mgwfbp.cli.probe", *left]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # What a launcher has set is for the ranks of a training run, and this is none.
        alone = {name: value for name, value in variables.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        ended = "did not end"
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                command, env=alone, capture_output=True, timeout=IMPORT_S, check=False
            )
            output, ended = done.stdout, f"ended Python with status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, ended = error.stdout or b"", f"took longer than {IMPORT_S:g} s"
        for line in output.decode(errors="replace").splitlines():
            if line.startswith('{"name": '):  # packages may print lines of their own
                answer = json.loads(line)
                answers[answer["name"]] = answer
        left = [name for name in left if name not in answers]
        if left:
            answers[left[0]] = {"problem": f"importing it {ended}"}
            left = left[1:]
    return answers


def _package(area: str, packages: Packages, name: str, use: str, extra: str, *, is_optional: bool = False) -> Finding:
    """Say whether a package can be imported."""
    shown = NAMES.get(name, name)
    answer = packages[name]
    if "problem" not in answer:
        return Finding(area, works=True, what=f"{shown} {answer['version']}: {use}")
    install = f"pip install 'mgwfbp[{extra}]'" if extra else f"pip install {shown}"
    if answer.get("is_missing"):
        return Finding(area, works=False, what=f"no {shown}: {use}", remedy=install, is_optional=is_optional)
    what = f"{shown} is installed and cannot be imported: {answer['problem']}"
    return Finding(
        area, works=False, what=what, remedy=f"pip install --force-reinstall {shown}", is_optional=is_optional
    )


def _plan(packages: Packages) -> list[Finding]:
    return [_package("plan", packages, "numpy", "plans, simulations and reports as pages or text", "")]


def _report(packages: Packages) -> list[Finding]:
    return [_package("report", packages, "matplotlib", "figures as png, svg and pdf", "report")]


def _torch(area: str, packages: Packages) -> tuple[Finding, Mapping[str, Any]]:
    """Say whether torch can be used at all, and what else is known of it."""
    found, answer = _package(area, packages, "torch", "measuring and training", ""), packages["torch"]
    oldest = ".".join(map(str, OLDEST_TORCH))
    if found.works and _number(answer["version"]) < OLDEST_TORCH:
        what = f"torch {answer['version']} is too old"
        return Finding(area, works=False, what=what, remedy=f"pip install 'torch>={oldest}'"), {}
    return found, answer if found.works else {}


def _ddp(packages: Packages) -> list[Finding]:
    torch, answer = _torch("ddp", packages)
    if not torch.works:
        return [torch]
    lacks, backends = answer["lacks"], answer["backends"]
    takes = Finding("ddp", works=True, what=f"torch {answer['version']} takes plans: models are tuned")
    if lacks:
        takes = Finding(
            "ddp",
            works=False,
            what=f"torch {answer['version']} takes no plans, DDP's own buckets are used: it lacks {', '.join(lacks)}",
            remedy="use a version of docs/torch-versions.md",
        )
    network = "set GLOO_SOCKET_IFNAME to a network interface that is up, or give this host's name an address"
    gloo = _backend(backends, "gloo", "messages between processors", network)
    nccl = _backend(backends, "nccl", "messages between GPUs", "", is_optional=True)
    mpi = _backend(backends, "mpi", "messages by MPI", "", is_optional=True)
    return [takes, gloo, nccl, mpi]


def _backend(backends: Mapping[str, str], name: str, use: str, remedy: str, *, is_optional: bool = False) -> Finding:
    problem = backends.get(name, "not in this torch")
    what = f"{name}: {problem or use}"
    return Finding("ddp", works=not problem, what=what, remedy=remedy, is_optional=is_optional)


def _gpu(packages: Packages) -> list[Finding]:
    torch, answer = _torch("gpu", packages)
    if not torch.works:
        return [torch]
    if answer["gpus"]:
        found = Finding("gpu", works=True, what=f"torch sees {plural(len(answer['gpus']), 'GPU')}: {answer['gpus'][0]}")
        problem = answer["backends"].get("nccl", "")
        nccl = Finding("gpu", works=not problem, what=f"nccl: {problem or 'an all-reduce of one rank'}")
        return [found, nccl, _mps()]
    without = "; on a GPU that you do not have: mgwfbp measure analytic"
    remedy = f"see whether nvidia-smi lists one, and whether torch {answer['version']} is a build for CUDA{without}"
    return [Finding("gpu", works=False, what="torch sees no GPU", remedy=remedy)]


def _mps() -> Finding:
    use = "ranks of a lab share a GPU by it"
    if find_control() is not None:
        return Finding("gpu", works=True, what=f"CUDA MPS: {use}")
    remedy = "install nvidia-cuda-mps-control for labs with several ranks on one GPU"
    return Finding("gpu", works=False, what=f"no CUDA MPS: {use}", remedy=remedy, is_optional=True)


def _models(packages: Packages) -> list[Finding]:
    torch, _ = _torch("models", packages)
    if not torch.works:
        return [torch]
    return [
        _package("models", packages, "torchvision", "models by name, as resnet50", "models"),
        _package("models", packages, "transformers", "models by name, as hf:bert", "models"),
    ]


def _train(packages: Packages) -> list[Finding]:
    torch, _ = _torch("train", packages)
    if not torch.works:
        return [torch]
    return [
        _package("train", packages, "torchvision", "models and images", "train"),
        _package("train", packages, "PIL", "images", "train"),
        _package("train", packages, "sklearn", "the handwritten digits", "train"),
        _package("train", packages, "tensorboard", "logs, else --no-tensorboard", "train", is_optional=True),
    ]


def _lab(packages: Packages) -> list[Finding]:
    pyroute = _package("lab", packages, "pyroute2", "emulated hosts", "lab")
    if not pyroute.works:
        return [pyroute]
    try:
        _make_lab(delay_s=0.0)
    except LabError as error:
        what, _, remedy = str(error).rpartition(": ")
        return [Finding("lab", works=False, what=what or remedy, remedy=remedy if what else "")]
    made = Finding("lab", works=True, what="a lab of two hosts was made, with links of 1 Gbit")
    try:
        _make_lab(delay_s=1e-4)
    except LabError as error:
        remedy = "load the kernel's module sch_netem, or leave --delay out"
        return [made, Finding("lab", works=False, what=f"no --delay: {error}", remedy=remedy, is_optional=True)]
    return [made, Finding("lab", works=True, what="links can have a --delay")]


def _make_lab(delay_s: float) -> None:
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9, delay_s=delay_s)
    run_lab(cluster, [sys.executable, "-c", ""], timeout_s=LAB_S, use_mps=False).check()


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> _number("2.15.0+cu132")
    (2, 15)
    """
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# In the order in which they are shown.
AREAS: Mapping[str, Callable[[Packages], list[Finding]]] = {
    "plan": _plan,
    "report": _report,
    "ddp": _ddp,
    "gpu": _gpu,
    "models": _models,
    "train": _train,
    "lab": _lab,
}
# What each imports; torch after those that do without.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("numpy",),
    "report": ("matplotlib",),
    "ddp": ("torch",),
    "gpu": ("torch",),
    "models": ("torch", "torchvision", "transformers"),
    "train": ("torch", "PIL", "sklearn", "tensorboard", "torchvision"),
    "lab": ("pyroute2",),
}
# What a package is called where it is installed.
NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}
