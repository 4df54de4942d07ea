"""The machine slows the training down: its memory and its CPUs."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence, threads_per_cpu
from fulltilt.diagnosis.findings import (
    OTHERS_TAKE_CPUS,
    Judgement,
    Severity,
    at,
    busy_thread,
    fetching_line,
    found,
    rewritten,
    time_spent,
)
from fulltilt.diagnosis.gpu_summary import vram_used_share
from fulltilt.diagnosis.loader_bottleneck import Bottleneck, is_oversubscribed
from fulltilt.diagnosis.predicted_gain import amdahl, by_removing, by_speeding_up, gain
from fulltilt.diagnosis.rules.worker_count import allowed_workers
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import capital, count, cpus, number, percent, seconds, size
from fulltilt.records import Abstention, LoaderRecord

# --------------------------------------------------------------------------- memory


def memory_pressure(evidence: Evidence) -> Judgement:
    """Memory is so full that the system reads back swapped pages, or the GPU's allocator has to retry."""
    host = evidence.host
    retries = max((rank.alloc_retries for rank in evidence.run.ranks if rank.alloc_retries is not None), default=None)
    vram_share = max((share for gpu in evidence.gpus if (share := vram_used_share(gpu)) is not None), default=None)
    measured = (host.ram_share_peak, host.swap_in_bytes_per_s, retries, vram_share)
    if all(figure is None for figure in measured):
        return Abstention("memory_pressure", "readings of memory use")
    swapping = (host.swap_in_bytes_per_s or 0.0) >= THRESHOLDS.swap_in_bytes_per_s
    full = (host.ram_share_peak or 0.0) >= THRESHOLDS.ram_full_share
    facts, fixes = [], []
    severity: Severity = "warn"
    if swapping:
        facts.append(f"{size(host.swap_in_bytes_per_s)}/s are read back from swap")
    if full:
        facts.append(f"RAM is at {percent(host.ram_share_peak)} of its limit")
    if swapping or full:
        fixes.append(_less_ram(evidence.loader))
        died = full and evidence.run.run.state in ("killed", "crashed")
        severity = "severe" if swapping or died else "warn"
    if retries:
        facts.append(f"the GPU's allocator ran out and freed its cache {count('time', retries)}")
        fixes.append(
            "leave some GPU memory free: a smaller micro-batch, gradient checkpointing, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation"
        )
    elif vram_share is not None and vram_share > THRESHOLDS.vram_full_share:
        severity = severity if fixes else "info"
        facts.append(f"the GPU's memory is at {percent(vram_share)}; no allocation had to be retried so far")
        fixes.append("keep the batch size: a larger batch, or longer samples, will not fit")
    if not facts:
        return None
    cost_s = (host.ram_full_share or 0.0) * evidence.active_s
    return found(evidence, "memory_pressure", cost_s, facts, capital(f"{'; '.join(fixes)}."), severity=severity)


def _less_ram(loader: LoaderRecord | None) -> str:
    if loader is None or loader.num_workers == 0:
        return "hold less in memory: load the data piece by piece, or map it from disk (numpy.memmap)"
    text = f"lower num_workers {loader.num_workers} → {max(loader.num_workers // 2, 1)}{at(loader.where)}"
    if loader.batch_bytes:
        kept = loader.num_workers * (loader.prefetch_factor or 2) * loader.batch_bytes
        text += f" ({size(kept)} of batches are kept ready)"
    return text


_SOON_S, _DAY_S = 3600.0, 86400.0


def worker_memory_growth(evidence: Evidence) -> Judgement:
    """The private memory of the workers grows steadily, until there is none left."""
    loader, growth = evidence.loader, evidence.workers.growth if evidence.workers else None
    if loader is None or not loader.num_workers or growth is None or growth.bytes < THRESHOLDS.growth_bytes:
        return None
    if growth.over_s < (THRESHOLDS.stream_growth_s if loader.iterable else THRESHOLDS.growth_seen_s):
        return None
    left = evidence.host.ram_left_bytes
    if left is None:
        return Abstention("worker_memory_growth", "the memory that is left")
    workers = loader.num_workers * evidence.ranks_here
    a_sample = growth.bytes / max(growth.batches * (loader.samples or 0) / max(loader.batches, 1), 1.0)
    # A cache stops growing when a worker has seen every sample; with several workers that takes several passes.
    seen_all = loader.persistent_workers and (loader.samples or 0) > (
        THRESHOLDS.growth_passes * (loader.dataset_len or 0) * loader.num_workers
    )
    if loader.dataset_len and not seen_all and a_sample * loader.dataset_len * workers < left:
        return None
    copied = 2 * growth.copied_bytes >= growth.bytes
    if copied and growth.shared_bytes * workers < left:
        return None  # every page is copied at most once, and that fits
    full_s = left / (workers * growth.bytes / growth.over_s)
    killed = evidence.run.run.oom_kills
    if full_s > _DAY_S and not killed:
        return None
    facts = [
        f"a worker's own memory grows by {size(growth.bytes / growth.over_s)}/s, {size(a_sample)} a sample: "
        f"{count('worker', workers)} will fill the remaining {size(left)} within {seconds(full_s)}",
    ]
    if killed:
        facts.append(f"the kernel killed {count('process', killed)} for lack of memory")
    if copied:
        facts.append(f"they are copies of the training process's pages; {size(growth.shared_bytes)} are still shared")
    if loader.objects:
        facts.append(f"the data set {loader.dataset} keeps Python objects: {loader.objects}")
    fix = (
        f"Let the data set{at(loader.where)} keep arrays instead of Python objects: workers share a list or dict only "
        "until they read it. And __getitem__ should not store what it has read. Until then: persistent_workers=False "
        "frees the memory after each pass, and fewer workers fill it later."
    )
    severity: Severity = "severe" if full_s < _SOON_S or killed else "warn"
    return found(evidence, "worker_memory_growth", 0.0, facts, fix, loader.where, None, severity)


# --------------------------------------------------------------------------- CPUs


def cpu_affinity(evidence: Evidence) -> Judgement:
    """The workers are bound to fewer CPUs than the job may use, and queue for them."""
    rank, loader, work, supply = evidence.rank, evidence.loader, evidence.workers, evidence.supply
    if evidence.bottleneck is not Bottleneck.AFFINITY or not (loader and work and work.cpus and supply):
        return None
    allowed, began = int(evidence.allowed_cpus), rank.cpus_at_start
    facts = [
        f"{count('worker', loader.num_workers)} may run on {cpus(work.cpus)} of the {allowed} that the job may use",
        f"they spend {percent(supply.queueing_share or 0.0)} of their runnable time waiting for a CPU",
        time_spent(evidence, "waiting for data", evidence.buckets.data_wait_s),
    ]
    restore = "os.sched_setaffinity(0, range(os.cpu_count()))"
    if began is not None and began > work.cpus:
        whose = "the process" if rank.cpus is not None and rank.cpus <= work.cpus else "a worker"
        facts.append(f"{whose} could use {cpus(began)} at first: an import or a call has bound it since")
        fix = (
            f"Find what binds {whose}: os.sched_setaffinity in the script or in a library, or OMP_PROC_BIND, "
            "GOMP_CPU_AFFINITY or KMP_AFFINITY in the environment."
        )
    else:
        facts.append(f"it was bound to {cpus(work.cpus)} from the start, by the command that started it")
        fix = (
            "Start the job without the binding (taskset, numactl --physcpubind, cpuset). Slurm: "
            f"srun --cpus-per-task={allowed} (srun does not take sbatch's), or --cpu-bind=none."
        )
    fix += f" Until then, undo it in the workers: worker_init_fn{at(loader.where)} with {restore}."
    wider = min(allowed, loader.num_workers + 1) / work.cpus
    slowed_s = evidence.buckets.data_wait_s
    if not evidence.on_gpu and rank.cpus is not None and rank.cpus <= work.cpus:
        slowed_s += evidence.buckets.compute_s  # the training computes on the same CPUs
    predicted = by_speeding_up(evidence.share(slowed_s), 1 + (wider - 1) * THRESHOLDS.scaling_low, wider)
    return found(evidence, "cpu_affinity", slowed_s * (1 - 1 / wider), facts, fix, loader.where, predicted)


def launch_contended(evidence: Evidence) -> Judgement:
    """The training thread gets no CPU to launch kernels: the job's own workers, or other processes, keep all busy."""
    waited_s, loader = evidence.rank.cpu_wait_s, evidence.loader
    if waited_s is None:
        return Abstention("launch_contended", "how long the training thread waited for a CPU")
    cost_s = evidence.contended_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.launch_contended_share:
        return None
    used_pct, usable = evidence.host.tree_cpu_pct, evidence.usable_cpus
    workers = loader.num_workers if loader else 0
    facts = [
        f"for {percent(evidence.share(waited_s))} of the time after start-up the training thread waits for a CPU and "
        "launches nothing",
    ]
    own = used_pct is not None and used_pct >= THRESHOLDS.cpus_full_share * 100 * usable
    if used_pct is not None:
        facts.append(f"the job's processes keep {number(used_pct / 100)} of {cpus(usable)} busy")
    where = loader.where if own and loader else None
    if own and workers:
        fewer = max(min(workers - 1, int(usable) - 2), 1)
        # Live tuning chose the number of workers by measuring: fewer were slower.
        tuned = evidence.live is not None and evidence.live.settings.num_workers != evidence.live.before.num_workers
        lower = "" if tuned else f"lower num_workers {workers} → {fewer}{at(where)}, "
        fix = (
            f"Leave the training thread a CPU: {lower}one thread in each worker (OMP_NUM_THREADS=1, "
            "cv2.setNumThreads(0), TOKENIZERS_PARALLELISM=false), or os.nice(10) in worker_init_fn."
        )
    elif own:
        fix = "Leave the training thread a CPU: fewer threads and processes beside it (OMP_NUM_THREADS, loggers)."
    else:
        fix = OTHERS_TAKE_CPUS
    return found(evidence, "launch_contended", cost_s, facts, fix, where, by_removing(share))


def gil_contended(evidence: Evidence) -> Judgement:
    """Other Python threads of the job take the interpreter lock, or a CPU, from the training thread."""
    cost_s, thread = evidence.stalled_by_threads_s, busy_thread(evidence)
    share = evidence.share(cost_s)
    if thread is None or share < THRESHOLDS.gil_contended_share:
        return None
    named, fact = thread
    lines = evidence.busy_threads[0].lines
    stalled = f"for {percent(share)} of the time after start-up the training thread waits for the GIL or a CPU"
    fix = (
        f"Move the work of {named} to a process, which has a GIL of its own: a DataLoader with num_workers, or "
        "multiprocessing.Process."
    )
    where = lines[0].where if lines else None
    return found(evidence, "gil_contended", cost_s, [stalled, fact], fix, where, gain(1.0, amdahl(share)))


def cpu_oversubscribed(evidence: Evidence) -> Judgement:
    """So many workers and threads that they queue for the CPUs and slow each other down."""
    rank, loader, supply = evidence.rank, evidence.loader, evidence.supply
    demand = threads_per_cpu(rank, loader, evidence.usable_cpus, evidence.host)
    if demand < THRESHOLDS.threads_per_cpu:
        return None
    if loader is None or loader.num_workers == 0:
        return _too_many_threads(evidence)
    if supply is None or supply.queueing_share is None:
        return Abstention("cpu_oversubscribed", "how long the workers waited for a CPU")
    if not is_oversubscribed(supply, demand) or evidence.bottleneck not in (Bottleneck.OVERSUBSCRIBED, Bottleneck.NONE):
        return None  # another part of loading sets its rate
    threads = (rank.torch_threads or 1) if not evidence.on_gpu else 1
    # Queueing slows down loading and, on a CPU job, computing: by at most the CPU time that the workers use.
    taken_s = evidence.workers.process_cpu_s if evidence.workers and not evidence.on_gpu else 0.0
    computing_s = min(evidence.buckets.compute_s * supply.queueing_share, taken_s)
    cost_s = evidence.buckets.data_wait_s * supply.queueing_share + computing_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.data_wait_share:
        return None
    rate = evidence.delivered_samples_per_s
    workers = allowed_workers(evidence, supply, rate) if rate else max(int(evidence.usable_cpus) - 1, 1)
    facts = [
        f"{count('worker', loader.num_workers)} and {count('training thread', threads)} queue for "
        f"{cpus(evidence.usable_cpus)}",
        f"the workers spend {percent(supply.queueing_share)} of their runnable time in that queue",
        time_spent(evidence, "waiting for data", evidence.buckets.data_wait_s),
        *fetching_line(evidence),
    ]
    fix = (
        f"Lower num_workers {loader.num_workers} → {workers}{at(loader.where)}: "
        f"{rewritten(evidence, loader, num_workers=workers)}."
    )
    if workers >= loader.num_workers:
        fix = f"Leave each worker a CPU{at(loader.where)}."
    if threads > 1:
        free = max(int(evidence.usable_cpus) - min(workers, loader.num_workers), 1)
        fix += f" And give the training {count('thread', free)}: torch.set_num_threads({free})."
    high = min(THRESHOLDS.oversubscription_loss, amdahl(share))
    return found(evidence, "cpu_oversubscribed", cost_s, facts, fix, loader.where, gain(1.0, high))


def _too_many_threads(evidence: Evidence) -> Judgement:
    """Too many training threads: they take turns on the CPUs, and an operation takes as long as the last of them."""
    threads, waited_s, usable = evidence.rank.torch_threads or 1, evidence.rank.cpu_wait_s, evidence.usable_cpus
    if waited_s is None:
        return Abstention("cpu_oversubscribed", "how long the training thread waited for a CPU")
    share = evidence.share(cost_s := min(waited_s, evidence.buckets.compute_s))
    if share < THRESHOLDS.warn_share:
        return None
    facts = [
        f"{count('training thread', threads)} queue for {cpus(usable)}",
        f"for {percent(evidence.share(waited_s))} of the time after start-up the main one waits for a CPU",
    ]
    fewer = max(int(usable), 1)
    fix = f"Give the training {count('thread', fewer)}: torch.set_num_threads({fewer}), or OMP_NUM_THREADS={fewer}."
    return found(evidence, "cpu_oversubscribed", cost_s, facts, fix, None, gain(1.0, amdahl(share)))
