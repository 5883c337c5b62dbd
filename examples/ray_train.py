"""Ray Train with our DDP: ``python examples/ray_train.py`` starts a cluster on this machine."""

from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

from mgwfbp.integrations.ray import prepare_model  # where ray.train.torch's stood


def train_loop() -> None:
    torch.manual_seed(ray.train.get_context().get_world_rank())
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    model: Any = prepare_model(net)  # parallel_strategy_kwargs={"plan": "plan.json"}: a plan from the first step on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    while model.tuning.state == "working":  # a training run goes on, of course
        x = torch.randn(8, 32)
        loss = nn.functional.mse_loss(model(x), x / 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({"loss": loss.item(), "tuning": str(model.tuning)})


def main(workers: int = 2) -> ray.train.Result:
    trainer = ray.train.torch.TorchTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=workers))
    return trainer.fit()


if __name__ == "__main__":
    main()
