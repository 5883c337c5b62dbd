"""``--factory``: one meaning in every command, a batch size that is true, a name that tells something."""

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from mgwfbp import MeasureError, ModelTrace
from mgwfbp.cli import run
from mgwfbp.errors import TrainError
from mgwfbp.measure.analytic import measure_analytic
from mgwfbp.measure.devices import DEVICES
from mgwfbp.measure.meta import built_on
from mgwfbp.measure.workload import build_workload
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.models import build_model
from mgwfbp.train.strategy import check_strategy
from tests.measure.models import TinyNet

HERE = "tests.measure.models:"


@pytest.mark.parametrize(
    ("function", "asked", "samples"),
    [
        ("four_samples", None, 4),
        ("four_samples", 4, 4),
        ("factory", None, 2),  # its own default
        ("factory", 5, 5),
        ("needs_batch_size", None, 32),
        ("named", 3, 3),
    ],
)
def test_the_batch_size_is_that_of_the_batch(function: str, asked: int | None, samples: int) -> None:
    workload = build_workload(HERE + function, batch_size=asked)
    assert workload.batch_size == samples
    (tensor,) = workload.batch.values() if isinstance(workload.batch, dict) else [workload.batch]
    assert tensor.shape == (samples, 4)


def test_the_speed_of_a_worker_is_met_with_the_factorys_own_batch(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    options = ["--factory", f"{HERE}four_samples", "--images-per-second", "100", "-o", path]
    assert run(["measure", "analytic", *options]) == 0
    trace = ModelTrace.load(path)
    assert trace.compute_s == pytest.approx(4 / 100)
    assert (trace.source["batch_size"], trace.source["workload"]) == (4, f"{HERE}four_samples")


def test_a_measured_trace_says_how_many_samples_it_had(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    assert run(["measure", "backward", "--factory", f"{HERE}four_samples", "--steps", "2", "-o", path]) == 0
    trace = ModelTrace.load(path)
    assert (trace.model, trace.source["batch_size"]) == ("TinyNet", 4)


@pytest.mark.parametrize(
    ("function", "batch_size", "message"),
    [
        ("four_samples", 64, "returned a batch of 4 samples where 64 are asked for: let it take batch_size, or leave"),
        ("model_alone", None, "returned a model without a batch, expected .model, batch. or .model, batch, loss_fn."),
        ("needs_width", None, "needs width, and this command gives only batch_size: let the others have a default"),
        ("no_tensor", None, "returned a batch without a tensor"),
        ("not_a_factory", None, "returned 'int', expected a torch.nn.Module, .model, batch. or"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_factory_cannot_do_is_said_in_one_line(
    function: str, batch_size: int | None, message: str, device: str
) -> None:
    with pytest.raises(MeasureError, match=message):
        build_workload(HERE + function, batch_size=batch_size, device=device)


@pytest.mark.parametrize(
    ("function", "name"), [("four_samples", "TinyNet"), ("named", "tiny, two layers"), ("factory", "factory")]
)
def test_a_model_is_named_by_itself_or_its_class_or_its_function(function: str, name: str) -> None:
    assert build_workload(HERE + function, batch_size=4).name == name


def test_a_factory_for_measuring_serves_training_too() -> None:
    for function in ("four_samples", "needs_batch_size", "factory", "model_alone"):
        model = build_model(HERE + function, num_classes=10, channels=1)
        assert isinstance(model, (TinyNet, nn.Sequential))
    with pytest.raises(TrainError, match="needs width, and this command gives only num_classes, channels, batch_size"):
        build_model(f"{HERE}needs_width", num_classes=10, channels=1)


@pytest.mark.parametrize("model", [f"{HERE}four_samples", "regnet_x_400mf"])
def test_a_model_that_computes_its_own_shape_can_be_checked_without_weights(model: str) -> None:
    check_strategy(TrainConfig(model=model), num_classes=10, channels=3)


def test_a_model_that_computes_its_own_shape_can_be_counted() -> None:
    workload = build_workload(f"{HERE}four_samples", device="meta")
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}
    trace = measure_analytic(workload, DEVICES["v100"])  # labels have values, scores have none
    assert {layer.name for layer in trace.layers} == {"first.weight", "first.bias", "last.weight", "last.bias"}


class Tied(nn.Module):
    """One weight in two places, made before either; and one that is not there before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = weight
        self.second.weight = weight
        self.lazy = nn.LazyLinear(3)
        self.register_buffer("mask", torch.ones(4))
        self.forward(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lazy(self.second(self.first(x)) * self.mask)  # type: ignore[no-any-return]


def test_a_model_built_without_weights_has_the_parameters_of_one_with() -> None:
    with built_on(torch.device("meta")):
        found = Tied().to("meta")
    real = Tied()
    assert {name: tensor.shape for name, tensor in found.named_parameters()} == {
        name: tensor.shape for name, tensor in real.named_parameters()
    }
    assert found.first.weight is found.second.weight
    assert {tensor.device.type for tensor in [*found.parameters(), *found.buffers()]} == {"meta"}
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # the way is put back


def test_regnet_has_its_published_parameters_without_weights() -> None:
    workload = build_workload("regnet_y_400mf", device="meta")
    published = torchvision.models.RegNet_Y_400MF_Weights.IMAGENET1K_V1.meta["num_params"]
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == published
