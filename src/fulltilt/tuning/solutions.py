"""The guides' "Solution 1, 2, 3" table, measured: which trials are its rows, what each would change, what it risks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.records import Settings, Trial
from fulltilt.tuning.learning_rate import Scaled, scale
from fulltilt.tuning.space import is_loader_only
from fulltilt.tuning.trials import best_of, is_valid, knee_of, rate, start_of

FULL_VRAM = 0.9
MOST_SOLUTIONS = 3


@dataclass(frozen=True, slots=True)
class Solution:
    """One row: a trial, how many times as fast as the start it was, the learning rate to use, and the risk."""

    name: str
    trial: Trial
    speedup: float | None
    learning_rate: Scaled | None
    risk: str


def solutions(
    trials: Sequence[Trial],
    optimizer: str | None = None,
    learning_rate: float | None = None,
    deep_supervision: bool = False,
    streams: bool = False,
) -> tuple[Solution, ...]:
    """The start, then at most three solutions from the safest to the fastest. ``streams``: from an IterableDataset."""
    start = start_of(trials)
    searched = [trial for trial in trials if is_valid(trial) and trial.purpose == "search"]
    picked = [
        best_of([trial for trial in searched if is_loader_only(trial.settings)]),
        knee_of(searched),
        best_of(searched),
    ]
    rows = [] if start is None else [Solution("Current", start, None, _rate_for(start, start, learning_rate), "–")]
    chosen: list[Trial] = []
    for trial in picked:
        if trial is not None and trial not in chosen and (start is None or rate(trial) > rate(start)):
            chosen.append(trial)
    for number, trial in enumerate(chosen[:MOST_SOLUTIONS], start=1):
        scaled = _rate_for(start or trial, trial, learning_rate, optimizer, deep_supervision)
        speedup = rate(trial) / rate(start) if start is not None and rate(start) else None
        rows.append(Solution(f"Solution {number}", trial, speedup, scaled, risk_of(trial, streams)))
    return tuple(rows)


def risk_of(trial: Trial, streams: bool = False) -> str:
    """What a setting may cost, in a few words."""
    settings, risks = trial.settings, []
    if streams and settings.num_workers is not None:
        risks.append("low: the samples of the stream come in another order")
    if settings.batch_size is not None and not settings.accumulation:
        risks.append("medium: another batch size")
    if settings.accumulation is not None:
        risks.append("low: the same effective batch")
    if settings.precision is not None:
        risks.append(f"medium: computes in {settings.precision}")
    if settings.compile:
        risks.append("medium: recompiles when shapes change")
    if trial.vram_peak_bytes and trial.vram_total_bytes and trial.vram_peak_bytes > FULL_VRAM * trial.vram_total_bytes:
        risks.append(f"higher: {trial.vram_peak_bytes / trial.vram_total_bytes:.0%} of VRAM in use")
    return "; ".join(risks) or "low: the same training"


def in_words(settings: Settings, current: Settings | None = None) -> str:
    """Settings as a user reads them: ``8 workers, prefetch 4, pinned, kept``."""
    shown = settings if current is None else current
    words = []
    if shown.num_workers is not None:
        words.append(f"{shown.num_workers} worker{'' if shown.num_workers == 1 else 's'}")
    if shown.prefetch_factor is not None and shown.num_workers != 0:
        words.append(f"prefetch {shown.prefetch_factor}")
    words += ["pinned"] if shown.pin_memory else []
    words += ["persistent"] if shown.persistent_workers else []
    if settings.batch_size is not None:
        words.append(f"batch {settings.batch_size}")
    if settings.accumulation is not None:
        words.append(f"accumulation {settings.accumulation}")
    words += [settings.precision] if settings.precision else []
    words += ["compiled"] if settings.compile else []
    return ", ".join(words) or "as it is"


def by_hand(settings: Settings) -> tuple[str, ...]:
    """What a trial put around the script from outside, and the lines that do it inside."""
    lines = []
    if settings.accumulation is not None and settings.accumulation > 1:
        parts = settings.accumulation
        lines.append(
            f"In the loop: (loss / {parts}).backward(), optimizer.step() and zero_grad() only every {parts} batches."
        )
    if settings.precision == "tf32":
        lines.append('Before the model is built: torch.set_float32_matmul_precision("high")')
    elif settings.precision is not None:
        dtype = {"bf16": "bfloat16"}[settings.precision]
        lines.append(f'Around forward and loss: with torch.autocast("cuda", dtype=torch.{dtype}):')
    if settings.compile:
        lines.append("Before training: model.compile()")
    return tuple(lines)


def _rate_for(
    start: Trial,
    trial: Trial,
    learning_rate: float | None,
    optimizer: str | None = None,
    deep_supervision: bool = False,
) -> Scaled | None:
    before, after = _effective_batch(start), _effective_batch(trial)
    if learning_rate is None or before is None or after is None:
        return None
    return scale(learning_rate, before, after, optimizer, deep_supervision)


def _effective_batch(trial: Trial) -> int | None:
    batch = trial.in_force.batch_size
    return None if batch is None else batch * (trial.in_force.accumulation or 1)
