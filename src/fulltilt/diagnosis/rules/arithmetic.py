"""The GPU computes: whether it computes well, or at least as well as it can."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import by_removing, by_speeding_up
from fulltilt.diagnosis.gpus import is_it_real
from fulltilt.diagnosis.rules.wording import Judgement, at, found, time_spent
from fulltilt.figures import number, percent
from fulltilt.records import Abstention, GpuSummary

# --------------------------------------------------------------------------- too little work at a time


def batch_too_small(evidence: Evidence) -> Judgement:
    """Kernels run, but each fills only a part of the GPU, and there is memory for a larger batch."""
    if not _compute_dominates(evidence):
        return None
    limits = evidence.thresholds
    gpu = gpu_in_use(evidence)
    launch_share = evidence.active_share(evidence.launch_s or 0.0)
    if launch_share >= limits.launch_share:
        return None  # the GPU idles between kernels: launch_bound, which is another cure
    vram_share = _vram_share(gpu)
    if vram_share is None:
        return Abstention("batch_too_small", "the GPU's memory in use")
    if vram_share >= limits.vram_mostly_free_share:
        return None
    sm_active = _active_while_busy(gpu)
    short_of_kernels = launch_share >= limits.launch_share / 2
    if sm_active is None and not short_of_kernels:
        return Abstention("batch_too_small", "SM activity (GPM, on Hopper and newer)")
    unfilled = sm_active is not None and sm_active < limits.low_sm_active_pct
    if not unfilled and not short_of_kernels:
        return None
    idle_part = 1 - sm_active / 100 if unfilled and sm_active is not None else 0.0
    cost_s = evidence.buckets.compute_s * idle_part + (evidence.launch_s or 0.0)
    facts = [time_spent(evidence, "compute", evidence.buckets.compute_s)]
    if sm_active is not None:
        facts.append(f"SMs are active {percent(sm_active / 100)} of the time that a kernel runs")
    facts.append(f"{percent(vram_share)} of the GPU's memory is in use")
    where = evidence.loader.where if evidence.loader else None
    predicted = by_removing(evidence.active_share(cost_s), limits.recovered_low)
    return found(evidence, "batch_too_small", cost_s, facts, _larger_batch(evidence), where, predicted)


def _active_while_busy(gpu: GpuSummary | None) -> float | None:
    """How much of the GPU a kernel fills (%): what it idles between kernels is no fault of theirs."""
    if gpu is None or gpu.sm_active_pct is None:
        return None
    return min(100.0 * gpu.sm_active_pct / gpu.util_pct, 100.0) if gpu.util_pct else gpu.sm_active_pct


def _larger_batch(evidence: Evidence) -> str:
    loader = evidence.loader
    attempt = "twice the batch"
    if loader and loader.batch_size:
        attempt = f"batch_size {loader.batch_size} → {2 * loader.batch_size}{at(loader.where)}"
    return (
        f"A suggestion, since it changes what is trained: try {attempt} while memory lasts, with the learning rate "
        "times √2 for Adam-like optimizers (× 2 for SGD)."
    )


# --------------------------------------------------------------------------- arithmetic that is too dear

# GPUs before Ampere by parts of their names: those with fp16 tensor cores alone, and those with none.
_FP16_ONLY = ("T4", "V100", "TITAN V", "RTX 20", "TITAN RTX", "Quadro RTX")
_NO_TENSOR_CORES = ("P100", "P40", "P4 ", "K80", "M60", "GTX", "MX")


def precision_unused(evidence: Evidence) -> Judgement:
    """Everything is computed in float32 on a GPU whose tensor cores are several times as fast."""
    if not _compute_dominates(evidence) or evidence.rank is None:
        return None
    gpu = gpu_in_use(evidence)
    name = gpu.name if gpu else ""
    if any(part in name for part in _NO_TENSOR_CORES):
        return None
    precision = evidence.rank.precision
    if precision is None or (precision.autocast is None and precision.parameters is None):
        return Abstention("precision_unused", "the arithmetic in use (autocast and the type of the parameters)")
    if precision.autocast is not None or "32" not in (precision.parameters or ""):
        return None
    limits = evidence.thresholds
    half = "float16" if any(part in name for part in _FP16_ONLY) else "bfloat16"
    tensor_cores = _tensor_core_share(evidence, gpu)
    on_tensor_cores = bool(precision.tf32) or (tensor_cores or 0.0) >= limits.tensor_cores_used_share
    compute_s = evidence.buckets.compute_s
    facts = [
        time_spent(evidence, "compute", compute_s),
        f"no autocast, parameters in {precision.parameters}, TF32 {_on_off(precision.tf32)}",
    ]
    if tensor_cores is not None:
        facts.append(f"tensor cores are active {percent(tensor_cores)} of the time")
    fix = f'Run forward and loss under torch.autocast("cuda", dtype=torch.{half})'
    if half == "float16":
        fix += ' with torch.amp.GradScaler("cuda")'
    elif not on_tensor_cores:
        fix += ', or at least allow TF32: torch.set_float32_matmul_precision("high")'
    fix += ". It changes the rounding of what is trained, so compare the loss."
    share = evidence.active_share(compute_s)
    speed = limits.tf32_to_half_speed if on_tensor_cores else limits.fp32_to_half_speed
    predicted = by_speeding_up(share, *speed)
    # What it costs is what the faster arithmetic would save at the cautious end.
    return found(evidence, "precision_unused", compute_s * (1 - 1 / speed[0]), facts, fix, None, predicted)


# Their batches hold texts of like length already. And what visobert has without residency.
_OF_LIKE_LENGTH = ("TextLoader", "ResidentTexts")
_WITHOUT_RESIDENCY = "TokenisedTexts"


def padding_waste(evidence: Evidence) -> Judgement:
    """Batches of texts are filled up to their longest, and the GPU computes on the filling."""
    if evidence.loader is None or evidence.loader.padding_share is None:
        return Abstention("padding_waste", "a batch with an attention mask or padding to count")
    padding = evidence.loader.padding_share
    limits = evidence.thresholds
    cost_s = evidence.buckets.compute_s * padding
    if padding < limits.padding_share or evidence.active_share(cost_s) < limits.warn_share / 2:
        return None
    facts = [
        f"{percent(padding)} of what the batches hold is padding",
        time_spent(evidence, "compute on padding", cost_s),
    ]
    if evidence.loader.dataset in _OF_LIKE_LENGTH:
        fix = (
            "Texts of like length share a batch already, but the lengths within one still differ: give a budget of "
            "tokens in place of the batch size (tokens_per_batch), which makes batches of long texts smaller, or a "
            "smaller batch size. Both change what is trained."
        )
        return found(evidence, "padding_waste", cost_s, facts, fix, evidence.loader.where, None)
    predicted = by_removing(evidence.active_share(cost_s), limits.recovered_low)
    if evidence.loader.dataset == _WITHOUT_RESIDENCY and evidence.run.run.asked.residency == "none":
        fix = "Leave out residency: none. Then texts of like length share a batch."
        return found(evidence, "padding_waste", cost_s, facts, fix, evidence.loader.where, predicted)
    fix = (
        f"Put texts of like length into one batch{at(evidence.loader.where)}: sort chunks of some hundred batches by "
        "length, shuffle the batches (a batch_sampler), and pad to the longest of each batch, not to a fixed length. "
        "With Hugging Face: group_by_length=True and DataCollatorWithPadding."
    )
    return found(evidence, "padding_waste", cost_s, facts, fix, evidence.loader.where, predicted)


# --------------------------------------------------------------------------- the healthy end


def compute_bound(evidence: Evidence) -> Judgement:
    """The job computes most of its time: the healthy end, with the word on whether a full GPU is really full."""
    compute_s = evidence.buckets.compute_s
    share = evidence.active_share(compute_s)
    if share < evidence.thresholds.compute_dominates:
        return None
    facts = [time_spent(evidence, "compute", compute_s)]
    reached = share_of_ceiling(evidence)
    if reached is not None and evidence.ceilings.compute_samples_per_s and evidence.throughput.samples_per_s:
        facts.append(
            f"{number(evidence.throughput.samples_per_s)} of at most "
            f"{number(evidence.ceilings.compute_samples_per_s)} samples/s: {percent(reached)} of the compute ceiling"
        )
    facts += [sentence for gpu in evidence.gpus if (sentence := is_it_real(gpu, evidence.thresholds))]
    healthy = share >= evidence.thresholds.full_tilt_share
    fix = "Nothing holds it up. " if healthy else "Once the rest is mended, compute sets the pace. "
    if evidence.on_gpu:
        fix += "Only less arithmetic makes it faster: a smaller model, lower precision, torch.compile."
    else:
        fix += "Only a faster processor, or a GPU, makes it faster."
    return found(evidence, "compute_bound", compute_s, facts, fix, None, None, "info")


def share_of_ceiling(evidence: Evidence) -> float | None:
    """The rate that was reached over the one that compute alone would allow; None when either is unknown."""
    rate, ceiling = evidence.throughput.samples_per_s, evidence.ceilings.compute_samples_per_s
    return min(rate / ceiling, 1.0) if rate is not None and ceiling else None


def gpu_in_use(evidence: Evidence) -> GpuSummary | None:
    """The GPU of the rank that sets the pace."""
    uuid = evidence.rank.gpu_uuid if evidence.rank else None
    return next((gpu for gpu in evidence.gpus if gpu.uuid == uuid), evidence.gpus[0] if evidence.gpus else None)


def _compute_dominates(evidence: Evidence) -> bool:
    share = evidence.active_share(evidence.buckets.compute_s)
    return evidence.on_gpu and share >= evidence.thresholds.compute_dominates


def _vram_share(gpu: GpuSummary | None) -> float | None:
    if gpu is None or gpu.vram_peak_bytes is None or not gpu.vram_total_bytes:
        return None
    return gpu.vram_peak_bytes / gpu.vram_total_bytes


def _tensor_core_share(evidence: Evidence, gpu: GpuSummary | None) -> float | None:
    if evidence.rank and evidence.rank.deep and evidence.rank.deep.tensor_core_share is not None:
        return evidence.rank.deep.tensor_core_share
    return gpu.tensor_active_pct / 100 if gpu and gpu.tensor_active_pct is not None else None


def _on_off(flag: bool | None) -> str:
    return {None: "unknown", True: "on", False: "off"}[flag]
