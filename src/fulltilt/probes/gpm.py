"""GPU Performance Monitoring, which Hopper and newer offer through NVML without a profiler or root.

NVML's utilisation says that some kernel ran; these counters say how much of the chip it used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fulltilt.probes.nvml import Nvml

# The counters refresh about every 100 ms; two samples closer than that can hold the same values.
MIN_INTERVAL_S = 0.1

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class GpmReading:
    """Means over the time between two samples. ``sm_active``: SMs with work on them; ``tensor``: any tensor pipe."""

    sm_active_pct: float | None = None
    sm_occupancy_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None


_METRICS = (  # field of GpmReading, NVML's metric, factor to the field's unit
    ("sm_active_pct", "NVML_GPM_METRIC_SM_UTIL", 1),
    ("sm_occupancy_pct", "NVML_GPM_METRIC_SM_OCCUPANCY", 1),
    ("tensor_active_pct", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1),
    ("dram_active_pct", "NVML_GPM_METRIC_DRAM_BW_UTIL", 1),
    ("pcie_tx_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),
    ("pcie_rx_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
)


class Gpm:
    """Two sample buffers of one GPU, or of one MIG instance of it, filled in turn."""

    def __init__(
        self, nvml: Nvml, older: Any, newer: Any, take: Callable[[Any], Any], clock: Callable[[], float]
    ) -> None:
        self._nvml = nvml
        self._older, self._newer = older, newer
        self._take = take
        self._clock = clock
        self._older_at_s: float | None = None
        self._last = GpmReading()
        self._request = nvml.module.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.module.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_METRICS)
        for slot, (_, metric, _) in enumerate(_METRICS):
            self._request.metrics[slot].metricId = getattr(nvml.module, metric)

    @classmethod
    def open(
        cls, nvml: Nvml, handle: Any, gpu_instance: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Gpm | None:
        """Begin measuring; None where the GPU has no GPM. ``handle`` is the whole GPU's, for a MIG device too."""
        support = nvml.query("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return None

        def take(sample: Any) -> Any:
            if gpu_instance is None:
                return nvml.query("nvmlGpmSampleGet", handle, sample)
            return nvml.query("nvmlGpmMigSampleGet", handle, gpu_instance, sample)

        older, newer = nvml.query("nvmlGpmSampleAlloc"), nvml.query("nvmlGpmSampleAlloc")
        if older is None or newer is None:
            return None
        gpm = cls(nvml, older, newer, take, clock)
        gpm.read()  # the first sample: the next reading covers the time since opening
        return gpm

    def read(self) -> GpmReading:
        """Means since the reading before; that one again if it is less than 0.1 s old. Raises GpuLost."""
        now_s = self._clock()
        if self._older_at_s is not None and now_s - self._older_at_s < MIN_INTERVAL_S:
            return self._last
        if self._take(self._newer) is None:
            self._older_at_s, self._last = None, GpmReading()
            return self._last
        self._last = GpmReading() if self._older_at_s is None else self._means()
        self._older, self._newer = self._newer, self._older
        self._older_at_s = now_s
        return self._last

    def _means(self) -> GpmReading:
        self._request.sample1, self._request.sample2 = self._older, self._newer
        if self._nvml.query("nvmlGpmMetricsGet", self._request) is None:
            return GpmReading()
        values: dict[str, float] = {}
        for slot, (field, _, factor) in enumerate(_METRICS):
            metric = self._request.metrics[slot]
            if metric.nvmlReturn == self._nvml.module.NVML_SUCCESS and math.isfinite(metric.value):
                values[field] = metric.value * factor
        return GpmReading(**values)

    def close(self) -> None:
        """Give the sample buffers back."""
        self._nvml.query("nvmlGpmSampleFree", self._older)
        self._nvml.query("nvmlGpmSampleFree", self._newer)
