"""Processors we do not have: how fast they train, with the source of every number."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mgwfbp.errors import MeasureError

__all__ = ["DEVICES", "Device"]


# By their names in torch.
_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Device:
    """A processor as the analytic model sees it (fp32 training; TF32 convolutions where the chip has them).

    ``flops_per_s`` is a *sustained* rate of dense kernels, chosen so that the model gives the known training speed of
    ResNet-50 with batch 64; ``bytes_per_s`` is the vendor's memory bandwidth; ``kernel_s`` is what even a kernel with
    nothing to do takes. ``half_flops_per_s`` is the rate of 16-bit matrices, chosen likewise from the speed under
    autocast with batch 256 and channels last; ``half_types`` are those that the chip has units for.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    source: str
    half_flops_per_s: float = 0.0
    half_types: tuple[str, ...] = ()
    half_source: str = ""

    def matrix_flops_per_s(self, dtype: str) -> float:
        """Return the rate of matrices of a type, by its name in torch; raise where there are no units for it."""
        if dtype not in _HALF_TYPES:
            return self.flops_per_s
        if dtype not in self.half_types:
            has = f"those for {', '.join(self.half_types)}" if self.half_types else "none for 16 bits"
            raise MeasureError(
                f"{self.name} has no units for matrices of {dtype}, but {has}: "
                f"choose another type (--autocast) or another of {', '.join(DEVICES)} (--device)"
            )
        return self.half_flops_per_s


# K80 and P100: TensorFlow's official benchmarks of 2017 (tensorflow.org/performance/benchmarks, synthetic data, batch
# 64). V100 and A100: NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, container 21.03, 1 GPU, FP32 and TF32, and
# mixed precision (FP16) for 16 bits. H200: our own traces of ResNet-50 with batch 64, and in BF16 with batch 256 and
# channels last (torch 2.11; with batch 64 the host bounds it). H100: the H200's processor with slower memory, by the
# vendor's data sheets. CPU: our own trace of ResNet-50 with one thread. 6.3 us is what an in-place addition to one
# number took on the H200 when launched from Python, one after another: the host's time, so it is taken for all GPUs.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("k80", 1.440e12, 240e9, 6.3e-6, "one GPU of the board: ResNet-50 at 52 images/s; 480 GB/s a board"),
            Device("p100", 6.411e12, 732e9, 6.3e-6, "ResNet-50 at 219 images/s; 732 GB/s"),
            Device(
                "v100",
                11.61e12,
                900e9,
                6.3e-6,
                "ResNet-50 at 367 images/s in FP32; 900 GB/s",
                half_flops_per_s=47.48e12,
                half_types=("float16",),
                half_source="ResNet-50 at 1200 images/s in FP16",
            ),
            Device(
                "a100",
                31.00e12,
                2039e9,
                6.3e-6,
                "ResNet-50 at 938 images/s in TF32; 2039 GB/s (80 GB)",
                half_flops_per_s=93.10e12,
                half_types=_HALF_TYPES,
                half_source="ResNet-50 at 2470 images/s in FP16",
            ),
            Device(
                "h100",
                65.15e12,
                3350e9,
                6.3e-6,
                "the rate of the H200; 3350 GB/s",
                half_flops_per_s=162.5e12,
                half_types=_HALF_TYPES,
                half_source="the rate of the H200",
            ),
            Device(
                "h200",
                65.15e12,
                4800e9,
                6.3e-6,
                "ResNet-50 at 2010 images/s in TF32, measured; 4800 GB/s",
                half_flops_per_s=162.5e12,
                half_types=_HALF_TYPES,
                half_source="ResNet-50 at 4694 images/s in BF16, measured",
            ),
            Device("cpu", 8.774e10, 10e9, 2e-6, "one x86-64 core: ResNet-50 at 3.0 images/s, measured; 10 GB/s"),
        )
    }
)
