"""The exhaustive sweep: a job trained for some seconds with each number of workers, in this process.

A loader with w workers gives its batches in bursts of w: the first ones are not counted, and only whole ones are. What
is queued when the clock starts was made before, so what the workers make is counted, not what training takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from children import drain
from torch.utils.data import DataLoader

from fulltilt.tuning.trial.throughput import ready_batches
from tunebench.figures import Figures
from tunebench.job import Job

POINT_S = 5.0
# A point whose bursts take long ends after the one that is under way.
LONGEST_POINT_S = 15.0
WARM_UP_BURSTS, LEAST_BURSTS = 2, 3


def train(job: Job, settings: dict[str, Any], device: torch.device, seconds: float) -> Iterator[float]:
    """Train for so long; yields the moment at which each batch was done, the queue of the GPU drained now and then."""
    loader = DataLoader(job.data, job.batch_size, shuffle=False, **settings)
    began_s = time.perf_counter()
    for number, batch in enumerate(loader):
        job.step([part.to(device, non_blocking=True) for part in batch])
        if number % 16 == 0:
            drain(device)
        now_s = time.perf_counter() - began_s
        yield now_s
        if now_s > seconds:
            return


def rate_of(moments: list[float], since_s: float, until_s: float = float("inf"), workers: int = 0) -> float:
    """Batches a second between two moments, over whole bursts of so many workers; 0.0 where there is none."""
    inside = [moment for moment in moments if since_s <= moment <= until_s]
    burst = max(workers, 1)
    batches = (len(inside) - 1) // burst * burst
    return batches / (inside[batches] - inside[0]) if batches > 0 else 0.0


def rate(job: Job, settings: dict[str, Any], device: torch.device, seconds: float) -> float:
    """Samples a second that the loader can keep up with these settings."""
    burst = max(settings["num_workers"], 1)
    iterator = iter(DataLoader(job.data, job.batch_size, shuffle=False, **settings))

    def train_burst() -> tuple[float, int]:
        """When it was done, and how many batches lie ready behind it."""
        for _ in range(burst):
            job.step([part.to(device, non_blocking=True) for part in next(iterator)])
        drain(device)
        return time.perf_counter(), ready_batches(iterator)

    for _ in range(WARM_UP_BURSTS):
        began_s, ready_before = train_burst()
    counted_s, batches = 0.0, 0
    while counted_s < LONGEST_POINT_S and (counted_s < seconds or batches < LEAST_BURSTS * burst):
        now_s, ready = train_burst()
        counted_s, batches = now_s - began_s, batches + burst
    used_up = max(ready_before - ready, 0)  # a queue that grows tells that training sets the pace
    return job.batch_size * (batches - used_up) / counted_s


def with_workers(workers: int, device: torch.device, prefetch: int = 2) -> dict[str, Any]:
    """A loader's settings as people recommend them for so many workers."""
    pin = {"pin_memory": device.type == "cuda"}
    if not workers:
        return {"num_workers": 0, **pin}
    return {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True, **pin}


def sweep(
    job: Job, device: torch.device, cpus: int, figures: Figures, point_s: float, reserve_s: float
) -> dict[str, Any]:
    """The best settings of all that were measured: numbers of workers up to the CPUs, those beside the best of them,
    and a deeper queue there. ``reserve_s`` are left for what comes after it."""
    rates: dict[tuple[int, int], float] = {}

    def point(workers: int, prefetch: int = 2) -> None:
        has_time = not rates or figures.has_time_for(job.name, f"sweep_{workers}x{prefetch}", reserve_s + 4 * point_s)
        if workers > 0 and (workers, prefetch) not in rates and has_time:
            rates[workers, prefetch] = rate(job, with_workers(workers, device, prefetch), device, point_s)
            figures.note(job.name, **{f"sweep_{workers}x{prefetch}": rates[workers, prefetch]})

    def best_workers() -> int:
        return max(rates, key=rates.__getitem__)[0]

    job.data[0]  # imports what decodes, which each forked worker would otherwise do for itself
    rate(job, with_workers(cpus // 2, device), device, point_s / 2)  # the first steps choose kernels
    for part in (8, 12, 4, 16):
        point(max(cpus * part // 16, 1))
    step = max(cpus // 8, 1)
    for workers in (best_workers() - step, best_workers() + step):
        point(workers)
    point(best_workers(), 4)
    best = max(rates, key=rates.__getitem__)
    figures.note(job.name, best_workers=best[0], best_prefetch=best[1], best_samples_per_s=rates[best])
    return with_workers(best[0], device, best[1])
