"""One GPU (or MIG device) as NVML addresses it, and the list of those that the job may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fulltilt.probes.gpm import Gpm
from fulltilt.probes.nvml import GpuLost, Nvml
from fulltilt.probes.visible import visible_uuids


@dataclass(slots=True)
class Device:
    """A GPU with what does not change about it. ``board`` is the whole GPU where ``handle`` is a MIG device."""

    uuid: str
    index: int
    handle: Any
    board: Any
    name: str = "NVIDIA GPU"
    gpm: Gpm | None = None
    sm_clock_max_mhz: float | None = None
    temperature_limit_c: float | None = None

    def describe(self, nvml: Nvml, clock: Callable[[], float]) -> None:
        """Ask for everything that does not change. What a lost GPU does not answer stays unknown."""
        module = nvml.module
        try:
            name = nvml.query("nvmlDeviceGetName", self.handle) or nvml.query("nvmlDeviceGetName", self.board)
            self.name = name or self.name
            clock_mhz = nvml.query("nvmlDeviceGetMaxClockInfo", self.board, module.NVML_CLOCK_SM)
            self.sm_clock_max_mhz = None if clock_mhz is None else float(clock_mhz)
            self.temperature_limit_c = self._slowdown_c(nvml)
            instance = None if self.handle is self.board else nvml.query("nvmlDeviceGetGpuInstanceId", self.handle)
            if self.handle is self.board or instance is not None:
                self.gpm = Gpm.open(nvml, self.board, instance, clock)
        except GpuLost:
            pass  # the readings will say so

    def _slowdown_c(self, nvml: Nvml) -> float | None:
        slowdown = nvml.module.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        limit = nvml.query("nvmlDeviceGetTemperatureThreshold", self.board, slowdown)
        if limit is not None:
            return float(limit)
        # Newer GPUs tell the distance to that temperature instead.
        margin, now_c = nvml.query("nvmlDeviceGetMarginTemperature", self.board), self.temperature_c(nvml)
        return None if margin is None or now_c is None else now_c + margin

    def memory(self, nvml: Nvml) -> Any:
        """NVML's memory info; from its second version on the driver's own reserve is not counted as used."""
        second = getattr(nvml.module, "nvmlMemory_v2", None)
        found = None if second is None else nvml.query("nvmlDeviceGetMemoryInfo", self.handle, second)
        return found if found is not None else nvml.query("nvmlDeviceGetMemoryInfo", self.handle)

    def temperature_c(self, nvml: Nvml) -> float | None:
        """The temperature of the GPU."""
        sensor = nvml.module.NVML_TEMPERATURE_GPU
        degrees = nvml.query("nvmlDeviceGetTemperatureV", self.board, sensor)
        if degrees is None:
            degrees = nvml.query("nvmlDeviceGetTemperature", self.board, sensor)
        return None if degrees is None else float(degrees)

    def find_again(self, nvml: Nvml, clock: Callable[[], float]) -> None:
        """Look this GPU up by its UUID, in a session that was begun anew."""
        try:
            handle = nvml.query("nvmlDeviceGetHandleByUUID", self.uuid)
            if handle is None:
                return
            board = nvml.query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            self.handle, self.board = handle, handle if board is None else board
        except GpuLost:
            return
        self.describe(nvml, clock)

    def close(self) -> None:
        """Give back what the driver holds for us."""
        if self.gpm is not None:
            try:
                self.gpm.close()
            except GpuLost:
                pass


def find_devices(
    nvml: Nvml, environ: Mapping[str, str] | None, clock: Callable[[], float]
) -> tuple[tuple[Device, ...], str | None]:
    """The GPUs that a job with this environment sees (None: every GPU), and why there are none. Raises GpuLost."""
    boards = dict(_boards(nvml))
    if not boards:
        return (), "the NVIDIA driver sees no GPU that this user may use"
    if environ is None:
        found = [(uuid, handle, handle) for uuid, handle in boards.items()]
    else:
        found = list(_visible(nvml, boards, environ))
    devices = tuple(Device(uuid, index, handle, board) for index, (uuid, handle, board) in enumerate(found))
    for device in devices:
        device.describe(nvml, clock)
    if devices:
        return devices, None
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
            continue  # it fell off the bus before we came; the others are still there
        if uuid is not None:
            yield uuid, handle


def _visible(nvml: Nvml, boards: dict[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """(UUID, handle, handle of the board) of each device in CUDA's order."""
    migs = {uuid: list(_mig_devices(nvml, uuid, handle)) for uuid, handle in boards.items()}
    mig_names = {name: mig[0] for found in migs.values() for mig, names in found for name in names}
    by_uuid = {mig[0]: mig for found in migs.values() for mig, _ in found}
    ordered = list(boards)
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # NVML's order is that of the PCI bus; CUDA's own puts the fastest first, by an estimate such as this one.
        ordered.sort(key=lambda uuid: -_speed(nvml, boards[uuid]))
    for uuid in visible_uuids(environ.get("CUDA_VISIBLE_DEVICES"), ordered, mig_names):
        if uuid in by_uuid:
            yield by_uuid[uuid]
        elif not _is_split(nvml, boards[uuid]):
            yield uuid, boards[uuid], boards[uuid]
        elif migs[uuid]:
            yield migs[uuid][0][0]  # of a GPU that is split by MIG, CUDA uses the first device


def _is_split(nvml: Nvml, board: Any) -> bool:
    mode = nvml.query("nvmlDeviceGetMigMode", board)
    return mode is not None and mode[0] == nvml.module.NVML_DEVICE_MIG_ENABLE


def _mig_devices(nvml: Nvml, uuid: str, board: Any) -> Iterator[tuple[tuple[str, Any, Any], tuple[str, str]]]:
    """Each MIG device of a GPU, with the new and the old form of its name."""
    if not _is_split(nvml, board):
        return
    for number in range(nvml.query("nvmlDeviceGetMaxMigDeviceCount", board) or 0):
        handle = nvml.query("nvmlDeviceGetMigDeviceHandleByIndex", board, number)
        name = None if handle is None else nvml.query("nvmlDeviceGetUUID", handle)
        if name is None:
            continue
        gpu_instance = nvml.query("nvmlDeviceGetGpuInstanceId", handle)
        compute_instance = nvml.query("nvmlDeviceGetComputeInstanceId", handle)
        yield (name, handle, board), (name, f"MIG-{uuid}/{gpu_instance}/{compute_instance}")


def _speed(nvml: Nvml, board: Any) -> int:
    cores = nvml.query("nvmlDeviceGetNumGpuCores", board)
    return int(cores or 0) * int(nvml.query("nvmlDeviceGetMaxClockInfo", board, nvml.module.NVML_CLOCK_SM) or 0)
