"""The GPUs that a job may use: their readings, and the processes on them."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from fulltilt.probes.nvml import Gpm, GpuLost, Nvml
from fulltilt.probes.rate_limit import RateLimit
from fulltilt.records import GpuProcess, GpuReading

# --------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES


def visible_uuids(value: str | None, gpus: Sequence[str], migs: Sequence[str] = ()) -> tuple[str, ...]:
    """The UUIDs that CUDA shows for a value of CUDA_VISIBLE_DEVICES, in the order of CUDA's ordinals.

    ``gpus`` are all UUIDs in CUDA's own order; ``migs`` those of the MIG devices.
    As in CUDA the first entry decides whether the list holds indices, GPUs' or MIG devices' UUIDs, the list ends
    at the first invalid entry, and a device named twice makes the whole list empty.
    """
    if value is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0].startswith("MIG-"):
        # CUDA lets a process use one MIG device, whatever else is listed.
        return tuple(uuid for uuid in [_by_prefix(entries[0], "MIG-", migs)] if uuid is not None)
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[str] = []
    for entry in entries:
        uuid = _by_prefix(entry, "GPU-", gpus) if by_uuid else _by_index(entry, gpus)
        if uuid is None:
            break
        if uuid in chosen:
            return ()
        chosen.append(uuid)
    return tuple(chosen)


def _by_index(entry: str, gpus: Sequence[str]) -> str | None:
    index = int(entry) if entry.isdecimal() else len(gpus)
    return gpus[index] if index < len(gpus) else None


def _by_prefix(entry: str, kind: str, uuids: Sequence[str]) -> str | None:
    found = [uuid for uuid in uuids if entry.startswith(kind) and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None  # an ambiguous prefix is invalid


# --------------------------------------------------------------------------- processes on a GPU

# Linux gives the first PID namespace this inode number (PROC_PID_INIT_INO). In it, the driver's numbers are ours.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


class GpuProcesses:
    """Reads the compute processes on a GPU (MPS clients included). Ours are ``root_pid`` and all that it started.

    The driver knows nothing of PID namespaces: inside a container it names processes by the host's numbers, or by 0.
    A number that is not found here may therefore be our own process, and counts as ours to avoid false alarms.
    """

    def __init__(self, nvml: Nvml, root_pid: int, proc: Path = Path("/proc")) -> None:
        self._nvml = nvml
        self._root_pid = root_pid
        self._proc = proc
        self._same_numbers = _numbers_are_the_drivers(proc)
        self._identify_once = lru_cache(256)(self._identify)  # psutil.Process differs for a reused number

    def read(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """The processes in order of their ids; None where the driver does not report them. Raises GpuLost."""
        # The names without a version raise another exception type. All drivers that torch runs on have version 3.
        compute = self._nvml.query("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        of_mps = self._nvml.query("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)
        if compute is None:
            return None
        held: dict[int, int | None] = {}
        for process in (*compute, *(of_mps or ())):
            held[process.pid] = max(held.get(process.pid) or 0, process.usedGpuMemory or 0) or None
        return tuple(GpuProcess(pid, name, held[pid], ours) for pid in sorted(held) for name, ours in [self._who(pid)])

    def _who(self, pid: int) -> tuple[str | None, bool]:
        """Name of a process, and whether it is ours."""
        try:
            return self._identify_once(pid, psutil.Process(pid) if pid else None)
        except psutil.Error:
            return self._identify_once(pid, None)

    def _identify(self, pid: int, process: psutil.Process | None) -> tuple[str | None, bool]:
        try:
            if process is not None:
                if self._root_pid in (pid, *(parent.pid for parent in process.parents())):
                    return process.name(), True
                if self._same_numbers or self._uses_a_gpu(pid):
                    return process.name(), False
        except psutil.Error:
            pass  # it has ended meanwhile
        path = self._nvml.query("nvmlSystemGetProcessName", pid) if pid else None
        name = None if not path else str(path).replace("\\", "/").rsplit("/", 1)[-1]
        return name, pid == 0 or not self._same_numbers

    def _uses_a_gpu(self, pid: int) -> bool:
        """Whether the process with this number has an NVIDIA device open. False if we may not look."""
        try:
            links = (self._proc / str(pid) / "fd").iterdir()
            return any(str(link.readlink()).startswith("/dev/nvidia") for link in links)
        except OSError:
            return False


def _numbers_are_the_drivers(proc: Path) -> bool:
    try:
        return (proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return not (proc / "self").exists()  # Windows has no PID namespaces; without /proc Linux may have one


# --------------------------------------------------------------------------- device


@dataclass(slots=True)
class Device:
    """A GPU, and a reading of its constant properties. ``board`` is the whole GPU where ``handle`` is a MIG device."""

    handle: Any
    board: Any
    known: GpuReading
    gpm: Gpm | None = None


def _open_device(nvml: Nvml, clock: Callable[[], float], index: int, uuid: str, handle: Any, board: Any) -> Device:
    device = Device(handle, board, GpuReading(uuid, index, "NVIDIA GPU"))
    try:
        clock_mhz = nvml.query("nvmlDeviceGetMaxClockInfo", board, nvml.module.NVML_CLOCK_SM)
        device.known = replace(
            device.known,
            name=nvml.query("nvmlDeviceGetName", handle) or nvml.query("nvmlDeviceGetName", board) or device.known.name,
            sm_clock_max_mhz=_scaled(clock_mhz, 1.0),
            power_default_w=_scaled(nvml.query("nvmlDeviceGetPowerManagementDefaultLimit", board), 1e-3),
            temperature_limit_c=_slowdown_c(nvml, board),
        )
        instance = None if handle is board else nvml.query("nvmlDeviceGetGpuInstanceId", handle)
        if handle is board or instance is not None:
            device.gpm = Gpm.open(nvml, board, instance, clock)
    except GpuLost:
        pass  # the readings show it
    return device


def _slowdown_c(nvml: Nvml, board: Any) -> float | None:
    limit = nvml.query("nvmlDeviceGetTemperatureThreshold", board, nvml.module.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if limit is not None:
        return float(limit)
    # Newer GPUs report the distance to that temperature instead.
    margin, now_c = nvml.query("nvmlDeviceGetMarginTemperature", board), _temperature_c(nvml, board)
    return None if margin is None or now_c is None else now_c + margin


def _temperature_c(nvml: Nvml, board: Any) -> float | None:
    sensor = nvml.module.NVML_TEMPERATURE_GPU
    return _scaled(nvml.query_first(("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), board, sensor), 1.0)


def find_devices(
    nvml: Nvml, environ: Mapping[str, str] | None, clock: Callable[[], float]
) -> tuple[tuple[Device, ...], str | None]:
    """The GPUs that are visible in this environment (None: all), and why there are none. Raises GpuLost."""
    boards = dict(_boards(nvml))
    if not boards:
        return (), "the NVIDIA driver sees no GPU that this user may use"
    if environ is None:
        found = [(uuid, handle, handle) for uuid, handle in boards.items()]
    else:
        found = list(_visible(nvml, boards, environ))
    if found:
        return tuple(_open_device(nvml, clock, index, *each) for index, each in enumerate(found)), None
    value = (environ or {}).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return (), "the GPU is split by MIG, and no MIG device has been made on it"
    return (), f"CUDA_VISIBLE_DEVICES={value!r} shows none of the {len(boards)} GPUs of this machine"


def _boards(nvml: Nvml) -> Iterator[tuple[str, Any]]:
    for number in range(nvml.query("nvmlDeviceGetCount") or 0):
        try:
            handle = nvml.query("nvmlDeviceGetHandleByIndex", number)
            uuid = None if handle is None else nvml.query("nvmlDeviceGetUUID", handle)
        except GpuLost:
            continue  # it fell off the bus; the others are still there
        if uuid is not None:
            yield uuid, handle


def _visible(nvml: Nvml, boards: dict[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """(UUID, handle, handle of the board) of each device in CUDA's order."""
    migs = {uuid: list(_mig_devices(nvml, handle)) for uuid, handle in boards.items()}
    by_uuid = {mig[0]: mig for found in migs.values() for mig in found}
    ordered = list(boards)
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # NVML orders by PCI bus; CUDA puts the fastest first, by an estimate like this one.
        ordered.sort(key=lambda uuid: -_speed(nvml, boards[uuid]))
    for uuid in visible_uuids(environ.get("CUDA_VISIBLE_DEVICES"), ordered, list(by_uuid)):
        if uuid in by_uuid:
            yield by_uuid[uuid]
        elif not _is_split(nvml, boards[uuid]):
            yield uuid, boards[uuid], boards[uuid]
        elif migs[uuid]:
            yield migs[uuid][0]  # of a GPU with MIG, CUDA uses the first device


def _is_split(nvml: Nvml, board: Any) -> bool:
    mode = nvml.query("nvmlDeviceGetMigMode", board)
    return mode is not None and mode[0] == nvml.module.NVML_DEVICE_MIG_ENABLE


def _mig_devices(nvml: Nvml, board: Any) -> Iterator[tuple[str, Any, Any]]:
    """(UUID, handle, handle of the board) of each MIG device of a GPU."""
    if not _is_split(nvml, board):
        return
    for number in range(nvml.query("nvmlDeviceGetMaxMigDeviceCount", board) or 0):
        handle = nvml.query("nvmlDeviceGetMigDeviceHandleByIndex", board, number)
        uuid = None if handle is None else nvml.query("nvmlDeviceGetUUID", handle)
        if uuid is not None:
            yield uuid, handle, board


def _speed(nvml: Nvml, board: Any) -> int:
    cores = nvml.query("nvmlDeviceGetNumGpuCores", board)
    return int(cores or 0) * int(nvml.query("nvmlDeviceGetMaxClockInfo", board, nvml.module.NVML_CLOCK_SM) or 0)


# --------------------------------------------------------------------------- gpu

# Clock event reasons that slow a busy GPU down, without idle, clocks set by the user, and the display's setting.
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

# Drivers before 535 only know the old name.
_CLOCK_EVENTS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")

# Reading the energy counter of an H200 takes 5 to 12 ms: it is read now and then, and None in between.
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
        gpus = cls(None)
        try:
            nvml = nvml or importlib.import_module("pynvml")
            environ = None if all_devices else os.environ if environ is None else environ
            gpus._begin(Nvml(nvml), environ, root_pid or os.getpid(), clock)
        except GpuLost:
            gpus.why_none = "the driver lost its GPUs; see the Xid errors in dmesg"
        except Exception as error:  # a damaged driver must not end the job that we only watch
            gpus.why_none = f"NVML failed: {error!r}"
        return gpus

    def _begin(self, nvml: Nvml, environ: Mapping[str, str] | None, root_pid: int, clock: Callable[[], float]) -> None:
        self.why_none = nvml.start()
        if self.why_none is not None:
            return
        self._nvml = nvml
        self.driver = nvml.query("nvmlSystemGetDriverVersion")
        version = nvml.query("nvmlSystemGetCudaDriverVersion_v2")
        self.cuda = None if not version else f"{version // 1000}.{version % 1000 // 10}"
        self._devices, self.why_none = find_devices(nvml, environ, clock)
        self._processes = GpuProcesses(nvml, root_pid)
        self._energy_limit = RateLimit(_ENERGY_SHARE, clock=clock)

    def read(self) -> tuple[GpuReading, ...]:
        """One reading of each GPU; a GPU that the driver lost stays in the list with ``lost=True``."""
        if self._nvml is None:
            return ()
        asks_energy = self._energy_limit.due()
        readings: list[GpuReading] = []
        for device in self._devices:
            try:
                readings.append(self._read_device(self._nvml, device, asks_energy))
            except GpuLost:
                known = device.known
                readings.append(GpuReading(known.uuid, known.index, known.name, lost=True))
        return tuple(readings)

    def _read_device(self, nvml: Nvml, device: Device, asks_energy: bool) -> GpuReading:
        module, handle, board = nvml.module, device.handle, device.board
        use = nvml.query("nvmlDeviceGetUtilizationRates", handle)
        # Version 2 does not count the driver's own reserve as used.
        memory = nvml.query("nvmlDeviceGetMemoryInfo", handle, module.nvmlMemory_v2)
        power_mw = nvml.query("nvmlDeviceGetPowerUsage", handle)
        power_limit_mw = nvml.query("nvmlDeviceGetEnforcedPowerLimit", handle)
        energy_mj = None
        if asks_energy:
            with self._energy_limit.spend():
                energy_mj = nvml.query("nvmlDeviceGetTotalEnergyConsumption", handle)
        counters: dict[str, Any] = dict(device.gpm.read()) if device.gpm is not None else {}
        return replace(
            device.known,
            util_pct=None if use is None else float(use.gpu),
            mem_util_pct=None if use is None else float(use.memory),
            vram_used_bytes=None if memory is None else int(memory.used),
            vram_total_bytes=None if memory is None else int(memory.total),
            power_w=_scaled(power_mw, 1e-3),
            power_limit_w=_scaled(power_limit_mw, 1e-3),
            energy_j=_scaled(energy_mj, 1e-3),
            temperature_c=_temperature_c(nvml, board),
            sm_clock_mhz=_scaled(nvml.query("nvmlDeviceGetClockInfo", board, module.NVML_CLOCK_SM), 1.0),
            mem_clock_mhz=_scaled(nvml.query("nvmlDeviceGetClockInfo", board, module.NVML_CLOCK_MEM), 1.0),
            throttle_reasons=throttle_words(nvml.query_first(_CLOCK_EVENTS, board)),
            processes=self._processes.read(handle),
            **counters,
        )

    def close(self) -> None:
        """End the session; reading afterwards gives ``()``."""
        if self._nvml is None:
            return
        for device in self._devices:
            if device.gpm is not None:
                with contextlib.suppress(GpuLost):
                    device.gpm.close()
        self._nvml.stop()
        self._nvml, self._devices = None, ()

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def throttle_words(reasons: int | None) -> tuple[str, ...] | None:
    """NVML's clock event bits as short words; ``()`` when nothing slows the GPU down."""
    return None if reasons is None else tuple(word for bit, word in THROTTLE_REASONS if reasons & bit)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
