"""A warning while a job runs: little GPU use, the likely bottleneck first, and the settings in force.

The first line says what the time goes into; only settings that touch that are offered.
"""

from __future__ import annotations

from fulltilt.diagnosis.thresholds import LIMITS
from fulltilt.records import BUCKETS, Buckets, LoaderRecord

_CAUSES = {
    "data_wait_s": "training waits for data",
    "transfer_s": "copies to the GPU",
    "compute_s": "the GPU computes",
    "sync_s": "calls that wait for the GPU (.item(), .cpu())",
    "host_code_s": "the script's own code between steps, or slow kernel launches",
    "validation_s": "validation",
    "checkpoint_s": "saving checkpoints",
    "epoch_turnover_s": "starting each pass over the data",
    "communication_s": "exchanging gradients",
    "unattributed_s": "time that could not be attributed",
}


def low_gpu_warning(
    util_pct: float | None,
    buckets: Buckets,
    loader: LoaderRecord | None,
    usable_cpus: float,
) -> str | None:
    """The warning for the time that ``buckets`` describe, or None when there is nothing to warn about.

    ``util_pct`` is the GPU's utilisation; without a GPU it is None and the share of data wait decides.
    """
    active_s = buckets.total_s - buckets.startup_s
    if active_s <= 0:
        return None
    if util_pct is not None:
        if util_pct >= LIMITS.low_util_pct:
            return None
        title = f"LOW GPU UTILIZATION ({util_pct:.1f}%)"
    else:
        share = buckets.data_wait_s / active_s
        if share < LIMITS.severe_share:
            return None
        title = f"TRAINING WAITS FOR DATA ({100 * share:.1f}% of the training time)"
    cause = likely_cause(buckets, util_pct is not None)
    lines = [
        f"Most likely: {_CAUSES[cause]} ({100 * getattr(buckets, cause) / active_s:.1f}% of the training time)",
        *_settings(buckets, active_s, loader, usable_cpus),
    ]
    return "\n".join((f"⚠️  {title}! Possible bottlenecks:", *(f"   - {line}" for line in lines)))


def likely_cause(buckets: Buckets, on_gpu: bool) -> str:
    """The name of the bucket that keeps the GPU from its work most."""
    idle = [name for name in BUCKETS if name not in ("startup_s", "compute_s")]
    largest = max(idle, key=lambda name: getattr(buckets, name))
    return "compute_s" if on_gpu and getattr(buckets, largest) < buckets.compute_s else largest


def _settings(buckets: Buckets, active_s: float, loader: LoaderRecord | None, usable_cpus: float) -> list[str]:
    starved = buckets.data_wait_s / active_s >= LIMITS.warn_share
    if loader is None:
        return ["Make batches beside the training: a DataLoader with workers (current: none)"] if starved else []
    # The engine's own settings have names of their own.
    workers, prefetch = ("workers", "prefetch") if loader.made_by == "fulltilt" else ("num_workers", "prefetch_factor")
    batch = f"batch_size (current: {loader.batch_size})"
    prefetch = f"{prefetch} (current: {loader.prefetch_factor or 2})"
    if not starved:
        return [
            *([f"Increase {batch}"] if loader.batch_size is not None else []),
            f"{workers} (current: {loader.num_workers}) keeps up",
        ]
    place = f" at {loader.where}" if loader.where else ""
    if 0 < loader.num_workers < usable_cpus - 1:
        lines = [f"Increase {workers} (current: {loader.num_workers}; {usable_cpus:g} CPUs are usable){place}"]
    elif loader.num_workers == 0:
        lines = [f"Increase {workers} (current: 0){place}"]
    else:
        lines = [f"{workers} (current: {loader.num_workers}) already fills the {usable_cpus:g} usable CPUs{place}"]
    lines += [f"Increase {prefetch}"] if loader.num_workers else []
    if loader.batch_size is not None:
        lines.append(f"A larger {batch} does not help while data is late")
    steady = loader.batches - max(loader.passes, 1)
    if steady > 0 and loader.wait_s > 0:
        lines.append(f"DataLoader avg: {1000 * loader.wait_s / steady:.1f}ms a batch")
    return lines
