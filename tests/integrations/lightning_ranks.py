"""What one rank does in the tests of Lightning: ``python -m tests.integrations.lightning_ranks FOLDER SCENARIO``."""

import sys
from pathlib import Path
from typing import Any

import fabric_loop
import lightning
import lightning_trainer
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDdp
from lightning.pytorch.strategies import DDPStrategy as Ddp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mgwfbp import MergePlan
from mgwfbp.integrations.lightning import MgwfbpFabricStrategy, MgwfbpStrategy
from tests.integrations.launch import be_rank, digests, found

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class StopWhenSettled(lightning.Callback):
    """Ends the training some steps after the tuner, which all ranks do in the same step."""

    left = 5

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= trainer.strategy.tuning.state != "working"
        trainer.should_stop = self.left <= 0


class WithManualSteps(lightning_trainer.Halves):
    """The example's module, which takes its steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def example() -> dict[str, Any]:
    trainer = lightning_trainer.main(callbacks=[StopWhenSettled()], enable_checkpointing=False, **QUIET)
    strategy: Any = trainer.strategy
    return {"settled": found(strategy.tuning), "plan": len(strategy.plan.layer_names), "steps": trainer.global_step}


def fabric_example() -> dict[str, Any]:
    model: Any = fabric_loop.main()
    return {"settled": found(model.tuning), "plan": len(model.plan.layer_names)}


def _plan() -> MergePlan:
    """A plan that torch would not make: neighbours apart."""
    names = [name for name, _ in lightning_trainer.Halves().named_parameters()]
    return MergePlan("Halves", "by hand", (tuple(names[::2]), tuple(names[1::2])))


def _fit(
    strategy: Any, *, resume: str | None = None, steps: int = 40, manual: bool = False, **arguments: Any
) -> tuple[lightning.Trainer, list[str]]:
    torch.manual_seed(1)
    module = WithManualSteps() if manual else lightning_trainer.Halves()
    data = DataLoader(TensorDataset(torch.randn(160, 32)), batch_size=8)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        enable_checkpointing=False,
        **QUIET,
        **arguments,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, digests(module)


def ways() -> dict[str, Any]:
    """Train in several ways with torch's class and with ours, and return the weights of both."""
    different: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulation, clipping and autocast": {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "precision": "bf16-mixed",
        },
        "manual": {"manual": True},
    }
    return {name: [_fit(kind(), **how)[1] for kind in (Ddp, MgwfbpStrategy)] for name, how in different.items()}


def checkpoints() -> dict[str, Any]:
    """Save half-way with one class, go on with another."""
    plan = _plan()
    ours = lambda: MgwfbpStrategy(plan=plan)  # noqa: E731
    saved = {}
    for name, kind in (("torch's", Ddp), ("ours", ours)):
        trainer, _ = _fit(kind(), steps=20)
        saved[name] = f"{sys.argv[1]}/{name}.ckpt"
        trainer.save_checkpoint(saved[name])
        trainer.strategy.barrier()
    kept = torch.load(saved["ours"], weights_only=False)["state_dict"]
    trainer, _ = _fit(ours())
    strategy: Any = trainer.strategy
    return {
        "names": list(kept) == [name for name, _ in lightning_trainer.Halves().named_parameters()],
        "resumed": [_fit(kind(), resume=path)[1] for kind in (Ddp, ours) for path in saved.values()],
        "plan": [strategy.plan == plan, strategy.tuning.reason],
    }


def fabric() -> dict[str, Any]:
    """Accumulate, save and load with Fabric, with torch's class and with ours."""

    def train(kind: Any) -> list[str]:
        fabric = lightning.Fabric(strategy=kind(), accelerator="cpu", devices=2, precision="bf16-mixed")
        fabric.launch()
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(fabric.global_rank))
        path = Path(sys.argv[1]) / f"{kind.__name__}.ckpt"
        for step, batch in enumerate(x):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(nn.functional.mse_loss(model(batch), batch / 2))
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            if step == 21:
                fabric.save(path, {"model": model})
                assert list(torch.load(path)["model"]) == list(net.state_dict())
        fabric.load(path, {"model": model})
        return digests(net)

    return {"weights": [train(kind) for kind in (FabricDdp, MgwfbpFabricStrategy)]}


if __name__ == "__main__":
    be_rank(
        {
            "example": example,
            "fabric_example": fabric_example,
            "ways": ways,
            "checkpoints": checkpoints,
            "fabric": fabric,
        }
    )
