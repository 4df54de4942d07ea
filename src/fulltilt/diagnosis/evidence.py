"""What the rules judge by, gathered once from a run, with its settings and whether its timings are valid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from fulltilt.diagnosis import ledger as ledgers
from fulltilt.diagnosis.gpu_summary import HostSummary, summarise_gpus, summarise_host
from fulltilt.diagnosis.live_tuning import live_record, live_settings
from fulltilt.diagnosis.loader_limits import Limit, Supply, find_limit, loader_ceiling, measure_supply
from fulltilt.diagnosis.thresholds import DEFAULT, Thresholds
from fulltilt.figures import percent
from fulltilt.records import (
    Buckets,
    Ceilings,
    GpuSummary,
    HotLine,
    Ledger,
    LoaderRecord,
    Machine,
    PrecisionRecord,
    RankRecord,
    RankSummary,
    Run,
    Span,
    Throughput,
    WorkerRecord,
)

# --------------------------------------------------------------------------- loaders of one line

# Two that a line makes may be drawn from side by side (labelled and unlabelled), or be two stages.
SIDE_BY_SIDE = 2
Number = TypeVar("Number", int, float)


def one_loader_a_line(rank: RankRecord) -> RankRecord:
    """The rank with the loaders joined that a line made for one pass each, as a curriculum does, and their workers."""
    lines: dict[tuple[str, int], list[LoaderRecord]] = {}
    for loader in rank.loaders:
        if loader.role == "train" and loader.made_by is None and loader.where and loader.passes <= loader.constructed:
            lines.setdefault((loader.where, loader.num_workers), []).append(loader)
    for same in lines.values():
        if len(same) > SIDE_BY_SIDE:
            rank = _with_one(rank, same)
    return rank


def _with_one(rank: RankRecord, same: list[LoaderRecord]) -> RankRecord:
    ids = {loader.loader_id for loader in same}
    kept = same[0].loader_id
    workers = [record for record in rank.workers if record.loader_id in ids]
    return replace(
        rank,
        loaders=tuple(
            _joined_loaders(same) if loader.loader_id == kept else loader
            for loader in rank.loaders
            if loader.loader_id == kept or loader.loader_id not in ids
        ),
        workers=(
            *(record for record in rank.workers if record.loader_id not in ids),
            *([_joined_workers(kept, workers)] if workers else []),
        ),
    )


def _joined_loaders(same: list[LoaderRecord]) -> LoaderRecord:
    first, last = same[0], same[-1]
    return replace(
        last,
        loader_id=first.loader_id,
        constructed=sum(loader.constructed for loader in same),
        passes=sum(loader.passes for loader in same),
        batches=sum(loader.batches for loader in same),
        eval_batches=sum(loader.eval_batches for loader in same),
        samples=_sum_of_known([loader.samples for loader in same]),
        batch_bytes=max((loader.batch_bytes for loader in same if loader.batch_bytes is not None), default=None),
        wait_s=sum(loader.wait_s for loader in same),
        wait_cpu_s=sum(loader.wait_cpu_s for loader in same),
        first_wait_s=first.first_wait_s,
        # The first wait of each later one is that for another pass.
        restart_s=sum(loader.restart_s for loader in same) + sum(loader.first_wait_s for loader in same[1:]),
        sampler_lines=_joined_lines(line for loader in same for line in loader.sampler_lines),
    )


def _joined_workers(loader_id: int, records: list[WorkerRecord]) -> WorkerRecord:
    return WorkerRecord(
        loader_id=loader_id,
        processes=max(record.processes for record in records),
        batches=sum(record.batches for record in records),
        fetch_s=sum(record.fetch_s for record in records),
        fetch_cpu_s=sum(record.fetch_cpu_s for record in records),
        cpu_wait_s=_sum_of_known([record.cpu_wait_s for record in records]),
        idle_s=sum(record.idle_s for record in records),
        process_cpu_s=sum(record.process_cpu_s for record in records),
        read_bytes=_sum_of_known([record.read_bytes for record in records]),
        lines=_joined_lines(line for record in records for line in record.lines),
        pss_bytes=max((record.pss_bytes for record in records if record.pss_bytes is not None), default=None),
    )


def _joined_lines(lines: Iterable[HotLine]) -> tuple[HotLine, ...]:
    total: dict[tuple[str, str, str | None], HotLine] = {}
    for line in lines:
        key = (line.where, line.function, line.call)
        known = total.get(key)
        total[key] = line if known is None else replace(known, seconds=known.seconds + line.seconds)
    return tuple(total.values())


def _sum_of_known(values: Sequence[Number | None]) -> Number | None:
    """The sum; None where one of them was not measured."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# --------------------------------------------------------------------------- the evidence


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run, ready to be judged.

    ``rank`` is the rank that sets the pace (the slowest in its own work); ``loader``, ``workers`` and ``supply``
    are its training loader, that loader's workers, and what its batches cost. ``delivered_samples_per_s`` (while
    training draws batches) and ``usable_cpus`` are for one rank.
    """

    run: Run
    ledger: Ledger
    throughput: Throughput
    ceilings: Ceilings
    gpus: tuple[GpuSummary, ...]
    host: HostSummary
    ranks: tuple[RankSummary, ...]
    rank: RankRecord | None
    loader: LoaderRecord | None
    workers: WorkerRecord | None
    supply: Supply | None
    limit: Limit
    delivered_samples_per_s: float | None
    usable_cpus: float
    thresholds: Thresholds

    @property
    def machine(self) -> Machine:
        """The machine the job ran on."""
        return self.run.run.machine

    @property
    def buckets(self) -> Buckets:
        """The buckets of the ledger."""
        return self.ledger.buckets

    @property
    def on_gpu(self) -> bool:
        """Whether the job trains on a GPU."""
        return self.rank is not None and self.rank.device != "cpu"

    @property
    def trainee(self) -> str:
        """Who waits when nothing computes, as a sentence begins it."""
        return "the GPU" if self.on_gpu else "training"

    @property
    def active_s(self) -> float:
        """Wall time after start-up: the part that grows with the length of the job. What nobody saw is left out."""
        return max(self.ledger.wall_s - self.buckets.startup_s - ledgers.unseen_seconds(self.run), 0.0)

    @property
    def too_short(self) -> bool:
        """Whether so little was seen that a share of it means nothing: one step is warming up for a good part."""
        return self.throughput.steps < 2 or self.active_s <= self.thresholds.longest_too_short_s

    @property
    def launch_s(self) -> float | None:
        """GPU idle time because kernels could not be launched fast enough; the mean over ranks, within host code."""
        known = [rank.launch_s for rank in self.run.ranks if rank.launch_s is not None]
        return min(sum(known) / len(known), self.buckets.host_code_s) if known else None

    @property
    def host_lines(self) -> tuple[HotLine, ...]:
        """The lines of the pace-setting rank that cost host time, the costliest first."""
        return _costliest_first(self.rank.host_lines if self.rank else ())

    def share(self, seconds: float) -> float:
        """``seconds`` as a share of the wall time of the run, which is what a finding reports."""
        return _ratio(seconds, self.ledger.wall_s)

    def active_share(self, seconds: float) -> float:
        """``seconds`` as a share of the time after start-up, which is what judgements and predictions go by."""
        return _ratio(seconds, self.active_s)

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


def gather(run: Run, thresholds: Thresholds = DEFAULT) -> Evidence:
    """Everything the rules look at, from the records of a run."""
    run = replace(run, ranks=tuple(one_loader_a_line(rank) for rank in run.ranks))
    ledger = ledgers.make_ledger(run)
    throughput = ledgers.measure_throughput(run)
    ranks = ledgers.compare_ranks(run)
    rank = _pace_setter(run, ranks)
    loader = training_loader(rank)
    workers = workers_of(rank, loader)
    own = next((spans for one, spans in zip(run.ranks, run.spans, strict=True) if one is rank), ())
    supply = measure_supply(loader, workers, own, live_record(rank, loader)) if loader else None
    usable_cpus = run.run.machine.cpu.usable / _ranks_beside(run, rank)
    wait_share = _ratio(ledger.buckets.data_wait_s, ledger.wall_s - ledger.buckets.startup_s)
    rate = ledgers.rate_while_drawing(run)
    delivered = rate / max(len(_training_ranks(run)), 1) if rate is not None else None
    return Evidence(
        run=run,
        ledger=ledger,
        throughput=throughput,
        ceilings=Ceilings(compute_ceiling(run), _loader_ceilings(run, wait_share, usable_cpus, delivered, thresholds)),
        gpus=summarise_gpus(run, thresholds),
        host=summarise_host(run, thresholds),
        ranks=ranks,
        rank=rank,
        loader=loader,
        workers=workers,
        supply=supply,
        limit=find_limit(
            wait_share,
            _ratio(waited_behind_loaders_s(rank, ledger.buckets.data_wait_s), ledger.buckets.data_wait_s),
            loader,
            supply,
            delivered,
            crowding(rank, loader, usable_cpus),
            thresholds,
        ),
        delivered_samples_per_s=delivered,
        usable_cpus=usable_cpus,
        thresholds=thresholds,
    )


def training_loader(rank: RankRecord | None) -> LoaderRecord | None:
    """The loader that feeds training; of several, the one that training waits for most."""
    loaders = [loader for loader in rank.loaders if loader.role == "train"] if rank else []
    return max(loaders, key=lambda loader: (loader.wait_s, loader.batches), default=None)


def waited_behind_loaders_s(rank: RankRecord | None, data_wait_s: float) -> float:
    """What the training waited for batches but not in a loader: a generator of the script's works on what it drew.

    0.0 where that is not known: no loader was seen, or another thread drew from it.
    """
    loaders = [loader for loader in rank.loaders if loader.role == "train"] if rank else []
    if not loaders or not all(loader.wait_s > 0 for loader in loaders):
        return 0.0
    return max(data_wait_s - sum(loader.wait_s + loader.first_wait_s for loader in loaders), 0.0)


def workers_of(rank: RankRecord | None, loader: LoaderRecord | None) -> WorkerRecord | None:
    """What the workers of a loader reported."""
    if rank is None or loader is None:
        return None
    return next((record for record in rank.workers if record.loader_id == loader.loader_id), None)


def crowding(rank: RankRecord | None, loader: LoaderRecord | None, usable_cpus: float) -> float:
    """Workers and training threads for each usable CPU."""
    workers = loader.num_workers if loader else 0
    threads = 1
    if rank is not None and rank.device == "cpu":
        threads = rank.torch_threads or 1
    return (workers + threads) / max(usable_cpus, 0.01)


def compute_ceiling(run: Run) -> float | None:
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


def _loader_ceilings(
    run: Run, wait_share: float, usable_cpus: float, delivered: float | None, thresholds: Thresholds
) -> float | None:
    rates = []
    for rank, spans in _training_ranks(run):
        loader = training_loader(rank)
        tuned = live_record(rank, loader)
        supply = measure_supply(loader, workers_of(rank, loader), spans, tuned) if loader else None
        # A step that draws from several loaders has no single loader's rate to compare with.
        if supply is None or sum(1 for other in rank.loaders if other.role == "train") > 1:
            return None
        rates.append(loader_ceiling(supply, usable_cpus, wait_share, delivered, thresholds))
    return sum(rates) if rates else None


def _training_ranks(run: Run) -> list[tuple[RankRecord, tuple[Span, ...]]]:
    pairs = zip(run.ranks, run.spans, strict=True)
    return [(rank, spans) for rank, spans in pairs if any(span.steps for span in spans)]


def _pace_setter(run: Run, ranks: tuple[RankSummary, ...]) -> RankRecord | None:
    slowest = next((summary.rank for summary in ranks if summary.slowest), None)
    return next((rank for rank in run.ranks if rank.rank == slowest), run.ranks[0] if run.ranks else None)


def _ranks_beside(run: Run, rank: RankRecord | None) -> int:
    """How many ranks share the machine of ``rank``, itself included."""
    return max(sum(1 for other in run.ranks if rank and other.hostname == rank.hostname), 1)


def _costliest_first(lines: tuple[HotLine, ...]) -> tuple[HotLine, ...]:
    return tuple(sorted(lines, key=lambda line: -line.seconds))


def _ratio(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


# --------------------------------------------------------------------------- settings

Setting = tuple[str, str | int | float | bool | None]


def settings_in_force(evidence: Evidence) -> tuple[Setting, ...]:
    """What the job ran with, what was asked for (``asked.…``), what live tuning did (``live.…``). None: not seen."""
    rank, loader = evidence.rank, evidence.loader
    in_force: list[Setting] = [
        ("device", rank.device if rank else None),
        ("world_size", rank.world_size if rank else None),
        ("batch_size", loader.batch_size if loader else None),
        ("accumulation", _accumulation(evidence)),
        ("num_workers", loader.num_workers if loader else None),
        ("prefetch_factor", loader.prefetch_factor if loader else None),
        ("pin_memory", loader.pin_memory if loader else None),
        ("persistent_workers", loader.persistent_workers if loader else None),
        ("start_method", loader.start_method if loader else None),
        ("torch_threads", rank.torch_threads if rank else None),
        ("precision", precision_name(rank.precision) if rank and rank.precision else None),
        ("tf32", rank.precision.tf32 if rank and rank.precision else None),
        ("compile", rank.precision.compiled if rank and rank.precision else None),
        ("optimizer", ", ".join(rank.optimizers) or None if rank else None),
        ("learning_rate", rank.learning_rate if rank else None),
        ("loader", loader.where if loader else None),
    ]
    asked = evidence.run.run.asked
    values = ((field.name, getattr(asked, field.name)) for field in fields(asked))
    asked_for = ((f"asked.{name}", value) for name, value in values if value is not None)
    return (*in_force, *asked_for, *live_settings(live_record(rank, loader)))


def precision_name(precision: PrecisionRecord) -> str | None:
    """``bfloat16`` under autocast, otherwise the type of the parameters."""
    return precision.autocast or precision.parameters


def _accumulation(evidence: Evidence) -> int | None:
    """Batches for each optimizer step, as counted."""
    batches = sum(span.batches for spans in evidence.run.spans for span in spans if span.steps > 0)
    steps = sum(span.steps for spans in evidence.run.spans for span in spans)
    return max(round(batches / steps), 1) if batches and steps else None


# --------------------------------------------------------------------------- valid timings


def invalid_because(evidence: Evidence) -> str | None:
    """Why the run is not a valid measurement, in one sentence; None when nothing speaks against it."""
    reasons = (reason for gpu in evidence.gpus for reason in (_slowed_down(gpu, evidence), _shared(gpu)))
    return next((reason for reason in reasons if reason is not None), None)


def _slowed_down(gpu: GpuSummary, evidence: Evidence) -> str | None:
    share = gpu.throttled_share
    if share is None or share < evidence.thresholds.throttled_share:
        return None
    reasons = ", ".join(gpu.throttle_reasons).replace("_", " ") or "reasons unknown"
    return f"GPU {gpu.index} was slowed down in {percent(share)} of the readings ({reasons})"


def _shared(gpu: GpuSummary) -> str | None:
    if not gpu.foreign_processes:
        return None
    first = gpu.foreign_processes[0]
    more = f" and {len(gpu.foreign_processes) - 1} more" if len(gpu.foreign_processes) > 1 else ""
    return f"GPU {gpu.index} was shared with {first.name or 'a process'} (pid {first.pid}){more}"


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
