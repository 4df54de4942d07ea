"""Fake NVIDIA drivers: whole NVMLs with the GPUs of common machines."""

from __future__ import annotations

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import pynvml
from pynvml import NVMLError

from fulltilt.testing.host import FakeClock

# --------------------------------------------------------------------------- the driver

# ruff: noqa: N802, N803, D102 - the names, arguments and documentation are NVIDIA's


Value = TypeVar("Value")


class FakeNvml:
    """Pass it as ``Gpus.open(nvml=...)``. A handle is the FakeGpu itself; ``calls`` counts those of each function."""

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        clock: Callable[[], float] | None = None,
        *,
        init_error: int | None = None,
        unknown: Sequence[str] = (),
        slow: Mapping[str, float] | None = None,
    ) -> None:
        """``unknown`` names functions that this driver is too old for; ``slow`` those that take seconds."""
        self.gpus = tuple(gpus)  # in the order of the PCI bus
        self.clock = clock or FakeClock()
        self.calls: Counter[str] = Counter()
        self.sessions = 0  # set it to 0 for what unbalanced shutdowns elsewhere in the process do
        self.samples: dict[int, tuple[FakeGpu, float] | None] = {}  # GPM buffer: what was sampled, and when
        self._slow = slow or {}
        self._unknown = frozenset(unknown)
        self._init_error = init_error
        self._next_address = 0x1000

    def __getattribute__(self, name: str) -> Any:
        """Functions of NVML are answered below, all else of its module is the real one."""
        real = getattr(pynvml, name, None)
        if inspect.isfunction(real):
            return partial(self._call, name, _signature(real))
        return object.__getattribute__(self, name) if real is None else real

    def _call(self, name: str, signature: inspect.Signature, /, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        self.calls[name] += 1
        if isinstance(self.clock, FakeClock):
            self.clock.advance(self._slow.get(name, 0.0))
        if name in self._unknown:
            raise NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name != "nvmlInit" and not self.sessions:
            raise NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if bound.args and isinstance(bound.args[0], FakeGpu):
            self._raise_if_lost(bound.args[0])
        if name in _TOLD:
            return _known(_TOLD[name](bound.args[0], self.clock()))
        return _known(vars(FakeNvml).get(name))(self, *bound.args)

    def _raise_if_lost(self, gpu: FakeGpu) -> None:
        """A GPU that has fallen off the bus answers nothing."""
        if gpu.lost_after_s is not None and self.clock() >= gpu.lost_after_s:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    # ----------------------------------------------------------------------- the session

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise NVMLError(self._init_error)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return f"/usr/bin/process-{pid}"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._raise_if_lost(self.gpus[index])
        return self.gpus[index]

    # ----------------------------------------------------------------------- one GPU

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: int | None = None) -> Any:
        total, used = handle.vram_total_bytes, int(at(handle.vram_used_bytes, self.clock()))
        if not version:  # it counts the driver's own reserve as used
            used += _DRIVER_RESERVE_BYTES
        return _struct(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        busy = int(_known(at(handle.util_pct, self.clock())))
        return _struct(gpu=busy, memory=int(at(handle.mem_util_pct, self.clock())))

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, type: int) -> int:
        speeds = {pynvml.NVML_CLOCK_SM: handle.sm_clock_mhz, pynvml.NVML_CLOCK_MEM: handle.mem_clock_mhz}
        return int(_known(at(speeds.get(type), self.clock())))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeGpu:
        if index >= len(device.migs):
            raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return device.migs[index]

    # ----------------------------------------------------------------------- GPM

    def nvmlGpmQueryDeviceSupport(self, device: FakeGpu) -> Any:
        return _struct(isSupportedDevice=int(device.gpm is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._next_address += 0x10
        self.samples[self._next_address] = None
        # A pointer that nobody follows: NVML's own buffers are opaque, too.
        return ctypes.cast(self._next_address, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:
        del self.samples[_address(gpmSample)]

    def nvmlGpmSampleGet(self, device: FakeGpu, gpmSample: Any) -> Any:
        if device.gpm is None or device.split:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.samples[_address(gpmSample)] = (device, self.clock())
        return gpmSample

    def nvmlGpmMigSampleGet(self, device: FakeGpu, gpuInstanceId: int, gpmSample: Any) -> Any:
        for mig in device.migs:
            if mig.gpu_instance == gpuInstanceId and mig.gpm is not None:
                self.samples[_address(gpmSample)] = (mig, self.clock())
                return gpmSample
        raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        if metricsGet.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            raise NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        first, second = (self.samples.get(_address(one)) for one in (metricsGet.sample1, metricsGet.sample2))
        if first is None or second is None or first[0] is not second[0] or second[1] <= first[1]:
            raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for slot in range(metricsGet.numMetrics):
            metric = metricsGet.metrics[slot]
            figure = (first[0].gpm or {}).get(metric.metricId)
            metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if figure is None else pynvml.NVML_SUCCESS
            metric.value = float("nan") if figure is None else _mean(figure, first[1], second[1])
        return metricsGet


_signature = cache(inspect.signature)  # made anew for each call, it would cost more than what is measured around it


def _struct(**fields: int | None) -> Any:
    """What a function of NVML fills in."""
    return pynvml.nvmlFriendlyObject(fields)


def _known(value: Value | None) -> Value:
    if value is None:
        raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


def _address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


def _mean(figure: Figure, start_s: float, end_s: float) -> float:
    if not callable(figure):
        return float(figure)
    points = 100
    return sum(figure(start_s + (end_s - start_s) * (k + 0.5) / points) for k in range(points)) / points


# --------------------------------------------------------------------------- gpus

Figure: TypeAlias = float | Callable[[float], float]
Bits: TypeAlias = int | Callable[[float], int]
Held: TypeAlias = tuple[tuple[int, int | None], ...]  # process ids with their bytes

_GIB = 1024**3
_DRIVER_RESERVE_BYTES = 300 * 1024**2


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
    util_pct: Figure | None = 0
    mem_util_pct: Figure = 0
    power_w: Figure | None = 30.0
    power_limit_w: float | None = 300.0
    power_default_w: float | None = None
    temperature_c: Figure = 40
    slowdown_c: int | None = 93
    margin_c: int | None = None
    sm_clock_mhz: Figure | None = 1000
    sm_clock_max_mhz: int = 1980
    mem_clock_mhz: Figure | None = 2000
    cores: int = 2560
    clock_events: Bits = 0
    processes: Held | Callable[[float], Held] = ()
    gpm: Mapping[int, Figure] | None = None
    lost_after_s: float | None = None
    split: bool = False
    migs: tuple[FakeGpu, ...] = ()
    gpu_instance: int | None = None


def _milli(figure: Figure | None, t_s: float) -> int | None:
    return None if figure is None else int(1e3 * at(figure, t_s))


def _energy_mj(gpu: FakeGpu, t_s: float) -> int | None:
    return None if gpu.power_w is None else int(1e3 * _mean(gpu.power_w, 0.0, t_s) * t_s)


def _processes(gpu: FakeGpu, t_s: float) -> list[Any]:
    return [_struct(pid=pid, usedGpuMemory=used) for pid, used in at(gpu.processes, t_s)]


# What functions tell of a GPU, whatever else they are given.
_TOLD: Mapping[str, Callable[[FakeGpu, float], Any]] = {
    "nvmlDeviceGetName": lambda gpu, _: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu, _: gpu.uuid,
    "nvmlDeviceGetPowerUsage": lambda gpu, t_s: _milli(gpu.power_w, t_s),
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu, t_s: _milli(gpu.power_limit_w, t_s),
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu, t_s: _milli(gpu.power_default_w, t_s),
    "nvmlDeviceGetTotalEnergyConsumption": _energy_mj,
    "nvmlDeviceGetTemperatureV": lambda gpu, t_s: int(at(gpu.temperature_c, t_s)),
    "nvmlDeviceGetTemperature": lambda gpu, t_s: int(at(gpu.temperature_c, t_s)),
    "nvmlDeviceGetTemperatureThreshold": lambda gpu, _: gpu.slowdown_c,
    "nvmlDeviceGetMarginTemperature": lambda gpu, _: gpu.margin_c,
    "nvmlDeviceGetMaxClockInfo": lambda gpu, _: gpu.sm_clock_max_mhz,
    "nvmlDeviceGetNumGpuCores": lambda gpu, _: gpu.cores,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu, t_s: at(gpu.clock_events, t_s),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu, t_s: at(gpu.clock_events, t_s),
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
    "nvmlDeviceGetMigMode": lambda gpu, _: [int(gpu.split), int(gpu.split)],
    "nvmlDeviceGetMaxMigDeviceCount": lambda _gpu, _: 7,
    "nvmlDeviceGetGpuInstanceId": lambda gpu, _: gpu.gpu_instance,
}


def t4(number: int = 0, **figures: Any) -> FakeGpu:
    """A Tesla T4 as on Kaggle: 15 GB, 70 W, no GPM."""
    uuid = f"GPU-{number:08x}-74a0-11ee-b962-0242ac120002"
    gpu = FakeGpu("Tesla T4", uuid, 15 * _GIB, power_limit_w=70.0, sm_clock_max_mhz=1590)
    return replace(gpu, **figures)


def h200(
    sm_active_pct: Figure = 0.0,
    occupancy_pct: Figure = 0.0,
    tensor_pct: Figure = 0.0,
    dram_pct: Figure = 0.0,
    **figures: Any,
) -> FakeGpu:
    """An H200 with GPM. Its slowdown temperature is told as a distance, as Hopper does."""
    gpm = {
        pynvml.NVML_GPM_METRIC_SM_UTIL: sm_active_pct,
        pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: occupancy_pct,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: tensor_pct,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: dram_pct,
        pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 10.0,
        pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 1000.0,
    }
    gpu = FakeGpu("NVIDIA H200", "GPU-a2000000-5c1d-4f2b-9f0a-7d2f8b6c4e11", 141 * _GIB, gpm=gpm, cores=16896)
    return replace(gpu, **{"power_limit_w": 700.0, "slowdown_c": None, "margin_c": 47, **figures})


# --------------------------------------------------------------------------- presets


Clock = Callable[[], float]


def two_t4s(clock: Clock | None = None) -> FakeNvml:
    """Kaggle's machine: two T4s, the first at work and the second idle."""
    return FakeNvml([t4(0, util_pct=85, vram_used_bytes=9 * _GIB, power_w=62.0), t4(1)], clock)


def one_h200(clock: Clock | None = None, busy_after_s: float = 5.0) -> FakeNvml:
    """An H200 with GPM: idle at first, then busy with matrix products."""

    def busy(high: float, low: float = 0.0) -> Callable[[float], float]:
        return lambda t_s: high if t_s >= busy_after_s else low

    gpu = h200(busy(96.0), busy(40.0), busy(88.0), busy(35.0), util_pct=busy(100), power_w=busy(650.0, 75.0))
    return FakeNvml([gpu], clock)


def lost_gpu(clock: Clock | None = None, after_s: float = 10.0) -> FakeNvml:
    """Two T4s of which the second falls off the bus."""
    return FakeNvml([t4(0, util_pct=90), t4(1, util_pct=90, lost_after_s=after_s)], clock)


def throttled_gpu(clock: Clock | None = None, after_s: float = 10.0) -> FakeNvml:
    """A T4 that grows too hot and clocks down."""
    thermal = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    gpu = t4(
        util_pct=100,
        temperature_c=lambda t_s: 94 if t_s >= after_s else 70,
        sm_clock_mhz=lambda t_s: 600 if t_s >= after_s else 1590,
        clock_events=lambda t_s: thermal if t_s >= after_s else pynvml.nvmlClocksEventReasonGpuIdle,
    )
    return FakeNvml([gpu], clock)


def shared_gpu(clock: Clock | None = None, our_pid: int = 1000, other_pid: int = 4242) -> FakeNvml:
    """A T4 with a process of ours and one of somebody else's on it."""
    processes = ((our_pid, 5 * _GIB), (other_pid, 6 * _GIB))
    return FakeNvml([t4(util_pct=97, vram_used_bytes=11 * _GIB, processes=processes)], clock)


def no_driver() -> FakeNvml:
    """A machine on which NVML is not installed."""
    return FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
