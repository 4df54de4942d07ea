"""What the job ran with, and the verification checklist: each line passed, failed or not applicable."""

from __future__ import annotations

import re
from dataclasses import fields

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.rules.live_tuning import live_settings
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import number, percent
from fulltilt.records import CheckLine

# --------------------------------------------------------------------------- settings

Setting = tuple[str, str | int | float | bool | None]
_OF_THE_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "start_method")


def settings_in_force(evidence: Evidence) -> tuple[Setting, ...]:
    """What the job ran with, was asked for (``asked.…``) and what live tuning did (``live.…``). None: not seen."""
    rank = evidence.rank if evidence.run.ranks else None
    loader, precision = evidence.loader, evidence.rank.precision
    batches = sum(span.batches for spans in evidence.run.spans for span in spans if span.steps > 0)
    steps = sum(span.steps for spans in evidence.run.spans for span in spans)
    in_force: list[Setting] = [
        ("device", rank.device if rank else None),
        ("world_size", rank.world_size if rank else None),
        ("batch_size", loader.batch_size if loader else None),
        ("accumulation", max(round(batches / steps), 1) if batches and steps else None),
        *((name, getattr(loader, name, None)) for name in _OF_THE_LOADER),
        ("torch_threads", evidence.rank.torch_threads),
        ("precision", precision.name if precision else None),
        ("tf32", precision.tf32 if precision else None),
        ("compile", precision.compiled if precision else None),
        ("optimizer", ", ".join(evidence.rank.optimizers) or None),
        ("learning_rate", evidence.rank.learning_rate),
        ("loader", loader.where if loader else None),
    ]
    asked = evidence.run.run.asked
    values = ((field.name, getattr(asked, field.name)) for field in fields(asked))
    asked_for = ((f"asked.{name}", value) for name, value in values if value is not None)
    return (*in_force, *asked_for, *live_settings(evidence.live))


# --------------------------------------------------------------------------- checklist

# The batch size on command lines: --batch_size 128, --batch-size=128, per_device_train_batch_size=128.
_BATCH_SIZE = re.compile(r"(?<!\S)(?:-{0,2}(?:per[-_]device[-_])?(?:train[-_])?batch[-_]?size|-b|--bs)[= ](\d+)(?!\S)")


def make_checklist(evidence: Evidence) -> tuple[CheckLine, ...]:
    """The five lines: batch size, GPU memory, GPU use, speed, data loading."""
    return tuple(check(evidence) for check in (_batch_size, _gpu_memory, _gpu_use, _speed, _loading))


def asked_batch_size(command: tuple[str, ...]) -> int | None:
    """The batch size on a command line (the last one counts); None when there is none."""
    asked = _BATCH_SIZE.findall(" ".join(command))
    return int(asked[-1]) if asked else None


def _batch_size(evidence: Evidence) -> CheckLine:
    name = "Batch size as asked"
    asked = evidence.run.run.asked.batch_size or asked_batch_size(evidence.run.run.command)
    in_force, world_size = _batch_in_force(evidence), evidence.rank.world_size
    if in_force is None:
        return CheckLine(name, "skip", "no batch size was seen")
    if asked is None:
        return CheckLine(name, "skip", f"Batch size: {in_force} (none asked for on the command line)")
    if world_size > 1 and in_force * world_size == asked:
        return CheckLine(name, "ok", f"Batch size: {asked} = {world_size} ranks × {in_force} (expected: {asked})")
    figure = f"Batch size: {in_force} (expected: {asked})"
    remedy = "Something between the command line and the DataLoader changes it."
    return CheckLine(name, "ok" if in_force == asked else "fail", figure, remedy)


def _batch_in_force(evidence: Evidence) -> int | None:
    loader = evidence.loader
    if loader is None:
        return None
    if loader.batch_size is not None and loader.batch_size > 1:
        return loader.batch_size
    # A batch sampler, or a data set that yields whole batches: take the mean.
    return round(loader.samples / loader.batches) if loader.samples and loader.batches else loader.batch_size


def _gpu_memory(evidence: Evidence) -> CheckLine:
    threshold = THRESHOLDS.check_memory_share
    name = f"GPU memory use > {percent(threshold)}"
    own = max((rank.vram_peak_bytes or 0 for rank in evidence.run.ranks), default=0)
    peak = own or max((gpu.vram_peak_bytes or 0 for gpu in evidence.gpus), default=0)
    total = max((gpu.vram_total_bytes or 0 for gpu in evidence.gpus), default=0)
    if not evidence.on_gpu or not peak or not total:
        return CheckLine(name, "skip", "memory use was not measured" if evidence.on_gpu else "no GPU in use")
    share = peak / total
    figure = f"GPU Memory - Peak: {peak / 2**30:.2f} GB ({100 * share:.0f}% of {total / 2**30:.0f}GB)"
    remedy = "There is room for a larger batch, which helps only if compute is the bottleneck."
    return CheckLine(name, "ok" if share > threshold else "fail", figure, remedy)


def _gpu_use(evidence: Evidence) -> CheckLine:
    threshold = THRESHOLDS.check_util_pct
    name = f"GPU use > {threshold:.0f} %"
    used = [gpu.util_pct for gpu in evidence.gpus if gpu.util_pct is not None]
    if not evidence.on_gpu or not used:
        return CheckLine(name, "skip", "utilisation was not measured" if evidence.on_gpu else "no GPU in use")
    figure = f"GPU utilization: {min(used):.0f}%"
    active = [gpu.sm_active_pct for gpu in evidence.gpus if gpu.sm_active_pct is not None]
    figure += f", SMs active {min(active):.0f}%" if active else ""
    remedy = "The findings say what the GPU waits for."
    return CheckLine(name, "ok" if min(used) > threshold else "fail", figure, remedy)


def _speed(evidence: Evidence) -> CheckLine:
    threshold = THRESHOLDS.check_speed_share
    name = f"Speed > {percent(threshold)} of the compute ceiling"
    rate, share = evidence.throughput.samples_per_s, evidence.share_of_ceiling
    if rate is None or share is None:
        return CheckLine(name, "skip", "samples were not counted")
    allowed = number(evidence.ceilings.compute_samples_per_s)
    figure = f"{_epoch_time(evidence, rate)}, {percent(share)} of the {allowed} that compute alone would reach"
    return CheckLine(name, "ok" if share > threshold else "fail", figure, "The findings say what takes the time.")


def _epoch_time(evidence: Evidence, rate: float) -> str:
    loader = evidence.loader
    batch = loader.samples / loader.batches if loader and loader.samples and loader.batches else None
    rates = f"{number(rate)} samples/sec" + (f", {number(rate / batch)} batches/sec" if batch else "")
    # Without a batch size an item may be a whole batch; a sampler may draw only some of them.
    draws_all = (
        loader is not None and loader.batch_size is not None and not {"sampler", "batch_sampler"} & {*loader.given}
    )
    samples = loader.dataset_len if loader is not None and draws_all else None
    return f"Epoch time: {number(samples / rate)}s ({rates})" if samples and rate > 0 else rates


def _loading(evidence: Evidence) -> CheckLine:
    name = f"Data wait < {percent(THRESHOLDS.warn_share)}"
    if evidence.throughput.steps == 0:
        return CheckLine(name, "skip", "no training step was seen")
    share = evidence.data_wait_share
    figure = f"Data wait: {percent(share)} of the time after start-up"
    remedy = "The first input finding says which part of the loader is slow."
    return CheckLine(name, "ok" if share < THRESHOLDS.warn_share else "fail", figure, remedy)
