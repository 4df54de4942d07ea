"""GPUs as NVML sees them, addressed by UUID and limited to those that the job may use."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from fulltilt.probes.device import Device, find_devices
from fulltilt.probes.gpm import GpmReading
from fulltilt.probes.nvml import GpuLost, Nvml
from fulltilt.probes.ration import Ration, Turns
from fulltilt.probes.tenants import Tenants
from fulltilt.records import GpuReading

# Clock event reasons that slow a busy GPU down. Left out: idle, clocks set by the user, and the display's setting.
THROTTLE_REASONS = (
    (0x004, "power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "thermal"),
    (0x040, "hw_thermal"),
    (0x080, "power_brake"),
    (0x200, "board_limit"),
    (0x400, "reliability"),
)

# Without GPM the driver watches the PCIe bus for 20 ms a call, and the energy counter takes an H200 5 to 12 ms.
# Each GPU is asked in its turn, and the readings between have None.
_PCIE_SHARE = 0.002
_ENERGY_SHARE = 0.001


class Gpus:
    """A session with NVML. Without a driver, library or GPU it reads ``()`` and ``why_none`` says why."""

    def __init__(self, why_none: str | None) -> None:
        self.driver: str | None = None
        self.cuda: str | None = None
        self.why_none = why_none
        self._nvml: Nvml | None = None
        self._devices: tuple[Device, ...] = ()

    @classmethod
    def open(
        cls,
        nvml: Any = None,
        *,
        all_devices: bool = False,
        root_pid: int | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Gpus:
        """Start a session; never raises. ``all_devices`` ignores CUDA_VISIBLE_DEVICES, as a monitor does.

        ``root_pid`` is the root of the job's process tree (default: this process; under a launcher, the launcher).
        ``nvml`` is the pynvml module or a fake of it.
        """
        if nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                return cls("the NVML bindings are not installed (pip install nvidia-ml-py)")
        gpus = cls(None)
        try:
            gpus._begin(Nvml(nvml), None if all_devices else _environment(environ), root_pid or os.getpid(), clock)
        except GpuLost:
            gpus.why_none = "the driver lost its GPUs; dmesg tells why (look for Xid)"
        except Exception as error:  # a damaged driver must not end the job that we only watch
            gpus.why_none = f"NVML failed: {error!r}"
        return gpus

    def _begin(self, nvml: Nvml, environ: Mapping[str, str] | None, root_pid: int, clock: Callable[[], float]) -> None:
        self.why_none = nvml.start()
        if self.why_none is not None:
            return
        self._nvml, self._clock = nvml, clock
        self.driver = nvml.query("nvmlSystemGetDriverVersion")
        version = nvml.query("nvmlSystemGetCudaDriverVersion_v2")
        self.cuda = None if not version else f"{version // 1000}.{version % 1000 // 10}"
        self._devices, self.why_none = find_devices(nvml, environ, clock)
        self._tenants = Tenants(nvml, root_pid)
        without_gpm = [device for device in self._devices if device.gpm is None]
        self._pcie_turns = Turns(without_gpm, Ration(_PCIE_SHARE, clock=clock))
        self._energy_turns = Turns(self._devices, Ration(_ENERGY_SHARE, clock=clock))

    def read(self) -> tuple[GpuReading, ...]:
        """One reading of each GPU; a GPU that the driver lost stays in the list with ``lost=True``."""
        if self._nvml is None:
            return ()
        asks_pcie, asks_energy = self._pcie_turns.next(), self._energy_turns.next()
        readings: list[GpuReading] = []
        ended = False
        for device in self._devices:
            try:
                readings.append(self._read_device(self._nvml, device, device is asks_pcie, device is asks_energy))
            except GpuLost as lost:
                readings.append(GpuReading(device.uuid, device.index, device.name, lost=True))
                ended = ended or lost.by_shutdown
        if ended and self._nvml.start() is None:
            # Other code in this process ended NVML under us. The next reading finds the GPUs again.
            for device in self._devices:
                device.find_again(self._nvml, self._clock)
        return tuple(readings)

    def _read_device(self, nvml: Nvml, device: Device, asks_pcie: bool, asks_energy: bool) -> GpuReading:
        module, handle, board = nvml.module, device.handle, device.board
        use = nvml.query("nvmlDeviceGetUtilizationRates", handle)
        memory = device.memory(nvml)
        power_mw = nvml.query("nvmlDeviceGetPowerUsage", handle)
        power_limit_mw = nvml.query("nvmlDeviceGetEnforcedPowerLimit", handle)
        energy_mj = None
        if asks_energy:
            with self._energy_turns.ration.spend():
                energy_mj = nvml.query("nvmlDeviceGetTotalEnergyConsumption", handle)
        gpm = device.gpm.read() if device.gpm is not None else GpmReading()
        tx, rx = gpm.pcie_tx_bytes_per_s, gpm.pcie_rx_bytes_per_s
        if asks_pcie:
            with self._pcie_turns.ration.spend():
                tx = _scaled(nvml.query("nvmlDeviceGetPcieThroughput", board, module.NVML_PCIE_UTIL_TX_BYTES), 1024)
                rx = _scaled(nvml.query("nvmlDeviceGetPcieThroughput", board, module.NVML_PCIE_UTIL_RX_BYTES), 1024)
        return GpuReading(
            uuid=device.uuid,
            index=device.index,
            name=device.name,
            util_pct=None if use is None else float(use.gpu),
            mem_util_pct=None if use is None else float(use.memory),
            vram_used_bytes=None if memory is None else int(memory.used),
            vram_total_bytes=None if memory is None else int(memory.total),
            power_w=_scaled(power_mw, 1e-3),
            power_limit_w=_scaled(power_limit_mw, 1e-3),
            energy_j=_scaled(energy_mj, 1e-3),
            temperature_c=device.temperature_c(nvml),
            temperature_limit_c=device.temperature_limit_c,
            sm_clock_mhz=_scaled(nvml.query("nvmlDeviceGetClockInfo", board, module.NVML_CLOCK_SM), 1.0),
            sm_clock_max_mhz=device.sm_clock_max_mhz,
            mem_clock_mhz=_scaled(nvml.query("nvmlDeviceGetClockInfo", board, module.NVML_CLOCK_MEM), 1.0),
            throttle_reasons=throttle_words(_clock_events(nvml, board)),
            pcie_tx_bytes_per_s=tx,
            pcie_rx_bytes_per_s=rx,
            sm_active_pct=gpm.sm_active_pct,
            sm_occupancy_pct=gpm.sm_occupancy_pct,
            tensor_active_pct=gpm.tensor_active_pct,
            dram_active_pct=gpm.dram_active_pct,
            processes=self._tenants.read(handle),
        )

    def close(self) -> None:
        """End the session; reading afterwards gives ``()``."""
        if self._nvml is None:
            return
        for device in self._devices:
            device.close()
        self._nvml.stop()
        self._nvml, self._devices = None, ()

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def throttle_words(reasons: int | None) -> tuple[str, ...] | None:
    """NVML's clock event bits as short words; ``()`` when nothing slows the GPU down."""
    return None if reasons is None else tuple(word for bit, word in THROTTLE_REASONS if reasons & bit)


def _clock_events(nvml: Nvml, board: Any) -> int | None:
    bits = nvml.query("nvmlDeviceGetCurrentClocksEventReasons", board)
    if bits is None:  # a driver before 535 knows them by their old name
        bits = nvml.query("nvmlDeviceGetCurrentClocksThrottleReasons", board)
    return None if bits is None else int(bits)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
