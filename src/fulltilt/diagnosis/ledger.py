"""Where the wall time of a run went, and the rates that follow from it. Pure functions over spans.

A rank's spans cover its life. Time before the first one is start-up (the interpreter and the imports); time after the
last one, or between two (a kill can tear the file), is unattributed. So the buckets of every rank always add up to the
wall time of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import combinations, islice
from statistics import fmean, median

from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import seconds
from fulltilt.records import BUCKETS, Buckets, GpuStep, JobSummary, Ledger, Phases, RankRecord, Run, Span, Throughput

Spans = tuple[Span, ...]

# --------------------------------------------------------------------------- the ledger


def wall_seconds(run: Run) -> float:
    """The whole job as the launcher timed it; while it runs or when it was killed, up to the end of the last span."""
    last_end = max((span.t1_s for spans in run.spans for span in spans), default=0.0)
    # The launcher stops its clock after the last rank, but both are rounded when they are stored.
    return max(run.run.wall_s or 0.0, last_end, 0.0)


def unseen_seconds(run: Run) -> float:
    """How long the job went on after its killed processes wrote their last record; the mean over the ranks."""
    if run.run.wall_s is None or not run.ranks:
        return 0.0
    unseen_s = 0.0
    for rank, spans in zip(run.ranks, run.spans, strict=False):
        if not rank.finished:
            written_s = max(rank.t1_s, max((span.t1_s for span in spans), default=0.0))
            unseen_s += max(run.run.wall_s - written_s, 0.0)
    return unseen_s / len(run.ranks)


def close_buckets(spans: Spans, wall_s: float, finished: bool = False) -> Buckets:
    """The buckets of one rank, which add up to ``wall_s``. The end of a finished process counts as start-up."""
    total = Buckets()
    reached_s = 0.0
    for span in sorted(spans, key=lambda span: span.t0_s):
        start_s = min(max(span.t0_s, reached_s), wall_s)
        end_s = min(max(span.t1_s, start_s), wall_s)
        gap_s = start_s - reached_s
        if gap_s:
            total = total.plus(Buckets(unattributed_s=gap_s) if reached_s > 0 else Buckets(startup_s=gap_s))
        total = total.plus(_fitted(span.buckets, end_s - start_s))
        reached_s = end_s
    rest_s = wall_s - reached_s
    return total.plus(Buckets(startup_s=rest_s) if finished or not spans else Buckets(unattributed_s=rest_s))


def _fitted(buckets: Buckets, length_s: float) -> Buckets:
    """``buckets`` made to add up to ``length_s``: missing time is unattributed, an excess is scaled away."""
    missing_s = length_s - buckets.total_s
    if missing_s < 0:
        return _scaled(buckets, length_s / buckets.total_s)
    return buckets.plus(Buckets(unattributed_s=missing_s)) if missing_s else buckets


def sum_buckets(parts: Iterable[Buckets]) -> Buckets:
    """The sum of several buckets."""
    return reduce(Buckets.plus, parts, Buckets())


def _scaled(buckets: Buckets, factor: float) -> Buckets:
    return Buckets(*(getattr(buckets, name) * factor for name in BUCKETS))


def close_ranks(run: Run) -> list[Buckets]:
    """The buckets of each rank, which add up to the wall time of the run."""
    wall_s = wall_seconds(run)
    return [
        close_buckets(launching_apart(rank, spans), wall_s, rank.finished)
        for rank, spans in zip(run.ranks, run.spans, strict=True)
    ]


def launching_apart(rank: RankRecord, spans: Spans) -> Spans:
    """The spans with the gaps between short kernels moved from compute, where CUDA events count them, to host code."""
    gap_s = launch_gap_s(rank)
    apart = []
    for span in spans if gap_s else ():
        moved_s = min(gap_s * span.steps, span.buckets.compute_s)
        apart.append(replace(span, buckets=span.buckets.plus(Buckets(compute_s=-moved_s, host_code_s=moved_s))))
    return tuple(apart) if gap_s else spans


def launch_gap_s(rank: RankRecord) -> float:
    """How long the GPU idles in a step between kernels that are too short for the host to launch them as fast.

    Longer kernels leave hardly any gaps, and the three traced steps may be shorter than the others.
    """
    traced, busy_s = rank.kernels, rank.gpu_busy_step_s
    if traced is None or busy_s is None or traced.busy_s > THRESHOLDS.short_kernel_s * traced.kernels:
        return 0.0
    return max(busy_s - traced.busy_s - traced.copies_s, 0.0)


def make_ledger(run: Run, each: list[Buckets] | None = None) -> Ledger:
    """The ledger of the run. With several ranks each bucket is the mean over the ranks (``each``, if known)."""
    wall_s = wall_seconds(run)
    if not run.spans:
        return Ledger(wall_s, Buckets(unattributed_s=wall_s))  # nothing attached, so nothing is known
    each = each or close_ranks(run)
    return Ledger(wall_s, _scaled(sum_buckets(each), 1 / len(each)))


# --------------------------------------------------------------------------- rates


def training_window(spans: Iterable[Span]) -> tuple[float, float] | None:
    """From the beginning of a rank's first step to the end of its last; None when it made no step."""
    stepping = sorted((span for span in spans if span.steps > 0), key=lambda span: span.t0_s)
    return (stepping[0].t0_s, stepping[-1].t1_s) if stepping else None


@dataclass(frozen=True, slots=True)
class _Rated:
    """The part of a rank's training that rates are taken from: after the first step, which is part warm-up.

    ``length_s`` includes validation, checkpoints and epoch restarts, but no start-up; ``paused_s`` is the first two.
    """

    steps: int
    samples: int | None
    length_s: float
    paused_s: float


def _rated(spans: Spans) -> _Rated:
    later = after_first_step(spans)
    steps, samples = sum(span.steps for span in later), count_samples(later)
    window = training_window(later)
    if window is None:
        return _Rated(steps, samples, 0.0, 0.0)
    t0_s, t1_s = window
    startup_s = sum(span.buckets.startup_s for span in later if t0_s <= span.t0_s and span.t1_s <= t1_s)
    first_ends_s = spans[len(spans) - len(later) - 1].t1_s if later is not spans else t0_s
    length_s = max(t1_s - t0_s - startup_s, 0.0) + max(t0_s - first_ends_s, 0.0)
    return _Rated(steps, samples, length_s, sum(paused_s(span.buckets) for span in later if span.t1_s <= t1_s))


def measure_throughput(run: Run) -> Throughput:
    """The rates over the training part, as with a stopwatch. Samples add up over the ranks."""
    steps = max((sum(span.steps for span in spans) for spans in run.spans), default=0)
    samples = _sum_known(count_samples(spans) for spans in run.spans)
    rated = [_rated(spans) for spans in run.spans]
    length_s = max((part.length_s for part in rated), default=0.0)
    if length_s <= 0:
        return Throughput(None, None, steps, samples)
    rated_samples = _sum_known(part.samples for part in rated)
    return Throughput(
        samples_per_s=rated_samples / length_s if rated_samples is not None else None,
        steps_per_s=max(part.steps for part in rated) / length_s,
        steps=steps,
        samples=samples,
    )


def rate_while_drawing(run: Run) -> float | None:
    """Samples a second of the time in which training draws batches: without validation and checkpoints."""
    rated = [_rated(spans) for spans in run.spans]
    samples = _sum_known(part.samples for part in rated)
    drawing_s = max((part.length_s - part.paused_s for part in rated), default=0.0)
    return samples / drawing_s if samples is not None and drawing_s > 0 else None


def paused_s(buckets: Buckets) -> float:
    """Time in which training draws no batches, so that its workers have nothing to do."""
    return buckets.validation_s + buckets.checkpoint_s


def rare_host_code_s(spans: Spans) -> float:
    """The script's own code that does not come with every step, such as curves drawn after an epoch."""
    each = [span.buckets.host_code_s / span.steps for span in spans if span.steps]
    usual_s = median(each) if each else 0.0
    return sum(max(span.buckets.host_code_s - usual_s * span.steps, 0.0) for span in spans)


def after_first_step(spans: Spans) -> Spans:
    """The spans after the first step, which is part warm-up; all of them where the first span holds several steps."""
    first = next((index for index, span in enumerate(spans) if span.steps > 0), None)
    if first is None or spans[first].steps > 1 or not any(span.steps > 0 for span in spans[first + 1 :]):
        return spans
    return spans[first + 1 :]


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def count_samples(spans: Iterable[Span]) -> int | None:
    """The samples that a rank trained on, or None when no loader was seen."""
    return _sum_known(span.samples for span in spans if span.steps > 0)


def mean_step(run: Run) -> Phases | None:
    """One training step of rank 0, the mean over all but the first. None when no phases were recorded."""
    recorded = after_first_step(run.spans[0]) if run.spans else ()
    spans = [span for span in recorded if span.steps > 0 and span.phases is not None]
    if not spans:
        return None
    steps = sum(span.steps for span in spans)
    columns = ([getattr(span.phases, phase.name) for span in spans] for phase in fields(Phases))
    return Phases(*(None if None in lengths_s else sum(lengths_s) / steps for lengths_s in columns))  # type: ignore[arg-type]


def mean_gpu_step(run: Run) -> GpuStep | None:
    """What the GPU of rank 0 does in a step. None when the job trains on the CPU, or nothing of it was measured."""
    step, rank = mean_step(run), run.ranks[0] if run.ranks else None
    idle_s = step.gpu_idle_s if step is not None else None
    kernel_s = rank.kernels.busy_s if rank is not None and rank.kernels is not None else None
    if idle_s is None and kernel_s is None:
        return None
    busy_s = rank.gpu_busy_step_s if rank is not None else None
    gap_s = max(busy_s - kernel_s, 0.0) if busy_s is not None and kernel_s is not None else None
    return GpuStep(kernel_s, gap_s, idle_s)


def gpu_step_words(run: Run) -> str | None:
    """``in a step the GPU runs kernels for 3 ms, 60 ms are gaps between them, 37 ms idle``; None without a trace."""
    step = mean_gpu_step(run)
    if step is None or step.kernel_s is None:
        return None
    rest = ((step.gap_s, "are gaps between them"), (step.idle_s, "it is idle"))
    others = "".join(f", {seconds(length_s)} {what}" for length_s, what in rest if length_s is not None)
    return f"in a step the GPU runs kernels for {seconds(step.kernel_s)}{others}"


def hung_after_s(run: Run) -> float:
    """How long after its last step a job counts as hung."""
    trained = [span for spans in run.spans for span in spans if span.steps]
    usual_s = sum(span.t1_s - span.t0_s for span in trained) / max(sum(span.steps for span in trained), 1)
    return max(THRESHOLDS.hung_s, THRESHOLDS.hung_steps * usual_s)


def hung_stretch(run: Run) -> Span | None:
    """The time since the last step of a job that was stopped, if it hung; of several ranks the longest."""
    stretches = [rank.under_way for rank in run.ranks if rank.under_way is not None and not rank.finished]
    stretches += [spans[-1] for spans in run.spans if spans and not spans[-1].steps]
    last = max(stretches, key=lambda span: span.t1_s - span.t0_s, default=None)
    if last is None or run.run.state not in ("killed", "interrupted"):
        return None
    return last if last.t1_s - last.t0_s >= hung_after_s(run) else None


# --------------------------------------------------------------------------- early against late

# The buckets of a step; validation, saves and epoch restarts do not come with every step.
_OF_A_STEP = ("data_wait_s", "transfer_s", "compute_s", "sync_s", "host_code_s", "communication_s")
_WINDOWS, _QUARTER = 8, 2


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Steps take longer and longer: ``early_s`` and ``late_s`` are those of the first and the last quarter.

    ``bucket`` is the one that grows most, by ``grown_s`` a step; ``lost_s`` is what all steps took of it beyond the
    early ones. Where samples are counted, a step here means as many samples as the mean step has.
    """

    early_s: float
    late_s: float
    bucket: str
    grown_s: float
    lost_s: float


def find_slowdown(spans: Spans) -> Slowdown | None:
    """How a rank slowed down, steadily and by enough; None where it did not, or ran too briefly to tell."""
    least_growth = THRESHOLDS.slowing_growth
    stepping = [span for span in after_first_step(spans) if span.steps > 0]
    counted = all(span.samples for span in stepping)
    sizes = [float(span.samples or 0) if counted else float(span.steps) for span in stepping]
    total = sum(sizes)
    trained_s = sum(getattr(span.buckets, name) for span in stepping for name in _OF_A_STEP)
    if trained_s < THRESHOLDS.slowing_least_s or len(stepping) < 5 * _WINDOWS:
        return None
    spent, sized, passed = [Buckets()] * _WINDOWS, [0.0] * _WINDOWS, 0.0
    for span, size in zip(stepping, sizes, strict=True):
        window = min(int(_WINDOWS * (passed + size / 2) / total), _WINDOWS - 1)
        passed += size
        sized[window] += size
        spent[window] = spent[window].plus(span.buckets)
    if not all(sized):
        return None
    steps = sum(span.steps for span in stepping)
    # Seconds a step in each window.
    windows = [_scaled(buckets, total / steps / size) for buckets, size in zip(spent, sized, strict=True)]
    each = {name: [getattr(window, name) for window in windows] for name in _OF_A_STEP}
    whole = [sum(column) for column in zip(*each.values(), strict=True)]
    early_s, late_s = fmean(whole[:_QUARTER]), fmean(whole[-_QUARTER:])
    growths = {name: fmean(one[-_QUARTER:]) - fmean(one[:_QUARTER]) for name, one in each.items()}
    grown_s, bucket = max((growth, name) for name, growth in growths.items())
    if grown_s < least_growth * early_s or 2 * grown_s < late_s - early_s or late_s < (1 + least_growth) * early_s:
        return None
    # Another job that starts makes all buckets leap once, and noise falls as often as it rises.
    grows = each[bucket]
    rising = [later > earlier for earlier, later in combinations(grows, 2)]
    if fmean(rising) < 0.85 or min(grows[-_QUARTER:]) <= max(grows[: _QUARTER + 1]):
        return None
    lost_s = sum(max(step_s - fmean(grows[:_QUARTER]), 0.0) for step_s in grows) * steps / _WINDOWS
    return Slowdown(early_s, late_s, bucket, grown_s, lost_s)


# --------------------------------------------------------------------------- a job's attempts, and its goodput

# Ranks without a record that are listed at most.
MOST_MISSING = 10_000
# The time of an attempt that is not spent in training steps, by its name in the JSON answer.
_NO_STEPS = {
    "startup_s": "start-up",
    "validation_s": "validation",
    "checkpoint_s": "checkpoints",
    "epoch_turnover_s": "starting passes",
    "unattributed_s": "not seen",
}


def summarise_job(run: Run, ledger: Ledger) -> JobSummary | None:
    """The job with all its attempts (``ledger`` is the newest one's); None for a run that is not a task of a job."""
    if run.run.task is None:
        return None
    ledgers = [*(make_ledger(attempt) for attempt in run.earlier), ledger]
    wall_s = sum(ledger.wall_s for ledger in ledgers)
    first = run.earlier[0] if run.earlier else run
    elapsed_s = max((run.run.began - first.run.began).total_seconds() + ledger.wall_s, wall_s)
    total = sum_buckets(ledger.buckets for ledger in ledgers)
    rest = {"between attempts": elapsed_s - wall_s} | {word: getattr(total, name) for name, word in _NO_STEPS.items()}
    world_size, there = max((rank.world_size for rank in run.ranks), default=0), {rank.rank for rank in run.ranks}
    return JobSummary(
        job=run.run.task.job,
        tasks=len(run.tasks),
        hosts=tuple(dict.fromkeys(task.machine.hostname for task in run.tasks)),
        attempts=len(ledgers),
        elapsed_s=elapsed_s,
        goodput=max(elapsed_s - sum(rest.values()), 0.0) / elapsed_s if elapsed_s > 0 else 0.0,
        rest=tuple((word, length_s) for word, length_s in rest.items() if length_s > 0),
        missing_ranks=tuple(islice((rank for rank in range(world_size) if rank not in there), MOST_MISSING)),
    )
