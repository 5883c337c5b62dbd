"""Mixed precision that is counted: types as torch's own autocast gives them on CUDA, rates with their sources."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mgwfbp import MeasureError
from mgwfbp.measure.analytic import count_operations, measure_analytic
from mgwfbp.measure.autocast import autocast_as_cuda
from mgwfbp.measure.devices import DEVICES, Device
from mgwfbp.measure.workload import Workload, build_workload, run_model

BOTH = ("float16", "bfloat16")
ONLY_BYTES = Device("d", 1e30, 1.0, 0.0, "made up", 1e30, BOTH)
ONLY_FLOPS = Device("d", 1.0, 1e30, 0.0, "made up", 4.0, BOTH)


@pytest.fixture
def linear() -> Workload:
    with torch.device("meta"):
        return Workload("l", nn.Linear(5, 7, bias=False), torch.ones(6, 5), 6, lambda output: output.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_times_of_a_linear_layer_by_hand(linear: Workload, dtype: torch.dtype) -> None:
    by_flops = measure_analytic(linear, ONLY_FLOPS, autocast_dtype=dtype)
    assert by_flops.forward_s == pytest.approx(2 * 6 * 5 * 7 / 4.0)
    by_bytes = measure_analytic(linear, ONLY_BYTES, autocast_dtype=dtype)
    # Batch and weight become 16 bits (4 + 2 bytes each), the product reads and writes those, the sum has 32 bits.
    assert by_bytes.forward_s == pytest.approx((30 + 35) * 6 + (30 + 35 + 42) * 2 + 42 * 2 + 4)
    # The weight is cast once, and its gradient is that of the weight as it is.
    assert by_bytes.grad_bytes == 35 * 4


def test_a_weight_that_is_used_twice_is_cast_once(linear: Workload) -> None:
    def twice(output: Tensor) -> Tensor:
        return (output @ linear.model.weight).sum()  # type: ignore[operator]  # 6 x 7 times 7 x 5

    found = measure_analytic(replace(linear, loss_fn=twice), ONLY_BYTES, autocast_dtype=torch.bfloat16)
    assert found.forward_s == pytest.approx((30 + 35) * 6 + (30 + 35 + 42) * 2 + (42 + 35 + 30) * 2 + 30 * 2 + 4)


def module_types(model: nn.Module, forward: Callable[[], object]) -> list[tuple[str, list[torch.dtype]]]:
    """What every module returns, in the order in which they end."""
    seen: list[tuple[str, list[torch.dtype]]] = []

    def hook_for(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            seen.append((name, [leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]))

        return note

    hooks = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules()]
    forward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.skipif(torch.version.cuda is None, reason="the oracle is the autocast of a torch built for CUDA")
@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "vit_b_32", "swin_v2_t", "hf:bert", "hf:gpt2", "hf:t5"])
def test_every_module_returns_the_type_that_it_returns_under_cudas_autocast(name: str) -> None:
    """The oracle is torch's own autocast, on tensors that say they are on a GPU and have no values either."""
    workload = build_workload(name, batch_size=2, device="meta")
    batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), workload.batch)
    with autocast_as_cuda(torch.bfloat16):
        found = module_types(workload.model, lambda: run_model(workload.model, batch))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = workload.model.to_empty(device="cuda:0")
        batch = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cuda:0"), batch)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)  # torch.autocast wants to see the GPU
        try:
            expected = module_types(model, lambda: run_model(model, batch))
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
    assert found == expected
    assert any(torch.bfloat16 in types for _, types in found)


def test_nothing_of_it_is_left_behind(linear: Workload) -> None:
    before = measure_analytic(linear, ONLY_BYTES)
    with autocast_as_cuda(torch.bfloat16):
        assert linear.model(linear.batch).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"5, 6|5x6"), autocast_as_cuda(torch.bfloat16):
        linear.model(linear.batch.T)
    assert linear.model(linear.batch).dtype == torch.float32
    assert measure_analytic(linear, ONLY_BYTES) == before


def test_a_torch_without_what_it_needs_is_one_error(linear: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_IncludeDispatchKeyGuard")
    with pytest.raises(MeasureError, match=r"cannot be counted under autocast \(.*_IncludeDispatchKeyGuard.*\): leave"):
        measure_analytic(linear, ONLY_BYTES, autocast_dtype=torch.bfloat16)
    assert linear.model(linear.batch).dtype == torch.float32


def test_operations_are_the_same_and_take_less_time() -> None:
    workload = build_workload("vit_b_32", batch_size=64, device="meta")
    plain = measure_analytic(workload, DEVICES["a100"])
    mixed = measure_analytic(workload, DEVICES["a100"], autocast_dtype=torch.bfloat16)
    for key in ("forward_flops", "backward_flops"):
        assert mixed.source[key] == plain.source[key]
    assert mixed.compute_s < plain.compute_s / 2
    assert {layer.name: layer.grad_bytes for layer in mixed.layers} == {
        layer.name: layer.grad_bytes for layer in plain.layers
    }
    assert (mixed.source["autocast"], plain.source["autocast"]) == ("bfloat16", None)
    assert "ResNet-50 at 2470 images/s in FP16" in mixed.source["device_source"]


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("k80", torch.bfloat16, r"k80 has no units for matrices of bfloat16, but none for 16 bits: choose another"),
        ("p100", torch.float16, r"p100 has no units for matrices of float16"),
        ("cpu", torch.bfloat16, r"cpu has no units"),
        ("v100", torch.bfloat16, r"v100 has no units for matrices of bfloat16, but those for float16"),
    ],
)
def test_a_device_without_such_units_is_refused(
    linear: Workload, device: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(MeasureError, match=message):
        measure_analytic(linear, DEVICES[device], autocast_dtype=dtype)


def test_a_model_with_weights_of_16_bits_goes_at_the_rate_for_them(linear: Workload) -> None:
    half = replace(linear, model=linear.model.to(torch.float16), batch=linear.batch.to(torch.float16))
    assert measure_analytic(half, ONLY_FLOPS).forward_s == pytest.approx(2 * 6 * 5 * 7 / 4.0)
    assert count_operations(half).forward_flops == 2 * 6 * 5 * 7
    with pytest.raises(MeasureError, match="k80 has no units for matrices of float16"):
        measure_analytic(half, DEVICES["k80"])


def test_a_device_trains_resnet50_under_autocast_as_fast_as_its_source_says() -> None:
    workload = build_workload("resnet50", batch_size=256, device="meta")
    for device in DEVICES.values():
        assert bool(device.half_types) == bool(device.half_flops_per_s) == bool(device.half_source)
        if published := re.search(r"(\d+) images/s", device.half_source):
            trace = measure_analytic(workload, device, autocast_dtype=getattr(torch, device.half_types[0]))
            assert 256 / trace.compute_s == pytest.approx(float(published[1]), rel=0.01)
