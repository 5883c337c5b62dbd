"""Operations that torch's own table counts wrongly or not at all, worked by hand; and every model of torchvision."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from mgwfbp.measure.analytic import count_operations, measure_analytic
from mgwfbp.measure.devices import Device
from mgwfbp.measure.workload import Workload, build_workload

ONLY_BYTES = Device("d", 1e30, 1.0, 0.0, "made up")


def count(model: nn.Module, batch: Tensor) -> tuple[int, int]:
    found = count_operations(Workload("m", model, batch, len(batch)))
    return found.forward_flops, found.backward_flops


def test_a_grouped_convolution_by_hand() -> None:
    with torch.device("meta"):
        found = count(nn.Conv2d(8, 12, 3, groups=4, bias=False), torch.ones(2, 8, 10, 10, requires_grad=True))
    # Each of 2 x 12 x 8 x 8 outputs sums 8 / 4 channels of 3 x 3; both gradients go through the same products.
    forward = 2 * (2 * 12 * 8 * 8) * (8 // 4 * 3 * 3)
    assert found == (forward, 2 * forward)


def test_a_depthwise_convolution_by_hand() -> None:
    with torch.device("meta"):
        found = count(nn.Conv1d(6, 6, 5, groups=6), torch.ones(3, 6, 20))
    forward = 2 * (3 * 6 * 16) * 5
    assert found == (forward, forward)  # images need no gradient


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_by_hand(groups: int) -> None:
    with torch.device("meta"):
        layer = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups)
        found = count(layer, torch.ones(2, 4, 5, 5, requires_grad=True))
    # Each of 2 x 4 x 5 x 5 inputs is added to 3 x 3 places of 6 / groups channels.
    forward = 2 * (2 * 4 * 5 * 5) * (6 // groups * 3 * 3)
    assert found == (forward, 2 * forward)


def test_only_gradients_that_are_asked_for_are_counted() -> None:
    with torch.device("meta"):
        frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        found = count(nn.Sequential(nn.Conv2d(4, 4, 1), frozen), torch.ones(1, 4, 3, 3))
    one = 2 * (4 * 3 * 3) * 4
    assert found == (2 * one, 2 * one)  # the weight of the first, the input of the second


class Experts(nn.Module):
    """Three experts, each with its own rows, in one product, as mixtures of experts are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 16, 32, dtype=torch.bfloat16))

    def forward(self, rows: Tensor) -> Tensor:
        ends = torch.tensor([8, 16, 24], dtype=torch.int32, device="meta")
        return nn.functional.grouped_mm(rows, self.weight, offs=ends)


def test_experts_that_share_a_product_by_hand() -> None:
    with torch.device("meta"):
        rows = torch.ones(24, 16, dtype=torch.bfloat16, requires_grad=True)
        found = count(Experts(), rows)
    forward = 2 * 24 * 16 * 32  # every row meets one expert
    assert found == (forward, 2 * forward)


def test_a_new_shape_and_new_memory_take_no_time() -> None:
    with torch.device("meta"):
        flat = Workload("m", nn.Linear(5, 7, bias=False), torch.ones(6, 5), 6)
        cube = Workload("m", nn.Linear(5, 7, bias=False), torch.ones(2, 3, 5), 2)
        drops = Workload("m", nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5)), torch.ones(6, 5), 6)
        plain = Workload("m", nn.Linear(5, 7), torch.ones(6, 5), 6)
    assert measure_analytic(cube, ONLY_BYTES).forward_s == measure_analytic(flat, ONLY_BYTES).forward_s
    assert count_operations(cube).kernels == count_operations(flat).kernels
    # Dropout: its mask is drawn (read and written), scaled (twice) and multiplied (three times); 6 x 7 numbers each.
    more_s = measure_analytic(drops, ONLY_BYTES).forward_s - measure_analytic(plain, ONLY_BYTES).forward_s
    assert more_s == (2 + 2 + 3) * 6 * 7 * 4


# The smallest model of every kind that torchvision has.
SMALLEST = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vgg11_bn",
    "vit_b_32",
    "wide_resnet50_2",
]


def test_every_kind_of_model_of_torchvision_is_counted_here() -> None:
    def modules(names: list[str]) -> set[str]:
        return {torchvision.models.get_model_builder(name).__module__ for name in names}

    assert modules(SMALLEST) == modules(torchvision.models.list_models(module=torchvision.models))


def on_meta(name: str, *, requires_grad: bool = True) -> Workload:
    weights = next(iter(torchvision.models.get_model_weights(name)))
    workload = build_workload(name, batch_size=2, device="meta", image_size=weights.transforms().crop_size[0])
    workload.batch.requires_grad_(requires_grad)
    return workload


@pytest.mark.parametrize("name", SMALLEST)
def test_models_of_torchvision_have_their_published_operations_and_twice_as_many_backward(name: str) -> None:
    weights = next(iter(torchvision.models.get_model_weights(name)))
    found = count_operations(on_meta(name))
    # Published without the auxiliary heads with which these two are trained.
    if name not in ("googlenet", "inception_v3"):
        assert found.forward_flops / 2 / 2 == pytest.approx(weights.meta["_ops"] * 1e9, rel=0.01, abs=5e5)
    # A table of positions that a small layer of Swin V2 reads is fixed: it needs no gradient.
    fixed = 5529600 if name == "swin_v2_t" else 0
    assert found.backward_flops == 2 * found.forward_flops - fixed


# Some that are quickly counted, among them the one whose first layer has the largest share.
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "vgg11"])
def test_images_need_no_gradient_so_that_the_first_layer_has_fewer_products(name: str) -> None:
    found, whole = (count_operations(on_meta(name, requires_grad=needs)) for needs in (False, True))
    assert found.forward_flops == whole.forward_flops
    # Up to a fifth of all.
    assert 1.79 * found.forward_flops < found.backward_flops < whole.backward_flops
