"""Lightning's Trainer and Fabric: importing this module makes ``strategy="mgwfbp"`` known to both."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mgwfbp.errors import StrategyError
from mgwfbp.integrations import missing
from mgwfbp.plan import MergePlan
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.tune.tuning import Tuning

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as DDPFabricStrategy
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise missing("lightning", error) from None

__all__ = ["MgwfbpFabricStrategy", "MgwfbpStrategy", "ddp_of"]


class MgwfbpStrategy(DDPStrategy):
    """Lightning's DDP strategy with `mgwfbp.DistributedDataParallel`: ``Trainer(strategy="mgwfbp")``.

    ``Trainer(strategy=MgwfbpStrategy(plan="plan.json"))`` takes every argument of Lightning's strategy and of our
    class. Names in plans are those of the LightningModule. Lightning takes the model out of our class when ``fit`` has
    ended; `tuning` and `plan` stay here.
    """

    _ended: tuple[Tuning, MergePlan | None] | None = None

    @property
    def tuning(self) -> Tuning | None:
        """What the tuner is doing or has found; None before ``fit``."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.tuning
        return self._ended[0] if self._ended else None

    @property
    def plan(self) -> MergePlan | None:
        """The messages of a step, as they are or, after ``fit``, were in the end."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.plan
        return self._ended[1] if self._ended else None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with _stream_for(device_ids):
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def teardown(self) -> None:
        """Keep what the tuner found, and do what Lightning does."""
        if isinstance(self.model, DistributedDataParallel):
            self._ended = self.model.tuning, self.model.plan
        super().teardown()


class MgwfbpFabricStrategy(DDPFabricStrategy):
    """Fabric's DDP strategy with `mgwfbp.DistributedDataParallel`: ``Fabric(strategy="mgwfbp")``.

    ``Fabric(strategy=MgwfbpFabricStrategy(plan="plan.json"))`` takes every argument of Fabric's strategy and of our
    class. `ddp_of` finds the latter in what ``fabric.setup`` returns.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap a model."""
        device_ids = self._determine_ddp_device_ids()
        with _stream_for(device_ids):
            return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)


def ddp_of(module: nn.Module) -> DistributedDataParallel:
    """Return the model in our class that is in what ``fabric.setup`` returned: ``ddp_of(model).tuning``.

    Raises:
        StrategyError: where there is none.
    """
    for one in module.modules():
        if isinstance(one, DistributedDataParallel):
            return one
    raise StrategyError(f"{type(module).__name__} holds no mgwfbp.DistributedDataParallel: set it up with our strategy")


def _stream_for(device_ids: list[int] | None) -> AbstractContextManager[Any]:
    """Return the stream to wrap a model in, as Lightning does: CUDA graphs need another than the default one."""
    return nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())


for _registry, _strategy in ((StrategyRegistry, MgwfbpStrategy), (STRATEGY_REGISTRY, MgwfbpFabricStrategy)):
    _registry.register("mgwfbp", _strategy, description="DDP that finds the best messages", override=True)
