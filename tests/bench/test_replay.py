"""A replay is a model like any other: the names, sizes, order and moments of its gradients are the trace's."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mgwfbp import LayerTrace, ModelTrace, TraceError, recorded_traces
from mgwfbp.bench.replay import Replay, replayable
from mgwfbp.runtime.rows.guards import Guards
from mgwfbp.trace import load_trace

names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda parts: ".".join([*parts, "weight"]))


@st.composite
def short_traces(draw: st.DrawFn) -> ModelTrace:
    layers = [
        LayerTrace(name, draw(st.floats(0, 1e-3)), draw(st.integers(0, 400)))
        for name in draw(st.lists(names, min_size=1, max_size=6, unique=True))
    ]
    return ModelTrace("short", draw(st.floats(0, 1e-3)), tuple(layers))


def run(replay: Replay) -> None:
    replay(torch.zeros(1)).sum().backward()


@settings(max_examples=50)
@given(short_traces())
def test_gradients_come_in_the_order_and_sizes_of_the_trace_and_none_before_its_time(trace: ModelTrace) -> None:
    replay = Replay(trace)
    came: list[tuple[str, float]] = []
    for name, parameter in replay.named_parameters():

        def note(_: Tensor, name: str = name) -> None:
            came.append((name, time.perf_counter()))

        parameter.register_post_accumulate_grad_hook(note)
    start_s = time.perf_counter()
    run(replay)
    assert [name for name, _ in came] == [layer.name for layer in trace.layers]
    assert all(moment_s - start_s >= ready_s for (_, moment_s), ready_s in zip(came, trace.ready_s, strict=True))
    sizes = {layer.name: layer.grad_bytes for layer in replayable(trace).layers}
    gradients = {name: parameter.grad for name, parameter in replay.named_parameters()}
    assert {name: grad.nbytes for name, grad in gradients.items() if grad is not None} == sizes


@given(short_traces())
def test_a_replays_sizes_are_the_traces_up_to_one_number(trace: ModelTrace) -> None:
    for layer, made in zip(trace.layers, replayable(trace).layers, strict=True):
        assert made.backward_s == layer.backward_s
        assert made.grad_bytes % 4 == 0
        assert layer.grad_bytes <= made.grad_bytes <= max(4, layer.grad_bytes + 3)


@given(short_traces(), st.floats(0.01, 100))
def test_slow_motion_stretches_every_time_alike_and_leaves_sizes_alone(trace: ModelTrace, factor: float) -> None:
    slow = trace.scaled(factor)
    assert slow.ready_s == pytest.approx([moment_s * factor for moment_s in trace.ready_s])
    assert [layer.grad_bytes for layer in slow.layers] == [layer.grad_bytes for layer in trace.layers]


def test_a_second_pass_takes_its_time_again() -> None:
    trace = ModelTrace("toy", 0.01, (LayerTrace("b", 0.01, 4), LayerTrace("a", 0.01, 4)))
    replay = Replay(trace)
    for _ in range(3):
        start_s = time.perf_counter()
        run(replay)
        assert time.perf_counter() - start_s >= trace.compute_s


def test_work_between_two_layers_shortens_the_next_wait() -> None:
    """Three layers of 40 ms with 30 ms of work after each: waits of their own would make it 210 ms at least."""
    trace = ModelTrace("toy", 0.0, tuple(LayerTrace(name, 0.04, 4) for name in "cba"))
    replay = Replay(trace)
    waits_s: list[float] = []
    for parameter in replay.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.03))
    original = replay.gradient

    def timed(index: int) -> Tensor:
        start_s = time.perf_counter()
        gradient = original(index)
        waits_s.append(time.perf_counter() - start_s)
        return gradient

    replay.gradient = timed  # type: ignore[method-assign]
    for _ in range(20):  # others may take the core meanwhile, which makes any wait longer
        run(replay)
        first, *others = (min(waits_s[layer::3]) for layer in range(3))
        if max(others) < first:
            break
    assert max(others) < first


class Late(dict[str, Any]):
    """The parameters of a module, one of which comes late; notes when each is asked for."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        super().__init__(own)
        self.asked_s: dict[str, float] = {}

    def __getitem__(self, name: str) -> Any:
        self.asked_s[name] = time.perf_counter()
        if name == "a":
            time.sleep(0.02)
        return super().__getitem__(name)


def test_a_layer_asks_for_its_parameter_when_those_before_have_ended_and_what_it_waits_delays_the_others() -> None:
    trace = ModelTrace("toy", 0.03, tuple(LayerTrace(name, 0.0, 4, forward_s=0.01) for name in "cba"))
    replay = Replay(trace)
    late = Late(replay._parameters)
    vars(replay)["_parameters"] = late
    start_s = time.perf_counter()
    replay(torch.zeros(1))
    ends_s = time.perf_counter()
    assert late.asked_s["b"] - start_s >= 0.02 + 0.01
    assert late.asked_s["c"] - start_s >= 0.02 + 0.02
    assert ends_s - start_s >= 0.02 + 0.03


def test_a_replay_waits_for_no_parameter_before_its_layer_asks() -> None:
    replay = Replay(load_trace("resnet50-k80-b32"))
    assert Guards(replay, {}, set(map(id, replay.parameters()))).waits_early == ""


def test_gradients_are_handed_out_and_not_copied() -> None:
    """Two passes over a recorded ResNet-50 hold one layer's bytes, not the 102 MB of all."""
    trace = load_trace("resnet50-k80-b32").scaled(1e-3)
    replay = Replay(trace)
    for _ in range(2):
        replay.zero_grad()
        run(replay)
    held = {
        parameter.grad.untyped_storage().data_ptr() for parameter in replay.parameters() if parameter.grad is not None
    }
    assert len(held) == 1


@pytest.mark.parametrize("name", recorded_traces())
def test_every_recorded_trace_can_be_replayed_under_its_names(name: str) -> None:
    trace = load_trace(name)
    replay = Replay(trace)
    assert {name for name, _ in replay.named_parameters()} == {layer.name for layer in trace.layers}


@pytest.mark.parametrize("others", [("a", "a.b"), ("a.b", "a"), ("a..b",), (".",)])
def test_names_that_no_parameters_can_have_are_refused(others: tuple[str, ...]) -> None:
    trace = ModelTrace("odd", 0.0, tuple(LayerTrace(name, 0.0, 4) for name in others))
    with pytest.raises(TraceError, match="is no name a parameter can have"):
        Replay(trace)
