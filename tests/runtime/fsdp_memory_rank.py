"""What torch allocates in a step of FSDP2, one of 8 ranks whose others are not there: ``python -m ... FOLDER``.

Torch's group for tests sends nothing, so that one process allocates what each of 8 would. Activations are negligible.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mgwfbp
from mgwfbp import FsdpPlan, LayerTrace, LinearCost, ModelTrace, predict_fsdp
from mgwfbp.measure.backward import measure_backward
from mgwfbp.memory import Precision

RANKS, WIDTH = 8, 256
BLOCKS = tuple(f"h.{place}" for place in range(8))


class Blocks(nn.Module):
    """Blocks of one weight each, and a head twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in BLOCKS)
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def each(*reshard: bool, forward: int = 1, backward: int = 1) -> FsdpPlan:
    return FsdpPlan("toy", tuple((name,) for name in (*BLOCKS, "head")), reshard, forward, backward)


PLANS = {
    "resharded": each(*[True] * 9),
    "far": each(*[True] * 9, forward=2, backward=3),
    "kept": each(*[False] * 9),
    "head kept": each(*[True] * 8, False),
    "some": each(True, False, True, True, False, True, False, True, True, backward=2),
    "merged": FsdpPlan("toy", (BLOCKS[:3], BLOCKS[3:4], (*BLOCKS[4:], "head")), (True, True, True), 1, 2),
    "head in the root": FsdpPlan("toy", tuple((name,) for name in BLOCKS), (True,) * 8, root=("head",)),
    "whole": FsdpPlan("toy", (), (), root=(*BLOCKS, "head")),
}
IN_16_BITS = ("far", "kept", "head in the root")


def allocated(plan: FsdpPlan, folder: Path, policy: Any) -> int:
    """Return how much more than before a step holds at most."""
    model, x = mgwfbp.fully_shard(Blocks(), plan, mp_policy=policy), torch.rand(1, WIDTH, requires_grad=True)
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(x).sum().backward()
    profile.export_chrome_trace(str(folder / "memory.json"))
    events = json.loads((folder / "memory.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted((one for one in events if one.get("name") == "[memory]"), key=lambda one: float(one["ts"])):
        held += int(event["args"]["Bytes"])
        most = max(most, held)
    return most


class Cut(nn.Module):
    """A weight that tensor parallelism has cut into a part for each rank."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (RANKS,))
        self.own = nn.Linear(WIDTH, 1, bias=False)
        self.weight = nn.Parameter(DTensor.from_local(torch.rand(4, WIDTH), mesh, [Shard(0)], run_check=False))

    def forward(self, x: Tensor) -> Tensor:
        cut: Any = self.weight
        return self.own(x) + (cut.to_local() @ x.T).sum()  # type: ignore[no-any-return]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    layers = [LayerTrace(f"{name}.weight", 1.0, 4 * WIDTH**2, 1.0) for name in reversed(BLOCKS)]
    trace = ModelTrace("toy", 1.0, (LayerTrace("head.weight", 1.0, 8 * WIDTH**2, 1.0), *layers))
    cost = LinearCost(RANKS, 1e-5, 1e-9)
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        for half in (False, True) if name in IN_16_BITS else (False,):
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if half else ()))
            precision = Precision(0.5, 1.0, 0) if half else Precision(states=0)
            share = trace.grad_bytes // RANKS
            predicted = predict_fsdp(trace, cost, plan, precision=precision).memory_bytes - share  # allocated before
            title = f"{name}, in 16 bits" if half else name
            found[title] = [allocated(plan, folder, policy) / share, predicted / share]
    cut = measure_backward(Cut(), torch.rand(1, WIDTH), steps=1, warmup=0)
    parts = {layer.name: layer.grad_bytes for layer in cut.layers}
    (folder / "rank0.json").write_text(json.dumps({"memory": found, "parts": parts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
