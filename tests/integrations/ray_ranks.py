"""What one rank does in the tests of Ray Train: ``python -m tests.integrations.ray_ranks FOLDER SCENARIO``.

With ``num_workers=0`` Ray Train runs the loop in the process that calls it, and takes the ranks of torchrun.
"""

from typing import Any

import ray.train
import ray.train.torch
import ray_train
import torch
from torch import nn

import mgwfbp
from mgwfbp import MergePlan
from mgwfbp.integrations.ray import prepare_model
from tests.integrations.launch import be_rank, digests


def example() -> dict[str, Any]:
    return {"tuning": ray_train.main(workers=0).metrics["tuning"]}


def loops() -> dict[str, Any]:
    """Train with Ray's function and with ours, and return the weights of both."""
    told: dict[str, Any] = {}

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def train(prepare: Any, **arguments: Any) -> list[str]:
        model = prepare(net(), parallel_strategy_kwargs={"gradient_as_bucket_view": True, **arguments})
        assert model.gradient_as_bucket_view
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = ray.train.get_context().get_world_rank()
        for step, x in enumerate(torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(rank))):
            if step % 2:
                loss = nn.functional.mse_loss(model(x), x / 2)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with model.no_sync(), torch.autocast("cpu", torch.bfloat16):
                    nn.functional.mse_loss(model(x), x / 2).backward()
        told["names"] = list(model.state_dict())
        if isinstance(model, mgwfbp.DistributedDataParallel):
            told.setdefault("plans", []).append(model.plan)
        return digests(model)

    def loop() -> None:
        names = [name for name, _ in net().named_parameters()]
        plan = MergePlan("Sequential", "by hand", (tuple(names[::2]), tuple(names[1::2])))
        told["weights"] = [train(ray.train.torch.prepare_model), train(prepare_model), train(prepare_model, plan=plan)]
        told["plan"] = told.pop("plans")[-1] == plan

    ray.train.torch.TorchTrainer(loop, scaling_config=ray.train.ScalingConfig(num_workers=0)).fit()
    return told


if __name__ == "__main__":
    be_rank({"example": example, "loops": loops})
