"""Live tuning from 0 workers against the sweep's best: what it reaches within a minute, and what it costs."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fulltilt import store
from fulltilt.recorder.session import Session
from fulltilt.tuning.live import Live
from tunebench.figures import Figures
from tunebench.job import Job
from tunebench.sweep import rate, rate_of, train, with_workers

# Its rate after a minute is measured in the seconds that follow, and compared with points of the sweep's best.
MINUTE_S, REACHED_S, POINT_S = 60.0, 15.0, 8.0
FIRST_MINUTES_S = 300.0
LONGEST_TRIAL_S = 12.0
NEAR, NEAR_FOR_S = 0.95, 6.0
TURNS, TURN_S = 2, 35.0


def measure(job: Job, folder: Path, device: torch.device, best: dict[str, Any], figures: Figures, small: bool) -> None:
    """Measure the sweep's best, a training run with live tuning, then the best and the settings found in turns.

    The machine's pace drifts by a fifth within minutes, so the best is measured before and after the run.
    """
    minute_s, reached_s, point_s = (20.0, 4.0, 1.5) if small else (MINUTE_S, REACHED_S, POINT_S)
    best_before = rate(job, best, device, point_s)
    session = Session(torch, store.create_folder(folder / "live"), time.perf_counter_ns())
    session.install()
    live = Live(session)
    session.loaders.live = live.begin
    moments = list(train(job, with_workers(0, device), device, minute_s + reached_s))
    (record,) = [tuner.record for tuner in live.tuners.values()]
    session.finish()
    found = with_workers(record.settings.num_workers or 0, device, record.settings.prefetch_factor or 2)
    workers = int(found["num_workers"])
    reached = job.batch_size * rate_of(moments, minute_s, workers=workers)
    lost_s = _lost_s(record)
    figures.note(
        job.name,
        live_settings=found,
        live_samples_per_s=reached,
        live_best_before=best_before,
        live_tuning_s=record.cost_s,
        live_lost_in_trials_s=lost_s,
        live_cost_share_of_five_minutes=(record.cost_s + lost_s) / FIRST_MINUTES_S,
        live_batches_each_s=_each_s(moments),
        live=store.encode(record),
    )
    turns: list[tuple[float, float]] = []
    while len(turns) < TURNS and (not turns or figures.has_time_for(job.name, "live_turn", TURN_S)):
        turns.append((rate(job, best, device, point_s), rate(job, found, device, point_s)))
        # Not the sweep's own figure: the best of many noisy figures is too high.
        best_now, found_now = (fmean(rates) for rates in zip(*turns, strict=True))
        figures.note(
            job.name,
            live_turns_best_and_found=turns,
            live_over_best_after_60_s=reached / fmean((best_before, best_now)),
            live_settings_over_best=found_now / best_now,
            live_near_after_s=_near_after_s(moments, NEAR_FOR_S, workers, NEAR * best_now / job.batch_size),
        )


def _each_s(moments: list[float]) -> list[int]:
    """Batches in each second of the run."""
    counts = Counter(map(int, moments))
    return [counts[second] for second in range(int(moments[-1]) + 1)]


def _near_after_s(moments: list[float], window_s: float, workers: int, wanted: float) -> float | None:
    """When a window first had this many batches a second."""
    return next(
        (
            moment
            for moment in moments
            if moment > window_s and rate_of(moments, moment - window_s, moment, workers) >= wanted
        ),
        None,
    )


def _lost_s(record: Any) -> float:
    """The time lost in trials that were slower than the settings before."""
    best = record.before_batches_per_s or 0.0
    lost_s = 0.0
    ends = [*(move.began_s for move in record.moves[1:]), None]
    for move, ended_s in zip(record.moves, ends, strict=True):
        if move.batches_per_s is not None and best:
            lasted_s = (ended_s if ended_s is not None else move.began_s + LONGEST_TRIAL_S) - move.began_s
            lost_s += lasted_s * max(1 - move.batches_per_s / best, 0.0)
            best = max(best, move.batches_per_s)
    return lost_s
