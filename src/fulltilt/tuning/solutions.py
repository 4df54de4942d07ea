"""What a study prints: a line for each trial, the table of solutions with their risks, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulltilt import figures
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.records import Settings, Trial
from fulltilt.report import run_view
from fulltilt.tuning.learning_rate import ScaledRate, scale, uses_deep_supervision
from fulltilt.tuning.search_space import (
    DEFAULT_PREFETCH,
    WAITS,
    best_of,
    is_loader_only,
    is_valid,
    knee_of,
    rate,
    start_of,
)
from fulltilt.tuning.study import StudyRecord
from fulltilt.tuning.verification import LEAST_PAIRS, Comparison, candidate_of, verified

FULL_VRAM = 0.9
UNVERIFIED = "Only verified settings are recommended and written: keep your settings."
WORKERS_STAY = (
    "Other numbers of workers were not tried: each worker would yield every sample of an IterableDataset that does not "
    "split its work by torch.utils.data.get_worker_info(). If yours does, set num_workers=2 and tune again."
)
MOST_SOLUTIONS = 3
STATES = {
    "ok": "ok",
    "oom": "out of memory",
    "crashed": "crashed",
    "timed_out": "timed out",
    "not_measured": "nothing to measure",
    "diverged": "diverged",
    "throttled": "GPU slowed down",
}


@dataclass(frozen=True, slots=True)
class Solution:
    """A row of the table: a trial, its speedup over the start, the learning rate to use, and the risk."""

    name: str
    trial: Trial
    speedup: float | None
    learning_rate: ScaledRate | None
    risk: str


def solutions(trials: Sequence[Trial], record: StudyRecord) -> tuple[Solution, ...]:
    """The start, then up to three solutions, the safest first."""
    streams = record.loader is not None and record.loader.iterable
    start = start_of(trials)
    searched = [trial for trial in trials if is_valid(trial) and trial.purpose == "search"]
    picked = [
        best_of([trial for trial in searched if is_loader_only(trial.settings)]),
        knee_of(searched),
        best_of(searched),
    ]

    def scaled(trial: Trial) -> ScaledRate | None:
        before, after = _effective_batch(start or trial), _effective_batch(trial)
        if record.learning_rate is None or before is None or after is None:
            return None
        deep_supervision = uses_deep_supervision(record.command)
        return scale(record.learning_rate, before, after, record.optimizer, deep_supervision)

    rows = [] if start is None else [Solution("Current", start, None, scaled(start), "–")]
    chosen: list[Trial] = []
    for trial in picked:
        if trial is not None and trial not in chosen and (start is None or rate(trial) > rate(start)):
            chosen.append(trial)
    for number, trial in enumerate(chosen[:MOST_SOLUTIONS], start=1):
        speedup = rate(trial) / rate(start) if start is not None and rate(start) else None
        rows.append(Solution(f"Solution {number}", trial, speedup, scaled(trial), risk_of(trial, streams)))
    return tuple(rows)


def risk_of(trial: Trial, streams: bool = False) -> str:
    """What may go wrong with the settings of a trial, in a few words."""
    settings = trial.settings
    vram_share = (trial.vram_peak_bytes or 0) / (trial.vram_total_bytes or math.inf)
    low, medium = list[str](), list[str]()
    if settings.num_workers is not None:
        low += ["the samples of the stream come in another order"] if streams else []
        low.append("random augmentations differ if there are any")
    if settings.persistent_workers:
        low.append("later epochs are shuffled differently")
    if settings.accumulation is not None:
        low.append("the same effective batch")
    elif settings.batch_size is not None:
        medium.append("another batch size")
    if settings.precision is not None:
        medium.append(f"computes in {settings.precision}")
    if settings.compile:
        medium.append("recompiles when shapes change")
    higher = [f"{vram_share:.0%} of VRAM in use"] if vram_share > FULL_VRAM else []
    levels = {"low": low, "medium": medium, "higher": higher}
    return "; ".join(f"{level}: {', '.join(risks)}" for level, risks in levels.items() if risks) or (
        "low: the same training"
    )


def in_words(settings: Settings, current: Settings | None = None) -> str:
    """Settings as a user reads them: ``8 workers, prefetch 4, pinned, persistent``."""
    shown = settings if current is None else current
    queue = shown.prefetch_factor if shown.prefetch_factor != DEFAULT_PREFETCH else settings.prefetch_factor
    words = (
        figures.loader_settings(shown.num_workers, queue, shown.pin_memory, shown.persistent_workers),
        f"batch {settings.batch_size}" if settings.batch_size else "",
        f"accumulation {settings.accumulation}" if settings.accumulation else "",
        settings.precision,
        "compiled" if settings.compile else "",
    )
    return ", ".join(filter(None, words)) or "as it is"


def manual_steps(settings: Settings) -> tuple[str, ...]:
    """What to write into the script for settings that trials apply from outside."""
    lines = []
    if settings.accumulation is not None and settings.accumulation > 1:
        parts = settings.accumulation
        lines.append(
            f"In the loop: (loss / {parts}).backward(), optimizer.step() and zero_grad() only every {parts} batches."
        )
        lines.append(
            "To a contrastive loss that is no larger batch: it adds up the gradients of small ones (fewer negatives). "
            "GradCache makes it larger."
        )
    if settings.precision == "tf32":
        lines.append('Before the model is built: torch.set_float32_matmul_precision("high")')
    elif settings.precision is not None:
        lines.append('Around forward and loss: with torch.autocast("cuda", dtype=torch.bfloat16):')
    if settings.compile:
        lines.append("Before training: model.compile()")
    return tuple(lines)


def _effective_batch(trial: Trial) -> int | None:
    batch = trial.in_force.batch_size
    return None if batch is None else batch * (trial.in_force.accumulation or 1)


# --------------------------------------------------------------------------- on the terminal


def show_solutions(console: Console, rows: Sequence[Solution], won: Settings | None) -> None:
    """Print the table; below it the settings, the risk and the learning rate of each row. ``won``: verified."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("workers", "batch", "samples/s", "speed", "GPU", "VRAM\nGiB", "RAM\nGiB", "CPU", "LR"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        trial = row.trial
        table.add_row(
            row.name,
            run_view.setting(trial.in_force.num_workers),
            _batch(trial),
            rate_words(trial),
            "1 ×" if row.speedup is None else f"{row.speedup:.2f} ×",
            figures.pct(trial.gpu_util_pct),
            _gib(trial.vram_peak_bytes),
            _gib(trial.ram_peak_bytes),
            figures.pct(trial.cpu_pct),
            figures.NOT_MEASURED if row.learning_rate is None else f"{row.learning_rate.rate:.3g}",
        )
    console.print(table)
    for row in rows:
        risk, settings = f" Risk {row.risk}." if row.speedup is not None else "", row.trial.settings
        once = "" if row.speedup is None or settings == won else " Measured once, not verified."
        console.print(Text(f"{row.name}: {in_words(settings, row.trial.in_force)}.{once}{risk}"))
    console.print()
    for row in rows:
        scaled = row.learning_rate
        if scaled is not None and "=" in scaled.arithmetic:
            advice = f"; {scaled.warm_up}" if scaled.warm_up else ""
            console.print(Text(f"{row.name}: learning rate {scaled.arithmetic}{advice}"))


def verdict(trials: Sequence[Trial], streams: bool = False, stopped: bool = False) -> str:
    """The result of a study in a few sentences. ``streams``: workers stay; ``stopped``: by the user."""
    start, comparison = start_of(trials), verified(trials)
    waits = (start.data_wait_share or 0.0) if start is not None else 0.0
    searched = [trial for trial in trials if trial.purpose == "search"]
    why = "the study was stopped" if stopped else f"the budget ({_enough(trials, comparison)}) ended"
    sentences = [_of_verification(comparison, candidate_of(trials), why, stopped)]
    if start is not None and not searched:
        why = "the study was stopped" if stopped else "the budget was used up; give it more with --budget"
        if waits < WAITS:
            why = f"training waits for data only {figures.percent(waits)} of its time"
        sentences = [] if streams and waits >= WAITS else [f"Nothing else was tried: {why}."]
    elif searched and not any(map(is_valid, searched)):
        last, failed = searched[-1], figures.count("trial", len(searched))
        why = f"{STATES[last.state]}{f': {last.note}' if last.note else ''}"
        sentences = [f"No other settings could be measured: all {failed} failed ({why})."]
    if streams and waits >= WAITS:
        sentences.append(WORKERS_STAY)
    busy = max((trial.others_share or 0.0 for trial in trials), default=0.0)
    if busy >= THRESHOLDS.others_share and (comparison is None or not comparison.wins):
        sentences.append(
            f"Other processes used up to {figures.percent(busy)} of the CPUs: tune again when they are idle."
        )
    if steps := max((trial.steps or 0 for trial in trials if is_valid(trial)), default=0):
        sentences.append(f"The trials measured only the first {figures.count('step', steps)} of the job.")
    return " ".join(sentences)


def _enough(trials: Sequence[Trial], comparison: Comparison | None) -> str:
    """The budget of a study that verifies its candidate, or goes on for one more pair: as a flag."""
    lasted_s = [trial.wall_s for trial in trials if trial.wall_s is not None]
    if not lasted_s:
        return "--budget"
    more = 2 * (LEAST_PAIRS if comparison is None else 1)
    return f"--budget; {math.ceil((sum(lasted_s) + more * fmean(lasted_s)) / 60)}m should do"


def _of_verification(comparison: Comparison | None, candidate: Settings | None, why: str, stopped: bool) -> str:
    if candidate is None:
        return f"Nothing faster was found{f': {why}' if stopped else ''}: keep your settings."
    if comparison is None:
        return f"Not verified: {in_words(candidate)} looked faster, but {why} before it was certain. {UNVERIFIED}"
    pairs = "a pair" if comparison.pairs == 1 else f"{comparison.pairs} pairs"
    spread = f"{comparison.low:.2f} to {comparison.high:.2f}, 95 %, {pairs} measured in turns"
    if comparison.wins:
        return f"Verified: {in_words(candidate)}: {comparison.ratio:.2f} × as fast ({spread})."
    unsure = "" if comparison.decided else f"; {why} before it was certain"
    return f"Not verified: {in_words(candidate)}: {comparison.ratio:.2f} × ({spread}){unsure}. {UNVERIFIED}"


def changing_data_set_sentence(where: str) -> str:
    """Why persistent workers were not tried."""
    return (
        f"Persistent workers were not tried: {where} changes the data set between epochs, which workers that are "
        "already running would not see."
    )


def trial_line(number: int, trial: Trial, best: Trial | None) -> str:
    """The line printed for a trial that has ended."""
    shown = trial.in_force if is_valid(trial) else None
    what = "start" if trial.settings == Settings() else in_words(trial.settings, shown)
    what += " (verifying)" if trial.purpose == "verify" else ""
    if not is_valid(trial):
        return f"trial {number}: {what}: {STATES[trial.state]}{f' ({trial.note})' if trial.note else ''}"
    lead = " (best)" if trial is best else ""
    waits = f", waits {figures.percent(trial.data_wait_share)}" if trial.data_wait_share is not None else ""
    return f"trial {number}: {what}: {rate_words(trial)} samples/s{waits}, took {figures.seconds(trial.wall_s)}{lead}"


def rate_words(trial: Trial) -> str:
    """A rate with half its interval: ``480 ± 9``."""
    if trial.samples_per_s is None:
        return figures.NOT_MEASURED
    low, high = trial.samples_per_s_low, trial.samples_per_s_high
    if low is None or high is None or math.isinf(high):
        return figures.number(trial.samples_per_s)
    return f"{figures.number(trial.samples_per_s)} ± {figures.number((high - low) / 2)}"


def _gib(value: int | None) -> str:
    return figures.NOT_MEASURED if value is None else f"{value / (1 << 30):.1f}"


def _batch(trial: Trial) -> str:
    batch, parts = trial.in_force.batch_size, trial.in_force.accumulation or 1
    if batch is None:
        return figures.NOT_MEASURED
    return str(batch) if parts == 1 else f"{batch} × {parts}"
