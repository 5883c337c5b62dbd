"""A drop-in DistributedDataParallel that sends exactly the messages of a plan."""

import contextlib
import inspect
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from mgwfbp.errors import PlanError
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.agreement import agree_on_plan
from mgwfbp.runtime.compile_private import install, uncompiled, warn_of_old_cuts
from mgwfbp.runtime.strides import StrideWatch
from mgwfbp.runtime.torch_private import PlannableParallel, missing
from mgwfbp.units import quote

__all__ = ["DistributedDataParallel"]

PlanLike = MergePlan | str | os.PathLike[str]


class DistributedDataParallel(PlannableParallel):
    """Torch's `torch.nn.parallel.DistributedDataParallel`, with every argument and method of it, and plans.

    ``plan`` is a `MergePlan` or the path of one, over the names of ``module.named_parameters()`` that get a gradient
    and are left to DDP's Reducer. Its messages are the Reducer's buckets from the first step on; averaged gradients
    are those of torch's class (bitwise at 2 ranks; with more ranks the bucket a gradient travels in decides in which
    order it is summed). Without ``plan`` the buckets are torch's own.

    All ranks must have the same plan: they compare before anything is changed, and a plan that differs, cannot be read
    or is not for this model is an error on every rank. A message holds gradients of one dtype and one device; a sparse
    gradient travels alone. Where this torch cannot hold given buckets, and with ``mixed_precision``, a warning says why
    and the buckets are torch's own.
    """

    def __init__(self, module: nn.Module, *args: Any, plan: PlanLike | None = None, **kwargs: Any) -> None:
        given = inspect.signature(TorchDistributedDataParallel.__init__).bind(self, module, *args, **kwargs).arguments
        self._plan: MergePlan | None = None
        self._watch: StrideWatch | None = None
        self._requested = _unless_missing(plan)
        self._clash = [name for name in ("bucket_cap_mb", "bucket_cap_mb_list") if given.get(name) is not None]
        # init_sync=False asks for a construction without collectives; a plan is compared even then.
        self._compares = self._requested is not None or given.get("init_sync", True)
        super().__init__(module, *args, **kwargs)
        if self._requested is not None and self.cannot_hold:
            _warn_unused(self.cannot_hold)
        del self._requested, self._clash, self._compares
        self._finish()

    @property
    def plan(self) -> MergePlan | None:
        """The plan in force; None while the buckets are torch's own."""
        return self._plan

    def replan(self, plan: PlanLike | None) -> None:
        """Change to another plan, or with None to torch's own buckets. All ranks must call it, with the same plan.

        To be called between steps: after a synchronised backward pass and before the next forward pass, not inside
        ``no_sync`` or ``join``. Gradients, comm hooks and everything else that was set stay; a comm hook that keeps
        state per bucket (PowerSGD) must be able to meet other buckets. With ``static_graph`` the first step after it
        sends its messages after the backward pass, as the first step of all does.
        """
        if self.in_join:
            raise PlanError("the plan cannot be changed inside join(), where ranks that ran out of data do not answer")

        def prepare() -> MergePlan | None:
            self.check_finished()
            return self._prepare(plan, *self.reducible())

        if plan is not None and (plan := _unless_missing(plan)) is None:
            return
        if self.cannot_hold:
            raise PlanError(f"no plan can be held: {self.cannot_hold}")
        with self._on_device():
            agreed = agree_on_plan(prepare, self.process_group)
        changed = (agreed and agreed.groups) != (self._plan and self._plan.groups)
        self._plan = agreed
        if changed:
            self.rebuild_reducer()
            self.check_held()
            warn_of_old_cuts(self)

    def before_reducer(self, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]) -> None:
        """Agree on the plan; called by the constructor, before torch's own first exchange with other ranks."""
        if not self.__dict__.get("_compares", False):
            return
        requested = None if self.cannot_hold else self._requested

        def prepare() -> MergePlan | None:
            if requested is not None and self._clash:
                raise PlanError(f"plan= and {self._clash[0]}= are both given, and each says how large buckets are")
            return self._prepare(requested, parameters, sparse)

        with self._on_device():
            self._plan = agree_on_plan(prepare, self.process_group)

    def wanted_buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[int]] | None:
        """Return the plan as indices into the Reducer's parameters."""
        if self._plan is None:
            return None
        places = {name: index for index, name in enumerate(self._names(parameters))}
        return [[places[name] for name in group] for group in self._plan.groups]

    def __getstate__(self) -> Any:
        self._stop_watch()  # its hooks belong to this object alone
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_plan": _unless_missing(state["_plan"])})
        self._finish()

    def _finish(self) -> None:
        """Do what follows every construction, be it from the constructor, a pickle or a copy."""
        if self.cannot_hold:
            return
        install()
        self.check_held()
        named = self.module.named_parameters()
        self._watch = StrideWatch(self, [(name, parameter) for name, parameter in named if parameter.requires_grad])

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _prepare(
        self, plan: PlanLike | None, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]
    ) -> MergePlan | None:
        """Read a plan and check that this model's gradients can be sent as it says."""
        if plan is None:
            return None
        loaded = plan if isinstance(plan, MergePlan) else MergePlan.load(plan)
        if any(name != uncompiled(name) for name in loaded.layer_names):  # made for the compiled model
            loaded = replace(loaded, groups=tuple(tuple(map(uncompiled, group)) for group in loaded.groups))
        kinds = {
            name: _Kind(parameter.dtype, parameter.device, is_sparse)
            for name, parameter, is_sparse in zip(self._names(parameters), parameters, sparse, strict=True)
        }
        loaded.check_covers(list(kinds), what="the model")
        for index, group in enumerate(loaded.groups):
            _check_message(index, [(name, kinds[name]) for name in group])
        return loaded

    def _names(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        by_parameter = {id(parameter): uncompiled(name) for name, parameter in self.module.named_parameters()}
        return [by_parameter[id(parameter)] for parameter in parameters]

    def _on_device(self) -> AbstractContextManager[object]:
        """Talk to other ranks from the model's GPU, which need not be the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


class _Kind(NamedTuple):
    """What must be equal within a message."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


def _check_message(index: int, members: Sequence[tuple[str, _Kind]]) -> None:
    first_name, first = members[0]
    for name, kind in members:
        if kind.is_sparse and len(members) > 1:
            raise PlanError(
                f"message {index} of the plan merges {quote(name)}, whose gradient is sparse, with others; "
                "DDP sends a sparse gradient alone: give it a message of its own"
            )
        if kind != first:
            raise PlanError(
                f"message {index} of the plan merges {quote(first_name)} ({first}) with {quote(name)} ({kind}); "
                "a message holds one dtype on one device: split it"
            )


def _unless_missing(plan: PlanLike | None) -> PlanLike | None:
    """Return the plan where this torch can hold one; else warn, and return None."""
    if plan is not None and (absent := missing()):
        _warn_unused(f"torch {torch.__version__} lacks {', '.join(absent)}")
        return None
    return plan


def _warn_unused(reason: str) -> None:
    warnings.warn(f"the plan is not used and DDP's own buckets are: {reason}", RuntimeWarning, stacklevel=4)
