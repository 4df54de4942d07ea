"""How many workers a study tries next. A pure function of the trials so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fulltilt.records import Trial
from fulltilt.tuning.bracket import Bracket
from fulltilt.tuning.interval import Z_95
from fulltilt.tuning.memory import ram_line
from fulltilt.tuning.outcome import Attempt
from fulltilt.tuning.scaling import Measured, fit_scaling
from fulltilt.tuning.space import Space, is_loader_only, tried, with_loader
from fulltilt.tuning.trials import OF_ONE_BLOCK, WAITS, is_valid, on_gpu, rate, start_of

MOST_WORKER_TRIALS = 7


def next_workers(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next number of workers: half of the CPUs, then beside the best; None when the loader is fast enough."""
    start = start_of(trials)
    assert start is not None
    if space.workers_stay or (start.data_wait_share or 0.0) < WAITS or start.in_force.num_workers is None:
        return None
    searched = [trial for trial in trials if trial.purpose != "verify"]
    seen = [t for t in searched if is_loader_only(t.settings) and not t.settings.prefetch_factor]
    best = max((trial for trial in seen if is_valid(trial)), key=rate)
    if len(seen) > MOST_WORKER_TRIALS or (best is not start and (best.data_wait_share or 0.0) < WAITS):
        return None
    rates = {count: rate(trial) if is_valid(trial) else 0.0 for trial in seen if (count := _workers_of(trial))}
    most = _most_workers(seen, space)
    half = min(space.expected_workers, most)
    if len(seen) == 1 and half not in rates:
        workers: int | None = half
    else:
        without_any = 0.0 if start.in_force.num_workers else rate(start)
        workers = Bracket(rates, most, _rate_of_one(start), _ceiling(seen), without_any).next_count() if rates else None
    if workers is None:
        return None
    settings = with_loader(start, workers, on_gpu(start), space.may_persist)
    return None if tried(trials, settings) else Attempt(settings, "search", _why(workers, seen, space))


def _workers_of(trial: Trial) -> int:
    asked = trial.settings.num_workers
    return (trial.in_force.num_workers or 0) if is_valid(trial) or asked is None else asked


def _rate_of_one(start: Trial) -> float | None:
    """What one worker should give, from a start without any: the training thread's own fetching."""
    wait = start.data_wait_share
    return rate(start) / wait if start.in_force.num_workers == 0 and wait else None


def _ceiling(seen: Sequence[Trial]) -> float:
    """Samples a second that training could take if it never waited, by the trial in which a step took it least.

    The start alone would tell too little: without pinned memory its copies take the training's time, not the loader's.
    """
    takes = [rate(trial) / max(1 - (trial.data_wait_share or 0.0), 1e-9) for trial in seen if is_valid(trial)]
    return max(takes) or math.inf


def _why(workers: int, seen: Sequence[Trial], space: Space) -> str:
    """For the status line: what the scaling law through the trials so far expects."""
    points = [Measured(_workers_of(t), rate(t), _spread(t)) for t in seen if is_valid(t) and _workers_of(t)]
    if not points:
        return "half of the CPUs"
    expected = fit_scaling(points, expected_peak=space.usable_cpus).at(workers)
    return f"the scaling law expects {expected.low:.0f} to {expected.high:.0f} samples/s"


def _most_workers(trials: Sequence[Trial], space: Space) -> int:
    """Workers that fit into memory, by the trials so far."""
    too_many = [trial.settings.num_workers for trial in trials if trial.state == "oom" and trial.settings.num_workers]
    bounds = [space.most_workers, *(workers - 1 for workers in too_many)]
    line = ram_line(trials)
    if line is not None and space.memory_bytes is not None:
        fit = line.most_within(space.memory_bytes)
        bounds += [] if fit is None else [fit]
    return max(1, min(bounds))


def _spread(trial: Trial) -> float:
    low, high = trial.samples_per_s_low, trial.samples_per_s_high
    if low is None or high is None or math.isinf(high) or not trial.samples_per_s:
        return OF_ONE_BLOCK
    return (high - low) / (2 * Z_95) / trial.samples_per_s
