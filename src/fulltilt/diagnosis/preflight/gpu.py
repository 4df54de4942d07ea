"""The preflight of the GPUs: are they there, usable by torch, free, cool and at full clock?"""

from __future__ import annotations

from collections.abc import Sequence

from fulltilt.diagnosis.preflight.limits import PreflightLimits
from fulltilt.figures import size, used_of
from fulltilt.records import CheckLine, GpuReading, Machine

_SHOWN_TENANTS = 3

_THROTTLE_REMEDIES = {
    "thermal": "Improve the cooling: fans, dust, air flow between the cards.",
    "hw_thermal": "Improve the cooling: fans, dust, air flow between the cards.",
    "power_cap": "Raise the power limit (nvidia-smi -pl WATTS) if supply and cooling allow it.",
    "power_brake": "The power supply tells the GPU to slow down: check its cables and rating.",
    "hw_slowdown": "The board slows the GPU down for heat or power: check cooling and supply.",
}


def check_presence(machine: Machine, gpus: Sequence[GpuReading]) -> CheckLine:
    """Is there a GPU, and do all of them answer?"""
    if not gpus:
        return CheckLine(
            "GPU",
            "warn",
            f"none: {machine.why_no_gpu or 'no GPU was found'}",
            "Training will run on the CPU. A container needs --gpus all; elsewhere see what nvidia-smi says.",
        )
    lost = [f"GPU {gpu.index} ({gpu.name}) no longer answers" for gpu in gpus if gpu.lost]
    if lost:
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
        remedy = "Install a build for CUDA: https://pytorch.org/get-started/locally"
        return CheckLine("CUDA", "fail", figure, remedy)
    if machine.driver_cuda is None:
        return CheckLine("CUDA", "skip", f"torch is built for CUDA {machine.cuda}; there is no driver to run it")
    figure = f"torch is built for CUDA {machine.cuda}, the driver runs up to {machine.driver_cuda}"
    built, runs = _version(machine.cuda), _version(machine.driver_cuda)
    if built is None or runs is None or built <= runs:
        return CheckLine("CUDA", "ok", figure)
    if built[0] == runs[0]:
        # NVIDIA promises this from CUDA 11 on, for kernels that were compiled before the job.
        return CheckLine("CUDA", "ok", f"{figure} (the same major version works)")
    remedy = f"Update the driver to one for CUDA {built[0]}, or install a torch built for CUDA {runs[0]}."
    return CheckLine("CUDA", "fail", figure, remedy)


def _version(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        return None


def check_vram(gpus: Sequence[GpuReading], limits: PreflightLimits) -> CheckLine:
    """How much of each GPU's memory is free for the job?"""
    free = [
        (gpu.vram_total_bytes - gpu.vram_used_bytes, gpu.vram_total_bytes, gpu.index)
        for gpu in gpus
        if gpu.vram_used_bytes is not None and gpu.vram_total_bytes
    ]
    if not free:
        return CheckLine("VRAM", "skip", "not told by this GPU")
    short = [
        f"GPU {index}: {used_of(left, all_)} free" for left, all_, index in free if left < limits.vram_free_share * all_
    ]
    if short:
        return CheckLine(
            "VRAM", "warn", "; ".join(short), "Plan the batch for what is free, or end what holds the rest."
        )
    left, all_, _ = min(free)
    return CheckLine("VRAM", "ok", f"{used_of(left, all_)} free" + (" or more on each" if len(free) > 1 else ""))


def check_tenants(gpus: Sequence[GpuReading], limits: PreflightLimits) -> CheckLine:
    """Does somebody else compute on these GPUs?"""
    if all(gpu.processes is None for gpu in gpus):
        return CheckLine("sharing", "skip", "the driver does not tell which processes are on the GPU")
    tenants = [
        f"GPU {gpu.index}: {process.name or 'a process'} (pid {process.pid})"
        + ("" if process.vram_used_bytes is None else f" holds {size(process.vram_used_bytes)}")
        for gpu in gpus
        for process in gpu.processes or ()
        if not process.ours and (process.vram_used_bytes is None or process.vram_used_bytes >= limits.tenant_bytes)
    ]
    if not tenants:
        return CheckLine("sharing", "ok", "no other process on the GPU" if len(gpus) == 1 else "no others on the GPUs")
    more = len(tenants) - _SHOWN_TENANTS
    figure = "; ".join([*tenants[:_SHOWN_TENANTS], *([f"{more} more"] if more > 0 else [])])
    remedy = "Unless it is your job, it takes time and memory from it. Pick a free GPU: CUDA_VISIBLE_DEVICES."
    return CheckLine("sharing", "warn", figure, remedy)


def check_throttling(gpus: Sequence[GpuReading], limits: PreflightLimits) -> CheckLine:
    """Is a GPU slowed down right now?"""
    if all(gpu.throttle_reasons is None for gpu in gpus):
        return CheckLine("throttling", "skip", "the driver does not tell")
    slowed = [(gpu, reasons) for gpu in gpus if (reasons := _slowing_reasons(gpu, limits))]
    if not slowed:
        return CheckLine("throttling", "ok", "none")
    figure = "; ".join(
        f"GPU {gpu.index}: {', '.join(reasons).replace('_', ' ')}{_clock(gpu)}" for gpu, reasons in slowed
    )
    remedy = _THROTTLE_REMEDIES.get(slowed[0][1][0], "See nvidia-smi -q -d PERFORMANCE.")
    return CheckLine("throttling", "warn", figure, remedy)


def _slowing_reasons(gpu: GpuReading, limits: PreflightLimits) -> tuple[str, ...]:
    reasons = gpu.throttle_reasons or ()
    if reasons == ("power_cap",) and gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz:
        return () if gpu.sm_clock_mhz >= limits.power_capped_clock * gpu.sm_clock_max_mhz else reasons
    return reasons


def _clock(gpu: GpuReading) -> str:
    if gpu.sm_clock_mhz is None or gpu.sm_clock_max_mhz is None:
        return ""
    return f" ({gpu.sm_clock_mhz:.0f} of {gpu.sm_clock_max_mhz:.0f} MHz)"


def check_temperature(gpus: Sequence[GpuReading], limits: PreflightLimits) -> CheckLine:
    """How far is each GPU from the temperature at which it slows itself down?"""
    known = [
        (gpu.temperature_limit_c - gpu.temperature_c, gpu)
        for gpu in gpus
        if gpu.temperature_c is not None and gpu.temperature_limit_c is not None
    ]
    if not known:
        return CheckLine("temperature", "skip", "the driver does not tell it together with its limit")
    hot = [(margin, gpu) for margin, gpu in known if margin < limits.temperature_margin_c]
    if hot:
        figure = "; ".join(f"GPU {gpu.index}: {_temperature(gpu)}" for _, gpu in hot)
        remedy = "Improve the cooling, or lower the power: nvidia-smi -pl WATTS"
        return CheckLine("temperature", "fail" if min(margin for margin, _ in hot) <= 0 else "warn", figure, remedy)
    _, hottest = min(known, key=lambda entry: entry[0])
    which = "" if len(known) == 1 else f"GPU {hottest.index} is the hottest: "
    return CheckLine("temperature", "ok", which + _temperature(hottest))


def _temperature(gpu: GpuReading) -> str:
    return f"{gpu.temperature_c:.0f} °C, slows down at {gpu.temperature_limit_c:.0f} °C"
