"""GPUs for the fake NVML: each figure is a value or a function of the time in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import pynvml

Value = TypeVar("Value")
Figure: TypeAlias = float | Callable[[float], float]
Bits: TypeAlias = int | Callable[[float], int]
Held: TypeAlias = tuple[tuple[int, int | None], ...]  # process ids with their bytes

_GIB = 1024**3


def at(value: Value | Callable[[float], Value], t_s: float) -> Value:
    """The value at a time."""
    return value(t_s) if callable(value) else value


@dataclass(eq=False)
class FakeGpu:
    """The script of one GPU. None is what this GPU does not support; ``gpm`` goes by NVML's metric ids."""

    name: str
    uuid: str
    vram_total_bytes: int
    vram_used_bytes: Figure = 0
    vram_reserved_bytes: int = 300 * 1024**2
    util_pct: Figure | None = 0
    mem_util_pct: Figure = 0
    power_w: Figure | None = 30.0
    power_limit_w: float | None = 300.0
    temperature_c: Figure = 40
    slowdown_c: int | None = 93
    margin_c: int | None = None
    sm_clock_mhz: Figure | None = 1000
    sm_clock_max_mhz: int = 1980
    mem_clock_mhz: Figure | None = 2000
    cores: int = 2560
    clock_events: Bits = 0
    pcie_tx_bytes_per_s: Figure = 0
    pcie_rx_bytes_per_s: Figure = 0
    processes: Held | Callable[[float], Held] = ()
    gpm: Mapping[int, Figure] | None = None
    lost_after_s: float | None = None
    split: bool = False
    migs: tuple[FakeGpu, ...] = ()
    gpu_instance: int | None = None


def t4(number: int = 0, **figures: object) -> FakeGpu:
    """A Tesla T4 as on Kaggle: 15 GB, 70 W, no GPM."""
    given: dict[str, object] = {
        "name": "Tesla T4",
        "uuid": f"GPU-{number:08x}-74a0-11ee-b962-0242ac120002",
        "vram_total_bytes": 15 * _GIB,
        "power_limit_w": 70.0,
        "sm_clock_max_mhz": 1590,
        **figures,
    }
    return FakeGpu(**given)  # type: ignore[arg-type]


def h200(
    sm_active_pct: Figure = 0.0,
    occupancy_pct: Figure = 0.0,
    tensor_pct: Figure = 0.0,
    dram_pct: Figure = 0.0,
    **figures: object,
) -> FakeGpu:
    """An H200 with GPM. Its slowdown temperature is told as a distance, as Hopper does."""
    given: dict[str, object] = {
        "name": "NVIDIA H200",
        "uuid": "GPU-a2000000-5c1d-4f2b-9f0a-7d2f8b6c4e11",
        "vram_total_bytes": 141 * _GIB,
        "power_limit_w": 700.0,
        "slowdown_c": None,
        "margin_c": 47,
        "cores": 16896,
        "gpm": {
            pynvml.NVML_GPM_METRIC_SM_UTIL: sm_active_pct,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: occupancy_pct,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: tensor_pct,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: dram_pct,
            pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 10.0,
            pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 1000.0,
        },
        **figures,
    }
    return FakeGpu(**given)  # type: ignore[arg-type]
