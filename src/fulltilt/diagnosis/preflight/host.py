"""The preflight of the host: CPUs that may really be used, memory under its limit, room in shared memory."""

from __future__ import annotations

import math

from fulltilt.diagnosis.preflight.limits import LoaderPlan, PreflightLimits
from fulltilt.figures import count, number, size, used_of
from fulltilt.records import CheckLine, Machine, Sample

GIB = 1024**3


def whole_cpus(machine: Machine) -> int:
    """Whole CPUs that this process may use, at least one: the workers to start from."""
    return max(1, math.floor(machine.cpu.usable))


def check_cpus(machine: Machine, plan: LoaderPlan) -> CheckLine:
    """May the job use the CPUs that it sees, and are there enough for its workers?"""
    cpu = machine.cpu
    figure = f"{number(cpu.usable)} of {cpu.present} usable"
    if cpu.quota is not None and cpu.quota < min(cpu.present, cpu.affinity):
        figure += f" (the cgroup's quota is {number(cpu.quota)})"
    elif cpu.affinity < cpu.present:
        figure += f" (affinity: {cpu.affinity})"
    fitting = whole_cpus(machine)
    if plan.workers is not None and plan.workers > fitting:
        remedy = f"Start from {count('worker', fitting)}: past the CPUs, more workers are slower."
        return CheckLine("CPUs", "warn", f"{figure}, {plan.workers} workers asked for", remedy)
    if cpu.usable < cpu.present:
        remedy = (
            f"Size workers and threads by {fitting}, not by os.cpu_count(), or raise the limit "
            "(docker run --cpus, limits.cpu, --cpus-per-task)."
        )
        return CheckLine("CPUs", "warn", figure, remedy)
    return CheckLine("CPUs", "ok", figure)


def check_memory(machine: Machine, sample: Sample | None, plan: LoaderPlan, limits: PreflightLimits) -> CheckLine:
    """Is there memory left for the job, under the limit that holds for it?"""
    caps = [cap for cap in (machine.mem_limit_bytes, machine.mem_total_bytes) if cap]
    if not caps:
        return CheckLine("memory", "skip", "not measured here")
    cap = min(caps)
    limited = " (the cgroup's limit)" if machine.mem_total_bytes is not None and cap < machine.mem_total_bytes else ""
    used = sample.host.mem_used_bytes if sample is not None else None
    if used is None:
        return CheckLine("memory", "ok", f"{size(cap)}{limited}")
    figure = f"{used_of(used, cap)}{limited} used"
    if plan.workers:
        figure += f", {size(max(0, cap - used) // plan.workers)} left for each of {count('worker', plan.workers)}"
    if used < limits.memory_warn_share * cap:
        return CheckLine("memory", "ok", figure)
    remedy = "End what is not needed, or use fewer workers and a shorter queue."
    return CheckLine("memory", "fail" if used >= limits.memory_fail_share * cap else "warn", figure, remedy)


def check_shm(machine: Machine, plan: LoaderPlan, limits: PreflightLimits) -> CheckLine:
    """Do the batches that the workers hold ready fit into shared memory?"""
    if machine.shm_free_bytes is None:
        return CheckLine("/dev/shm", "skip", "there is none here")
    free, said, flag = machine.shm_free_bytes, "free", "--shm-size"
    if machine.mem_limit_bytes is not None and machine.mem_limit_bytes < free:
        # What lies in shared memory counts against the memory limit too.
        free, said, flag = machine.mem_limit_bytes, "allowed", "--memory"
    workers = whole_cpus(machine) if plan.workers is None else plan.workers
    prefetch = limits.prefetch if plan.prefetch is None else plan.prefetch
    batch_bytes = limits.batch_bytes if plan.batch_bytes is None else plan.batch_bytes
    need = workers * prefetch * batch_bytes
    given = {"workers": plan.workers, "prefetch": plan.prefetch, "batch": plan.batch_bytes}
    assumed = [name for name, value in given.items() if value is None]
    figure = f"{size(free)} {said}, {size(need)} needed: {count('worker', workers)} × {prefetch} × {size(batch_bytes)}"
    if assumed:
        figure += " (assumed)" if len(assumed) == len(given) else f" ({' and '.join(assumed)} assumed)"
    if need <= limits.shm_share * free:
        return CheckLine("/dev/shm", "ok", figure)
    # An assumption proves nothing: only what the user named can fail.
    fails = need > free and not assumed
    wanted_gib = math.ceil(need / limits.shm_share / GIB)
    remedy = f"Enlarge it (docker run {flag}={wanted_gib}g), or use fewer workers or a smaller prefetch."
    return CheckLine("/dev/shm", "fail" if fails else "warn", figure, remedy)
