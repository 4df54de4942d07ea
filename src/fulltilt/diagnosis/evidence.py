"""What the rules judge by, gathered once from a run, and whether its timings are valid."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fulltilt.diagnosis import ledger as ledgers
from fulltilt.diagnosis.gpu_summary import HostSummary, dense_peak, summarise_gpus, summarise_host
from fulltilt.diagnosis.loader_bottleneck import (
    Limit,
    Supply,
    find_limit,
    loader_ceiling,
    measure_supply,
    one_loader_a_line,
)
from fulltilt.diagnosis.stragglers import RankSteps, align, compare_ranks
from fulltilt.diagnosis.thresholds import LIMITS
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
    """One run, ready to be judged.

    ``rank`` is the rank that sets the pace (the slowest in its own work), an empty record where no process was
    recorded; ``loader``, ``workers`` and ``supply`` are its training loader, that loader's workers, and what its
    batches cost; ``live`` is what live tuning did to it. ``delivered_samples_per_s`` (while training draws batches)
    and ``usable_cpus`` are for one rank, and so is ``allowed_cpus``, what the job was given, whatever it is bound to.
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
    limit: Limit
    delivered_samples_per_s: float | None
    usable_cpus: float
    allowed_cpus: float

    @property
    def machine(self) -> Machine:
        """The machine of the rank that sets the pace."""
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
        """Wall time after start-up: the part that grows with the length of the job. What nobody saw is left out."""
        return max(self.ledger.wall_s - self.buckets.startup_s - ledgers.unseen_seconds(self.run), 0.0)

    @property
    def too_short(self) -> bool:
        """Whether so little was seen that a share of it means nothing: one step is warming up for a good part."""
        return self.throughput.steps < 2 or self.active_s <= LIMITS.longest_too_short_s

    @property
    def invalid_because(self) -> str | None:
        """Why the timings are not the job's own, in one sentence; None when nothing speaks against them."""
        for gpu in self.gpus:
            share = gpu.throttled_share
            if share is not None and share >= LIMITS.throttled_share:
                reasons = ", ".join(gpu.throttle_reasons).replace("_", " ") or "reasons unknown"
                return f"GPU {gpu.index} was slowed down in {percent(share)} of the readings ({reasons})"
            if others := gpu.foreign_processes:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                return f"GPU {gpu.index} was shared with {others[0].name or 'a process'} (pid {others[0].pid}){more}"
        return None

    @property
    def launch_s(self) -> float | None:
        """GPU idle time because kernels could not be launched fast enough; the mean over ranks, within host code."""
        known = [
            rank.launch_s + ledgers.launch_gap_s(rank) * sum(span.steps for span in spans)
            for rank, spans in zip(self.run.ranks, self.run.spans, strict=True)
            if rank.launch_s is not None
        ]
        return min(sum(known) / len(known), self.buckets.host_code_s) if known else None

    @property
    def workers_share(self) -> float:
        """How much of the job's CPUs the workers of its training loader keep busy."""
        worked_s = self.workers.process_cpu_s if self.workers is not None else 0.0
        return min(worked_s / max(self.usable_cpus * self.active_s, 1e-9), 1.0)

    @property
    def crowded_by_workers(self) -> bool:
        """Whether the job computes on CPUs of which its workers take a good part."""
        staffed = self.loader is not None and self.loader.num_workers > 0  # otherwise the two take turns
        return staffed and not self.on_gpu and self.workers_share >= LIMITS.loading_cpu_share

    @property
    def bound(self) -> str:
        """What the gain without loading is by the time that training waits: ``at most``, ``about`` or ``at least``.

        Loading that takes CPUs or the interpreter lock from compute leaves it those as well. Of workers that take a
        good part of the CPUs, only the wait is counted.
        """
        if self.crowded_by_workers:
            return "at least"
        staffed = self.loader is not None and self.loader.num_workers > 0
        beside = staffed and not self.on_gpu and self.workers_share >= LIMITS.beside_compute_share
        without_cpu = self.share(self.contended_s) >= LIMITS.launch_contended_share
        return "about" if beside or without_cpu or self.busy_threads else "at most"

    @property
    def contended_s(self) -> float:
        """Host time, while the GPU idled, in which the training thread had no CPU: at most what it waited for one."""
        return min(self.rank.cpu_wait_s or 0.0, self.buckets.host_code_s) if self.on_gpu else 0.0

    @property
    def busy_threads(self) -> tuple[ThreadRecord, ...]:
        """The job's other Python threads that run for a good part of the time, the busiest first."""
        ran = sorted(self.rank.threads, key=lambda thread: -thread.cpu_s)
        return tuple(thread for thread in ran if self.share(thread.cpu_s) >= LIMITS.busy_thread_share)

    @property
    def stalled_by_threads_s(self) -> float:
        """Compute on CPUs in which the training thread did not run: at most what other Python threads took."""
        taken_s = sum(thread.cpu_s for thread in self.busy_threads)
        if self.on_gpu or self.rank.off_cpu_s is None:
            return 0.0
        stalled_s = self.rank.off_cpu_s - (self.active_s - self.buckets.compute_s)
        return max(min(stalled_s, taken_s, self.buckets.compute_s), 0.0)

    @property
    def host_lines(self) -> tuple[HotLine, ...]:
        """The lines of the pace-setting rank that cost host time, the costliest first; none that make batches."""
        drawing = {(line.where, line.function) for line in self.rank.drawing_lines}
        own = (line for line in self.rank.host_lines if (line.where, line.function) not in drawing)
        return tuple(sorted(own, key=lambda line: -line.seconds))

    @property
    def drawing_lines(self) -> tuple[HotLine, ...]:
        """Where no loader brings the batches: the lines that make them or wait for them, the costliest first."""
        return self.rank.drawing_lines or self.host_lines

    @property
    def slowdown(self) -> ledgers.Slowdown | None:
        """How the pace-setting rank slowed down; None where it did not."""
        pairs = zip(self.run.ranks, self.run.spans, strict=True)
        spans = next((own for rank, own in pairs if rank is self.rank), ())
        return ledgers.find_slowdown(spans, self.is_tuned)

    @property
    def is_tuned(self) -> bool:
        """Whether live tuning tried settings in this run, so that its waits for data are those of several settings."""
        return self.live is not None and bool(self.live.moves)

    @property
    def collectives_unmeasured(self) -> bool:
        """Whether ranks share their parameters (FSDP, tensor parallel) and their waits were not timed."""
        return any(rank.sharded and rank.world_size > 1 and rank.communication is None for rank in self.run.ranks)

    @property
    def share_of_ceiling(self) -> float | None:
        """The rate that was reached over the one that compute alone would allow; None when either is unknown."""
        rate, ceiling = self.throughput.samples_per_s, self.ceilings.compute_samples_per_s
        return min(rate / ceiling, 1.0) if rate is not None and ceiling else None

    def share(self, seconds: float) -> float:
        """``seconds`` as a share of the time after start-up: the base of every share that is told."""
        return _ratio(seconds, self.active_s)

    @property
    def data_wait_share(self) -> float:
        """How much of the time after start-up training waits for data."""
        return self.share(self.buckets.data_wait_s)

    @property
    def drawing_s(self) -> float:
        """The part of the active time in which training draws batches: a faster loader shortens no other."""
        return max(self.active_s - ledgers.paused_s(self.buckets), 0.0)

    @property
    def waiting_share(self) -> float:
        """How much of the time in which training draws batches it waits for them."""
        return _ratio(self.buckets.data_wait_s, self.drawing_s)

    def per_step(self, seconds: float) -> float:
        """``seconds`` spread over the steps of the run."""
        return seconds / max(self.throughput.steps, 1)


def gather(run: Run) -> Evidence:
    """Everything the rules look at, from the records of a run."""
    run = replace(run, ranks=tuple(one_loader_a_line(rank) for rank in run.ranks))
    each = ledgers.close_ranks(run)
    ledger = ledgers.make_ledger(run, each)
    rank_steps = align(run)
    ranks = compare_ranks(run, each, rank_steps)
    pace_setter = next((place for place, summary in enumerate(ranks) if summary.slowest), None)
    rank, own = (_NO_RANK, ()) if pace_setter is None else (run.ranks[pace_setter], run.spans[pace_setter])
    loader, workers, live, supply = _input_of(rank, own)
    cpu = _machine_of(run, rank).cpu
    beside = max(sum(other.hostname == rank.hostname for other in run.ranks), 1)  # ranks that share the machine
    bound = max(cpu.affinity, cpu.allotted or 0)
    usable_cpus, allowed_cpus = cpu.usable / beside, min(bound, cpu.quota or bound) / beside
    host = summarise_host(run)
    wait_s = ledger.buckets.data_wait_s
    wait_share = _ratio(wait_s, ledger.wall_s - ledger.buckets.startup_s)
    rate = ledgers.rate_while_drawing(run)
    delivered = rate / max(len(_training_ranks(run)), 1) if rate is not None else None
    return Evidence(
        run=run,
        ledger=ledger,
        throughput=ledgers.measure_throughput(run),
        ceilings=Ceilings(_compute_ceiling(run), _loader_ceilings(run, wait_share, usable_cpus, delivered)),
        gpus=summarise_gpus(run),
        host=host,
        ranks=ranks,
        rank_steps=rank_steps,
        rank=rank,
        loader=loader,
        workers=workers,
        live=live,
        supply=supply,
        limit=find_limit(
            wait_share,
            _ratio(waited_behind_loaders_s(rank, wait_s), wait_s),
            loader,
            supply,
            delivered,
            crowding(rank, loader, usable_cpus, host),
            confined(loader, workers, allowed_cpus),
        ),
        delivered_samples_per_s=delivered,
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
    live = next(own, next(iter(rank.live), None))
    return loader, workers, live, measure_supply(loader, workers, spans, live, rank.cpu_wait_s)


def waited_behind_loaders_s(rank: RankRecord, data_wait_s: float) -> float:
    """What the training waited for batches but not in a loader: a generator of the script's works on what it drew.

    0.0 where that is not known: no generator or no loader was seen, or another thread drew from it.
    """
    loaders = training_loaders(rank)
    if rank.drawn_from is None or not loaders or not all(loader.wait_s > 0 for loader in loaders):
        return 0.0
    return max(data_wait_s - sum(loader.wait_s + loader.first_wait_s for loader in loaders), 0.0)


def crowding(rank: RankRecord, loader: LoaderRecord | None, usable_cpus: float, host: HostSummary) -> float:
    """Workers and training threads for each usable CPU; 0 where it is other processes that hold the CPUs."""
    if host.others_share >= LIMITS.others_share:
        return 0.0
    threads = (rank.torch_threads or 1) if rank.device == "cpu" else 1
    return ((loader.num_workers if loader else 0) + threads) / max(usable_cpus, 0.01)


def confined(loader: LoaderRecord | None, workers: WorkerRecord | None, allowed_cpus: float) -> bool:
    """Whether the workers may run on fewer CPUs than they and the training could use of those that are allowed."""
    if loader is None or workers is None or workers.cpus is None or not loader.num_workers:
        return False
    return workers.cpus < min(int(allowed_cpus), loader.num_workers + 1)


def _compute_ceiling(run: Run) -> float | None:
    """Samples a second if compute never had to wait; ranks add up. None when a training rank was not measured."""
    rates = []
    for rank, spans in _training_ranks(run):
        samples = ledgers.count_samples(spans)
        steps = sum(span.steps for span in spans)
        compute_s = sum(span.buckets.compute_s for span in spans)
        busy_s = rank.gpu_busy_step_s * steps if rank.gpu_busy_step_s is not None else compute_s
        if samples is None or busy_s <= 0:
            return None
        rates.append(samples / busy_s)
    return sum(rates) if rates else None


def _loader_ceilings(run: Run, wait_share: float, usable_cpus: float, delivered: float | None) -> float | None:
    rates = []
    for rank, spans in _training_ranks(run):
        *_, supply = _input_of(rank, spans)
        # A step that draws from several loaders has no single loader's rate to compare with.
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
    """AU and MFU of the pace-setting rank; empty for a job on the CPU."""
    rank = evidence.rank
    if not evidence.on_gpu or not evidence.active_s or not rank.steps:
        return Utilisation()
    # What a rank waits for sharded parameters looks like compute.
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
    """The run without processes that a rank started, trained on their own account, and outlived.

    A probe on frozen weights, or a search, takes the time of the rank that waits for it, and its steps are not the
    job's. A script that trains a little before it starts its ranks does not train while they do: they stay.
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
