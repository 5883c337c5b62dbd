"""What groups of gradients that are no neighbours, and gradients cut into pieces, would gain over `optimal`: simulated.

    python benchmarks/partitions.py [--taken-us H --taken-share S] [TRACE COST ...]

Every trace and cost that benchmarks/runtime_gpu recorded (all-reduces over nccl, 4 hosts), the trace and all-reduces of
the paper's authors (8 hosts), and what is given; messages take from the computation what their cost says, or H us each
and the share S of the time of their bytes. Beside the best plan of neighbours of whole gradients:

- *any groups*: the best that a local search finds (move a gradient, exchange two, join or split groups; annealed from
  three starts), so at least so much can be gained. Messages go in the order in which they are ready, which for given
  messages is best where they take nothing: with an exchange of two neighbouring messages that are not, the later ends
  no later.
- *pieces*: the best plan of neighbours of the gradients cut into pieces of 64 kB to 4 MB, exactly.
- *at most*: no plan of any groups of any pieces gains more. All bytes that are ready at r or later are sent from r on,
  and none of their messages is faster, by the byte, than the fastest of all sizes there are.
  Messages take nothing from the computation there: no plan is faster for what they take.

Prints Markdown.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from mgwfbp import Cost, LayerTrace, ModelTrace, load_cost, load_trace, predict
from mgwfbp.cost import taken_by
from mgwfbp.costs import part_by_part
from mgwfbp.planners import plan_bucket, plan_optimal
from mgwfbp.results import BenchResult
from mgwfbp.simulate.evaluation import logged_cost

MOVES = 20_000
PIECES = (2**16, 2**18, 2**20, 2**22)
HERE = Path(__file__).parent
Groups = list[list[int]]  # numbers of gradients


def cases(arguments: Sequence[str]) -> Iterator[tuple[str, ModelTrace, Cost]]:
    for path in sorted((HERE / "runtime_gpu").glob("*.json")):
        result = BenchResult.load(path)
        if result.trace is not None and result.cost is not None:
            yield f"{result.model}, {result.network}", result.trace, result.cost
    authors = load_trace("googlenet-k80-bcaffe")
    yield "googlenet (K80), the authors' all-reduces", authors, logged_cost(authors)
    for trace, cost in zip(arguments[::2], arguments[1::2], strict=True):
        yield f"{trace}, {cost}", load_trace(trace), load_cost(cost)


class Row:
    """Gradients in a row: when they are ready, how large they are, and what messages of them take."""

    def __init__(self, trace: ModelTrace, cost: Cost) -> None:
        self.ready_s, self.cost = trace.ready_s, cost
        self.launch_s = taken_by(cost, 0)
        self.taken_per_byte_s = taken_by(cost, 1) - self.launch_s
        self.sizes = [layer.grad_bytes for layer in trace.layers]
        self._known: dict[int, float] = {}

    def message_s(self, num_bytes: int) -> float:
        if num_bytes not in self._known:
            self._known[num_bytes] = self.cost(num_bytes)
        return self._known[num_bytes]

    def end_s(self, groups: Groups) -> float:
        """The end of the last message, in the order in which messages are ready."""
        free_s = taken_s = 0.0
        for last, num_bytes in sorted((max(group), sum(self.sizes[one] for one in group)) for group in groups):
            free_s = max(free_s, self.ready_s[last] + taken_s) + self.message_s(num_bytes)
            taken_s += self.launch_s + self.taken_per_byte_s * num_bytes
        return free_s


def changed(groups: Groups, rng: random.Random) -> Groups:
    """Groups after one random move."""
    new = [list(group) for group in groups]
    kind = rng.random()
    source = rng.randrange(len(new))
    target = rng.randrange(len(new))
    if kind < 0.5:  # a gradient goes to another group, sometimes to one of its own
        one = new[source].pop(rng.randrange(len(new[source])))
        if kind < 0.05:
            new.append([one])
        else:
            new[target].append(one)
    elif kind < 0.8 and source != target:
        here, there = rng.randrange(len(new[source])), rng.randrange(len(new[target]))
        new[source][here], new[target][there] = new[target][there], new[source][here]
    elif kind < 0.9 and source != target:
        new[target] += new[source]
        new[source] = []
    else:
        cut = rng.randrange(len(new[source]))
        new[source].sort()
        new.append(new[source][cut:])
        new[source] = new[source][:cut]
    return [group for group in new if group]


def search(row: Row, start: Groups, rng: random.Random) -> float:
    """The shortest end that annealing from these groups comes to."""
    groups, end_s = start, row.end_s(start)
    best_s = end_s
    for move in range(MOVES):
        heat_s = 0.003 * best_s * (1 - move / MOVES) ** 2
        other = changed(groups, rng)
        other_s = row.end_s(other)
        if other_s <= end_s or (heat_s and rng.random() < math.exp((end_s - other_s) / heat_s)):
            groups, end_s = other, other_s
            best_s = min(best_s, end_s)
    return best_s


def in_groups(sizes: Sequence[int]) -> Groups:
    ends = list(accumulate(sizes, initial=0))
    return [list(range(start, end)) for start, end in pairwise(ends)]


def in_pieces(trace: ModelTrace, most_bytes: int) -> ModelTrace:
    """The trace with every gradient cut into equal pieces of at most so many bytes."""
    layers = []
    for layer in trace.layers:
        count = max(1, -(-layer.grad_bytes // most_bytes))
        marks = [layer.grad_bytes * piece // count for piece in range(count + 1)]
        for piece in range(count):
            took_s = 0.0 if piece else layer.backward_s
            layers.append(LayerTrace(f"{layer.name}/{piece}", took_s, marks[piece + 1] - marks[piece]))
    return ModelTrace(trace.model, trace.forward_s, tuple(layers))


def bound_s(trace: ModelTrace, cost: Cost) -> float:
    """A time before which no plan of any groups of any pieces ends its step."""
    total = trace.grad_bytes
    sizes = np.unique(np.geomspace(1, total, 4000).astype(np.int64)).tolist()
    # Between two sizes the time is no less than that of the smaller, for as many bytes as the larger.
    rate: float = min(cost(low) / high for low, high in zip(sizes, [*sizes[1:], total], strict=True))
    left = list(accumulate(layer.grad_bytes for layer in reversed(trace.layers)))[::-1]
    ends_s = [ready_s + rate * num_bytes for ready_s, num_bytes in zip(trace.ready_s, left, strict=True)]
    return max(max(ends_s), trace.ready_s[-1] + cost(0))


def main() -> None:
    out = [
        "| cell | gradients | step of `optimal` | exposed | any groups gain | pieces gain | anything gains at most |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="TRACE COST", help="besides those that are recorded")
    parser.add_argument("--taken-us", type=float, help="what a message takes from the computation")
    parser.add_argument("--taken-share", type=float, default=0.0, help="and of the time of its bytes")
    options = parser.parse_args()
    for name, trace, cost in cases(options.files):
        if options.taken_us is not None:
            byte_s = (cost(trace.grad_bytes) - cost(0)) / trace.grad_bytes
            taken = {"taken_s": options.taken_us * 1e-6, "taken_per_byte_s": options.taken_share * byte_s}
            cost = part_by_part(cost, partial(replace, **taken))
        plan = plan_optimal(trace, cost)
        timeline = predict(trace, cost, plan)
        step_s, row = timeline.iteration_s, Row(trace, cost)
        rng = random.Random(7)
        starts = [in_groups(plan.group_sizes), in_groups(plan_bucket(trace, cost).group_sizes)]
        starts.append(in_groups([1] * len(trace.layers)))
        found_s = min(search(row, start, rng) for start in starts)
        cuts = [in_pieces(trace, size) for size in PIECES]
        pieces_s = min(predict(cut, cost, plan_optimal(cut, cost)).iteration_s for cut in cuts)
        gains = [step_s / max(one_s, trace.compute_s) - 1 for one_s in (found_s, pieces_s, bound_s(trace, cost))]
        out.append(
            f"| {name} | {len(trace.layers)} | {1e3 * step_s:.1f} ms | {1e3 * timeline.exposed_s:.1f} ms "
            f"| {max(0.0, gains[0]):.2%} | {max(0.0, gains[1]):.2%} | {gains[2]:.2%} |"
        )
        sys.stderr.write(out[-1] + "\n")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
