"""A warning while a job runs: little GPU use, the likely bottleneck first, and the settings in force.

The first line says what the time goes into; only settings that touch that are offered.
"""

from __future__ import annotations

from collections.abc import Iterable

from fulltilt.diagnosis.thresholds import LIMITS
from fulltilt.figures import pct, percent, seconds
from fulltilt.records import BUCKETS, Buckets, LoaderRecord

_CAUSES = {
    "data_wait_s": "training waits for data",
    "transfer_s": "copies to the GPU",
    "compute_s": "the GPU computes",
    "sync_s": "calls that wait for the GPU (.item(), .cpu())",
    "host_code_s": "the script's own code in the loop, or slow kernel launches",
    "validation_s": "validation",
    "checkpoint_s": "saving checkpoints",
    "epoch_turnover_s": "starting each pass over the data",
    "communication_s": "exchanging gradients",
    "unattributed_s": "time that could not be attributed",
}


def low_gpu_warning(
    util_pct: float | None, buckets: Buckets, loaders: Iterable[LoaderRecord], usable_cpus: float
) -> str | None:
    """What holds the job up in the time that ``buckets`` describe, then a line a cure; None where there is nothing.

    ``util_pct`` is the GPU's utilisation; without a GPU it is None and the share of data wait decides.
    """
    active_s = buckets.total_s - buckets.startup_s
    if active_s <= 0:
        return None
    share = buckets.data_wait_s / active_s
    well = share < LIMITS.severe_share if util_pct is None else util_pct >= LIMITS.low_util_pct
    if well:
        return None
    title = f"GPU utilization is low ({pct(util_pct)})"
    if util_pct is None:
        title = f"{_CAUSES['data_wait_s']} ({percent(share)} of the training time)"
    name = likely_cause(buckets, util_pct is not None)
    cause = f"{_CAUSES[name]} ({percent(getattr(buckets, name) / active_s)} of the training time)"
    lines = [] if cause == title else [f"most likely: {cause}"]
    trains = [loader for loader in loaders if loader.role == "train"]
    lines += _settings(buckets, active_s, max(trains, key=lambda loader: loader.wait_s, default=None), usable_cpus)
    return "\n".join((title, *(f"- {line}" for line in lines)))


def likely_cause(buckets: Buckets, on_gpu: bool) -> str:
    """The name of the bucket that keeps the GPU from its work most."""
    idle = [name for name in BUCKETS if name not in ("startup_s", "compute_s")]
    largest = max(idle, key=lambda name: getattr(buckets, name))
    return "compute_s" if on_gpu and getattr(buckets, largest) < buckets.compute_s else largest


def _settings(buckets: Buckets, active_s: float, loader: LoaderRecord | None, usable_cpus: float) -> list[str]:
    starved = buckets.data_wait_s / active_s >= LIMITS.warn_share
    if loader is None:
        return ["make batches beside the training: a DataLoader with workers (current: none)"] if starved else []
    # The engine's own settings have names of their own.
    workers, prefetch = ("workers", "prefetch") if loader.made_by == "fulltilt" else ("num_workers", "prefetch_factor")
    batch = f"batch_size (current: {loader.batch_size})"
    prefetch = f"{prefetch} (current: {loader.prefetch_factor or 2})"
    if not starved:
        return [
            *([f"increase {batch}"] if loader.batch_size is not None else []),
            f"{workers} (current: {loader.num_workers}) keeps up",
        ]
    place = f" at {loader.where}" if loader.where else ""
    if 0 < loader.num_workers < usable_cpus - 1:
        more = f"increase {workers} (current: {loader.num_workers}; {usable_cpus:g} CPUs are usable){place}"
        lines = [more, f"increase {prefetch}"]
    elif loader.num_workers == 0:
        lines = [f"increase {workers} (current: 0){place}"]
    else:
        lines = [f"{workers} (current: {loader.num_workers}) already fills the {usable_cpus:g} usable CPUs{place}"]
    if loader.batch_size is not None:
        lines.append(f"a larger {batch} does not help while data is late")
    steady = loader.batches - max(loader.passes, 1)
    if steady > 0 and loader.wait_s > 0:
        lines.append(f"a batch is waited for {seconds(loader.wait_s / steady)} on average")
    return lines
