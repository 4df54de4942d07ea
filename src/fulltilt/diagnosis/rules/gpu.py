"""The GPU: batch size, precision, padding, copies, synchronization, kernel launches, its clock and other users."""

from __future__ import annotations

import re
from dataclasses import replace

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import (
    Judgement,
    at,
    busy_thread,
    call_at,
    costliest_line,
    found,
    line_cost,
    neighbours,
    time_spent,
)
from fulltilt.diagnosis.gpu_summary import (
    clock_ratio,
    is_it_real,
    training_samples,
    use_before_the_job,
    vram_used_share,
)
from fulltilt.diagnosis.ledger import gpu_step_words
from fulltilt.diagnosis.libraries import is_library_code
from fulltilt.diagnosis.predicted_gain import Gain, amdahl, by_removing, by_speeding_up, gain
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import brief, capital, celsius, count, number, percent, seconds, size
from fulltilt.records import Abstention, GpuSummary, TransferRecord

MOST_OF_A_CALL = 60

# --------------------------------------------------------------------------- too little work at a time


def batch_too_small(evidence: Evidence) -> Judgement:
    """Each kernel fills only a part of the GPU, and there is memory for a larger batch."""
    launch_share = evidence.share(evidence.launch_s or 0.0)
    if not _compute_dominates(evidence) or launch_share >= THRESHOLDS.launch_share:
        return None  # idle between kernels: that is launch_bound
    gpu = gpu_in_use(evidence)
    vram_share = vram_used_share(gpu) if gpu else None
    if gpu is None or vram_share is None:
        return Abstention("batch_too_small", "the GPU's memory in use")
    if vram_share >= THRESHOLDS.vram_mostly_free_share:
        return None
    # How much of the GPU a kernel fills, without the idle time between kernels.
    filled = gpu.sm_active_pct / 100 if gpu.sm_active_pct is not None else None
    if filled is not None and gpu.util_pct:
        filled = min(100 * filled / gpu.util_pct, 1.0)
    short_of_kernels = launch_share >= THRESHOLDS.launch_share / 2
    if filled is None and not short_of_kernels:
        return Abstention("batch_too_small", "SM activity (GPM, on Hopper and newer)")
    idle_part = 1 - filled if filled is not None and filled < THRESHOLDS.low_sm_active else 0.0
    if not idle_part and not short_of_kernels:
        return None
    cost_s = evidence.buckets.compute_s * idle_part + (evidence.launch_s or 0.0)
    facts = [time_spent(evidence, "compute", evidence.buckets.compute_s)]
    if filled is not None:
        facts.append(f"while a kernel runs, {percent(filled)} of the SMs are active")
    facts.append(f"{percent(vram_share)} of the GPU's memory is in use")
    loader, larger = evidence.loader, "twice the batch"
    where = loader.where if loader else None
    if loader and loader.batch_size:
        larger = f"batch_size {loader.batch_size} → {2 * loader.batch_size}{at(where)}"
    fix = (
        f"A suggestion, since it changes what is trained: try {larger} as far as memory allows, with the learning rate "
        "times √2 for Adam-like optimizers (× 2 for SGD). `fulltilt plan RUN` shows which batches fit."
    )
    return found(evidence, "batch_too_small", cost_s, facts, fix, where, by_removing(evidence.share(cost_s)))


# --------------------------------------------------------------------------- slow arithmetic

# GPUs before Ampere by parts of their names: those with fp16 tensor cores alone, and those with none.
_FP16_ONLY = ("T4", "V100", "TITAN V", "RTX 2060", "RTX 2070", "RTX 2080", "TITAN RTX", "Quadro RTX")
_NO_TENSOR_CORES = ("P100", "P40", "P4 ", "K80", "M60", "GTX", "MX")


def precision_unused(evidence: Evidence) -> Judgement:
    """Everything is computed in float32 on a GPU whose tensor cores are several times as fast."""
    if not _compute_dominates(evidence):
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
    half = "float16" if any(part in name for part in _FP16_ONLY) else "bfloat16"
    tensor_cores = evidence.rank.deep.tensor_core_share if evidence.rank.deep else None
    if tensor_cores is None and gpu and gpu.tensor_active_pct is not None:
        tensor_cores = gpu.tensor_active_pct / 100
    on_tensor_cores = bool(precision.tf32) or (tensor_cores or 0.0) >= THRESHOLDS.tensor_cores_used_share
    compute_s = evidence.buckets.compute_s
    tf32 = {None: "unknown", True: "on", False: "off"}[precision.tf32]
    facts = [
        time_spent(evidence, "compute", compute_s),
        f"no autocast, parameters in {precision.parameters}, TF32 {tf32}",
    ]
    if tensor_cores is not None:
        facts.append(f"tensor cores are active {percent(tensor_cores)} of the training time")
    fix = f'Run forward and loss under torch.autocast("cuda", dtype=torch.{half})'
    if half == "float16":
        fix += ' with torch.amp.GradScaler("cuda")'
    elif not on_tensor_cores:
        fix += ', or at least allow TF32: torch.set_float32_matmul_precision("high")'
    fix += ". That changes rounding, so compare the loss."
    speed = THRESHOLDS.tf32_to_half_speed if on_tensor_cores else THRESHOLDS.fp32_to_half_speed
    predicted = by_speeding_up(evidence.share(compute_s), *speed)
    # The cost is what faster arithmetic would save at the cautious end.
    return found(evidence, "precision_unused", compute_s * (1 - 1 / speed[0]), facts, fix, None, predicted)


# Kernels by name: cuDNN converting the memory layout of images, convolutions, optimizers in several kernels.
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE)
_CONVOLUTION = re.compile(r"conv|_fprop|_dgrad|_wgrad|implicit_gemm", re.IGNORECASE)
_UNFUSED = re.compile(r"multi_tensor_apply(?!.*Fused)", re.IGNORECASE)


def free_switches(evidence: Evidence) -> Judgement:
    """Performance flags that hardly change results, each advised only where traced kernels show that it applies."""
    rank, loader = evidence.rank, evidence.loader
    if rank.kernels is None or rank.precision is None:
        return Abstention("free_switches", "kernels of a traced step (runs longer than 8 s)")
    busy_s, precision = rank.kernels.busy_s, rank.precision
    if busy_s <= 0 or not _compute_dominates(evidence) or precision.compiled:
        return None
    layout, convolution, unfused = (
        sum(line.seconds for line in rank.kernels.top_kernels if kind.search(line.function)) / busy_s
        for kind in (_LAYOUT, _CONVOLUTION, _UNFUSED)
    )
    shapes = loader.batch_shapes if loader else None
    facts, fixes, saved = [], [], 0.0
    if layout >= THRESHOLDS.switch_share:
        facts.append(f"cuDNN converts images from channels first to last in {percent(layout)} of the kernel time")
        fixes.append(
            "keep them channels last: model.to(memory_format=torch.channels_last), and the same for the images"
        )
        saved += layout
    if unfused >= THRESHOLDS.switch_share and precision.fused_optimizer is False:
        facts.append(f"the optimizer takes {percent(unfused)} of the kernel time, in several kernels for each group")
        fixes.append(
            f"one kernel does it: torch.optim.{rank.optimizers[0] if rank.optimizers else 'AdamW'}(fused=True)"
        )
        saved += unfused / 2
    if convolution >= THRESHOLDS.convolution_share and shapes is not None:
        fact = f"convolutions take {percent(convolution)} of the kernel time, in batches of {shapes} shapes"
        if not precision.cudnn_benchmark and shapes <= THRESHOLDS.few_shapes:
            facts.append(f"{fact}, and cudnn.benchmark is off")
            fixes.append("let cuDNN find the fastest algorithm once: torch.backends.cudnn.benchmark = True")
        elif precision.cudnn_benchmark and shapes > THRESHOLDS.many_shapes:
            facts.append(f"{fact}, and cudnn.benchmark tries all algorithms for each new shape")
            fixes.append("torch.backends.cudnn.benchmark = False, or pad or crop to few shapes")
    if not facts:
        return None
    cost_s = evidence.buckets.compute_s * saved
    fix = capital(f"{'; '.join(fixes)}. Try it and compare with `fulltilt report`: the gain was not measured.")
    return found(evidence, "free_switches", cost_s, facts, fix, None, gain(1.0, amdahl(evidence.share(cost_s))))


# Its batches already hold texts of similar length.
_SIMILAR_LENGTHS = "TextLoader"


def padding_waste(evidence: Evidence) -> Judgement:
    """The texts of a batch are padded to the longest, and the GPU computes on the padding."""
    loader = evidence.loader
    if loader is None or loader.padding_share is None:
        if loader is not None and loader.batch_shapes is not None and loader.batch_shapes <= THRESHOLDS.few_shapes:
            return None  # images or tables: nothing in them is padded
        return Abstention("padding_waste", "a batch with an attention mask or padding to count")
    cost_s = evidence.buckets.compute_s * loader.padding_share
    if loader.padding_share < THRESHOLDS.padding_share or evidence.share(cost_s) < THRESHOLDS.warn_share / 2:
        return None
    facts = [
        f"{percent(loader.padding_share)} of what the batches hold is padding",
        time_spent(evidence, "compute on padding", cost_s),
    ]
    predicted: Gain | None = by_removing(evidence.share(cost_s))
    if loader.dataset == _SIMILAR_LENGTHS:
        predicted = None
        fix = (
            "Texts of similar length already share a batch: set a number of tokens instead of the batch size "
            "(tokens_per_batch), or a smaller batch size. Both change what is trained."
        )
    else:
        fix = (
            f"Pad each batch to its own longest text only (in the collate_fn of the loader{at(loader.where)}), and put "
            "texts of similar length into one batch: sort chunks of some hundred batches by length, and shuffle them. "
            "With Hugging Face: tokenize without padding, take a collator that pads to the batch's longest text "
            "(DataCollatorWithPadding; DataCollatorForSeq2Seq pads labels, too), and group_by_length=True (since "
            "transformers 5: train_sampling_strategy='group_by_length')."
        )
    return found(evidence, "padding_waste", cost_s, facts, fix, loader.where, predicted)


# --------------------------------------------------------------------------- compute


def compute_bound(evidence: Evidence) -> Judgement:
    """The job computes most of its time: the healthy state. Also says whether GPU utilisation means real work."""
    compute_s = evidence.buckets.compute_s - evidence.stalled_by_threads_s
    share = evidence.share(compute_s)
    if share < THRESHOLDS.compute_dominates:
        return None
    if evidence.collectives_unmeasured:  # waiting for parameters looks like compute
        return Abstention("compute_bound", "how long ranks wait for sharded parameters (FSDP)")
    facts = [time_spent(evidence, "compute", compute_s)]
    reached = evidence.share_of_ceiling
    if reached is not None and evidence.ceilings.compute_samples_per_s and evidence.throughput.samples_per_s:
        bound = "at most" if evidence.bound == "at most" else "about"  # loading meanwhile lowers the ceiling
        facts.append(
            f"{number(evidence.throughput.samples_per_s)} of {bound} "
            f"{number(evidence.ceilings.compute_samples_per_s)} samples/s: {percent(reached)} of the compute ceiling"
        )
    if words := gpu_step_words(evidence.run):
        facts.append(words)
    facts += [sentence for gpu in evidence.gpus if (sentence := is_it_real(gpu))]
    slower, ways = evidence.slowdown, []
    if slower and slower.bucket == "compute_s":
        ways.append("Find out why compute takes longer and longer")
    less = "less arithmetic makes it faster: a smaller model, lower precision, torch.compile."
    if not evidence.on_gpu:
        if others := neighbours(evidence):
            facts += others
            ways.append("Run it where other processes do not take the CPUs")
        if evidence.crowded_by_workers:
            facts.append(f"loader workers take {percent(evidence.workers_share)} of the CPUs from compute")
            line = costliest_line(evidence)
            ways.append(f"Make {f'{line.function} ({line.where})' if line else 'the fetch'} cheaper")
        less = (
            f"less arithmetic{_starting_at(evidence)}, fewer and larger operations instead of loops over parts of "
            "tensors, a faster processor or, for large operations, a GPU makes it faster."
        )
    if ways:
        only = f"{'. '.join(ways)}. Apart from that, only"
    elif share >= THRESHOLDS.full_tilt_share:
        only = "Compute sets the pace. Only"
    else:
        only = "Once the other findings are fixed, compute sets the pace. Only"
    return found(evidence, "compute_bound", compute_s, facts, f"{only} {less}", None, None, "info")


def _starting_at(evidence: Evidence) -> str:
    """The lines from which much of the computing on the CPU starts, without backward; empty where none stands out."""
    compute_s = evidence.buckets.compute_s
    own = (ln for ln in evidence.rank.compute_lines if not (ln.where.startswith("torch/") or is_library_code(ln)))
    much = [
        replace(line, call=line.call and brief(line.call, MOST_OF_A_CALL))
        for line in own
        if line.seconds >= THRESHOLDS.warn_share * compute_s
    ][:3]
    words = (f"{call_at(line)} {percent(line.seconds / compute_s)}" for line in much)
    return f" (of which {', '.join(words)})" if much else ""


def gpu_in_use(evidence: Evidence) -> GpuSummary | None:
    """The GPU of the slowest rank."""
    uuid = evidence.rank.gpu_uuid
    return next((gpu for gpu in evidence.gpus if gpu.uuid == uuid), evidence.gpus[0] if evidence.gpus else None)


def _compute_dominates(evidence: Evidence) -> bool:
    return evidence.share(evidence.buckets.compute_s) >= THRESHOLDS.compute_dominates


# --------------------------------------------------------------------------- copies


def transfer_blocking(evidence: Evidence) -> Judgement:
    """The GPU idles while the training thread copies a batch to it."""
    cost_s = evidence.buckets.transfer_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.transfer_share:
        return None
    transfer = evidence.rank.transfer
    if transfer is None:
        return Abstention("transfer_blocking", "how the batches were copied (pinned or not, blocking or not)")
    copies = f"{number(transfer.copies / max(evidence.throughput.steps, 1))} copies a step"
    if transfer.bytes is not None and transfer.copies:
        copies += f", {size(transfer.bytes / transfer.copies)} each"
    if transfer.pageable_share is not None:
        copies += f", {percent(transfer.pageable_share)} from pageable memory"
    if transfer.blocking_share is not None:
        copies += f", {percent(transfer.blocking_share)} blocking"
    facts = [time_spent(evidence, "copying to the GPU", cost_s), copies]
    fix = _overlap_copies(evidence, transfer)
    return found(evidence, "transfer_blocking", cost_s, facts, fix, transfer.where, by_removing(share))


def _overlap_copies(evidence: Evidence, transfer: TransferRecord) -> str:
    loader = evidence.loader
    steps = []
    if transfer.pageable_share is None or transfer.pageable_share > 0:
        if loader is not None and not loader.pin_memory:
            steps.append(f"pin the batches: DataLoader(..., pin_memory=True){at(loader.where)}")
        elif loader is None:
            steps.append("make the batches in pinned memory: tensor.pin_memory()")
    if transfer.blocking_share is None or transfer.blocking_share > 0:
        steps.append(f"copy without waiting: .to(device, non_blocking=True){at(transfer.where)}")
    if not steps:
        return (
            f"The copies{at(transfer.where)} are pinned and do not block, but large: send uint8 or bfloat16 and "
            "convert on the GPU, or copy the next batch on a second stream."
        )
    return capital(f"{' and '.join(steps)}.")


# --------------------------------------------------------------------------- calls that wait for the GPU

# What the call looks like, and what to do instead of it.
_INSTEAD = (
    (r"synchronize", "delete it; nothing in training needs it, and torch.cuda.Event measures time without it"),
    (r"\bprint\(|\blog", "print every {every} steps"),
    (r"isnan|isfinite|isinf|\.any\(|\.all\(", "check every {every} steps, or let the gradient scaler do it"),
    (
        r"\.item\(|\.tolist\(|\b(float|int|bool)\(",
        "keep the value on the GPU (total += loss.detach()) and read it every {every} steps",
    ),
    (
        r"\.cpu\(|\.numpy\(|\.to\(.?cpu",
        "keep the results on the GPU and move them once every {every} steps, or at the end of the epoch",
    ),
    (
        r"nonzero|masked_select|unique|argwhere",
        "its shape depends on the data; use torch.where or multiply by the mask so that the shape stays fixed",
    ),
)
_OTHERWISE = "do it every {every} steps, or keep its result on the GPU"


def sync_point(evidence: Evidence) -> Judgement:
    """The host waits for the GPU, and the GPU then idles until the host has launched work again."""
    cost_s = evidence.buckets.sync_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.sync_share:
        return None
    lines = sorted(evidence.rank.sync_lines, key=lambda line: -line.seconds)
    if not lines and evidence.rank.syncs == 0:
        return Abstention("sync_point", "the calls that waited for the GPU")
    facts = [time_spent(evidence, "GPU idle time after the host waited for it", cost_s)]
    if evidence.rank.syncs:
        facts.append(f"{number(evidence.rank.syncs / max(evidence.rank.steps, 1))} such calls a step")
    facts += [line_cost(line) for line in lines[:3]]
    where = lines[0].where if lines else None
    call = (lines[0].call or lines[0].function) if lines else "the call"
    fix = f"{call}{at(where)}: {instead_of(call, share)}."
    return found(evidence, "sync_point", cost_s, facts, fix, where, by_removing(share))


def instead_of(call: str, share: float) -> str:
    """What to do instead of a call that waits for the GPU and costs ``share`` of the time."""
    # So rarely that it takes less than half a percent.
    every = next((n for n in (10, 20, 50) if share / n <= 0.005), 100)
    advice = next((advice for pattern, advice in _INSTEAD if re.search(pattern, call)), _OTHERWISE)
    return advice.format(every=every)


# --------------------------------------------------------------------------- kernels launched too slowly


def launch_bound(evidence: Evidence) -> Judgement:
    """Kernels are so short that the host cannot launch them as fast as the GPU runs them."""
    if evidence.launch_s is None:
        return Abstention("launch_bound", "the GPU's idle time between kernels")
    cost_s = max(evidence.launch_s - evidence.contended_s, 0.0)  # without a CPU: that is launch_contended
    share = evidence.share(cost_s)
    if share < THRESHOLDS.launch_share:
        return None
    facts = [time_spent(evidence, "GPU idle time between kernels that the host launches too slowly", cost_s)]
    traced = evidence.rank.kernels
    if traced and traced.kernels:
        facts.append(f"{traced.kernels} kernels a step of {seconds(traced.busy_s / traced.kernels)} each")
    if words := gpu_step_words(evidence.run):
        facts.append(words)
    rank = evidence.rank
    fixes = ['capture the step in CUDA graphs: model = torch.compile(model, mode="reduce-overhead")']
    if rank.precision and rank.precision.compiled:
        fixes = ['the model is compiled; mode="reduce-overhead" also captures it in CUDA graphs']
    if rank.compile and rank.compile.graph_breaks:
        reasons = f": {'; '.join(rank.compile.break_reasons[:2])}" if rank.compile.break_reasons else ""
        facts.append(f"torch.compile broke the graph {count('time', rank.compile.graph_breaks)}{reasons}")
        fixes.insert(0, "fix what breaks the compiled graph: torch.compile(model, fullgraph=True) names its line")
    fusible = [name for name in rank.optimizers if name in ("Adam", "AdamW", "SGD", "Adagrad")]
    if fusible:
        fixes.append(f"update all parameters in one kernel: {fusible[0]}(..., fused=True)")
    if evidence.loader and evidence.loader.batch_size:
        fixes.append(f"if the training allows it, try a batch larger than {evidence.loader.batch_size}")
    if thread := busy_thread(evidence):
        named, fact = thread
        facts.append(fact)
        fixes.insert(0, f"move the work of {named} to a process, so that the GIL is free to launch kernels")
    fix = capital(f"{'; '.join(fixes)}.")
    return found(evidence, "launch_bound", cost_s, facts, fix, None, by_removing(share))


# --------------------------------------------------------------------------- a GPU that is slowed down or shared


def throttled(evidence: Evidence) -> Judgement:
    """The GPU lowers its clock: it is too hot, has too little power, or the board has a fault."""
    measured = [gpu for gpu in evidence.gpus if gpu.throttled_share is not None]
    if not measured:
        return Abstention("throttled", "the GPU's clock and its reasons for slowing down")
    worst = max(measured, key=lambda gpu: gpu.throttled_share or 0.0)
    share = worst.throttled_share or 0.0
    if share < THRESHOLDS.throttled_share:
        return None
    readings = [reading for sample in training_samples(evidence.run) for reading in sample.gpus]
    clock = clock_ratio(reading for reading in readings if reading.uuid == worst.uuid)
    reasons = ", ".join(worst.throttle_reasons).replace("_", " ") or "no reason given"
    facts = [f"GPU {worst.index} was slowed down in {percent(share)} of the readings: {reasons}"]
    facts += [f"its clock was at {percent(clock)} of its maximum"] if clock is not None else []
    facts += [f"it reached {celsius(worst.temperature_peak_c)}"] if worst.temperature_peak_c is not None else []
    hot = any("thermal" in reason.lower() for reason in worst.throttle_reasons)
    fix = "Give the GPU more power: raise the limit (nvidia-smi -pl), check the supply and its cables."
    if hot:
        fix = "Cool the GPU: clear its air flow, raise the fan speed or lower the room's temperature."
    fix += " Until then its timings say nothing about the job."
    compute_s = evidence.buckets.compute_s
    predicted = by_speeding_up(evidence.share(compute_s), 1.0, 1 / clock) if clock else None
    return found(evidence, "throttled", share * compute_s, facts, fix, None, predicted)


def gpu_shared(evidence: Evidence) -> Judgement:
    """Another process uses the same GPU."""
    uuids = {gpu.uuid for gpu in evidence.gpus}
    readings = [r for s in training_samples(evidence.run) for r in s.gpus if r.uuid in uuids]
    if all(reading.processes is None for reading in readings):
        return Abstention("gpu_shared", "the processes on the GPU")
    crowded = max(evidence.gpus, key=lambda gpu: len(gpu.foreign_processes), default=None)
    if crowded is None or not crowded.foreign_processes:
        return None
    others = crowded.foreign_processes
    facts = [
        f"GPU {crowded.index} also runs {other.name or 'a process'} (pid {other.pid}, {size(other.vram_used_bytes)})"
        for other in others[:3]
    ]
    if len(others) > 3:
        facts.append(f"and {len(others) - 3} more")
    fix = "Give the job a GPU of its own (CUDA_VISIBLE_DEVICES): timings on a shared GPU are not the job's own."
    # Processes that compute take turns; an idle one, such as an open notebook, only takes memory.
    use_pct = use_before_the_job(evidence.run, crowded.uuid)
    if use_pct is not None:
        facts.append(f"before the job used it, that GPU was busy {percent(use_pct / 100)} of the time")
        if use_pct < THRESHOLDS.idle_gpu_pct:
            return found(evidence, "gpu_shared", 0.0, facts, fix, severity="info")
    cost_s = evidence.buckets.compute_s * len(others) / (len(others) + 1)
    predicted = gain(1.0, amdahl(evidence.share(cost_s)))
    return found(evidence, "gpu_shared", cost_s, facts, fix, None, predicted, "warn")
