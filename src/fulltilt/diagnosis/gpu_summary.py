"""The GPUs and the host over the training part of a run: means and peaks of what the sampler saw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fulltilt.diagnosis.ledger import training_window
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import percent
from fulltilt.records import CpuCapacity, GpuReading, GpuSummary, HostReading, PrecisionRecord, Run, Sample

# Reasons that every busy GPU gives sooner or later: throttling only if the clock falls far.
_USUAL_REASONS = ("power_cap", "board_limit", "reliability", "sync_boost")
LEAST_READINGS = 3
_MEANS = ("util_pct", "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct", "power_w")


@dataclass(frozen=True, slots=True)
class HostSummary:
    """The host over the training part of a run. ``ram_share_peak`` is used memory over its limit.

    ``others_share``: the share of the job's CPUs that other processes used while none was free.
    """

    tree_cpu_pct: float | None = None
    ram_share_peak: float | None = None
    ram_full_share: float | None = None
    swap_in_bytes_per_s: float | None = None
    ram_left_bytes: int | None = None
    others_share: float = 0.0


def training_samples(run: Run) -> tuple[Sample, ...]:
    """The samples taken while the job trained; all of them when it never made a step."""
    windows = [window for spans in run.spans if (window := training_window(spans))]
    if not windows:
        return run.samples
    t0_s, t1_s = min(window[0] for window in windows), max(window[1] for window in windows)
    return tuple(sample for sample in run.samples if t0_s <= sample.t_s <= t1_s)


def summarise_gpus(run: Run) -> tuple[GpuSummary, ...]:
    """Each GPU that the ranks use, over the training part; all sampled GPUs where the ranks do not name theirs."""
    machines = [run.run.machine, *(task.machine for task in run.tasks)]
    named = {reading.uuid: reading for machine in machines for reading in machine.gpus}
    readings: dict[str, list[GpuReading]] = {uuid: [] for uuid in named}
    for sample in training_samples(run):
        for reading in sample.gpus:
            readings.setdefault(reading.uuid, []).append(reading)
    used = {rank.gpu_uuid for rank in run.ranks} - {None}
    if not used and any(rank.device == "cpu" for rank in run.ranks):
        return ()
    # Each task reads the GPUs of its machine and takes the ranks of other tasks there for foreign processes.
    ranks = {rank.pid for rank in run.ranks} if run.tasks else set()
    summaries = []
    for uuid, seen in readings.items():
        if used and uuid not in used:
            continue
        first = seen[0] if seen else named[uuid]
        summaries.append(_summarise(first, [reading for reading in seen if not reading.lost], ranks))
    return tuple(sorted(summaries, key=lambda gpu: (gpu.index, gpu.uuid)))


def _summarise(first: GpuReading, seen: list[GpuReading], ranks: set[int]) -> GpuSummary:
    vram = _present(reading.vram_used_bytes for reading in seen)
    energy = _present(reading.energy_j for reading in seen)
    known = [reasons for reading in seen if (reasons := slowing_reasons(reading)) is not None]
    others = {p.pid: p for reading in seen for p in reading.processes or () if not p.ours and p.pid not in ranks}
    return GpuSummary(
        uuid=first.uuid,
        name=first.name,
        index=first.index,
        **{name: _mean(getattr(reading, name) for reading in seen) for name in _MEANS},
        vram_used_bytes=round(fmean(vram)) if vram else None,
        vram_peak_bytes=round(max(vram)) if vram else None,
        vram_total_bytes=next((r.vram_total_bytes for r in (*seen, first) if r.vram_total_bytes), None),
        energy_j=max(energy) - min(energy) if energy else None,
        temperature_peak_c=max(_present(r.temperature_c for r in seen), default=None),
        throttled_share=sum(1 for reasons in known if reasons) / len(known) if known else None,
        throttle_reasons=tuple(sorted({reason for reasons in known for reason in reasons})),
        foreign_processes=tuple(others[pid] for pid in sorted(others)),
    )


def slowing_reasons(reading: GpuReading) -> tuple[str, ...] | None:
    """The reasons that slow this GPU down at this moment; None when the driver does not report them."""
    if reading.throttle_reasons is None:
        return None
    clock = clock_ratio([reading])
    slow = clock is not None and clock < THRESHOLDS.power_capped_clock
    # A board at its default power limit lowers its clock under every dense model: that is its full speed.
    limit_w, default_w = reading.power_limit_w, reading.power_default_w
    full = limit_w is not None and default_w is not None and limit_w >= default_w
    usual = _USUAL_REASONS if not slow else ("power_cap",) if full else ()
    return tuple(reason for reason in reading.throttle_reasons if reason not in usual)


def clock_ratio(readings: Iterable[GpuReading]) -> float | None:
    """The mean SM clock over its maximum; None when it was not measured."""
    return _mean(
        min(r.sm_clock_mhz / r.sm_clock_max_mhz, 1.0)
        for r in readings
        if r.sm_clock_mhz is not None and r.sm_clock_max_mhz
    )


def vram_used_share(gpu: GpuSummary) -> float | None:
    """How much of a GPU's memory was in use at most."""
    if gpu.vram_peak_bytes is None or not gpu.vram_total_bytes:
        return None
    return gpu.vram_peak_bytes / gpu.vram_total_bytes


def use_before_the_job(run: Run, uuid: str) -> float | None:
    """How busy others kept a GPU (%) before the job used it; None for too few readings, which may be pauses."""
    readings = (reading for sample in run.samples for reading in sample.gpus if reading.uuid == uuid)
    without_us = [reading for reading in readings if reading.processes and not any(p.ours for p in reading.processes)]
    return _mean(r.util_pct for r in without_us) if len(without_us) >= LEAST_READINGS else None


def summarise_host(run: Run) -> HostSummary:
    """The host over the training part."""
    hosts = [sample.host for sample in training_samples(run)]
    ram, left = [], None
    for host in hosts:
        limit = min(_present((host.mem_limit_bytes, host.mem_total_bytes)), default=0)
        if limit > 0 and host.mem_used_bytes is not None:
            ram.append(host.mem_used_bytes / limit)
            left = max(round(limit) - host.mem_used_bytes, 0)
    return HostSummary(
        tree_cpu_pct=_mean(host.tree_cpu_pct for host in hosts),
        ram_share_peak=max(ram, default=None),
        ram_full_share=sum(1 for share in ram if share >= THRESHOLDS.ram_full_share) / len(ram) if ram else None,
        swap_in_bytes_per_s=_mean(host.swap_in_bytes_per_s for host in hosts),
        ram_left_bytes=left,
        others_share=_others_share(hosts, run.run.machine.cpu) if len(run.tasks) < 2 else 0.0,
    )


def _others_share(hosts: Iterable[HostReading], cpu: CpuCapacity) -> float:
    used = [
        (host.cpu_pct / 100, host.tree_cpu_pct / 100)
        for host in hosts
        if host.cpu_pct is not None and host.tree_cpu_pct is not None
    ]
    if not used or fmean(all_ for all_, _ in used) < THRESHOLDS.no_cpu_free:
        return 0.0
    all_, own = (fmean(each) for each in zip(*used, strict=True))
    return min(max(all_ * cpu.present - own, 0.0), max(cpu.usable - own, 0.0)) / max(cpu.usable, 0.01)


def is_it_real(gpu: GpuSummary) -> str | None:
    """One sentence on whether GPU utilisation means real work; None where it was not measured."""
    if gpu.util_pct is None:
        return None
    shown = f"GPU {gpu.index} utilisation {percent(gpu.util_pct / 100)}"
    if gpu.sm_active_pct is None:
        return f"{shown}, which only says that some kernel ran; SM activity (Hopper and newer) was not measured"
    active = percent(gpu.sm_active_pct / 100)
    if gpu.util_pct < THRESHOLDS.high_util_pct:
        return f"{shown}, SMs active {active}"
    if gpu.sm_active_pct >= THRESHOLDS.real_sm_active_pct:
        return f"{shown} is real: SMs active {active}"
    return f"{shown} only says that some kernel ran: SMs active {active}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = _present(values)
    return fmean(known) if known else None


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --------------------------------------------------------------------------- data sheets

# Dense peaks in TFLOP/s by NVIDIA's data sheets (half of the figures with sparsity): half precision on tensor cores,
# TF32, plain float32; 0 where a GPU has none. By words of its name; the entry with most matching words counts.
_PEAKS: dict[tuple[str, ...], tuple[float, float, float]] = {
    ("B200",): (2250.0, 1100.0, 75.0),
    ("H200",): (989.4, 494.7, 67.0),
    ("H200", "NVL"): (835.5, 417.5, 60.0),
    ("H100",): (989.4, 494.7, 67.0),
    ("H100", "PCIe"): (756.0, 378.0, 51.0),
    ("H100", "NVL"): (835.5, 417.5, 60.0),
    ("A100",): (312.0, 156.0, 19.5),
    ("A30",): (165.0, 82.0, 10.3),
    ("A40",): (149.7, 74.8, 37.4),
    ("A10",): (125.0, 62.5, 31.2),
    ("L4",): (121.0, 60.0, 30.3),
    ("L40",): (181.0, 90.5, 90.5),
    ("L40S",): (362.0, 183.0, 91.6),
    ("V100", "SXM2"): (125.0, 0.0, 15.7),
    ("V100", "PCIE"): (112.0, 0.0, 14.0),
    ("T4",): (65.0, 0.0, 8.1),
}


def dense_peak(name: str, precision: PrecisionRecord | None) -> tuple[str, float | None]:
    """The arithmetic that a job uses, and the GPU's dense peak for it in FLOP/s; None for MIG and unknown GPUs."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    known = [entry for entry in _PEAKS if words.issuperset(entry)]
    used = (precision.name if precision else None) or "float32"
    half = used in ("bfloat16", "float16")
    tf32 = not half and precision is not None and bool(precision.tf32)
    arithmetic = used if half else "TF32" if tf32 else "float32"
    if not known or "MIG" in words or (not half and used != "float32"):
        return arithmetic, None
    peaks = _PEAKS[max(known, key=len)]
    peak = peaks[0] if half else peaks[1] if tf32 and peaks[1] else peaks[2]
    return arithmetic, peak * 1e12
