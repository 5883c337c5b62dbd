"""All ranks stop after the same step."""

from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["StopVote"]


class StopVote:
    """Asks during every step whether any rank was told to stop; all of them get the same answer.

    The question is one small message in a group of its own that travels while the step computes: it neither waits for
    gradients nor holds them up.
    """

    def __init__(self, why_stop: Callable[[], str], group: dist.ProcessGroup) -> None:
        self._why_stop = why_stop
        self._group = group
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._sent: dist.Work | None = None

    def cast(self) -> None:
        """Say whether this rank was told to stop; when a step begins."""
        self._votes.fill_(int(bool(self._why_stop())))
        self._sent = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def count(self) -> bool:
        """Return whether any rank was, when it cast its vote; when the step has ended."""
        assert self._sent is not None  # noqa: S101 - cast comes first
        self._sent.wait()
        return bool(self._votes.item())
