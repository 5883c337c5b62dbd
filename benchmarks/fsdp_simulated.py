"""What is predicted of FSDP2 on clusters of GPUs, wrapped by hand and by plan: Markdown on stdout.

python benchmarks/fsdp_simulated.py llama.json
"""

import sys

from mgwfbp import ModelTrace, fsdp_lower_bound_s, load_network, load_trace, predict_fsdp
from mgwfbp.memory import Precision
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import plan_blocks_alone, plan_by_block
from mgwfbp.simulate import Cluster


def simulated(trace: ModelTrace) -> None:
    """Print both ways to wrap by hand beside ours on clusters of nodes of 8, with limits between what they need.

    Parameters are gathered and gradients sent in 16 bits; a rank's share is of parameters and gradients in 32 bits and
    of two states.
    """
    precision = Precision(gather=0.5, reduce=0.5)
    print("| computes, s | Gbit a node | GPUs | per block | memory | blocks, rest in the root | memory | ", end="")
    print("ours, within per block's memory | no plan within it is below | ", end="")
    print("ours, within 1.5 times that | ours, any memory | memory | no plan is below |")
    print(f"|{'--:|' * 13}")
    for scale in (1.0, 0.3):
        short = trace.scaled(scale)
        for network in ("100gbe", "ib-ndr"):
            cluster = Cluster(load_network(network), load_network("nvlink3"), 8)
            for workers in (64, 512):
                cost = cluster.cost(workers)
                block, rest = (
                    predict_fsdp(short, cost, way(short), precision=precision)
                    for way in (plan_by_block, plan_blocks_alone)
                )
                cells = [f"{short.compute_s:.2f}", f"{8e-9 / cluster.network.per_byte_s:.0f}", str(workers)]
                for step in (block, rest):
                    cells += [f"{step.iteration_s:.3f}", f"{step.memory_bytes / 1e9:.2f} GB"]
                for factor in (1.0, 1.5, None):
                    limit = None if factor is None else int(factor * block.memory_bytes)
                    plan = plan_fsdp(short, cost, memory_limit=limit, precision=precision)
                    step_s, held = plan.predicted["iteration_s"], plan.predicted["memory_bytes"]
                    cells.append(f"{step_s:.3f} ({block.iteration_s / step_s:.3f}x)")
                    cells += [f"{plan.predicted['lower_bound_s']:.3f}"] if factor == 1.0 else []
                    cells += [f"{held / 1e9:.1f} GB"] if factor is None else []
                bound_s = fsdp_lower_bound_s(short, cost, precision=precision)
                print(f"| {' | '.join([*cells, f'{bound_s:.3f}'])} |", flush=True)


if __name__ == "__main__":
    simulated(load_trace(sys.argv[1]))
