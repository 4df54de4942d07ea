"""Checks before a run: GPUs, driver, CPUs, memory, shared memory and the data's storage."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.diagnosis.gpu_summary import slowing_reasons
from fulltilt.figures import celsius, count, number, size, used_of
from fulltilt.records import CheckLine, GpuReading, Machine, Sample, StorageReading

# --------------------------------------------------------------------------- limits

MIB, GIB = 1024**2, 1024**3


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """The loader that the user plans. None was not given and is assumed."""

    workers: int | None = None
    prefetch: int | None = None
    batch_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PreflightThresholds:
    """Shares are of the whole: 0.8 of the memory, of /dev/shm, of the clock."""

    # -- assumed where the user does not say
    prefetch: int = 2  # DataLoader's own default
    batch_bytes: int = 64 * 3 * 224 * 224 * 4  # a common batch: 64 images of 3 × 224 × 224 float32

    # -- host
    shm_share: float = 0.8  # of what is free: collate holds one batch more than the queues
    memory_warn_share: float = 0.8  # the rest is for the page cache, which keeps the data set
    memory_fail_share: float = 0.95  # the kernel's OOM killer is one batch away

    # -- GPU
    vram_free_share: float = 0.9  # a desktop and the driver take up to a tenth of an 8 GB card
    tenant_bytes: int = 64 * MIB  # the smallest CUDA context is about 100 MiB; less is a desktop's window
    temperature_margin_c: float = 5.0  # clocks begin to fall a few degrees before the limit itself

    # -- storage, measured with one reader: several workers read in parallel, but a slow disk stays slow
    sequential_bytes_per_s: float = 200e6  # a hard disk's best, or 1,500 JPEGs of 130 kB each second
    small_files_per_s: float = 500.0  # four workers then read 2,000 a second, what one GPU takes of 224 px images


THRESHOLDS = PreflightThresholds()

# --------------------------------------------------------------------------- gpu

_SHOWN_TENANTS = 3
_COOLING = "Improve the cooling: fans, dust, air flow between the cards."
_THROTTLE_REMEDIES = {
    "thermal": _COOLING,
    "hw_thermal": _COOLING,
    "power_cap": "Raise the power limit (nvidia-smi -pl WATTS) if supply and cooling allow it.",
    "power_brake": "The power supply tells the GPU to slow down: check its cables and rating.",
    "hw_slowdown": "The board slows the GPU down for heat or power: check cooling and supply.",
}


def check_presence(machine: Machine, gpus: Sequence[GpuReading]) -> CheckLine:
    """Is there a GPU, and do all of them answer?"""
    if not gpus:
        remedy = "Training will run on the CPU. A container needs --gpus all; elsewhere see what nvidia-smi says."
        return CheckLine("GPU", "warn", f"none: {machine.why_no_gpu or 'no GPU was found'}", remedy)
    if lost := [f"GPU {gpu.index} ({gpu.name}) no longer answers" for gpu in gpus if gpu.lost]:
        remedy = "Look for Xid errors in dmesg, then reset it (nvidia-smi --gpu-reset) or restart the machine."
        return CheckLine("GPU", "fail", "; ".join(lost), remedy)
    names = [gpu.name for gpu in gpus]
    return CheckLine("GPU", "ok", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))


def check_cuda(machine: Machine, gpus: Sequence[GpuReading]) -> CheckLine:
    """Can this torch use this driver?"""
    if machine.torch is None:
        return CheckLine("CUDA", "fail", "torch is not installed", "Install it: pip install torch")
    if machine.cuda is None:
        figure = f"torch {machine.torch} is built without CUDA"
        if not gpus:
            return CheckLine("CUDA", "ok", f"{figure}; there is no GPU to use it")
        return CheckLine("CUDA", "fail", figure, "Install a build for CUDA: https://pytorch.org/get-started/locally")
    if machine.driver_cuda is None:
        return CheckLine("CUDA", "skip", f"torch is built for CUDA {machine.cuda}; there is no driver to run it")
    figure = f"torch is built for CUDA {machine.cuda}, the driver runs up to {machine.driver_cuda}"
    built, runs = _major(machine.cuda), _major(machine.driver_cuda)
    # The same major version works: NVIDIA promises it from CUDA 11 on, for kernels that were compiled before the job.
    if built is None or runs is None or built <= runs:
        return CheckLine("CUDA", "ok", figure)
    remedy = f"Update the driver to one for CUDA {built}, or install a torch built for CUDA {runs}."
    return CheckLine("CUDA", "fail", figure, remedy)


def _major(version: str) -> int | None:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else None


def check_vram(gpus: Sequence[GpuReading]) -> CheckLine:
    """How much of each GPU's memory is free for the job?"""
    free = [
        (gpu.vram_total_bytes - gpu.vram_used_bytes, gpu.vram_total_bytes, gpu.index)
        for gpu in gpus
        if gpu.vram_used_bytes is not None and gpu.vram_total_bytes
    ]
    if not free:
        return CheckLine("VRAM", "skip", "this GPU does not report it")
    low = [gpu for gpu in free if gpu[0] < THRESHOLDS.vram_free_share * gpu[1]]
    figure = "; ".join(f"GPU {index}: {used_of(left, all_)} free" for left, all_, index in low or [min(free)])
    remedy = "Plan the batch for what is free, or end what holds the rest."
    return CheckLine("VRAM", "warn" if low else "ok", figure, remedy)


def check_processes(gpus: Sequence[GpuReading]) -> CheckLine:
    """Do other processes compute on these GPUs?"""
    if all(gpu.processes is None for gpu in gpus):
        return CheckLine("sharing", "skip", "the driver does not report which processes are on the GPU")
    tenants = [
        f"GPU {gpu.index}: {process.name or 'a process'} (pid {process.pid})"
        + ("" if process.vram_used_bytes is None else f" holds {size(process.vram_used_bytes)}")
        for gpu in gpus
        for process in gpu.processes or ()
        if not process.ours and (process.vram_used_bytes is None or process.vram_used_bytes >= THRESHOLDS.tenant_bytes)
    ]
    if not tenants:
        return CheckLine("sharing", "ok", f"no other process on the GPU{'s' if len(gpus) > 1 else ''}")
    more = len(tenants) - _SHOWN_TENANTS
    figure = "; ".join([*tenants[:_SHOWN_TENANTS], *([f"{more} more"] if more > 0 else [])])
    remedy = "It takes time and memory from your job. Pick a free GPU with CUDA_VISIBLE_DEVICES."
    return CheckLine("sharing", "warn", figure, remedy)


def check_throttling(gpus: Sequence[GpuReading]) -> CheckLine:
    """Is a GPU slowed down right now?"""
    if all(gpu.throttle_reasons is None for gpu in gpus):
        return CheckLine("throttling", "skip", "the driver does not report it")
    slowed = [(gpu, reasons) for gpu in gpus if (reasons := slowing_reasons(gpu))]
    if not slowed:
        return CheckLine("throttling", "ok", "none")
    figures = (f"GPU {gpu.index}: {', '.join(reasons).replace('_', ' ')}{_clock(gpu)}" for gpu, reasons in slowed)
    remedy = _THROTTLE_REMEDIES.get(slowed[0][1][0], "See nvidia-smi -q -d PERFORMANCE.")
    return CheckLine("throttling", "warn", "; ".join(figures), remedy)


def _clock(gpu: GpuReading) -> str:
    if gpu.sm_clock_mhz is None or gpu.sm_clock_max_mhz is None:
        return ""
    return f" ({gpu.sm_clock_mhz:.0f} of {gpu.sm_clock_max_mhz:.0f} MHz)"


def check_temperature(gpus: Sequence[GpuReading]) -> CheckLine:
    """How far is the hottest GPU from the temperature at which it slows itself down?"""
    known = [
        (gpu.temperature_limit_c - gpu.temperature_c, gpu.index, gpu.temperature_c, gpu.temperature_limit_c)
        for gpu in gpus
        if gpu.temperature_c is not None and gpu.temperature_limit_c is not None
    ]
    if not known:
        return CheckLine("temperature", "skip", "the driver does not report it together with its limit")
    margin, hottest, now, limit = min(known)
    figure = f"GPU {hottest}: {celsius(now)}, slows down at {celsius(limit)}"
    remedy, near = "Improve the cooling, or lower the power: nvidia-smi -pl WATTS", THRESHOLDS.temperature_margin_c
    return CheckLine("temperature", "fail" if margin <= 0 else "warn" if margin < near else "ok", figure, remedy)


# --------------------------------------------------------------------------- data

PLACES = {
    "tmpfs": "in RAM",
    "hdd": "on a hard disk",
    "ssd": "on an SSD",
    "nvme": "on NVMe",
    "network": "on a network file system",
    "overlay": "on a container's overlay",
}


def check_storage(storage: StorageReading) -> CheckLine:
    """Is the data on storage that reads fast enough?"""
    if storage.files == 0:
        return CheckLine("data", "warn", f"there is no file in {storage.path}", "Check the folder given with --data.")
    cold = _rates(storage.sequential_cold_bytes_per_s, storage.small_cold_files_per_s)
    warm = _rates(storage.sequential_warm_bytes_per_s, storage.small_warm_files_per_s)
    measured = f"{cold} uncached" if cold else f"{warm} cached" if warm else None
    figure = ", ".join(part for part in (PLACES.get(storage.kind), measured) if part)
    if storage.kind == "tmpfs":
        return CheckLine("data", "ok", figure)
    slow = is_slow(storage)
    if slow is None:
        unknown = "what it reads uncached could not be measured"
        return CheckLine("data", "skip", f"{figure}; {unknown}" if figure else unknown)
    remedy = "Move it to a local SSD, pack small files into large ones, or keep it in RAM (next line)."
    return CheckLine("data", "warn" if slow else "ok", figure, remedy)


def _rates(bytes_per_s: float | None, files_per_s: float | None) -> str:
    parts = [f"{size(bytes_per_s)}/s"] if bytes_per_s is not None else []
    parts += [f"{number(files_per_s)} files/s"] if files_per_s is not None else []
    return " and ".join(parts)


def is_slow(storage: StorageReading) -> bool | None:
    """By uncached reads, or else by the kind of disk; None where neither is known."""
    sequential, small = storage.sequential_cold_bytes_per_s, storage.small_cold_files_per_s
    if sequential is None and small is None:
        return True if storage.kind in ("hdd", "network") else None
    return (sequential is not None and sequential < THRESHOLDS.sequential_bytes_per_s) or (
        small is not None and small < THRESHOLDS.small_files_per_s
    )


def check_staging(storage: StorageReading, machine: Machine) -> CheckLine:
    """Would a RAM disk help, and does the set fit?"""
    if storage.kind == "tmpfs":
        return CheckLine("RAM disk", "ok", "the data is on one")
    if storage.total_bytes is None or storage.fits_in_ram is None:
        return CheckLine("RAM disk", "skip", "the size of the data is not known")
    held = f"{'' if storage.counted_fully else 'at least '}{size(storage.total_bytes)}"
    slow = is_slow(storage)
    if not storage.fits_in_ram:
        figure = f"the data ({held}) does not fit in RAM, so every epoch reads the disk"
        remedy = "Store it smaller (resized, uint8) or on a faster disk."
        return CheckLine("RAM disk", "warn" if slow else "ok", figure, remedy)
    if not slow:
        return CheckLine("RAM disk", "ok", f"not needed: the data ({held}) stays cached after one epoch")
    copy = "Mount a tmpfs of that size and copy the data there."
    if machine.shm_free_bytes is not None and machine.shm_free_bytes > storage.total_bytes:
        copy = f"cp -r {shlex.quote(storage.path)} /dev/shm/"
    return CheckLine("RAM disk", "warn", f"would help, and the data ({held}) fits", copy)


# --------------------------------------------------------------------------- host


def whole_cpus(machine: Machine) -> int:
    """Whole CPUs that this process may use, at least one: the number of workers to start from."""
    return max(1, math.floor(machine.cpu.usable))


def check_cpus(machine: Machine, plan: LoaderPlan) -> CheckLine:
    """May the job use all CPUs, and are there enough for its workers?"""
    cpu = machine.cpu
    figure = f"{number(cpu.usable)} of {cpu.present} usable"
    if cpu.quota is not None and cpu.quota < min(cpu.present, cpu.affinity):
        figure += f" (the cgroup's quota is {number(cpu.quota)})"
    elif cpu.affinity < cpu.present:
        figure += f" (affinity: {cpu.affinity})"
    fitting = whole_cpus(machine)
    if plan.workers is not None and plan.workers > fitting:
        remedy = f"Start with {count('worker', fitting)}: more workers than CPUs are slower."
        return CheckLine("CPUs", "warn", f"{figure}, {plan.workers} workers asked for", remedy)
    if cpu.usable >= cpu.present:
        return CheckLine("CPUs", "ok", figure)
    limits = "docker run --cpus, limits.cpu, --cpus-per-task"
    remedy = f"Plan for {count('CPU', fitting)}, not for os.cpu_count(), or raise the limit ({limits})."
    return CheckLine("CPUs", "warn", figure, remedy)


def check_memory(machine: Machine, sample: Sample | None, plan: LoaderPlan) -> CheckLine:
    """Is there memory left for the job, within its limit?"""
    cap = min((cap for cap in (machine.mem_limit_bytes, machine.mem_total_bytes) if cap), default=None)
    if cap is None:
        return CheckLine("memory", "skip", "not measured here")
    limited = " (the cgroup's limit)" if machine.mem_total_bytes is not None and cap < machine.mem_total_bytes else ""
    used = sample.host.mem_used_bytes if sample is not None else None
    if used is None:
        return CheckLine("memory", "ok", f"{size(cap)}{limited}")
    figure = f"{used_of(used, cap)}{limited} used"
    if plan.workers:
        figure += f", {size(max(0, cap - used) // plan.workers)} left for each of {count('worker', plan.workers)}"
    remedy = "End other processes, or use fewer workers and a smaller prefetch."
    fails, warns = used >= THRESHOLDS.memory_fail_share * cap, used >= THRESHOLDS.memory_warn_share * cap
    return CheckLine("memory", "fail" if fails else "warn" if warns else "ok", figure, remedy)


def check_shm(machine: Machine, plan: LoaderPlan) -> CheckLine:
    """Do the batches that the workers keep ready fit into shared memory?"""
    if machine.shm_free_bytes is None:
        return CheckLine("/dev/shm", "skip", "there is none here")
    free, said, flag = machine.shm_free_bytes, "free", "--shm-size"
    if machine.mem_limit_bytes is not None and machine.mem_limit_bytes < free:
        # Shared memory counts against the memory limit too.
        free, said, flag = machine.mem_limit_bytes, "allowed", "--memory"
    workers = whole_cpus(machine) if plan.workers is None else plan.workers
    prefetch = THRESHOLDS.prefetch if plan.prefetch is None else plan.prefetch
    batch_bytes = THRESHOLDS.batch_bytes if plan.batch_bytes is None else plan.batch_bytes
    need = workers * prefetch * batch_bytes
    given = {"workers": plan.workers, "prefetch": plan.prefetch, "batch": plan.batch_bytes}
    assumed = [name for name, value in given.items() if value is None]
    figure = f"{size(free)} {said}, {size(need)} needed: {count('worker', workers)} × {prefetch} × {size(batch_bytes)}"
    figure += f" ({', '.join(assumed)} assumed)" if assumed else ""
    # Only what the user named can fail, not what was assumed.
    fails, fits = need > free and not assumed, need <= THRESHOLDS.shm_share * free
    wanted_gib = math.ceil(need / THRESHOLDS.shm_share / GIB)
    remedy = f"Enlarge it (docker run {flag}={wanted_gib}g), or use fewer workers or a smaller prefetch."
    return CheckLine("/dev/shm", "ok" if fits else "fail" if fails else "warn", figure, remedy)


def preflight(
    machine: Machine,
    storage: StorageReading | None = None,
    sample: Sample | None = None,
    plan: LoaderPlan | None = None,
) -> tuple[CheckLine, ...]:
    """All lines of the preflight. GPUs are taken from ``sample`` if it has any, else from the machine's reading."""
    plan = plan or LoaderPlan()
    gpus = sample.gpus if sample is not None and sample.gpus else machine.gpus
    lines = [check_presence(machine, gpus), check_cuda(machine, gpus)]
    if gpus:
        lines += [check(gpus) for check in (check_vram, check_processes, check_throttling, check_temperature)]
    lines += [check_cpus(machine, plan), check_memory(machine, sample, plan), check_shm(machine, plan)]
    if storage is None:
        lines.append(CheckLine("data", "skip", "not checked", "Name the folder of your data: --data DIR"))
    else:
        lines += [check_storage(storage), check_staging(storage, machine)]
    return tuple(lines)
