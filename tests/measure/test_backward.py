"""When gradients are ready: order against DDP's reducer, odd parameters, and nothing left changed."""

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mgwfbp import MeasureError, ModelTrace, measure_backward
from mgwfbp.measure.backward import plain_passes
from mgwfbp.measure.workload import build_workload, default_loss
from tests.measure.models import Checkpointed, Odd, SlowMiddle


def names(trace: ModelTrace) -> list[str]:
    return [layer.name for layer in trace.layers]


def sizes(trace: ModelTrace) -> dict[str, int]:
    return {layer.name: layer.grad_bytes for layer in trace.layers}


def test_the_time_is_where_the_backward_pass_spends_it() -> None:
    trace = measure_backward(SlowMiddle(0.05), torch.ones(2, 4), steps=3, warmup=1)
    assert {name.partition(".")[0] for name in names(trace)[:4]} == {"second", "third"}
    spent = {layer.name: layer.backward_s for layer in trace.layers}
    first = max(("first.weight", "first.bias"), key=lambda name: spent[name])
    assert spent[first] >= 0.05
    assert spent[first] > 5 * sum(seconds for name, seconds in spent.items() if name != first)


def test_frozen_unused_shared_and_sparse_parameters() -> None:
    model = Odd()
    tokens = torch.tensor([[1, 2, 3], [3, 4, 5]]).flatten()
    trace = measure_backward(model, tokens, lambda output: output["logits"].sum(), steps=3)
    assert names(trace)[:2] == ["unused.weight", "unused.bias"]  # ready from the start, as DDP takes them
    assert trace.source["unused"] == ("unused.weight", "unused.bias")
    assert not any(name.startswith("frozen") for name in names(trace))
    assert names(trace).count("shared.weight") == 1
    assert names(trace)[-1] == "embedding.weight"
    # Five different tokens: an index of 8 bytes and 8 values of 4 bytes each, not the 50 rows of the table.
    assert sizes(trace)["embedding.weight"] == 5 * (8 + 8 * 4)
    assert sizes(trace)["shared.weight"] == 8 * 8 * 4
    assert [layer.backward_s for layer in trace.layers[:2]] == [0.0, 0.0]


def run_plain(model: nn.Module, batch: Any, loss_fn: Any, steps: int) -> None:
    with plain_passes(model, batch, loss_fn) as passes:
        for _ in range(steps):
            passes(lambda: lambda: None)


def test_passes_are_timed_up_to_their_end_and_to_that_of_what_is_done_beside_them() -> None:
    model, called = SlowMiddle(0.05), list[str]()

    def begin() -> Callable[[], object]:
        called.append("begun")

        def finish() -> None:
            called.append("ended" if model.first.weight.grad is not None else "early")
            time.sleep(0.1)

        return finish

    with plain_passes(model, torch.ones(2, 4)) as passes:
        took_s, finished_s = passes(begin)
    assert called == ["begun", "ended"]
    assert took_s >= 0.05
    assert finished_s >= took_s + 0.1


@pytest.mark.parametrize("run", [measure_backward, run_plain])
def test_model_gradients_buffers_and_random_generators_are_as_before(run: Callable[..., object]) -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.full_like(model.head.weight, 7.0)
    model.head.weight.grad = gradient
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)

    def loss_fn(output: dict[str, Any]) -> Tensor:
        random.random()
        np.random.rand()
        return output["logits"].sum()  # type: ignore[no-any-return]

    run(model, torch.arange(6), loss_fn, steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.head.weight.grad is gradient
    assert torch.equal(gradient, torch.full_like(gradient, 7.0))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "head.weight")
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


@pytest.mark.parametrize("fails", [False, True], ids=["measured", "failed"])
def test_no_hook_is_left_and_a_backward_pass_calls_what_it_called_before(fails: bool) -> None:
    model = Odd()
    called: list[Tensor] = []
    model.head.weight.register_hook(called.append)  # the user's own

    def loss_fn(output: dict[str, Any]) -> Tensor:
        return output["logits"].sum() / (1 // (not fails))  # type: ignore[no-any-return]

    calls_of_a_backward_pass(model)  # the first one of a process imports modules
    before = calls_of_a_backward_pass(model)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        measure_backward(model, torch.arange(6), loss_fn, steps=2)
    called.clear()
    assert calls_of_a_backward_pass(model) == before
    assert len(called) == 1
    for name, parameter in model.named_parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert (parameter._backward_hooks is None) == (name != "head.weight")  # an empty list costs a call too


def calls_of_a_backward_pass(model: nn.Module) -> list[str]:
    """Name the Python functions that autograd calls in this thread, where a CPU's backward pass runs."""
    loss, calls = model(torch.arange(6))["logits"].sum(), []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return calls


def test_everything_is_as_before_when_the_model_fails() -> None:
    model = Odd()
    gradient = torch.ones_like(model.head.weight)
    model.head.weight.grad = gradient
    with pytest.raises(ZeroDivisionError):
        measure_backward(model, torch.arange(6), lambda output: output["logits"].sum() / (1 // 0), steps=2)
    assert model.head.weight.grad is gradient


def test_a_replaced_buffer_and_the_gradient_of_an_input_are_as_before() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return self.layer(x)  # type: ignore[no-any-return]

    model, x = Counts(), torch.ones(2, 4, requires_grad=True)
    before = model.count
    measure_backward(model, {"x": x}, steps=2)
    assert model.count is before
    assert before == 0
    assert x.grad is None


def test_parameters_of_any_dtype_and_size() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.nothing = nn.Parameter(torch.ones(0, 3))

        def forward(self) -> tuple[Tensor, None, list[Tensor]]:
            return (self.wave * self.narrow).abs() * self.wide, None, [self.nothing.sum()]

    trace = measure_backward(Mixed(), (), steps=2)
    assert sizes(trace) == {"wave": 3 * 8, "narrow": 3 * 2, "wide": 8, "nothing": 0}
    assert trace.source["unused"] == ()


def test_a_nested_batch_reaches_the_model_as_it_is() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], scale: float) -> Tensor:
            return self.layer(pair[0] + pair[1]["more"]) * scale  # type: ignore[no-any-return]

    one = torch.ones(2, 4)
    for batch in (((one, {"more": one}), 2.0), {"pair": (one, {"more": one}), "scale": 2.0}):
        assert len(measure_backward(Nested(), batch, steps=1).layers) == 2


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(MeasureError, match=r"'1.weight' is on meta, '0.weight' on cpu; one clock"):
        measure_backward(model, torch.ones(2, 4))


def test_under_autocast_the_bytes_are_those_of_the_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    trace = measure_backward(model, torch.ones(2, 4), steps=2, autocast_dtype=torch.bfloat16)
    assert sizes(trace)["0.weight"] == 16 * 4  # bf16 on the way, fp32 where it is accumulated
    half = measure_backward(model.to(torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16), steps=2)
    assert sizes(half)["0.weight"] == 16 * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    x = torch.ones(2, 6, requires_grad=True)  # reentrant checkpoints need an input that asks for a gradient
    trace = measure_backward(Checkpointed(reentrant=reentrant), x, steps=2)
    assert sorted(names(trace)) == sorted(name for name, _ in Checkpointed(reentrant=reentrant).named_parameters())
    # A weight that serves every block is ready when the last block to be computed, the first, has used it.
    assert names(trace).index("shared.weight") > names(trace).index("blocks.1.weight")


def test_with_accumulation_only_the_last_backward_pass_is_taken_apart() -> None:
    model = SlowMiddle(0.03)
    once = measure_backward(model, torch.ones(2, 4), steps=2, warmup=1)
    thrice = measure_backward(model, torch.ones(2, 4), steps=2, warmup=1, accumulation_steps=3)
    assert thrice.forward_s >= 2 * 0.03 > once.forward_s
    assert thrice.backward_s < 2 * 0.03
    assert sizes(thrice) == sizes(once)


def test_an_order_that_changes_is_reported() -> None:
    class Flip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            order = self.layers if self.calls % 2 else reversed(self.layers)
            for layer in order:
                x = layer(x)
            return x

    trace = measure_backward(Flip(), torch.ones(1, 3), steps=4)
    assert trace.source["num_orders"] == 2
    assert measure_backward(SlowMiddle(0.0), torch.ones(2, 4), steps=4).source["num_orders"] == 1


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (nn.Linear(4, 4), lambda output: output, r"the loss is \(2, 4\), expected a tensor with one number"),
        (nn.Linear(4, 4), lambda _: 3.0, "the loss is float, expected a tensor"),
        (nn.Linear(4, 4), lambda _: default_loss(None), "returned 'NoneType' without a floating-point tensor"),
        (nn.Linear(4, 4).requires_grad_(False), lambda output: output.sum(), "no parameter that requires a gradient"),
        (nn.Linear(4, 4), lambda output: output.detach().sum(), "does not depend on any parameter"),
        (nn.Linear(4, 4), lambda _: torch.ones(1, requires_grad=True).sum(), "gave no parameter a gradient"),
    ],
)
def test_what_cannot_be_measured_is_said_clearly(model: nn.Module, loss_fn: Any, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        measure_backward(model, torch.ones(2, 4), loss_fn, steps=1)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"warmup": -1}, {"accumulation_steps": 0}])
def test_steps_that_cannot_be_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(MeasureError, match="expected 1, 0 and 1 or more"):
        measure_backward(nn.Linear(4, 4), torch.ones(2, 4), **bad)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", r"no classification model 'resnet51' \(near: .*resnet50"),
        ("hf:nonsense", "no Hugging Face language model of type or folder 'nonsense'"),
        ("tests.measure.models:nothing", "has no attribute 'nothing'"),
        ("no.such.module:f", "No module named 'no'"),
        ("tests.measure.models:not_a_factory", "returned 'int', expected"),
    ],
)
def test_a_model_that_is_not_there_is_said_clearly(name: str, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        build_workload(name, batch_size=1)


def test_googlenet_has_both_auxiliary_heads() -> None:
    workload = build_workload("googlenet", batch_size=1, device="meta")
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    assert 12.9e6 < count < 13.1e6  # "about 13 millions" in the paper


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}
    (folder / "config.json").write_text(json.dumps(config))
    workload = build_workload(f"hf:{folder}", batch_size=2, sequence_length=16)
    assert workload.name == "tiny"
    trace = measure_backward(workload.model, workload.batch, workload.loss_fn, steps=1)
    assert names(trace)[-1] in ("transformer.wte.weight", "transformer.wpe.weight")
    with pytest.raises(MeasureError, match=r"sequence length 17: .* takes at most 16"):
        build_workload(f"hf:{folder}", batch_size=2, sequence_length=17)


def test_a_configuration_that_names_code_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto}))
    with pytest.raises(MeasureError, match="no Hugging Face language model"):
        build_workload(f"hf:{tmp_path}", batch_size=1)
