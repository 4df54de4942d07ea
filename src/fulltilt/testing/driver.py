"""The answers of the fake NVML. Methods are named, and take their arguments, as the functions of pynvml do."""

# ruff: noqa: N802, N803, ARG002, D102 - the names, arguments and documentation are NVIDIA's

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml
from pynvml import NVMLError

from fulltilt.testing.gpus import FakeGpu, Figure, at

Value = TypeVar("Value")


class FakeDriver:
    """A driver with scripted GPUs. A handle is the FakeGpu itself."""

    def __init__(self, gpus: tuple[FakeGpu, ...], clock: Callable[[], float], init_error: int | None) -> None:
        self.gpus = gpus
        self.clock = clock
        self.sessions = 0  # set it to 0 for what unbalanced shutdowns elsewhere in the process do
        self.samples: dict[int, tuple[FakeGpu, float] | None] = {}  # GPM buffer: what was sampled, and when
        self._init_error = init_error
        self._next_address = 0x1000

    def raise_if_lost(self, gpu: FakeGpu) -> None:
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
        self.raise_if_lost(self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for device in (*self.gpus, *(mig for gpu in self.gpus for mig in gpu.migs)):
            if device.uuid == uuid:
                self.raise_if_lost(device)
                return device
        raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    # ----------------------------------------------------------------------- one GPU

    def _figure(self, figure: Figure | None) -> float:
        if figure is None:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return at(figure, self.clock())

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: int | None = None) -> Any:
        memory = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        used = int(at(handle.vram_used_bytes, self.clock()))
        # The first version counts the driver's own reserve as used.
        memory.total, memory.used = handle.vram_total_bytes, used if version else used + handle.vram_reserved_bytes
        memory.free = memory.total - memory.used
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        use = pynvml.c_nvmlUtilization_t()
        use.gpu = int(self._figure(handle.util_pct))
        use.memory = int(at(handle.mem_util_pct, self.clock()))
        return use

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return int(1e3 * self._figure(handle.power_w))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        return int(1e3 * _known(handle.power_limit_w))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:
        if handle.power_w is None:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(1e3 * _mean(handle.power_w, 0.0, self.clock()) * self.clock())

    def nvmlDeviceGetTemperatureV(self, handle: FakeGpu, sensor: int, version: int = 0) -> int:
        return int(at(handle.temperature_c, self.clock()))

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        return int(at(handle.temperature_c, self.clock()))

    def nvmlDeviceGetTemperatureThreshold(self, handle: FakeGpu, threshold: int) -> int:
        return _known(handle.slowdown_c)

    def nvmlDeviceGetMarginTemperature(self, handle: FakeGpu) -> int:
        return _known(handle.margin_c)

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, type: int) -> int:
        speeds = {pynvml.NVML_CLOCK_SM: handle.sm_clock_mhz, pynvml.NVML_CLOCK_MEM: handle.mem_clock_mhz}
        return int(self._figure(speeds.get(type)))

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, type: int) -> int:
        return handle.sm_clock_max_mhz

    def nvmlDeviceGetNumGpuCores(self, device: FakeGpu) -> int:
        return device.cores

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        return at(handle.clock_events, self.clock())

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeGpu) -> int:
        return at(handle.clock_events, self.clock())

    def nvmlDeviceGetPcieThroughput(self, device: FakeGpu, counter: int) -> int:
        is_tx = counter == pynvml.NVML_PCIE_UTIL_TX_BYTES
        rate = device.pcie_tx_bytes_per_s if is_tx else device.pcie_rx_bytes_per_s
        return int(at(rate, self.clock()) // 1024)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: FakeGpu) -> list[Any]:
        held = at(handle.processes, self.clock())
        return [pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used}) for pid, used in held]

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: FakeGpu) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses_v3(handle)

    # ----------------------------------------------------------------------- MIG

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        return [int(device.split), int(device.split)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeGpu:
        if index >= len(device.migs):
            raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return device.migs[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: FakeGpu) -> FakeGpu:
        for gpu in self.gpus:
            if migDevice in gpu.migs:
                return gpu
        raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def nvmlDeviceGetGpuInstanceId(self, device: FakeGpu) -> int:
        return _known(device.gpu_instance)

    def nvmlDeviceGetComputeInstanceId(self, device: FakeGpu) -> int:
        _known(device.gpu_instance)
        return 0

    # ----------------------------------------------------------------------- GPM

    def nvmlGpmQueryDeviceSupport(self, device: FakeGpu) -> Any:
        support = pynvml.c_nvmlGpmSupport_t()
        support.isSupportedDevice = int(device.gpm is not None)
        return support

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


def _known(value: Value | None) -> Value:
    if value is None:
        raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


def _address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


def _mean(figure: Figure, start_s: float, end_s: float) -> float:
    points = 100
    return sum(at(figure, start_s + (end_s - start_s) * (k + 0.5) / points) for k in range(points)) / points
