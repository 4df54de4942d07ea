"""NVML: sessions, queries that may fail, and the SM counters (GPM)."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

# --------------------------------------------------------------------------- nvml

_LOST = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_GPU_NOT_FOUND",
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
)

_WHY_NO_SESSION = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver is installed (its NVML library was not found)",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated while it ran; reboot or reload it",
    "NVML_ERROR_NO_PERMISSION": "this user may not talk to the NVIDIA driver",
}


# One call at a time: two threads in GPM at once ended in a segmentation fault, and a process may have two samplers.
_lock = threading.Lock()


def _renew_lock() -> None:
    """A forked child needs a new lock: a thread of its parent may have held the old one."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class GpuLost(Exception):  # noqa: N818 - a state of the GPU, not an error of ours
    """The driver no longer answers for a GPU."""


class Nvml:
    """The NVML module (or a fake of it) with errors turned into None or GpuLost."""

    def __init__(self, module: ModuleType | Any) -> None:
        self.module = module
        self._lost = {code for name in _LOST if (code := getattr(module, name, None)) is not None}

    def start(self) -> str | None:
        """Begin a session; returns None, or why it could not begin."""
        try:
            with _lock:
                self.module.nvmlInit()
        except self.module.NVMLError as error:
            for name, words in _WHY_NO_SESSION.items():
                if error.value == getattr(self.module, name, None):
                    return words
            return f"NVML failed: {error}"
        return None

    def query(self, function: str, *arguments: Any) -> Any:
        """The answer, or None where the GPU, driver, user or binding does not support it. Raises GpuLost."""
        call = getattr(self.module, function, None)
        if call is None:
            return None
        try:
            with _lock:
                return call(*arguments)
        except self.module.NVMLError as error:
            if error.value in self._lost:
                raise GpuLost from error
            return None

    def query_first(self, functions: tuple[str, ...], *arguments: Any) -> Any:
        """The answer of the first of these functions that the driver has, or None. Raises GpuLost."""
        answers = (self.query(function, *arguments) for function in functions)
        return next((answer for answer in answers if answer is not None), None)

    def stop(self) -> None:
        """End the session."""
        try:
            with _lock:
                self.module.nvmlShutdown()
        except self.module.NVMLError:
            pass  # it had ended already


# --------------------------------------------------------------------------- gpm

# The counters refresh about every 100 ms; two samples closer than that can hold the same values.
MIN_INTERVAL_S = 0.1

_MIB = 1024**2


# By field of GpuReading: means over the time between two samples, without metrics that the GPU lacks.
GpmReading = dict[str, float]

_METRICS = (  # field, NVML's metric, factor to the field's unit
    ("sm_active_pct", "NVML_GPM_METRIC_SM_UTIL", 1),
    ("sm_occupancy_pct", "NVML_GPM_METRIC_SM_OCCUPANCY", 1),
    ("tensor_active_pct", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1),
    ("dram_active_pct", "NVML_GPM_METRIC_DRAM_BW_UTIL", 1),
    ("pcie_tx_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),
    ("pcie_rx_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
)


class Gpm:
    """GPM counters of one GPU or MIG instance, read with two sample buffers in turn."""

    def __init__(self, nvml: Nvml, handle: Any, gpu_instance: int | None, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._handle, self._gpu_instance = handle, gpu_instance
        self._clock = clock
        self._older, self._newer = nvml.query("nvmlGpmSampleAlloc"), nvml.query("nvmlGpmSampleAlloc")
        self._older_at_s: float | None = None
        self._last: GpmReading = {}
        self._request = nvml.module.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.module.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_METRICS)
        for slot, (_, metric, _) in enumerate(_METRICS):
            self._request.metrics[slot].metricId = getattr(nvml.module, metric)

    @classmethod
    def open(
        cls, nvml: Nvml, handle: Any, gpu_instance: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Gpm | None:
        """Begin measuring; None where the GPU has no GPM. ``handle`` is that of the whole GPU, also for MIG."""
        support = nvml.query("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return None
        gpm = cls(nvml, handle, gpu_instance, clock)
        if gpm._older is None or gpm._newer is None:
            return None
        gpm.read()  # the first sample: the next reading covers the time since opening
        return gpm

    def _take(self, sample: Any) -> Any:
        if self._gpu_instance is None:
            return self._nvml.query("nvmlGpmSampleGet", self._handle, sample)
        return self._nvml.query("nvmlGpmMigSampleGet", self._handle, self._gpu_instance, sample)

    def read(self) -> GpmReading:
        """Means since the last reading, or that reading again if it is less than 0.1 s old. Raises GpuLost."""
        now_s = self._clock()
        if self._older_at_s is not None and now_s - self._older_at_s < MIN_INTERVAL_S:
            return self._last
        if self._take(self._newer) is None:
            self._older_at_s, self._last = None, {}
            return self._last
        self._last = {} if self._older_at_s is None else self._means()
        self._older, self._newer = self._newer, self._older
        self._older_at_s = now_s
        return self._last

    def _means(self) -> GpmReading:
        self._request.sample1, self._request.sample2 = self._older, self._newer
        if self._nvml.query("nvmlGpmMetricsGet", self._request) is None:
            return {}
        values: GpmReading = {}
        for slot, (field, _, factor) in enumerate(_METRICS):
            metric = self._request.metrics[slot]
            if metric.nvmlReturn == self._nvml.module.NVML_SUCCESS and math.isfinite(metric.value):
                values[field] = metric.value * factor
        return values

    def close(self) -> None:
        """Free the sample buffers."""
        self._nvml.query("nvmlGpmSampleFree", self._older)
        self._nvml.query("nvmlGpmSampleFree", self._newer)
