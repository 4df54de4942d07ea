"""Readings of a machine: its CPUs, memory, GPUs and storage, once and every second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. ``ours``: it belongs to the watched job."""

    pid: int
    name: str | None
    vram_used_bytes: int | None
    ours: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of one GPU. ``lost``: the driver no longer sees it.

    ``energy_j`` (a counter) and, without GPM, the PCIe rates are slow to ask for: most readings have None there.
    """

    uuid: str
    index: int
    name: str
    util_pct: float | None = None
    mem_util_pct: float | None = None
    vram_used_bytes: int | None = None
    vram_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None  # the limit that the board comes with
    energy_j: float | None = None
    temperature_c: float | None = None
    temperature_limit_c: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    mem_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    sm_active_pct: float | None = None
    sm_occupancy_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class HostReading:
    """One reading of the host, and of what the watched process tree uses.

    ``mem_used_bytes`` counts against ``mem_limit_bytes`` where there is a limit (a container's own use), else
    against ``mem_total_bytes``; reclaimable page cache is not in it. ``tree_cpu_pct`` of 100 is one core.
    """

    cpu_pct: float | None = None
    cpu_per_core_pct: tuple[float, ...] | None = None
    iowait_pct: float | None = None
    load_1min: float | None = None
    mem_total_bytes: int | None = None
    mem_used_bytes: int | None = None
    mem_limit_bytes: int | None = None
    tree_pss_bytes: int | None = None
    tree_cpu_pct: float | None = None
    swap_in_bytes_per_s: float | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What the machine did at one moment."""

    t_s: float
    host: HostReading
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process that is on a GPU or belongs to one of Fulltilt's runs, with all processes under it.

    ``cpu_pct`` is 100 for one busy core; ``run_folder`` is None where it is not one of Fulltilt's.
    """

    pid: int
    name: str | None
    children: int = 0
    cpu_pct: float | None = None
    pss_bytes: int | None = None
    run_folder: str | None = None


@dataclass(frozen=True, slots=True)
class CpuCapacity:
    """CPUs present, and how many of them this process may use (affinity and cgroup quota).

    ``allotted`` is what Slurm gave to the task, which may be more than it is bound to.
    """

    present: int
    affinity: int
    quota: float | None
    usable: float
    allotted: int | None = None


@dataclass(frozen=True, slots=True)
class StorageReading:
    """A data folder: the storage it is on, and how fast its files read."""

    path: str
    filesystem: str | None = None
    device: str | None = None
    kind: Literal["ssd", "hdd", "nvme", "tmpfs", "network", "overlay", "unknown"] = "unknown"
    files: int | None = None
    total_bytes: int | None = None
    counted_fully: bool = False
    sequential_cold_bytes_per_s: float | None = None
    sequential_warm_bytes_per_s: float | None = None
    small_cold_files_per_s: float | None = None
    small_warm_files_per_s: float | None = None
    small_file_bytes: float | None = None
    free_bytes: int | None = None
    fits_in_ram: bool | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run. ``cuda`` is torch's version, ``driver_cuda`` the newest that the driver supports."""

    hostname: str
    platform: str
    python: str
    torch: str | None
    cuda: str | None
    driver: str | None
    cpu: CpuCapacity
    mem_total_bytes: int | None
    mem_limit_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    gpus: tuple[GpuReading, ...] = ()
    driver_cuda: str | None = None
    why_no_gpu: str | None = None
