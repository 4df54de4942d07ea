"""The study of a job's script against a full grid: the share of the grid's best rate, and of its time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fulltilt import store
from fulltilt.probes.host import cpu_capacity
from fulltilt.records import Settings, Trial
from fulltilt.tuning.search_space import Space, is_valid, start_of
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial.isolation import choose
from fulltilt.tuning.trial.throughput import Patience
from fulltilt.tuning.verification import winner
from tunebench.figures import Figures
from tunebench.job import Job
from tunebench.sweep import POINT_S, rate, with_workers

# The full grid that people sweep: its best was measured in the sweep, where pinning and persistence are as recommended.
WORKERS = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
PREFETCH = (2, 4, 8)
TURNS, TURN_S = 2, 15.0
# One turn, and what starting the script anew takes.
AFTERWARDS_S = 2 * TURN_S + 15.0
JOB = Path(__file__).with_name("job.py")


def grid_size(on_gpu: bool) -> int:
    """How many points the full grid has on this machine."""
    most = max(round(2 * cpu_capacity().usable), 2)
    pins = 2 if on_gpu else 1
    return sum(pins * (len(PREFETCH) * 2 if workers else 1) for workers in WORKERS if workers <= most)


def measure(
    job: Job, folder: Path, device: torch.device, best: dict[str, Any], figures: Figures, budget_s: float, small: bool
) -> None:
    """The study, then what it chose and the sweep's best in turns."""
    point_s = 1.5 if small else POINT_S
    quick = Patience(wanted_error=0.2, least_blocks=3, least_s=0.3, most_s=1.0, block_s=0.1)
    command = [str(JOB), job.name, str(folder / "pictures"), *(["--small"] if small else [])]
    isolation, reasons = choose()
    if isolation is None:
        figures.note(job.name, study_failed="; ".join(reasons))
        return
    began_s = time.monotonic()
    study = Study(
        command,
        [sys.executable, *command],
        folder / "study",
        Space(cpu_capacity().usable),
        isolation,
        None,
        lambda text: print(text, flush=True),
        quick if small else None,
    )
    try:
        study.run(budget_s, lambda *_: None, lambda trial: _note(figures, job, len(study.trials), trial))
    finally:
        study.close()
    study_s = time.monotonic() - began_s
    start = start_of(study.trials)
    if start is None:
        figures.note(job.name, study_failed=study.trials[-1].note if study.trials else "no trial was made")
        return
    won = winner(study.trials)
    chosen = Settings() if won is None else won.candidate
    in_force = next(trial.in_force for trial in study.trials if trial.settings == chosen and is_valid(trial))
    settings = with_workers(in_force.num_workers or 0, device, in_force.prefetch_factor or 2)
    figures.note(job.name, study_s=study_s, study_trials=len(study.trials), study_settings=store.encode(chosen))
    turns: list[tuple[float, float]] = []
    while len(turns) < TURNS and (not turns or figures.has_time_for(job.name, "study_turn", 2 * TURN_S)):
        turns.append((rate(job, settings, device, point_s), rate(job, best, device, point_s)))
    # The time of a grid point: a trial that is measured to the end, as start and verifying trials are.
    whole = [trial.wall_s for trial in study.trials if trial.wall_s and trial.purpose in ("start", "verify")]
    trial_s, points = fmean(whole), grid_size(device.type == "cuda")
    figures.note(
        job.name,
        study_verified=None if won is None else [won.ratio, won.low, won.high],
        study_turns=turns,
        study_over_best=sum(ours for ours, _ in turns) / sum(theirs for _, theirs in turns),
        study_trial_s=trial_s,
        grid_points=points,
        study_time_of_grid=study_s / (points * trial_s),
    )


def _note(figures: Figures, job: Job, number: int, trial: Trial) -> None:
    shown = f"{trial.samples_per_s:.0f} samples/s" if trial.samples_per_s else f"{trial.state} {trial.note or ''}"
    line = f"{trial.purpose} {store.encode(trial.settings)}: {shown}, {trial.wall_s or 0:.1f} s"
    figures.note(job.name, **{f"study_trial_{number}": line})
