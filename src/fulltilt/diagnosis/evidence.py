"""What the rules judge by, gathered once from a run, and whether its timings are valid."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fulltilt.diagnosis import ledger as ledgers
from fulltilt.diagnosis.gpu_summary import HostSummary, dense_peak, summarise_gpus, summarise_host
from fulltilt.diagnosis.loader_bottleneck import (
    Bottleneck,
    Supply,
    find_bottleneck,
    loader_ceiling,
    measure_supply,
    without_first_batches,
)
from fulltilt.diagnosis.stragglers import RankSteps, align, compare_ranks
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import percent
from fulltilt.records import (
    Buckets,
    Ceilings,
    GpuSummary,
    HotLine,
    Ledger,
    LiveRecord,
    LoaderRecord,
    Machine,
    RankRecord,
    RankSummary,
    Run,
    Span,
    ThreadRecord,
    Throughput,
    Utilisation,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules know of one run.

    ``rank`` is the slowest rank (by its own work), or an empty record where no process was recorded; ``loader``,
    ``workers`` and ``supply`` are its training loader, that loader's workers, and what its batches cost; ``live`` is
    what live tuning did to it. ``delivered_samples_per_s`` (while training draws batches), ``usable_cpus`` and
    ``allowed_cpus`` (what the job was given, whatever it is bound to) are for one of ``ranks_here``, those that share
    its machine.
    """

    run: Run
    ledger: Ledger
    throughput: Throughput
    ceilings: Ceilings
    gpus: tuple[GpuSummary, ...]
    host: HostSummary
    ranks: tuple[RankSummary, ...]
    rank_steps: RankSteps | None
    rank: RankRecord
    loader: LoaderRecord | None
    workers: WorkerRecord | None
    live: LiveRecord | None
    supply: Supply | None
    bottleneck: Bottleneck
    delivered_samples_per_s: float | None
    ranks_here: int
    usable_cpus: float
    allowed_cpus: float

    @property
    def machine(self) -> Machine:
        """The machine of the slowest rank."""
        return _machine_of(self.run, self.rank)

    @property
    def buckets(self) -> Buckets:
        """The buckets of the ledger."""
        return self.ledger.buckets

    @property
    def on_gpu(self) -> bool:
        """Whether the job trains on a GPU."""
        return self.rank.device != "cpu"

    @property
    def active_s(self) -> float:
        """Recorded wall time after start-up: the part that grows with the length of the job."""
        return max(self.ledger.wall_s - self.buckets.startup_s - ledgers.unseen_seconds(self.run), 0.0)

    @property
    def too_short(self) -> bool:
        """Whether so little was recorded that shares mean nothing: a single step is largely warm-up."""
        return self.throughput.steps < 2 or self.active_s <= THRESHOLDS.longest_too_short_s

    @property
    def invalid_because(self) -> str | None:
        """Why the timings are not valid, in one sentence; None when they are."""
        for gpu in self.gpus:
            share = gpu.throttled_share
            if share is not None and share >= THRESHOLDS.throttled_share:
                reasons = ", ".join(gpu.throttle_reasons).replace("_", " ") or "reasons unknown"
                return f"GPU {gpu.index} was slowed down in {percent(share)} of the readings ({reasons})"
            if others := gpu.foreign_processes:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                return f"GPU {gpu.index} was shared with {others[0].name or 'a process'} (pid {others[0].pid}){more}"
        return None

    @property
    def launch_s(self) -> float | None:
        """GPU idle time because kernels were launched too slowly, a part of host code; the mean over ranks."""
        known = [
            rank.launch_s + ledgers.launch_gap_s(rank) * sum(span.steps for span in spans)
            for rank, spans in zip(self.run.ranks, self.run.spans, strict=True)
            if rank.launch_s is not None
        ]
        return min(sum(known) / len(known), self.buckets.host_code_s) if known else None

    @property
    def workers_share(self) -> float:
        """How much of the job's CPUs the workers of its training loader keep busy."""
        has_workers = self.loader is not None and self.loader.num_workers > 0
        worked_s = self.workers.process_cpu_s if has_workers and self.workers is not None else 0.0
        return min(worked_s / max(self.usable_cpus * self.active_s, 1e-9), 1.0)

    @property
    def crowded_by_workers(self) -> bool:
        """Whether the job computes on CPUs and its workers take a good part of them."""
        return not self.on_gpu and self.workers_share >= THRESHOLDS.loading_cpu_share

    @property
    def bound(self) -> str:
        """How the gain computed from the data wait is meant: ``at most``, ``about`` or ``at least``.

        Loading may also take CPUs or the GIL from compute; without it compute gets faster, which is not counted.
        """
        if self.crowded_by_workers:
            return "at least"
        beside = not self.on_gpu and self.workers_share >= THRESHOLDS.beside_compute_share
        without_cpu = self.share(self.contended_s) >= THRESHOLDS.launch_contended_share
        return "about" if beside or without_cpu or self.busy_threads else "at most"

    @property
    def contended_s(self) -> float:
        """At most so long did the GPU idle because the training thread had no CPU."""
        return min(self.rank.cpu_wait_s or 0.0, self.buckets.host_code_s) if self.on_gpu else 0.0

    @property
    def busy_threads(self) -> tuple[ThreadRecord, ...]:
        """The job's other Python threads that run for much of the time, the busiest first."""
        ran = sorted(self.rank.threads, key=lambda thread: -thread.cpu_s)
        return tuple(thread for thread in ran if self.share(thread.cpu_s) >= THRESHOLDS.busy_thread_share)

    @property
    def stalled_by_threads_s(self) -> float:
        """At most so long did other Python threads keep a job that computes on CPUs from running."""
        taken_s = sum(thread.cpu_s for thread in self.busy_threads)
        if self.on_gpu or self.rank.off_cpu_s is None:
            return 0.0
        stalled_s = self.rank.off_cpu_s - (self.active_s - self.buckets.compute_s)
        return max(min(stalled_s, taken_s, self.buckets.compute_s), 0.0)

    @property
    def host_lines(self) -> tuple[HotLine, ...]:
        """The lines of the slowest rank that cost host time, the costliest first, without those that make batches."""
        drawing = {(line.where, line.function) for line in self.rank.drawing_lines}
        own = (line for line in self.rank.host_lines if (line.where, line.function) not in drawing)
        return tuple(sorted(own, key=lambda line: -line.seconds))

    @property
    def drawing_lines(self) -> tuple[HotLine, ...]:
        """In a script without a loader: the lines that make batches or wait for them, the costliest first."""
        return self.rank.drawing_lines or self.host_lines

    @property
    def slowdown(self) -> ledgers.Slowdown | None:
        """How the slowest rank slowed down; None if it did not, or if live tuning changed its settings meanwhile."""
        if any(live.moves for live in self.rank.live):
            return None
        pairs = zip(self.run.ranks, self.run.spans, strict=True)
        return ledgers.find_slowdown(next((own for rank, own in pairs if rank is self.rank), ()))

    @property
    def collectives_unmeasured(self) -> bool:
        """Whether ranks share their parameters (FSDP, tensor parallel) and their waits were not timed."""
        return any(rank.sharded and rank.world_size > 1 and rank.communication is None for rank in self.run.ranks)

    @property
    def share_of_ceiling(self) -> float | None:
        """The rate reached over the compute ceiling; None when either is unknown."""
        rate, ceiling = self.throughput.samples_per_s, self.ceilings.compute_samples_per_s
        return min(rate / ceiling, 1.0) if rate is not None and ceiling else None

    def share(self, seconds: float) -> float:
        """``seconds`` as a share of the time after start-up, as in all sentences."""
        return _ratio(seconds, self.active_s)

    @property
    def data_wait_share(self) -> float:
        """Data wait as a share of the time after start-up."""
        return self.share(self.buckets.data_wait_s)

    @property
    def drawing_s(self) -> float:
        """The part of the active time in which training draws batches, the only one that a faster loader shortens."""
        return max(self.active_s - ledgers.paused_s(self.buckets), 0.0)

    @property
    def waiting_share(self) -> float:
        """Data wait as a share of the time in which training draws batches."""
        return _ratio(self.buckets.data_wait_s, self.drawing_s)

    def per_step(self, seconds: float) -> float:
        """``seconds`` spread over the steps of the run."""
        return seconds / max(self.throughput.steps, 1)


def gather(run: Run) -> Evidence:
    """Everything the rules look at, from the records of a run."""
    run = replace(run, ranks=tuple(without_first_batches(rank) for rank in run.ranks))
    each = ledgers.close_ranks(run)
    ledger = ledgers.make_ledger(run, each)
    rank_steps = align(run)
    ranks = compare_ranks(run, each, rank_steps)
    slowest = next((place for place, summary in enumerate(ranks) if summary.slowest), None)
    rank, own = (_NO_RANK, ()) if slowest is None else (run.ranks[slowest], run.spans[slowest])
    loader, workers, live, supply = _input_of(rank, own)
    cpu = _machine_of(run, rank).cpu
    ranks_here = max(sum(other.hostname == rank.hostname for other in run.ranks), 1)
    bound = max(cpu.affinity, cpu.allotted or 0)
    usable_cpus, allowed_cpus = cpu.usable / ranks_here, min(bound, cpu.quota or bound) / ranks_here
    host = summarise_host(run)
    wait_s = ledger.buckets.data_wait_s
    wait_share = _ratio(wait_s, ledger.wall_s - ledger.buckets.startup_s)
    rate = ledgers.rate_while_drawing(run)
    delivered = rate / max(len(_training_ranks(run)), 1) if rate is not None else None
    throughput = ledgers.measure_throughput(run)
    return Evidence(
        run=run,
        ledger=ledger,
        throughput=throughput,
        ceilings=Ceilings(_compute_ceiling(run, throughput), _loader_ceilings(run, wait_share, usable_cpus, delivered)),
        gpus=summarise_gpus(run),
        host=host,
        ranks=ranks,
        rank_steps=rank_steps,
        rank=rank,
        loader=loader,
        workers=workers,
        live=live,
        supply=supply,
        bottleneck=find_bottleneck(
            wait_share,
            _ratio(wait_after_loader_s(rank, wait_s), wait_s),
            loader,
            supply,
            delivered,
            threads_per_cpu(rank, loader, usable_cpus, host),
            bound_to_few_cpus(loader, workers, allowed_cpus),
        ),
        delivered_samples_per_s=delivered,
        ranks_here=ranks_here,
        usable_cpus=usable_cpus,
        allowed_cpus=allowed_cpus,
    )


def training_loaders(rank: RankRecord) -> list[LoaderRecord]:
    """The loaders of a rank that feed its training."""
    return [loader for loader in rank.loaders if loader.role == "train"]


def _input_of(
    rank: RankRecord, spans: tuple[Span, ...]
) -> tuple[LoaderRecord | None, WorkerRecord | None, LiveRecord | None, Supply | None]:
    """The training loader that a rank waits for most, its workers, its live tuning, and what its batches cost."""
    loader = max(training_loaders(rank), key=lambda loader: (loader.wait_s, loader.batches), default=None)
    if loader is None:
        return None, None, next(iter(rank.live), None), None
    workers = next((record for record in rank.workers if record.loader_id == loader.loader_id), None)
    own = (live for live in rank.live if live.loader_id == loader.loader_id)
    live = next(own, rank.live[0] if len(rank.live) == 1 else None)
    return loader, workers, live, measure_supply(loader, workers, spans, live, rank.cpu_wait_s)


def wait_after_loader_s(rank: RankRecord, data_wait_s: float) -> float:
    """The data wait outside of loaders, in a generator of the script that works on what a loader gave.

    0.0 where that is not known: no generator or no loader was seen, or another thread drew from it.
    """
    loaders = training_loaders(rank)
    if rank.drawn_from is None or not loaders or not all(loader.wait_s > 0 for loader in loaders):
        return 0.0
    return max(data_wait_s - sum(loader.wait_s + loader.first_wait_s for loader in loaders), 0.0)


def threads_per_cpu(rank: RankRecord, loader: LoaderRecord | None, usable_cpus: float, host: HostSummary) -> float:
    """Workers and training threads for each usable CPU; 0 where other processes take the CPUs."""
    if host.others_share >= THRESHOLDS.others_share:
        return 0.0
    threads = (rank.torch_threads or 1) if rank.device == "cpu" else 1
    return ((loader.num_workers if loader else 0) + threads) / max(usable_cpus, 0.01)


def bound_to_few_cpus(loader: LoaderRecord | None, workers: WorkerRecord | None, allowed_cpus: float) -> bool:
    """Whether the workers are bound to fewer of the allowed CPUs than they and the training could use."""
    if loader is None or workers is None or workers.cpus is None or not loader.num_workers:
        return False
    return workers.cpus < min(int(allowed_cpus), loader.num_workers + 1)


def _compute_ceiling(run: Run, reached: Throughput) -> float | None:
    """Samples a second if compute never had to wait, summed over ranks; None when a rank was not measured."""
    rates = []
    for rank, spans in _training_ranks(run):
        samples = ledgers.count_samples(spans)
        steps = sum(span.steps for span in spans)
        compute_s = sum(span.buckets.compute_s for span in spans)
        busy_s = rank.gpu_busy_step_s * steps if rank.gpu_busy_step_s is not None else compute_s
        if samples is None or busy_s <= 0:
            return None
        rates.append(samples / busy_s)
    return max(sum(rates), reached.samples_per_s or 0.0) if rates else None


def _loader_ceilings(run: Run, wait_share: float, usable_cpus: float, delivered: float | None) -> float | None:
    rates = []
    for rank, spans in _training_ranks(run):
        *_, supply = _input_of(rank, spans)
        # With several loaders in a step there is no single rate to compare with.
        if supply is None or len(training_loaders(rank)) > 1:
            return None
        rates.append(loader_ceiling(supply, usable_cpus, wait_share, delivered))
    return sum(rates) if rates else None


def _training_ranks(run: Run) -> list[tuple[RankRecord, tuple[Span, ...]]]:
    pairs = zip(run.ranks, run.spans, strict=True)
    return [(rank, spans) for rank, spans in pairs if any(span.steps for span in spans)]


# Stands for the rank of a run in which no process was recorded.
_NO_RANK = RankRecord(0, 1, 0, "", "cpu", None, t0_s=0.0, t1_s=0.0, finished=False, steps=0, backwards=0)


def _machine_of(run: Run, rank: RankRecord) -> Machine:
    machines = (task.machine for task in run.tasks)
    return next((machine for machine in machines if machine.hostname == rank.hostname), run.run.machine)


def _ratio(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


# --------------------------------------------------------------------------- how well the GPU is used


def measure_utilisation(evidence: Evidence) -> Utilisation:
    """AU and MFU of the slowest rank; empty for a job on the CPU."""
    rank = evidence.rank
    if not evidence.on_gpu or not evidence.active_s or not rank.steps:
        return Utilisation()
    # Waiting for sharded parameters looks like compute.
    au = None if evidence.collectives_unmeasured else evidence.share(evidence.buckets.compute_s)
    if rank.flops_per_call is None:
        return Utilisation(au)
    per_step = rank.flops_per_call * max(round(rank.optimizer_calls / rank.steps), 1)
    gpu = next((gpu for gpu in evidence.gpus if gpu.uuid == rank.gpu_uuid), None)
    precision, peak = dense_peak(gpu.name if gpu else "", rank.precision)
    mfu = per_step * rank.steps / evidence.active_s / peak if peak else None
    return Utilisation(au, mfu, per_step, peak, precision if peak else None)


# --------------------------------------------------------------------------- ranks of the job


def without_side_jobs(run: Run) -> Run:
    """The run without processes that a rank started and that trained something else meanwhile.

    A linear probe or a hyperparameter search takes time of the rank that waits for it, but its steps are not the job's.
    A script that trains a little and then starts its ranks keeps them: it does not train at the same time.
    """
    streams = list(zip(run.ranks, run.spans, strict=True))
    kept = [stream for stream in streams if not any(_is_beside(stream, other) for other in streams)]
    if len(kept) == len(streams):
        return run
    return replace(run, ranks=tuple(rank for rank, _ in kept), spans=tuple(spans for _, spans in kept))


def _is_beside(child: tuple[RankRecord, tuple[Span, ...]], parent: tuple[RankRecord, tuple[Span, ...]]) -> bool:
    (rank, spans), (above, spans_above) = child, parent
    if rank.world_size != 1 or rank.parent_pid != above.pid or rank.hostname != above.hostname:
        return False
    began_s = min((span.t0_s for span in spans if span.steps), default=float("inf"))
    return any(span.steps and span.t1_s > began_s for span in spans_above)
