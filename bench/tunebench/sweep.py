"""The exhaustive sweep: a job trained for a few seconds with each number of workers, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from tunebench.figures import Figures
from tunebench.job import Job

POINT_S = 3.5
# The part of a point that is not counted: workers start, and what they made meanwhile is consumed.
SETTLING = 0.35


def train(job: Job, settings: dict[str, Any], device: torch.device, seconds: float) -> Iterator[float]:
    """Train for so long; yields the moment at which each batch was done, the queue of the GPU drained now and then."""
    loader = DataLoader(job.data, job.batch_size, shuffle=False, **settings)
    began_s = time.perf_counter()
    for number, batch in enumerate(loader):
        job.step([part.to(device, non_blocking=True) for part in batch])
        if device.type == "cuda" and number % 16 == 0:
            torch.cuda.synchronize()
        now_s = time.perf_counter() - began_s
        yield now_s
        if now_s > seconds:
            return


def rate_of(moments: list[float], since_s: float, until_s: float = float("inf")) -> float:
    """Batches a second between two moments."""
    inside = [moment for moment in moments if since_s <= moment <= until_s]
    return (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 2 else 0.0


def rate(job: Job, settings: dict[str, Any], device: torch.device, seconds: float) -> float:
    """Samples a second with these settings of the loader, from the first batch on."""
    moments = list(train(job, settings, device, seconds))
    first = moments[0]
    return job.batch_size * rate_of(moments, first + SETTLING * (moments[-1] - first))


def with_workers(workers: int, device: torch.device, prefetch: int = 2) -> dict[str, Any]:
    """A loader's settings as people recommend them for so many workers."""
    pin = {"pin_memory": device.type == "cuda"}
    if not workers:
        return {"num_workers": 0, **pin}
    return {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True, **pin}


def sweep(job: Job, device: torch.device, counts: list[int], figures: Figures, point_s: float) -> dict[str, Any]:
    """The best settings of all that were measured: every number of workers, and a deeper queue at the best of them."""
    rates: dict[tuple[int, int], float] = {}
    job.data[0]  # imports what decodes, which each forked worker would otherwise do for itself
    rate(job, with_workers(counts[-1], device), device, point_s / 2)  # the first steps choose kernels
    for workers in counts:
        rates[workers, 2] = rate(job, with_workers(workers, device), device, point_s)
    best = max(rates, key=rates.__getitem__)
    rates[best[0], 4] = rate(job, with_workers(best[0], device, 4), device, point_s)
    best = max(rates, key=rates.__getitem__)
    figures.note(
        job.name,
        sweep={f"{workers} workers, prefetch {prefetch}": value for (workers, prefetch), value in rates.items()},
        best_workers=best[0],
        best_samples_per_s=rates[best],
    )
    return with_workers(best[0], device, best[1])
