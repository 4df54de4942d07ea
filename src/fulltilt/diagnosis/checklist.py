"""The verification checklist after a run: each line passed, failed or not applicable, with its figure."""

from __future__ import annotations

import re

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.figures import number, percent
from fulltilt.records import CheckLine, LoaderRecord

# How the batch size is called on command lines: --batch_size 128, --batch-size=128, per_device_train_batch_size=128.
_BATCH_FLAG = re.compile(r"-{0,2}(?:per[-_]device[-_])?(?:train[-_])?batch[-_]?size|-b|--bs")


def make_checklist(evidence: Evidence) -> tuple[CheckLine, ...]:
    """The five lines: batch size, GPU memory, GPU use, speed, data loading."""
    return (
        _batch_size(evidence),
        _gpu_memory(evidence),
        _gpu_use(evidence),
        _speed(evidence),
        _loading(evidence),
    )


def asked_batch_size(command: tuple[str, ...]) -> int | None:
    """The batch size on a command line; of a repeated flag the last one counts. None when there is none."""
    asked = None
    for i, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if not _BATCH_FLAG.fullmatch(flag):
            continue
        if not equals:
            value = command[i + 1] if i + 1 < len(command) else ""
        if value.isdigit():
            asked = int(value)
    return asked


def _batch_size(evidence: Evidence) -> CheckLine:
    name = "Batch size as asked"
    asked = evidence.run.run.asked.batch_size or asked_batch_size(evidence.run.run.command)
    in_force = _batch_in_force(evidence)
    if in_force is None:
        return CheckLine(name, "skip", "no batch size was seen")
    if asked is None:
        return CheckLine(name, "skip", f"Batch size: {in_force} (none asked for on the command line)")
    world_size = evidence.rank.world_size if evidence.rank else 1
    if world_size > 1 and in_force * world_size == asked:
        return CheckLine(name, "ok", f"Batch size: {asked} = {world_size} ranks × {in_force} (expected: {asked})")
    figure = f"Batch size: {in_force} (expected: {asked})"
    if in_force == asked:
        return CheckLine(name, "ok", figure)
    return CheckLine(name, "fail", figure, "Something between the command line and the DataLoader changes it.")


def _batch_in_force(evidence: Evidence) -> int | None:
    loader = evidence.loader
    if loader is None:
        return None
    if loader.batch_size is not None and loader.batch_size > 1:
        return loader.batch_size
    # A batch sampler, or a data set that yields whole batches: count what came.
    return round(loader.samples / loader.batches) if loader.samples and loader.batches else loader.batch_size


def _gpu_memory(evidence: Evidence) -> CheckLine:
    threshold = evidence.thresholds.check_memory_share
    name = f"GPU memory use > {percent(threshold)}"
    own = max((rank.vram_peak_bytes or 0 for rank in evidence.run.ranks), default=0)
    peak = own or max((gpu.vram_peak_bytes or 0 for gpu in evidence.gpus), default=0)
    total = max((gpu.vram_total_bytes or 0 for gpu in evidence.gpus), default=0)
    if not evidence.on_gpu or not peak or not total:
        return CheckLine(name, "skip", _no_figure(evidence, "memory use was not measured"))
    share = peak / total
    figure = f"GPU Memory - Peak: {peak / 2**30:.2f} GB ({100 * share:.0f}% of {total / 2**30:.0f}GB)"
    if share > threshold:
        return CheckLine(name, "ok", figure)
    return CheckLine(name, "fail", figure, "There is room for a larger batch; it pays only if compute is the limit.")


def _gpu_use(evidence: Evidence) -> CheckLine:
    threshold = evidence.thresholds.check_util_pct
    name = f"GPU use > {threshold:.0f} %"
    used = [gpu.util_pct for gpu in evidence.gpus if gpu.util_pct is not None]
    if not evidence.on_gpu or not used:
        return CheckLine(name, "skip", _no_figure(evidence, "utilisation was not measured"))
    figure = f"GPU utilization: {min(used):.0f}%"
    active = [gpu.sm_active_pct for gpu in evidence.gpus if gpu.sm_active_pct is not None]
    figure += f", SMs active {min(active):.0f}%" if active else ""
    if min(used) > threshold:
        return CheckLine(name, "ok", figure)
    return CheckLine(name, "fail", figure, "The findings say what the GPU waits for.")


def _speed(evidence: Evidence) -> CheckLine:
    threshold = evidence.thresholds.check_speed_share
    name = f"Speed > {percent(threshold)} of the compute ceiling"
    rate, ceiling = evidence.throughput.samples_per_s, evidence.ceilings.compute_samples_per_s
    if rate is None or not ceiling:
        return CheckLine(name, "skip", _no_figure(evidence, "samples were not counted", gpu_needed=False))
    share = min(rate / ceiling, 1.0)
    figure = f"{_epoch_time(evidence, rate)}, {percent(share)} of the {number(ceiling)} that compute allows"
    if share > threshold:
        return CheckLine(name, "ok", figure)
    return CheckLine(name, "fail", figure, "The findings say what takes the time.")


def _epoch_time(evidence: Evidence, rate: float) -> str:
    loader = evidence.loader
    batch = loader.samples / loader.batches if loader and loader.samples and loader.batches else None
    rates = f"{number(rate)} samples/sec" + (f", {number(rate / batch)} batches/sec" if batch else "")
    samples = _samples_of_a_pass(loader, batch) if loader else None
    return f"Epoch time: {number(samples / rate)}s ({rates})" if samples and rate > 0 else rates


def _samples_of_a_pass(loader: LoaderRecord, batch: float | None) -> float | None:
    """Without a batch size an item of the data set may be a whole batch, or the script's own sampler makes batches."""
    if loader.dataset_len is None or loader.batch_size is not None:
        return loader.dataset_len
    if loader.samples and loader.passes > 1:
        return loader.samples / loader.passes
    return loader.dataset_len if "batch_sampler" in loader.given else loader.dataset_len * (batch or 1.0)


def _loading(evidence: Evidence) -> CheckLine:
    name = "No data loading bottleneck"
    if evidence.throughput.steps == 0:
        return CheckLine(name, "skip", "no training step was seen")
    share = evidence.active_share(evidence.buckets.data_wait_s)
    figure = f"Data wait: {percent(share)} of the time after start-up"
    if share < evidence.thresholds.warn_share:
        return CheckLine(name, "ok", figure)
    return CheckLine(name, "fail", figure, "The first input finding says which part of the loader is slow.")


def _no_figure(evidence: Evidence, otherwise: str, gpu_needed: bool = True) -> str:
    return "no GPU in use" if gpu_needed and not evidence.on_gpu else otherwise
