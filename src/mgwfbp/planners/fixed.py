"""Plans that do not look at time: one message per gradient, one for all, buckets of a given size."""

from mgwfbp.cost import Cost
from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.record import check_count
from mgwfbp.trace import ModelTrace

__all__ = ["DEFAULT_BUCKET_BYTES", "DEFAULT_FIRST_BUCKET_BYTES", "plan_bucket", "plan_single", "plan_wfbp"]

# What torch.nn.parallel.DistributedDataParallel uses: dist._DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb=25.
DEFAULT_FIRST_BUCKET_BYTES = 2**20
DEFAULT_BUCKET_BYTES = 25 * 2**20


def plan_wfbp(trace: ModelTrace, cost: Cost) -> MergePlan:  # noqa: ARG001 - every planner takes a cost
    """Send every gradient alone, as soon as it is ready: WFBP (Section II-C)."""
    return MergePlan.of_sizes(trace, [1] * len(trace.layers), planner="wfbp")


def plan_single(trace: ModelTrace, cost: Cost) -> MergePlan:  # noqa: ARG001 - every planner takes a cost
    """Send all gradients as one message after the backward pass: SyncEASGD."""
    return MergePlan.of_sizes(trace, [len(trace.layers)], planner="single")


def plan_bucket(
    trace: ModelTrace,
    cost: Cost,  # noqa: ARG001 - every planner takes a cost
    *,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    may_exceed: bool = True,
) -> MergePlan:
    """Fill buckets of a given size: ``first_bucket_bytes`` the first, ``bucket_bytes`` the others.

    PyTorch's DDP closes a bucket with the gradient that brings it to its size or beyond. Horovod, whose fusion buffer
    has one size, closes it before the gradient that would bring it beyond: ``may_exceed=False``.
    """
    limit = check_count(first_bucket_bytes, "first_bucket_bytes", PlanError, minimum=1)
    later_limit = check_count(bucket_bytes, "bucket_bytes", PlanError, minimum=1)
    sizes, held, held_bytes = [], 0, 0
    for layer in trace.layers:
        if held and not may_exceed and held_bytes + layer.grad_bytes > limit:
            sizes.append(held)
            held, held_bytes, limit = 0, 0, later_limit
        held += 1
        held_bytes += layer.grad_bytes
        if may_exceed and held_bytes >= limit:
            sizes.append(held)
            held, held_bytes, limit = 0, 0, later_limit
    if held:
        sizes.append(held)
    return MergePlan.of_sizes(trace, sizes, planner="bucket")
