"""Counting instead of measuring: published numbers of operations, autograd's order, and devices with their sources."""

import re

import pytest
import torch
from torch import Tensor, nn

from mgwfbp import MeasureError, ModelTrace, measure_backward
from mgwfbp.measure.analytic import count_operations, measure_analytic, ready_order
from mgwfbp.measure.devices import DEVICES, Device
from mgwfbp.measure.workload import Workload, build_workload
from tests.measure.models import Odd, SlowMiddle, tiny_transformer

PLAIN = Device("plain", 1e12, 1e11, 1e-6, "made up")


def names(trace: ModelTrace) -> list[str]:
    return [layer.name for layer in trace.layers]


def odd_loss(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].sum()


@pytest.fixture(scope="module")
def resnet50() -> Workload:
    return build_workload("resnet50", batch_size=64, device="meta")


@pytest.fixture(scope="module")
def on_devices(resnet50: Workload) -> dict[str, ModelTrace]:
    return {name: measure_analytic(resnet50, device) for name, device in DEVICES.items()}


def test_resnet50_has_its_published_operations(resnet50: Workload) -> None:
    count = count_operations(resnet50)
    # 4.1 GMACs an image of 224 x 224 (torchvision's table of weights says 4.09); a MAC is two operations.
    assert count.forward_flops / 2 / 64 == pytest.approx(4.1e9, rel=0.02)
    # Backward computes two products for every one of forward, but the first layer needs no gradient of its input.
    assert 1.9 < count.backward_flops / count.forward_flops < 2.0
    assert count.kernels > 2 * 161


def test_operations_of_a_linear_layer_by_hand() -> None:
    with torch.device("meta"):
        workload = Workload("l", nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.ones(2, 5), 2)
    count = count_operations(workload)
    assert count.forward_flops == 2 * 2 * (5 * 7 + 7 * 3)
    assert count.backward_flops == 2 * 2 * (5 * 7 + 2 * 7 * 3)  # the input of the first layer needs no gradient


class Tower(nn.Module):
    """Frozen layers before and between others, one that runs twice, and one that is read without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.stem = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 6)
        self.middle, self.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.middle(self.last(self.stem(self.tower(x)))))
        return x @ self.head.weight.T


def test_what_is_frozen_runs_again_or_is_not_called_is_recorded_as_where_it_is_measured() -> None:
    measured = measure_backward(Tower(), torch.ones(2, 4), lambda output: output.sum(), steps=1, warmup=0)
    with torch.device("meta"):
        counted = measure_analytic(Workload("t", Tower(), torch.ones(2, 4), 2, lambda output: output.sum()), PLAIN)
    for key in ("not_called", "repeated", "unused", "unread"):
        assert counted.source[key] == measured.source[key] != ()
    assert (counted.source["not_called"], counted.source["repeated"]) == (("head", "spare"), ("last",))
    assert set(counted.source["unread"]) == {"head.bias", "spare.weight", "spare.bias"}
    # Where parameters are used together a real clock tells which came first.
    where = [
        {one["name"]: (one["bytes"], one["next"]) for one in trace.source["frozen"]} for trace in (counted, measured)
    ]
    assert where[0] == where[1]
    assert where[0]["tower.weight"] == (96, "stem.weight")
    # Five kernels run from when `last` begins, the one of `middle` and those behind it among them.
    assert sum(one["share"] for one in counted.source["frozen"] if one["name"].startswith("middle")) == pytest.approx(
        0.8
    )
    assert sum(layer.forward_s or 0.0 for layer in counted.layers) == pytest.approx(counted.forward_s)


def test_times_by_hand() -> None:
    """On a device on which only arithmetic takes time, times are operations over its rate."""
    with torch.device("meta"):
        workload = Workload("l", nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.ones(2, 5), 2)
    trace = measure_analytic(workload, Device("d", 1.0, 1e30, 0.0, "made up"))
    assert trace.forward_s == pytest.approx(2 * 2 * (5 * 7 + 7 * 3))
    assert trace.backward_s == pytest.approx(2 * 2 * (5 * 7 + 2 * 7 * 3))
    # The last weight's product is the only one between the gradients of the second layer and those of the first.
    assert trace.layers[-1].name == "0.weight"
    assert sum(layer.backward_s for layer in trace.layers[2:]) >= 2 * 2 * 5 * 7


def test_no_kernel_is_faster_than_an_empty_one() -> None:
    with torch.device("meta"):
        workload = Workload("l", nn.Linear(2, 2), torch.ones(1, 2), 1)
    slow = measure_analytic(workload, Device("d", 1e30, 1e30, 1.0, "made up"))
    assert slow.forward_s + slow.backward_s == count_operations(workload).kernels


@pytest.mark.parametrize("images_per_second", [0.5, 55.0, 1e4])
def test_calibration_meets_the_given_speed_and_keeps_the_proportions(
    resnet50: Workload, on_devices: dict[str, ModelTrace], images_per_second: float
) -> None:
    trace = measure_analytic(resnet50, DEVICES["k80"], images_per_second=images_per_second)
    assert 64 / trace.compute_s == pytest.approx(images_per_second)
    before = on_devices["k80"]
    factor = trace.forward_s / before.forward_s
    assert [layer.backward_s for layer in trace.layers] == pytest.approx(
        [layer.backward_s * factor for layer in before.layers]
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_cannot_be_is_refused(resnet50: Workload, bad: float) -> None:
    with pytest.raises(MeasureError, match=r"images_per_second is .*, expected above 0"):
        measure_analytic(resnet50, PLAIN, images_per_second=bad)


def test_the_order_is_that_of_a_measured_trace() -> None:
    for make, shape in ((lambda: SlowMiddle(0.0), (2, 4)), (tiny_transformer, (2, 5, 32))):
        with torch.device("meta"):
            workload = Workload("m", make(), torch.ones(shape), 2)
        measured = measure_backward(make(), torch.ones(shape), steps=1)
        assert names(measure_analytic(workload, PLAIN)) == names(measured) == ready_order(workload)


def test_frozen_unused_and_shared_parameters_are_as_in_a_measured_trace() -> None:
    with torch.device("meta"):
        workload = Workload("odd", Odd(), torch.arange(6), 6, odd_loss)
    trace = measure_analytic(workload, PLAIN)
    measured = measure_backward(Odd(), torch.arange(6), odd_loss, steps=1)
    assert names(trace) == names(measured)
    assert trace.source["unused"] == measured.source["unused"] == ("unused.weight", "unused.bias")
    assert ready_order(workload) == names(trace)[2:]


def test_every_device_has_a_source_and_a_bandwidth_that_it_names() -> None:
    assert {"k80", "p100", "v100", "a100", "h100", "h200", "cpu"} <= set(DEVICES)
    for name, device in DEVICES.items():
        assert device.name == name
        bandwidth = re.search(r"(\d+) GB/s", device.source)
        assert bandwidth is not None
        boards = 2 if "a board" in device.source else 1  # a K80 is two GPUs on one board
        assert device.bytes_per_s * boards == float(bandwidth[1]) * 1e9


@pytest.mark.parametrize("name", [name for name, device in DEVICES.items() if "images/s" in device.source])
def test_a_device_trains_resnet50_as_fast_as_its_source_says(name: str, on_devices: dict[str, ModelTrace]) -> None:
    published = re.search(r"([\d.]+) images/s", DEVICES[name].source)
    assert published is not None
    assert 64 / on_devices[name].compute_s == pytest.approx(float(published[1]), rel=0.01)


def test_newer_devices_are_faster(on_devices: dict[str, ModelTrace]) -> None:
    times = [on_devices[name].compute_s for name in ("cpu", "k80", "p100", "v100", "a100", "h100", "h200")]
    assert times == sorted(times, reverse=True)


def test_a_model_that_is_not_on_the_meta_device_is_refused() -> None:
    with pytest.raises(MeasureError, match="not on the meta device: build it with device='meta'"):
        measure_analytic(Workload("l", nn.Linear(2, 2), torch.ones(1, 2), 1), PLAIN)


def test_what_cannot_be_counted_is_said_clearly() -> None:
    with torch.device("meta"):
        frozen = Workload("l", nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), 1)
        vector = Workload("l", nn.Linear(2, 2), torch.ones(1, 2), 1, lambda output: output)
    with pytest.raises(MeasureError, match="no parameter that requires a gradient"):
        measure_analytic(frozen, PLAIN)
    with pytest.raises(MeasureError, match=r"the loss is \(1, 2\), expected a tensor with one number"):
        measure_analytic(vector, PLAIN)
