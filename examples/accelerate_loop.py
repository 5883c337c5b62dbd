"""A training loop with Accelerate and our DDP: ``torchrun --nproc-per-node 2 examples/accelerate_loop.py``."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mgwfbp import DistributedDataParallel
from mgwfbp.integrations.accelerate import Accelerator  # where accelerate's stood


def main() -> DistributedDataParallel:
    accelerator = Accelerator(cpu=True)  # mgwfbp={"plan": "plan.json"} for a plan from the first step on
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = DataLoader(TensorDataset(torch.randn(800, 32)), batch_size=8)
    model: DistributedDataParallel
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    while model.tuning.state == "working":  # a training run goes on, of course
        for (x,) in data:
            loss = nn.functional.mse_loss(model(x), x / 2)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(model.tuning)
    return model


if __name__ == "__main__":
    main()
