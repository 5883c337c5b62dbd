"""Does a replay without communication take the recorded time? Run by ``make bench``."""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from mgwfbp import load_trace
from mgwfbp.bench.replay import Replay, replayable

# Steps of less than a tenth of a second are dominated by what autograd itself takes per layer.
CASES = [("googlenet-k80-b64", 1.0), ("resnet50-k80-b32", 1.0), ("googlenet-k80-b64", 5.0), ("resnet50-h200-b32", 10.0)]
ALLOWED = 0.03


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_a_replay_takes_the_recorded_time(benchmark: BenchmarkFixture, name: str, scale: float) -> None:
    torch.set_num_threads(1)
    trace = replayable(load_trace(name).scaled(scale))
    replay, start = Replay(trace), torch.zeros(1)

    def step() -> None:
        replay.zero_grad()
        replay(start).sum().backward()

    benchmark.pedantic(step, rounds=5, warmup_rounds=1)
    if benchmark.stats is None:  # not asked to measure
        return
    off = benchmark.stats.stats.median / trace.compute_s - 1
    print(f"\n{name}, {scale:g} times as slow: {trace.compute_s:.3f} s recorded, replayed {off:+.2%}")
    assert abs(off) <= ALLOWED
