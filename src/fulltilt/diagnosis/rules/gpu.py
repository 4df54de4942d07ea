"""The GPU idles although its data is there: copies, calls that wait for it, kernels that come too slowly."""

from __future__ import annotations

import re

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import by_removing
from fulltilt.diagnosis.rules.wording import Judgement, at, found, line_cost, time_spent
from fulltilt.figures import capital, number, percent, seconds, size
from fulltilt.records import Abstention, TransferRecord

# --------------------------------------------------------------------------- copies


def transfer_blocking(evidence: Evidence) -> Judgement:
    """The GPU idles while the training thread copies a batch to it."""
    if not evidence.on_gpu or evidence.rank is None:
        return None
    cost_s = evidence.buckets.transfer_s
    share = evidence.active_share(cost_s)
    if share < evidence.thresholds.transfer_share:
        return None
    transfer = evidence.rank.transfer
    if transfer is None:
        return Abstention("transfer_blocking", "how the batches were copied (pinned or not, blocking or not)")
    facts = [time_spent(evidence, "copying to the GPU", cost_s), _copies(evidence, transfer)]
    fix = _overlap_copies(evidence, transfer)
    predicted = by_removing(share, evidence.thresholds.recovered_low)
    return found(evidence, "transfer_blocking", cost_s, facts, fix, transfer.where, predicted)


def _copies(evidence: Evidence, transfer: TransferRecord) -> str:
    parts = [f"{number(transfer.copies / max(evidence.throughput.steps, 1))} copies a step"]
    if transfer.bytes is not None and transfer.copies:
        parts.append(f"{size(transfer.bytes / transfer.copies)} each")
    if transfer.pageable_share is not None:
        parts.append(f"{percent(transfer.pageable_share)} from pageable memory")
    if transfer.blocking_share is not None:
        parts.append(f"{percent(transfer.blocking_share)} blocking")
    return ", ".join(parts)


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
            f"The copies{at(transfer.where)} are pinned and do not block, so they are simply large: send uint8 or "
            "bfloat16 and convert on the GPU, or copy the next batch on a second stream while this one trains."
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
    """The host waits for the GPU, and the GPU then idles until the host has caught up again."""
    if not evidence.on_gpu or evidence.rank is None:
        return None
    cost_s = evidence.buckets.sync_s
    share = evidence.active_share(cost_s)
    if share < evidence.thresholds.sync_share:
        return None
    lines = sorted(evidence.rank.sync_lines, key=lambda line: -line.seconds)
    if not lines and evidence.rank.syncs == 0:
        return Abstention("sync_point", "the calls that waited for the GPU")
    facts = [time_spent(evidence, "idling after the host had waited for the GPU", cost_s)]
    if evidence.rank.syncs:
        facts.append(f"{number(evidence.rank.syncs / max(evidence.rank.steps, 1))} such calls a step")
    facts += [line_cost(line) for line in lines[:3]]
    where = lines[0].where if lines else None
    call = (lines[0].call or lines[0].function) if lines else "the call"
    fix = f"{call}{at(where)}: {instead_of(call, share)}."
    predicted = by_removing(share, evidence.thresholds.recovered_low)
    return found(evidence, "sync_point", cost_s, facts, fix, where, predicted)


def instead_of(call: str, share: float) -> str:
    """What to do instead of a call that waits for the GPU and costs ``share`` of the time."""
    # So rarely that what is left of it is under half a percent.
    every = next((n for n in (10, 20, 50) if share / n <= 0.005), 100)
    advice = next((advice for pattern, advice in _INSTEAD if re.search(pattern, call)), _OTHERWISE)
    return advice.format(every=every)


# --------------------------------------------------------------------------- kernels that come too slowly


def launch_bound(evidence: Evidence) -> Judgement:
    """Kernels are so short that the host cannot launch them as fast as the GPU runs them."""
    if not evidence.on_gpu or evidence.rank is None:
        return None
    if evidence.launch_s is None:
        return Abstention("launch_bound", "the GPU's idle time between kernels")
    share = evidence.active_share(evidence.launch_s)
    if share < evidence.thresholds.launch_share:
        return None
    facts = [time_spent(evidence, "idling between kernels that the host launches too slowly", evidence.launch_s)]
    deep = evidence.rank.deep
    if deep and deep.kernels and deep.gpu_busy_s:
        facts.append(f"{deep.kernels} kernels a step of {seconds(deep.gpu_busy_s / deep.kernels)} each")
    if busy_s := evidence.rank.gpu_busy_step_s:
        facts.append(f"the GPU is busy for {seconds(busy_s)} of a step")
    predicted = by_removing(share, evidence.thresholds.recovered_low)
    return found(evidence, "launch_bound", evidence.launch_s, facts, _fewer_launches(evidence), None, predicted)


def _fewer_launches(evidence: Evidence) -> str:
    rank = evidence.rank
    steps = []
    if rank is None or rank.precision is None or not rank.precision.compiled:
        steps.append('capture the step in CUDA graphs: model = torch.compile(model, mode="reduce-overhead")')
    else:
        steps.append('the model is compiled; mode="reduce-overhead" also captures it in CUDA graphs')
    fusible = [name for name in (rank.optimizers if rank else ()) if name in ("Adam", "AdamW", "SGD", "Adagrad")]
    if fusible:
        steps.append(f"update all parameters in one kernel: {fusible[0]}(..., fused=True)")
    if evidence.loader and evidence.loader.batch_size:
        steps.append(f"if the training allows it, try a batch larger than {evidence.loader.batch_size}")
    return capital(f"{'; '.join(steps)}.")
