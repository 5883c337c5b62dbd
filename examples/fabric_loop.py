"""A training loop with Fabric and our DDP: ``torchrun --nproc-per-node 2 examples/fabric_loop.py``."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mgwfbp import DistributedDataParallel
from mgwfbp.integrations.lightning import ddp_of  # makes strategy="mgwfbp" known, too


def main() -> DistributedDataParallel:
    fabric = lightning.Fabric(strategy="mgwfbp", accelerator="cpu", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(800, 32)), batch_size=8))
    while ddp_of(model).tuning.state == "working":  # a training run goes on, of course
        for (x,) in data:
            loss = nn.functional.mse_loss(model(x), x / 2)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(ddp_of(model).tuning)
    return ddp_of(model)


if __name__ == "__main__":
    main()
