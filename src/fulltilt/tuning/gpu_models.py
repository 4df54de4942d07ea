"""Data sheets of GPUs: enough of each to say what fits and how fast a job would be there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Memory in GiB, bandwidth in GB/s, rates in TFLOPS: dense, with sums in float32, as training uses them.

    None: the GPU has no units for it.
    """

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    fp32: float
    tf32: float | None
    fp16: float | None
    bf16: float | None

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return round(self.memory_gib * GIB)

    def rate(self, precision: Precision) -> tuple[float, Precision]:
        """TFLOPS at a precision, and the precision it would really run at: the next best one that is there."""
        for wanted in {"bf16": ("bf16", "fp16"), "tf32": ("tf32",), "fp16": ("fp16",), "fp32": ()}[precision]:
            found: float | None = getattr(self, wanted)
            if found is not None:
                return found, wanted  # type: ignore[return-value]
        return self.fp32, "fp32"


# GeForce cards sum float16 products in float32 at half of the advertised rate. Memory is what the driver offers: the
# GDDR6 of servers gives a sixteenth to error correction, which is on unless one turns it off.
GPU_MODELS = (
    GpuModel("Tesla P100", 16, 732, 9.5, None, 19.0, None),
    GpuModel("Tesla V100", 16, 900, 15.7, None, 125, None),
    GpuModel("Tesla V100 32GB", 32, 900, 15.7, None, 125, None),
    GpuModel("Tesla T4", 15, 320, 8.1, None, 65, None),
    GpuModel("GTX 1080 Ti", 11, 484, 11.3, None, None, None),
    GpuModel("RTX 2060", 6, 336, 6.5, None, 26, None),
    GpuModel("RTX 2080 Ti", 11, 616, 13.4, None, 54, None),
    GpuModel("RTX 3060", 12, 360, 12.7, 12.7, 25.5, 25.5),
    GpuModel("RTX 3060 Ti", 8, 448, 16.2, 16.2, 32.4, 32.4),
    GpuModel("RTX 3070", 8, 448, 20.3, 20.3, 40.6, 40.6),
    GpuModel("RTX 3070 Ti", 8, 608, 21.7, 21.7, 43.5, 43.5),
    GpuModel("RTX 3080", 10, 760, 29.8, 29.8, 59.5, 59.5),
    GpuModel("RTX 3080 Ti", 12, 912, 34.1, 34.1, 68.2, 68.2),
    GpuModel("RTX 3090", 24, 936, 35.6, 35.6, 71, 71),
    GpuModel("RTX 3090 Ti", 24, 1008, 40, 40, 80, 80),
    GpuModel("RTX 4060", 8, 272, 15.1, 15.1, 30.2, 30.2),
    GpuModel("RTX 4060 Ti", 8, 288, 22.1, 22.1, 44.1, 44.1),
    GpuModel("RTX 4070", 12, 504, 29.1, 29.1, 58.3, 58.3),
    GpuModel("RTX 4070 SUPER", 12, 504, 35.5, 35.5, 71, 71),
    GpuModel("RTX 4070 Ti", 12, 504, 40.1, 40.1, 80.2, 80.2),
    GpuModel("RTX 4070 Ti SUPER", 16, 672, 44.1, 44.1, 88.2, 88.2),
    GpuModel("RTX 4080", 16, 717, 48.7, 48.7, 97.5, 97.5),
    GpuModel("RTX 4080 SUPER", 16, 736, 52.2, 52.2, 104, 104),
    GpuModel("RTX 4090", 24, 1008, 82.6, 82.6, 165, 165),
    GpuModel("RTX 5070", 12, 672, 30.9, 30.9, 61.7, 61.7),
    GpuModel("RTX 5070 Ti", 16, 896, 43.9, 43.9, 87.9, 87.9),
    GpuModel("RTX 5080", 16, 960, 56.3, 56.3, 113, 113),
    GpuModel("RTX 5090", 32, 1792, 105, 105, 210, 210),
    GpuModel("RTX A4000", 16, 448, 19.2, 38.3, 76.7, 76.7),
    GpuModel("RTX A5000", 24, 768, 27.8, 55.6, 111, 111),
    GpuModel("RTX A6000", 48, 768, 38.7, 77.4, 155, 155),
    GpuModel("RTX 6000 Ada", 48, 960, 91.1, 182, 364, 364),
    GpuModel("A10", 22.5, 600, 31.2, 62.5, 125, 125),
    GpuModel("A10G", 22.5, 600, 31.5, 35, 70, 70),
    GpuModel("A30", 24, 933, 10.3, 82, 165, 165),
    GpuModel("A40", 45, 696, 37.4, 74.8, 150, 150),
    GpuModel("A100 40GB", 40, 1555, 19.5, 156, 312, 312),
    GpuModel("A100 80GB", 80, 2039, 19.5, 156, 312, 312),
    GpuModel("L4", 22.5, 300, 30.3, 60, 121, 121),
    GpuModel("L40", 45, 864, 90.5, 90.5, 181, 181),
    GpuModel("L40S", 45, 864, 91.6, 183, 362, 362),
    GpuModel("H100 PCIe", 80, 2000, 51, 378, 756, 756),
    GpuModel("H100", 80, 3350, 67, 494, 989, 989),
    GpuModel("H100 NVL", 94, 3938, 60, 417, 835, 835),
    GpuModel("H200", 140, 4800, 67, 494, 989, 989),
    GpuModel("H200 NVL", 140, 4800, 60, 417, 835, 835),
    GpuModel("GH200", 96, 4000, 67, 494, 989, 989),
    GpuModel("B200", 180, 8000, 75, 1100, 2250, 2250),
)
# Words that only say whose product it is.
_MAKERS = frozenset({"nvidia", "geforce", "rtx", "gtx", "tesla", "quadro", "graphics", "device", "generation"})
# Words that make another GPU of the same number, slower or faster: what has one is no model that has not.
_VARIANTS = frozenset({"laptop", "mobile", "max", "super", "ti", "d", "mig", "nvl"})


def find_gpu(name: str, memory_bytes: int | None = None) -> GpuModel | None:
    """The data sheet for a name as the driver or a person writes it; None for one that is not in the table.

    Of two sizes of the same model, the one nearest to ``memory_bytes``. A laptop's GPU is another one, and so
    is a part of one (MIG).
    """
    asked = _words(name)
    fitting = [model for model in GPU_MODELS if _chip(model) <= asked and not (asked & _VARIANTS) - _chip(model)]
    if not fitting:
        return None
    most = max(len(_chip(model)) for model in fitting)
    best = [model for model in fitting if len(_chip(model)) == most]
    if memory_bytes is not None:
        return min(best, key=lambda model: abs(model.memory_bytes - memory_bytes))
    return max(best, key=lambda model: len(_words(model.name) & asked))


def _words(name: str) -> frozenset[str]:
    spaced = re.sub(r"(?<=\d)(?=ti\b)|(?<=[rg]tx)(?=\d)", " ", name.lower())  # RTX3080Ti
    words = frozenset(re.findall(r"[a-z0-9]+", spaced)) - _MAKERS
    return words | {"pcie"} if any(word.startswith("pcie") for word in words) else words


def _chip(model: GpuModel) -> frozenset[str]:
    """The words of a model's name that tell it from others, without the size of its memory."""
    return frozenset(word for word in _words(model.name) if not re.fullmatch(r"\d+gb", word))
