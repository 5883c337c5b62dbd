"""Options that several commands share."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from mgwfbp.errors import PlanError
from mgwfbp.planners import PLANNERS, Planner, plan_bucket, planner_of
from mgwfbp.planners.fixed import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mgwfbp.units import quote

__all__ = [
    "BucketMb",
    "FirstBucketMb",
    "Output",
    "PlannerName",
    "TraceFile",
    "find_planner",
    "planners",
    "worker_counts",
]

_MIB = 2**20


def find_planner(name: str, chosen: Mapping[str, Planner]) -> Planner:
    """Return a planner by its name, of those chosen or any that `planner_of` knows, or refuse it."""
    if name in chosen:
        return chosen[name]
    try:
        return planner_of(name)
    except PlanError as error:
        raise typer.BadParameter(str(error), param_hint="--planner") from None


TraceFile = Annotated[
    str,
    typer.Option("--trace", metavar="FILE|NAME", help="trace.json, or a name that `mgwfbp traces` lists."),
]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="Where to write the result; stdout if not given."),
]
BucketMb = Annotated[
    float,
    typer.Option("--bucket-mb", metavar="MIB", help="Size of the buckets of planner `bucket`."),
]
FirstBucketMb = Annotated[
    float,
    typer.Option("--first-bucket-mb", metavar="MIB", help="Size of the first of these buckets."),
]
PlannerName = Annotated[
    str,
    typer.Option(
        "--planner", metavar="NAME", help=f"Who makes the plan: {', '.join(PLANNERS)}, cautious, or bucket-N for N MiB."
    ),
]
DEFAULT_BUCKET_MB = DEFAULT_BUCKET_BYTES / _MIB
DEFAULT_FIRST_BUCKET_MB = DEFAULT_FIRST_BUCKET_BYTES / _MIB


def planners(bucket_mb: float, first_bucket_mb: float) -> dict[str, Planner]:
    """Return all planners by name, with the bucket sizes that were asked for (in MiB, as DDP's ``bucket_cap_mb``)."""
    bucket_bytes = _cap_bytes("--bucket-mb", bucket_mb)
    first_bucket_bytes = _cap_bytes("--first-bucket-mb", first_bucket_mb)
    bucket = partial(plan_bucket, first_bucket_bytes=first_bucket_bytes, bucket_bytes=bucket_bytes)
    return {**PLANNERS, "bucket": bucket}


def worker_counts(text: str) -> list[int]:
    """Return the numbers of workers that were asked for, ``4,8,16``."""
    counts = []
    for part in text.split(","):
        # No number of workers has a hundred digits, and Python refuses to read one of thousands.
        if not part.strip().isdecimal() or len(part) > 100 or int(part) < 1:
            raise typer.BadParameter(f"{quote(part)}, expected whole numbers of 1 or more: 4,8", param_hint="--workers")
        counts.append(int(part))
    return counts


def _cap_bytes(option: str, size_mb: float) -> int:
    if not 1 <= size_mb * _MIB <= 2**53:
        raise typer.BadParameter(f"{size_mb:g} MiB, expected 1 byte or more", param_hint=option)
    return int(size_mb * _MIB)
