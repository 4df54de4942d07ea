"""A warning while a job runs: low GPU use, the likely bottleneck, and the settings that could help."""

from __future__ import annotations

from collections.abc import Iterable

from fulltilt.diagnosis.findings import BUCKET_WORDS, at, call_at
from fulltilt.diagnosis.libraries import setting_name
from fulltilt.diagnosis.loader_bottleneck import runs_ahead
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import capital, pct, percent
from fulltilt.records import BUCKETS, Buckets, LoaderRecord, WorkerRecord


def low_gpu_warning(
    util_pct: float | None,
    buckets: Buckets,
    loaders: Iterable[LoaderRecord],
    usable_cpus: float,
    workers: Iterable[WorkerRecord] = (),
) -> str | None:
    """The likely bottleneck by ``buckets``, then a line for each thing to change; None when all is well.

    ``util_pct`` is the GPU's utilisation; without a GPU it is None and the share of data wait decides.
    """
    active_s = buckets.total_s - buckets.startup_s
    share = buckets.data_wait_s / active_s if active_s > 0 else 0.0
    if active_s <= 0 or (share < THRESHOLDS.severe_share if util_pct is None else util_pct >= THRESHOLDS.low_util_pct):
        return None
    name = likely_cause(buckets) if util_pct is not None else "data_wait_s"
    cause = f"{BUCKET_WORDS[name]} takes {percent(getattr(buckets, name) / active_s)} of the training time"
    if name == "host_code_s":
        cause += ", or the kernels are launched too slowly"
    title = [f"GPU utilization is low ({pct(util_pct)})", f"- most likely: {cause}"]
    trains = [loader for loader in loaders if loader.role == "train"]
    loader = max(trains, key=lambda loader: loader.wait_s, default=None)
    work = next((work for work in workers if loader is not None and work.loader_id == loader.loader_id), None)
    lines = _settings(share, loader, usable_cpus, work)
    return "\n".join([*(title if util_pct is not None else [capital(cause)]), *(f"- {line}" for line in lines)])


def likely_cause(buckets: Buckets) -> str:
    """The bucket that most keeps the GPU idle."""
    idle = [name for name in BUCKETS if name not in ("startup_s", "compute_s")]
    largest = max(idle, key=lambda name: getattr(buckets, name))
    return "compute_s" if getattr(buckets, largest) < buckets.compute_s else largest


def _settings(
    wait_share: float, loader: LoaderRecord | None, usable_cpus: float, work: WorkerRecord | None
) -> list[str]:
    starved = wait_share >= THRESHOLDS.warn_share
    if loader is None:
        return ["make batches during training: use a DataLoader with workers (current: none)"] if starved else []
    workers = f"{setting_name(loader, 'num_workers')} (current: {loader.num_workers})"
    prefetch = f"{setting_name(loader, 'prefetch_factor')} (current: {loader.prefetch_factor or 2})"
    batch = f"batch_size (current: {loader.batch_size})"
    if not starved:
        return [*([f"increase {batch}"] if loader.batch_size is not None else []), f"{workers} keeps up"]
    lines = [f"increase {workers}{at(loader.where)}"]
    computed_s = work.fetch_cpu_s + (work.cpu_wait_s or 0.0) if work is not None else 0.0
    if not loader.num_workers and runs_ahead(loader) and loader.wait_cpu_s < THRESHOLDS.cpu_bound_share * loader.wait_s:
        lines = [f"make the source of the batches faster{at(loader.where)}: a worker would wait for it as well"]
    elif work is not None and loader.num_workers and computed_s < THRESHOLDS.cpu_bound_share * work.fetch_s:
        line = max(work.lines, key=lambda line: line.seconds, default=None)
        place = f" in {call_at(line)}" if line else at(loader.where)
        lines = [f"the workers wait{place} instead of computing: unless they wait for each other, increase {workers}"]
    elif loader.num_workers >= usable_cpus:
        lines = [f"{workers} already fills the {usable_cpus:g} usable CPUs{at(loader.where)}"]
    elif loader.num_workers:
        lines.append(f"increase {prefetch}")
    return [*lines, f"a larger {batch} does not help while data is late"] if loader.batch_size is not None else lines
