"""What both the terminal and the page show of a run: words, figures, and one step drawn to scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from fulltilt import figures
from fulltilt.diagnosis.ledger import after_first_step, unseen_seconds
from fulltilt.diagnosis.loader_bottleneck import joined_lines
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
from fulltilt.report.legend import BUCKET_LEGEND, IDLE

Reported: TypeAlias = tuple[Run, Diagnosis]

NO_END_YET = "This run has no end yet: it still runs, or it was killed. This is what there is so far."


def ended(record: RunRecord) -> str:
    """How a run ended: ``done``, ``ended with exit code 1``, ``killed``."""
    if record.exit_code is not None and record.exit_code > 0:
        state = "ended" if record.state == "crashed" else record.state  # an exit code of its own choice
        return f"{state} with exit code {record.exit_code}"
    return f"{record.state}, {clean(record.ended_by)}" if record.ended_by else record.state


def after_startup(finding: Finding) -> str:
    """``62 % of the time after start-up``, the base of all shares outside of the ledger."""
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
    """The decimals for a table of seconds that add up to ``whole_s``."""
    return 1 if whole_s >= 100 else 2 if whole_s >= 10 else 3


def deep_facts(deep: DeepRecord) -> list[tuple[str, str]]:
    """What the profiler saw in a step (``--deep N``), as names and figures."""
    return [
        ("steps profiled", whole(deep.steps)),
        ("step", seconds(deep.step_s)),
        ("GPU busy", seconds(deep.gpu_busy_s)),
        ("gaps between kernels", seconds(deep.kernel_gaps_s)),
        ("copies", seconds(deep.copies_s)),
        ("kernels", NOT_MEASURED if deep.kernels is None else whole(deep.kernels)),
        ("on tensor cores", percent(deep.tensor_core_share)),
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
    text = f"torch.compile: {count('compilation', record.compiles)}, {seconds(record.seconds)} of the start-up"
    if record.recompile_lines:
        line = record.recompile_lines[0]
        reason = (line.call or "").partition(": ")[2]
        text += f"; {record.recompiles} again at {line.where}" + (f" because {reason}" if reason else "")
    return text


def not_valid(because: str) -> str:
    """The warning above a run whose timings are not valid."""
    return f"Not a valid measurement: {one_line(because)}."


def job_line(diagnosis: Diagnosis) -> str | None:
    """A job over several tasks with its goodput, and where the remaining time went; None for other runs."""
    job = diagnosis.job
    if job is None:
        return None
    text = f"{count('task', job.tasks)} on {count('machine', len(job.hosts))} · {count('attempt', job.attempts)}"
    text += f" · goodput {percent(job.goodput)} of {seconds(job.elapsed_s)}"
    lost = sorted(job.rest, key=lambda part: -part[1])[:3]
    if lost and job.elapsed_s > 0:
        text += "; lost: " + ", ".join(f"{what} {percent(part / job.elapsed_s)}" for what, part in lost)
    return text


def rank_name(rank: RankSummary, diagnosis: Diagnosis) -> str:
    """``rank 3``, with its machine where there are several."""
    several = diagnosis.job is not None and len(diagnosis.job.hosts) > 1 and rank.hostname
    return f"rank {rank.rank} {rank.hostname}" if several else f"rank {rank.rank}"


MOST_RANKS = 32


def shown_ranks(diagnosis: Diagnosis) -> tuple[Sequence[RankSummary], str]:
    """The ranks to show (of very many, those with the most own work), and a remark on the others."""
    ranks = diagnosis.ranks
    if len(ranks) <= MOST_RANKS:
        return ranks, ""
    slowest = sorted(ranks, key=lambda rank: -rank.own_work_s)[: MOST_RANKS // 2]
    return slowest, f"{len(ranks) - len(slowest)} more have less own work; --json lists all"


def notes(run: Run, diagnosis: Diagnosis) -> list[str]:
    """What the recorder noticed, and which rules lacked evidence."""
    lines = [*run.warnings, *(note for rank in run.ranks for note in rank.notes)]
    for lacks in dict.fromkeys(abstention.lacks for abstention in diagnosis.abstained):
        codes = ", ".join(abstention.code for abstention in diagnosis.abstained if abstention.lacks == lacks)
        lines.append(f"Not judged: {codes}. Missing: {lacks}.")
    return list(dict.fromkeys(lines))


OURS = "fulltilt/recorder/"
# Fetching that takes less of a run is not shown by line.
LEAST_FETCHING = 0.01


def hot_lines(rank: RankRecord, most: int) -> list[tuple[str, list[tuple[str, HotLine]]]]:
    """The lines that cost most, with their figures, by group: where batches are fetched, in the training process, …"""
    fetch_s = sum(work.fetch_s for work in rank.workers)
    fetching = list(joined_lines(line for work in rank.workers for line in work.lines))
    if fetch_s < LEAST_FETCHING * (rank.t1_s - rank.t0_s):
        fetching = []  # a few samples of next to nothing
    groups: list[tuple[str, Iterable[HotLine], float | None]] = [
        (_fetching_title(rank), fetching, max(fetch_s, sum(line.seconds for line in fetching))),
        # Without the recorder's own hooks.
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
        figures_of = [
            (percent(line.seconds / total_s) if total_s else seconds(line.seconds), line) for line in costliest
        ]
        shown += [(name, figures_of)] if figures_of else []
    return shown


def _fetching_title(rank: RankRecord) -> str:
    """Without workers the training process fetches by itself."""
    fetching = {work.loader_id for work in rank.workers if work.lines}
    workers = any(loader.num_workers > 0 for loader in rank.loaders if loader.loader_id in fetching)
    return f"{'In the workers' if workers else 'Data loading'}, share of fetching"


def _vram(gpu: GpuSummary) -> str:
    peak, total = gpu.vram_peak_bytes, gpu.vram_total_bytes
    return NOT_MEASURED if peak is None else f"{figures.size(peak)} of {figures.size(total)}"


# The figures of a GPU over the training part: utilisation, and what shows whether it is real work.
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


# The figures of a whole run.
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

UsedLoader = tuple[LoaderRecord, WorkerRecord | None]
MOST_LOADERS = 16


def used_loaders(rank: RankRecord) -> list[UsedLoader]:
    """The loaders that gave batches, of very many those that gave most, each with the record of its workers."""
    workers = {work.loader_id: work for work in rank.workers}
    used = sorted((loader for loader in rank.loaders if loader.batches > 0), key=lambda loader: -loader.batches)
    shown = sorted(used[:MOST_LOADERS], key=lambda loader: loader.loader_id)
    return [(loader, workers.get(loader.loader_id)) for loader in shown]


@dataclass(frozen=True, slots=True)
class LanePart:
    """A part of a lane. ``phase`` is a key of PHASE_LEGEND."""

    phase: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """What the workers, the host or the GPU do in a step, in order."""

    name: str
    parts: tuple[LanePart, ...]

    @property
    def length_s(self) -> float:
        """From the start of the step to the end of the last part."""
        return max((part.start_s + part.length_s for part in self.parts), default=0.0)


@dataclass(frozen=True, slots=True)
class StepPicture:
    """The mean step, as lanes drawn to scale."""

    step_s: float
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def scale_s(self) -> float:
        """The length of the longest lane, the full width of the drawing."""
        return max(self.step_s, *(lane.length_s for lane in self.lanes))


def step_picture(run: Run, diagnosis: Diagnosis) -> StepPicture | None:
    """The mean step of the first rank, or None when no step was recorded.

    Lengths are measured; the order within a lane is the usual one, and the GPU's work is drawn in one piece.
    """
    phases = diagnosis.step
    if phases is None or not run.ranks:
        return None
    loaders = [used for used in used_loaders(run.ranks[0]) if used[0].role == "train"]
    slowest = max(loaders, key=lambda used: used[0].wait_s, default=None)
    host = _host_lane(phases, None if slowest is None else slowest[0])
    gpu = _gpu_lane(phases, diagnosis.gpu_step)
    step_s = max(lane.length_s for lane in (host, gpu) if lane is not None)
    if step_s <= 0:
        return None
    workers = None if slowest is None else _worker_lane(slowest, run.ranks[0].steps, step_s)
    lanes = tuple(lane for lane in (workers, host, gpu) if lane is not None)
    # In a run that was cut short some steps have no phases.
    spans = after_first_step(run.spans[0]) if run.spans else ()
    measured = sum(span.steps for span in spans if span.phases is not None)
    return StepPicture(step_s, measured, lanes)


def _host_lane(phases: Phases, loader: LoaderRecord | None) -> Lane:
    after_wait = ("transfer", "forward", "backward", "optimizer", "other")
    rest = [(name, float(getattr(phases, f"{name}_s"))) for name in after_wait]
    if loader is None or loader.num_workers > 0:
        return _lane("Host", [("data_wait", phases.load_s), *rest])
    # Without workers the training process fetches by itself: its CPU time meanwhile is preprocessing.
    preprocess_s = phases.load_s * min(loader.wait_cpu_s / loader.wait_s, 1.0) if loader.wait_s > 0 else 0.0
    return _lane("Host", [("load", phases.load_s - preprocess_s), ("preprocess", preprocess_s), *rest])


def _gpu_lane(phases: Phases, traced: GpuStep | None) -> Lane | None:
    if phases.gpu_busy_s is None or phases.gpu_idle_s is None:
        return None
    if traced is not None and traced.kernel_s is not None:
        return _lane("GPU", [(IDLE, phases.gpu_idle_s), ("kernels", traced.kernel_s), ("gaps", traced.gap_s or 0.0)])
    return _lane("GPU", [(IDLE, phases.gpu_idle_s), ("busy", phases.gpu_busy_s)])


def _worker_lane(used: UsedLoader, steps: int, step_s: float) -> Lane | None:
    """What each worker does in the time of one step, all workers being equal."""
    loader, work = used
    if work is None or work.batches == 0 or loader.num_workers == 0 or steps == 0:
        return None
    if 2 * loader.batches < steps:
        return None  # other loaders fed the other steps
    # The workers' batches may be fewer than the loader's: those not reported before they were stopped are missing.
    each = loader.batches / steps / loader.num_workers / work.batches
    queue_s = work.cpu_wait_s or 0.0
    load_s = max(work.fetch_s - work.fetch_cpu_s - queue_s, 0.0)
    computed_s = min(work.fetch_cpu_s, work.fetch_s)  # on several threads it may be more
    busy = [("load", load_s * each), ("preprocess", computed_s * each), ("queue", queue_s * each)]
    idle_s = max(step_s - sum(length for _, length in busy), 0.0)
    name = "Worker" if loader.num_workers == 1 else f"Each of {loader.num_workers} workers"
    return _lane(name, [*busy, (IDLE, idle_s)])


def _lane(name: str, lengths: list[tuple[str, float]]) -> Lane:
    parts, start_s = [], 0.0
    for phase, length_s in lengths:
        if length_s > 0:
            parts.append(LanePart(phase, start_s, length_s))
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


def distinct_names(runs: Sequence[Reported]) -> tuple[str, ...]:
    """A name for each run: its own, or that of its folder where names are not unique."""
    candidates = (
        tuple(run.run.name for run, _ in runs),
        tuple(PurePath(run.folder).name for run, _ in runs),
        tuple(run.folder for run, _ in runs),
    )
    return next((names for names in candidates if all(names) and len(set(names)) == len(names)), candidates[-1])


_USE = ("GPU use", "SM active", "GPU memory, peak")
_SPEED = ("start-up", "wall time", "steps", "steps/s", "compute ceiling, samples/s", "samples/s")
# Shares that are always shown, and the smallest that is shown of the others.
_ALWAYS = ("data_wait_s", "compute_s")
_WORTH_A_ROW = 0.05


def compare(runs: Sequence[Reported]) -> tuple[Row, ...]:
    """The rows of the table: settings first, then results. Rows without any figure are left out."""
    answers = [diagnosis for _, diagnosis in runs]
    rows: list[tuple[str, list[str]]] = []
    settings = dict.fromkeys(name for answer in answers for name, _ in answer.settings)
    for name in settings:
        rows.append((name, [setting(dict(answer.settings).get(name)) for answer in answers]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _USE]
    for bucket, entry in BUCKET_LEGEND.items():
        shares = [bucket_after_startup(bucket, run) for run in runs]
        if bucket in _ALWAYS or (bucket != "startup_s" and any((share or 0.0) >= _WORTH_A_ROW for share in shares)):
            rows.append((f"{entry.label}, after start-up", [percent(share) for share in shares]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _SPEED]
    rows.append(("relative speed, after start-up", _against_first(answers)))
    known = [(name, cells) for name, cells in rows if any(cell != NOT_MEASURED for cell in cells)]
    return tuple(Row(name, tuple(cells), name in settings) for name, cells in known)


def _against_first(answers: Sequence[Diagnosis]) -> list[str]:
    """By samples a second, or by steps where no run counted samples."""
    rates = [answer.throughput.samples_per_s for answer in answers]
    if not any(rates):
        rates = [answer.throughput.steps_per_s for answer in answers]
    first = rates[0]
    return [f"{rate / first:.2f} ×" if rate is not None and first else NOT_MEASURED for rate in rates]
