"""Hugging Face Accelerate: an Accelerator that wraps models in our DDP."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mgwfbp.errors import StrategyError
from mgwfbp.integrations import missing
from mgwfbp.runtime.distributed import DistributedDataParallel

try:
    import accelerate
    from accelerate.utils import DistributedType, DynamoBackend, compile_regions, is_compiled_module
except ImportError as error:
    raise missing("accelerate", error) from None

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):
    """Accelerate's class, whose ``prepare`` wraps models in `mgwfbp.DistributedDataParallel` where it wraps in torch's.

    Where Accelerate uses no DDP (one process, FSDP, DeepSpeed, tensor parallelism) nothing differs. A
    ``DistributedDataParallelKwargs`` counts, with its communication hook.

    Args:
        *args: as Accelerate's class takes them.
        mgwfbp: what our class takes beside torch's arguments: ``{"plan": "plan.json"}``, ``{"tune": False}``.
        **kwargs: as Accelerate's class takes them.
    """

    _mgwfbp: Mapping[str, Any] = {}

    def __init__(self, *args: Any, mgwfbp: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mgwfbp = dict(mgwfbp or {})

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator, mgwfbp: Mapping[str, Any]) -> None:
        """Make one of these of an Accelerator that another library has made, in place."""
        if type(accelerator) is not accelerate.Accelerator:
            raise StrategyError(
                f"the accelerator is no plain accelerate.Accelerator but {type(accelerator).__module__}."
                f"{type(accelerator).__name__}, which may wrap models its own way: let that use "
                "mgwfbp.DistributedDataParallel"
            )
        accelerator.__class__ = cls
        accelerator._mgwfbp = dict(mgwfbp)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; all ranks must call it.

        Raises:
            StrategyError: where Transformer Engine's fp8 was asked for, which must be set up around torch's own class.
            PlanError: on every rank, where the plan cannot be run or ranks differ.
        """
        if evaluation_mode or not self._wraps(model):
            theirs: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return theirs
        if self.delayed_fp8_autocast:
            raise StrategyError("fp8 of Transformer Engine cannot be used here: take accelerate.Accelerator instead")
        # Accelerate's evaluation mode is all but the wrapping and what comes after it, which is to compile.
        dynamo = self.state.dynamo_plugin
        backend, dynamo.backend = dynamo.backend, DynamoBackend.NO
        try:
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            dynamo.backend = backend
        del prepared._is_accelerate_prepared  # says that it need not be wrapped, should it be prepared again
        arguments = {**(self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}), **self._mgwfbp}
        is_on_one_gpu = self.device.type != "cpu" and not self.verify_device_map(prepared)
        wrapped = DistributedDataParallel(prepared, device_ids=[self.device] if is_on_one_gpu else None, **arguments)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        outer: Any = wrapped
        if backend != DynamoBackend.NO and not is_compiled_module(wrapped):
            compiler: Any = compile_regions if dynamo.use_regional_compilation else torch.compile
            outer = compiler(wrapped, **dynamo.to_kwargs())
        outer._is_accelerate_prepared = True
        return outer  # type: ignore[no-any-return]

    def _wraps(self, model: nn.Module) -> bool:
        """Whether Accelerate would wrap a model in torch's DDP."""
        by_tensors = self.parallelism_config is not None and self.parallelism_config.tp_enabled
        in_ddp = self.distributed_type == DistributedType.MULTI_CPU or (self.multi_device and not by_tensors)
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        return in_ddp and not is_prepared and any(parameter.requires_grad for parameter in model.parameters())
