"""What would hold a job up on this machine before it has started: a line a subject, with its figure and remedy."""

from __future__ import annotations

from fulltilt.diagnosis.preflight import data, gpu, host
from fulltilt.diagnosis.preflight.limits import LoaderPlan, PreflightLimits
from fulltilt.records import CheckLine, Machine, Sample, StorageReading

__all__ = ["LoaderPlan", "PreflightLimits", "preflight"]


def preflight(
    machine: Machine,
    storage: StorageReading | None = None,
    sample: Sample | None = None,
    plan: LoaderPlan | None = None,
    limits: PreflightLimits | None = None,
) -> tuple[CheckLine, ...]:
    """Every line of the preflight. GPUs are judged by ``sample`` where it has some, else by the machine's reading."""
    plan, limits = plan or LoaderPlan(), limits or PreflightLimits()
    gpus = sample.gpus if sample is not None and sample.gpus else machine.gpus
    lines = [gpu.check_presence(machine, gpus), gpu.check_cuda(machine, gpus)]
    if gpus:
        lines += [
            check(gpus, limits)
            for check in (gpu.check_vram, gpu.check_tenants, gpu.check_throttling, gpu.check_temperature)
        ]
    lines += [
        host.check_cpus(machine, plan),
        host.check_memory(machine, sample, plan, limits),
        host.check_shm(machine, plan, limits),
    ]
    if storage is None:
        lines.append(CheckLine("data", "skip", "not looked at", "Name the folder of your data: --data DIR"))
    else:
        lines += [data.check_storage(storage, limits), data.check_staging(storage, machine, limits)]
    return tuple(lines)
