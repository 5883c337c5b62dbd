"""Lightning's Trainer with our DDP: ``python examples/lightning_trainer.py`` starts both ranks."""

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mgwfbp.integrations.lightning  # noqa: F401 - makes strategy="mgwfbp" known


class Halves(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x), x / 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(**arguments: Any) -> lightning.Trainer:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(800, 32)), batch_size=8)
    arguments = {"max_steps": 1000, "default_root_dir": "runs", **arguments}
    trainer = lightning.Trainer(strategy="mgwfbp", accelerator="cpu", devices=2, **arguments)
    trainer.fit(Halves(), data)
    if trainer.is_global_zero:
        print(trainer.strategy.tuning)
    return trainer


if __name__ == "__main__":
    main()
