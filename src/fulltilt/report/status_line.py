"""The status line of a machine, the same in `watch`, beside a progress bar and in a log."""

from __future__ import annotations

from fulltilt.records import GpuReading, Sample

GIB = 1024**3


def status_line(sample: Sample, gpu_index: int = 0) -> str:
    """``GPU: 85% | VRAM:12.3/24.0GB(51.2%) | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)``.

    ``gpu_index`` is an index into ``sample.gpus``. A GB is 1024³ bytes here; ``n/a`` was not measured. RAM is that of
    the machine, or of the container's limit.
    """
    gpu = sample.gpus[gpu_index] if gpu_index < len(sample.gpus) else None
    use = _percent(gpu.util_pct if gpu else None, 0)
    vram = _used_of(gpu.vram_used_bytes, gpu.vram_total_bytes) if gpu else "n/a"
    return f"GPU: {use} | VRAM:{vram} | {host_line(sample)}"


def host_line(sample: Sample) -> str:
    """``CPU: 45.2% | RAM:18.4/64.0GB(28.8%)``: the line of a machine without a GPU."""
    host = sample.host
    ram = _used_of(host.mem_used_bytes, host.mem_limit_bytes or host.mem_total_bytes)
    return f"CPU: {_percent(host.cpu_pct, 1)} | RAM:{ram}"


def sample_lines(sample: Sample) -> list[str]:
    """A status line for each GPU, or one for the host alone, then SM activity and temperature where known."""
    if len(sample.gpus) < 2:
        return [status_line(sample) + "".join(_more(gpu) for gpu in sample.gpus)]
    return [f"[{gpu.index}] {status_line(sample, place)}{_more(gpu)}" for place, gpu in enumerate(sample.gpus)]


def _more(gpu: GpuReading) -> str:
    if gpu.lost:
        return " | lost"
    active = "" if gpu.sm_active_pct is None else f" | SM: {gpu.sm_active_pct:.0f}%"
    if gpu.temperature_c is None:
        return active
    limit = "" if gpu.temperature_limit_c is None else f"/{gpu.temperature_limit_c:.0f}"
    return f"{active} | TEMP:{gpu.temperature_c:.0f}{limit}C"


def memory_line(allocated_bytes: int, peak_bytes: int) -> str:
    """``GPU Memory - Allocated: 4.50 GB, Peak: 5.20 GB``; a GB is 1024³ bytes, as above."""
    return f"GPU Memory - Allocated: {allocated_bytes / GIB:.2f} GB, Peak: {peak_bytes / GIB:.2f} GB"


def _percent(value: float | None, decimals: int) -> str:
    return "n/a" if value is None else f"{value:.{decimals}f}%"


def _used_of(used_bytes: int | None, total_bytes: int | None) -> str:
    if used_bytes is None or not total_bytes:
        return "n/a"
    return f"{used_bytes / GIB:.1f}/{total_bytes / GIB:.1f}GB({100 * used_bytes / total_bytes:.1f}%)"
