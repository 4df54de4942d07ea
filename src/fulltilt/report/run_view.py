"""What the terminal and the page both show of a run: its words and figures, and one step laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from fulltilt import figures
from fulltilt.diagnosis.ledger import after_first_step, unseen_seconds
from fulltilt.diagnosis.loader_bottleneck import joined_lines, one_loader_a_line
from fulltilt.figures import NOT_MEASURED, clean, count, number, one_line, percent, seconds, whole
from fulltilt.records import (
    DeepRecord,
    Diagnosis,
    Finding,
    GpuStep,
    GpuSummary,
    HotLine,
    LoaderRecord,
    Phases,
    RankRecord,
    RankSummary,
    Run,
    RunRecord,
    WorkerRecord,
)
from fulltilt.report.palette import BUCKET_TINTS, IDLE

Reported: TypeAlias = tuple[Run, Diagnosis]

NO_END_YET = "This run has no end yet: it still runs, or it was killed. This is what there is so far."


def ended(record: RunRecord) -> str:
    """How a run ended: ``done``, ``ended with exit code 1``, ``killed``."""
    if record.exit_code is not None and record.exit_code > 0:
        state = "ended" if record.state == "crashed" else record.state  # it may have chosen to say so
        return f"{state} with exit code {record.exit_code}"
    return f"{record.state}, {clean(record.ended_by)}" if record.ended_by else record.state


def after_startup(finding: Finding) -> str:
    """``62 % of the time after start-up``: the base of every share that is told, but those of the ledger."""
    return f"{percent(finding.share_after_startup)} of the time after start-up"


def bucket_after_startup(bucket: str, reported: Reported) -> float | None:
    """A bucket as a share of the time after start-up, the base of all findings; None for start-up itself."""
    run, diagnosis = reported
    ledger = diagnosis.ledger
    active_s = ledger.wall_s - ledger.buckets.startup_s - unseen_seconds(run)
    size_s: float = getattr(ledger.buckets, bucket)
    return min(size_s / active_s, 1.0) if active_s > 0 and bucket != "startup_s" else None


def setting(value: str | int | float | bool | None) -> str:
    """A setting's value as Python writes it."""
    return NOT_MEASURED if value is None else str(value)


def decimals(whole_s: float) -> int:
    """How many decimals of a second a table needs whose figures add up to ``whole_s``."""
    return 1 if whole_s >= 100 else 2 if whole_s >= 10 else 3


def deep_facts(deep: DeepRecord) -> list[tuple[str, str]]:
    """What the profiler saw in a step (``--deep N``), as names and figures."""
    return [
        ("steps looked at", whole(deep.steps)),
        ("step", seconds(deep.step_s)),
        ("GPU busy", seconds(deep.gpu_busy_s)),
        ("gaps between kernels", seconds(deep.kernel_gaps_s)),
        ("copies", seconds(deep.copies_s)),
        ("kernels", NOT_MEASURED if deep.kernels is None else whole(deep.kernels)),
        ("in tensor cores", percent(deep.tensor_core_share)),
        *([("the profiler failed", deep.error)] if deep.error else []),
    ]


def utilisation_line(diagnosis: Diagnosis) -> str | None:
    """AU and MFU in one line; None for a job on the CPU."""
    used, parts = diagnosis.utilisation, []
    if used.au is not None:
        parts.append(f"AU {percent(used.au)}: compute over the time after start-up")
    if used.mfu is not None and used.peak_flops_per_s:
        peak = f"{number(used.peak_flops_per_s * 1e-12)} TFLOP/s ({used.peak_precision}, dense, data sheet)"
        parts.append(f"MFU {percent(used.mfu)} of {peak}")
    return " · ".join(parts) or None


def compile_line(run: Run) -> str | None:
    """What torch.compile did on the first rank; None where nothing was compiled."""
    record = run.ranks[0].compile if run.ranks else None
    if record is None:
        return None
    told = f"torch.compile: {count('compilation', record.compiles)}, {seconds(record.seconds)} of the start-up"
    if record.recompile_lines:
        line = record.recompile_lines[0]
        reason = (line.call or "").partition(": ")[2]
        told += f"; {record.recompiles} again at {line.where}" + (f" because {reason}" if reason else "")
    return told


def not_valid(because: str) -> str:
    """The warning above a run whose timings are not its own."""
    return f"Not a valid measurement: {one_line(because)}."


def job_line(diagnosis: Diagnosis) -> str | None:
    """A job over several tasks with its goodput and what the rest went into; None for any other run."""
    job = diagnosis.job
    if job is None:
        return None
    told = f"{count('task', job.tasks)} on {count('machine', len(job.hosts))} · {count('attempt', job.attempts)}"
    told += f" · goodput {percent(job.goodput)} of {seconds(job.elapsed_s)}"
    rest = sorted(job.rest, key=lambda part: -part[1])[:3]
    if rest and job.elapsed_s > 0:
        told += ": the rest is " + ", ".join(f"{what} {percent(part / job.elapsed_s)}" for what, part in rest)
    return told


def rank_name(rank: RankSummary, diagnosis: Diagnosis) -> str:
    """``rank 3``, with its machine where there are several."""
    several = diagnosis.job is not None and len(diagnosis.job.hosts) > 1 and rank.hostname
    return f"rank {rank.rank} {rank.hostname}" if several else f"rank {rank.rank}"


MOST_RANKS = 32


def shown_ranks(diagnosis: Diagnosis) -> tuple[Sequence[RankSummary], str]:
    """The ranks to show, of very many those with the most work of their own, and what is to be said of the rest."""
    ranks, lost = diagnosis.ranks, diagnosis.job.missing_ranks if diagnosis.job is not None else ()
    told = f"no record of rank {', '.join(map(str, lost[:MOST_RANKS]))}{' and more' if lost[MOST_RANKS:] else ''}"
    if len(ranks) <= MOST_RANKS:
        return ranks, told if lost else ""
    slowest = sorted(ranks, key=lambda rank: -rank.own_work_s)[: MOST_RANKS // 2]
    more = f"{len(ranks) - len(slowest)} more have less work of their own; --json lists all"
    return slowest, f"{more}; {told}" if lost else more


def notes(run: Run, diagnosis: Diagnosis) -> list[str]:
    """What the recorder noticed, and which rules could not judge."""
    lines = [*run.warnings, *(note for rank in run.ranks for note in rank.notes)]
    lines += [f"{line.code} could not be judged: it lacks {line.lacks}" for line in diagnosis.abstained]
    return list(dict.fromkeys(lines))


OURS = "fulltilt/recorder/"
# Fetching that takes less of a run is not looked into.
LEAST_FETCHING = 0.01


def hot_lines(rank: RankRecord, most: int) -> list[tuple[str, list[tuple[str, HotLine]]]]:
    """The lines that cost most, each with its figure: where batches are fetched, in the training process, and so on."""
    fetch_s = sum(work.fetch_s for work in rank.workers)
    fetching = list(joined_lines(line for work in rank.workers for line in work.lines))
    if fetch_s < LEAST_FETCHING * (rank.t1_s - rank.t0_s):
        fetching = []  # a few samples of next to nothing
    groups: list[tuple[str, Iterable[HotLine], float | None]] = [
        (_fetching_title(rank), fetching, max(fetch_s, sum(line.seconds for line in fetching))),
        # What the recorder's own hooks take is no line of the user's; it is told as the cost of observing.
        ("In the training process", [line for line in rank.host_lines if OURS not in line.where], None),
        ("Lines that wait for the GPU", rank.sync_lines, None),
        ("Saving", rank.checkpoint_lines, None),
        ("Synchronising calls, per step", rank.deep.sync_calls if rank.deep else (), None),
    ]
    if traced := rank.deep or rank.kernels:
        groups.append(("Kernels, per step", traced.top_kernels, None))
    shown = []
    for name, lines, total_s in groups:
        costliest = sorted(lines, key=lambda line: -line.seconds)[:most]
        told = [(percent(line.seconds / total_s) if total_s else seconds(line.seconds), line) for line in costliest]
        shown += [(name, told)] if told else []
    return shown


def _fetching_title(rank: RankRecord) -> str:
    """Without workers the training process fetches by itself."""
    fetching = {work.loader_id for work in rank.workers if work.lines}
    staffed = any(loader.num_workers > 0 for loader in rank.loaders if loader.loader_id in fetching)
    return f"{'Inside the workers' if staffed else 'Inside the loading'}, share of fetching"


def _vram(gpu: GpuSummary) -> str:
    peak, total = gpu.vram_peak_bytes, gpu.vram_total_bytes
    return NOT_MEASURED if peak is None else f"{figures.size(peak)} of {figures.size(total)}"


# What is told of a GPU over the training part, utilisation beside what says whether it is real.
GPU_FIGURES: dict[str, Callable[[GpuSummary], str]] = {
    "use": lambda gpu: figures.pct(gpu.util_pct),
    "SM active": lambda gpu: figures.pct(gpu.sm_active_pct),
    "tensor cores": lambda gpu: figures.pct(gpu.tensor_active_pct),
    "memory bus": lambda gpu: figures.pct(gpu.dram_active_pct),
    "memory, peak": _vram,
    "power": lambda gpu: figures.watts(gpu.power_w),
    "hottest": lambda gpu: figures.celsius(gpu.temperature_peak_c),
    "throttled": lambda gpu: figures.percent(gpu.throttled_share),
}


# What is told of a whole run.
RUN_FIGURES: dict[str, Callable[[Diagnosis], str]] = {
    "GPU use": lambda answer: figures.pct_range([gpu.util_pct for gpu in answer.gpu]),
    "SM active": lambda answer: figures.pct_range([gpu.sm_active_pct for gpu in answer.gpu]),
    "GPU memory, peak": lambda answer: figures.size(
        max((gpu.vram_peak_bytes for gpu in answer.gpu if gpu.vram_peak_bytes is not None), default=None)
    ),
    "start-up": lambda answer: seconds(answer.ledger.buckets.startup_s),
    "wall time": lambda answer: seconds(answer.ledger.wall_s),
    "steps": lambda answer: whole(answer.throughput.steps),
    "steps/s": lambda answer: figures.number(answer.throughput.steps_per_s),
    "loader ceiling, samples/s": lambda answer: figures.number(answer.ceilings.loader_samples_per_s),
    "compute ceiling, samples/s": lambda answer: figures.number(answer.ceilings.compute_samples_per_s),
    "samples/s": lambda answer: figures.number(answer.throughput.samples_per_s),
}

# --------------------------------------------------------------------------- one step

Site = tuple[LoaderRecord, WorkerRecord | None]


def loader_sites(rank: RankRecord) -> list[Site]:
    """The loaders that gave batches, those of one line as one, each with the record of its workers."""
    rank = one_loader_a_line(rank)
    workers = {work.loader_id: work for work in rank.workers}
    return [(loader, workers.get(loader.loader_id)) for loader in rank.loaders if loader.batches > 0]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a lane. ``kind`` is a key of PHASE_TINTS."""

    kind: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One of those who work at a step, and its parts in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def length_s(self) -> float:
        """From the start of the step to the end of the last part."""
        return max((part.start_s + part.length_s for part in self.parts), default=0.0)


@dataclass(frozen=True, slots=True)
class StepPicture:
    """The mean step. ``scale_s`` is the length of the longest lane, to which all of them are drawn."""

    step_s: float
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def scale_s(self) -> float:
        """What the full width of the drawing stands for."""
        return max(self.step_s, *(lane.length_s for lane in self.lanes))


def step_picture(run: Run, diagnosis: Diagnosis) -> StepPicture | None:
    """The mean step of the first rank, or None when no step was recorded.

    Lengths are measured; the order within a lane is the usual one, and the GPU's work is drawn in one piece.
    """
    phases = diagnosis.step
    if phases is None or not run.ranks:
        return None
    sites = [site for site in loader_sites(run.ranks[0]) if site[0].role == "train"]
    site = max(sites, key=lambda site: site[0].wait_s, default=None)  # the one that was waited for longest
    host = _host_lane(phases, None if site is None else site[0])
    gpu = _gpu_lane(phases, diagnosis.gpu_step)
    step_s = max(lane.length_s for lane in (host, gpu) if lane is not None)
    if step_s <= 0:
        return None
    workers = None if site is None else _worker_lane(site, run.ranks[0].steps, step_s)
    lanes = tuple(lane for lane in (workers, host, gpu) if lane is not None)
    # A run that was cut short has steps of which no phases were written.
    spans = after_first_step(run.spans[0]) if run.spans else ()
    measured = sum(span.steps for span in spans if span.phases is not None)
    return StepPicture(step_s, measured, lanes)


def _host_lane(phases: Phases, loader: LoaderRecord | None) -> Lane:
    after_load = ("transfer", "forward", "backward", "optimizer", "other")
    rest = [(name, float(getattr(phases, f"{name}_s"))) for name in after_load]
    if loader is None or loader.num_workers > 0:
        return _lane("Host", [("wait", phases.load_s), *rest])
    # Without workers the training process loads by itself: its CPU time meanwhile is preprocessing.
    preprocess_s = phases.load_s * min(loader.wait_cpu_s / loader.wait_s, 1.0) if loader.wait_s > 0 else 0.0
    return _lane("Host", [("load", phases.load_s - preprocess_s), ("preprocess", preprocess_s), *rest])


def _gpu_lane(phases: Phases, traced: GpuStep | None) -> Lane | None:
    if phases.gpu_busy_s is None or phases.gpu_idle_s is None:
        return None
    if traced is not None and traced.kernel_s is not None:
        return _lane("GPU", [(IDLE, phases.gpu_idle_s), ("kernels", traced.kernel_s), ("gaps", traced.gap_s or 0.0)])
    return _lane("GPU", [(IDLE, phases.gpu_idle_s), ("busy", phases.gpu_busy_s)])


def _worker_lane(site: Site, steps: int, step_s: float) -> Lane | None:
    """What each worker does in the time of one step, all workers being equal."""
    loader, work = site
    if work is None or work.batches == 0 or loader.num_workers == 0 or steps == 0:
        return None
    # A worker's batches may be fewer than the loader's: what it had not told when it was stopped is missing.
    each = loader.batches / steps / loader.num_workers / work.batches
    queue_s = work.cpu_wait_s or 0.0
    load_s = max(work.fetch_s - work.fetch_cpu_s - queue_s, 0.0)
    busy = [("load", load_s * each), ("preprocess", work.fetch_cpu_s * each), ("queue", queue_s * each)]
    idle_s = max(step_s - sum(length for _, length in busy), 0.0)
    name = "Worker" if loader.num_workers == 1 else f"Each of {loader.num_workers} workers"
    return _lane(name, [*busy, (IDLE, idle_s)])


def _lane(name: str, lengths: list[tuple[str, float]]) -> Lane:
    parts, start_s = [], 0.0
    for kind, length_s in lengths:
        if length_s > 0:
            parts.append(Part(kind, start_s, length_s))
            start_s += length_s
    return Lane(name, tuple(parts))


# --------------------------------------------------------------------------- several runs side by side


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a name and one cell a run."""

    name: str
    cells: tuple[str, ...]
    is_setting: bool

    @property
    def differs(self) -> bool:
        """Whether not all runs have the same."""
        return len(set(self.cells)) > 1


def told_apart(runs: Sequence[Reported]) -> tuple[str, ...]:
    """A name for each run: its own, or that of its folder where several runs have the same."""
    ways = (
        tuple(run.run.name for run, _ in runs),
        tuple(PurePath(run.folder).name for run, _ in runs),
        tuple(run.folder for run, _ in runs),
    )
    return next((names for names in ways if all(names) and len(set(names)) == len(names)), ways[-1])


_USE = ("GPU use", "SM active", "GPU memory, peak")
_SPEED = ("start-up", "wall time", "steps", "steps/s", "compute ceiling, samples/s", "samples/s")
# Shares that are always told, and from which share on the others are.
_ALWAYS = ("data_wait_s", "compute_s")
_WORTH_A_ROW = 0.05


def compare(runs: Sequence[Reported]) -> tuple[Row, ...]:
    """The rows of the table: settings first, then what came of them. Rows that no run has are left out."""
    answers = [diagnosis for _, diagnosis in runs]
    rows: list[tuple[str, list[str]]] = []
    settings = dict.fromkeys(name for answer in answers for name, _ in answer.settings)
    for name in settings:
        rows.append((name, [setting(dict(answer.settings).get(name)) for answer in answers]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _USE]
    for bucket, tint in BUCKET_TINTS.items():
        shares = [bucket_after_startup(bucket, run) for run in runs]
        if bucket in _ALWAYS or (bucket != "startup_s" and any((share or 0.0) >= _WORTH_A_ROW for share in shares)):
            rows.append((f"{tint.label}, after start-up", [percent(share) for share in shares]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _SPEED]
    rows.append(("relative speed, after start-up", _against_first(answers)))
    told = [(name, cells) for name, cells in rows if any(cell != NOT_MEASURED for cell in cells)]
    return tuple(Row(name, tuple(cells), name in settings) for name, cells in told)


def _against_first(answers: Sequence[Diagnosis]) -> list[str]:
    """By samples a second; by steps where no run knows its samples."""
    rates = [answer.throughput.samples_per_s for answer in answers]
    if not any(rates):
        rates = [answer.throughput.steps_per_s for answer in answers]
    first = rates[0]
    return [f"{rate / first:.2f} ×" if rate is not None and first else NOT_MEASURED for rate in rates]
