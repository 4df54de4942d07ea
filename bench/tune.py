"""`fulltilt tune` on the COD and CLIP jobs: what a study finds, and in what share of a full grid's time.

    python bench/tune.py --out tune.json             on a GPU; nine minutes on an H200 with 16 CPUs
    python bench/tune.py --small --out tune.json     rehearsed on a CPU, tiny: does the benchmark itself work?

For each job: the sweep (each number of workers for some seconds), a study of the script, then the settings found and
the best of the sweep in turns. Each job runs in a process of its own, which prints its progress and is killed with all
its children when it overruns. Every figure is written as soon as it is known, to OUT.<job>.json; all of them to OUT.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tune_job
from children import IN_MEMORY, drain, measured_in_child, process_start_s, versions
from torch.utils.data import DataLoader

from fulltilt import store
from fulltilt.probes.host import cpu_capacity
from fulltilt.records import Settings, Trial
from fulltilt.tuning.search_space import Space, is_valid, start_of
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial.isolation import choose
from fulltilt.tuning.trial.throughput import Patience, ready_batches
from fulltilt.tuning.verification import winner

# The seconds that a job may take, and those without which it is not begun.
LONGEST_S, LEAST_S = 400.0, 120.0
# Before a job is ended for overrunning, it prints where each of its threads stands.
LAST_WORDS_S = 4.0
# (figure, its target, whether it should be at least that)
TARGETS = (("study_over_best", 0.97, True), ("study_time_of_grid", 0.10, False))


class Figures:
    """The figures of one job, written after each one. ``deadline_s`` counts from the start of the process."""

    def __init__(self, job: str, out: Path, deadline_s: float) -> None:
        self.job, self.out, self.deadline_s = job, out, deadline_s
        self.began_s = process_start_s()
        self.all: dict[str, Any] = {}

    def note(self, **figures: Any) -> None:
        """Write figures down at once."""
        self.all.update(figures)
        for name, value in figures.items():
            shown = f"{value:,.3f}" if isinstance(value, float) else json.dumps(value)
            passed_s = time.monotonic() - self.began_s
            print(f"{passed_s:6.1f} s  {self.job:<5} {name:<32} {shown[:120]}", flush=True)
        self.out.write_text(json.dumps(self.all, indent=1) + "\n")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.began_s + self.deadline_s - time.monotonic()

    def has_time_for(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; what is left out is noted."""
        if self.left_s >= seconds:
            return True
        self.note(**{f"{what}_left_out": f"{seconds:.0f} s were not left of {self.deadline_s:.0f}"})
        return False


# --------------------------------------------------------------------------- the sweep

POINT_S = 5.0
# A point whose bursts take long ends after the one that is under way.
LONGEST_POINT_S = 15.0
WARM_UP_BURSTS, LEAST_BURSTS = 2, 3


def rate(job: tune_job.Job, settings: dict[str, Any], device: torch.device, seconds: float) -> float:
    """Samples a second that the loader can keep up with these settings.

    A loader with w workers gives its batches in bursts of w: the first ones are not counted, and only whole ones are.
    What is queued when the clock starts was made before, so what the workers make is counted, not what training takes.
    """
    burst = max(settings["num_workers"], 1)
    iterator = iter(DataLoader(job.data, job.batch_size, shuffle=False, **settings))

    def train_burst() -> tuple[float, int]:
        """When it was done, and how many batches lie ready behind it."""
        for _ in range(burst):
            job.step([part.to(device, non_blocking=True) for part in next(iterator)])
        drain(device)
        return time.perf_counter(), ready_batches(iterator)

    for _ in range(WARM_UP_BURSTS):
        began_s, ready_before = train_burst()
    counted_s, batches = 0.0, 0
    while counted_s < LONGEST_POINT_S and (counted_s < seconds or batches < LEAST_BURSTS * burst):
        now_s, ready = train_burst()
        counted_s, batches = now_s - began_s, batches + burst
    used_up = max(ready_before - ready, 0)  # a queue that grows tells that training sets the pace
    return job.batch_size * (batches - used_up) / counted_s


def with_workers(workers: int, device: torch.device, prefetch: int = 2) -> dict[str, Any]:
    """A loader's settings as people recommend them for so many workers."""
    pin = {"pin_memory": device.type == "cuda"}
    if not workers:
        return {"num_workers": 0, **pin}
    return {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True, **pin}


def sweep(job: tune_job.Job, device: torch.device, cpus: int, figures: Figures, point_s: float) -> dict[str, Any]:
    """The best settings of all that were measured.

    Those are numbers of workers up to the CPUs, those beside the best of them, and a deeper queue there.
    """
    rates: dict[tuple[int, int], float] = {}

    def point(workers: int, prefetch: int = 2) -> None:
        has_time = not rates or figures.has_time_for(f"sweep_{workers}x{prefetch}", 4 * point_s)
        if workers > 0 and (workers, prefetch) not in rates and has_time:
            rates[workers, prefetch] = rate(job, with_workers(workers, device, prefetch), device, point_s)
            figures.note(**{f"sweep_{workers}x{prefetch}": rates[workers, prefetch]})

    def best_workers() -> int:
        return max(rates, key=rates.__getitem__)[0]

    job.data[0]  # imports what decodes, which each forked worker would otherwise do for itself
    rate(job, with_workers(cpus // 2, device), device, point_s / 2)  # the first steps choose kernels
    for part in (8, 12, 4, 16):
        point(max(cpus * part // 16, 1))
    step = max(cpus // 8, 1)
    for workers in (best_workers() - step, best_workers() + step):
        point(workers)
    point(best_workers(), 4)
    best = max(rates, key=rates.__getitem__)
    figures.note(best_workers=best[0], best_prefetch=best[1], best_samples_per_s=rates[best])
    return with_workers(best[0], device, best[1])


# --------------------------------------------------------------------------- the study

# The full grid that people sweep: its best was measured in the sweep, where pinning and persistence are as recommended.
WORKERS = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
PREFETCH = (2, 4, 8)
TURNS, TURN_S = 2, 15.0
# One turn, and what starting the script anew takes.
AFTERWARDS_S = 2 * TURN_S + 15.0


def grid_size(on_gpu: bool) -> int:
    """How many points the full grid has on this machine."""
    most = max(round(2 * cpu_capacity().usable), 2)
    pins = 2 if on_gpu else 1
    return sum(pins * (len(PREFETCH) * 2 if workers else 1) for workers in WORKERS if workers <= most)


def study_job(
    job: tune_job.Job, home: Path, device: torch.device, best: dict[str, Any], figures: Figures, study_s: float
) -> None:
    """The study, then what it chose and the sweep's best in turns."""
    small = device.type == "cpu"
    point_s = 1.5 if small else POINT_S
    quick = Patience(wanted_error=0.2, least_blocks=3, least_s=0.3, most_s=1.0, block_s=0.1)
    command = [tune_job.__file__, job.name, str(home / "pictures"), *(["--small"] if small else [])]
    isolation, reasons = choose()
    if isolation is None:
        figures.note(study_failed="; ".join(reasons))
        return
    began_s = time.monotonic()
    study = Study(
        command,
        [sys.executable, *command],
        home / "study",
        Space(cpu_capacity().usable),
        isolation,
        None,
        lambda text: print(text, flush=True),
        quick if small else None,
    )

    def note_trial(trial: Trial) -> None:
        shown = f"{trial.samples_per_s:.0f} samples/s" if trial.samples_per_s else f"{trial.state} {trial.note or ''}"
        line = f"{trial.purpose} {store.encode(trial.settings)}: {shown}, {trial.wall_s or 0:.1f} s"
        figures.note(**{f"study_trial_{len(study.trials)}": line})

    try:
        study.run(min(study_s, figures.left_s - AFTERWARDS_S), lambda *_: None, note_trial)
    finally:
        study.close()
    took_s = time.monotonic() - began_s
    if start_of(study.trials) is None:
        figures.note(study_failed=study.trials[-1].note if study.trials else "no trial was made")
        return
    won = winner(study.trials)
    chosen = Settings() if won is None else won.candidate
    in_force = next(trial.in_force for trial in study.trials if trial.settings == chosen and is_valid(trial))
    settings = with_workers(in_force.num_workers or 0, device, in_force.prefetch_factor or 2)
    figures.note(study_s=took_s, study_trials=len(study.trials), study_settings=store.encode(chosen))
    turns: list[tuple[float, float]] = []
    while len(turns) < TURNS and (not turns or figures.has_time_for("study_turn", 2 * TURN_S)):
        turns.append((rate(job, settings, device, point_s), rate(job, best, device, point_s)))
    # The time of a grid point: a trial that is measured to the end, as start and verifying trials are.
    whole = [trial.wall_s for trial in study.trials if trial.wall_s and trial.purpose in ("start", "verify")]
    trial_s, points = fmean(whole), grid_size(device.type == "cuda")
    figures.note(
        study_verified=None if won is None else [won.ratio, won.low, won.high],
        study_turns=turns,
        study_over_best=sum(ours for ours, _ in turns) / sum(theirs for _, theirs in turns),
        study_trial_s=trial_s,
        grid_points=points,
        study_time_of_grid=took_s / (points * trial_s),
    )


# --------------------------------------------------------------------------- all jobs


def child(arguments: argparse.Namespace) -> None:
    """Measure one job in this process."""
    faulthandler.dump_traceback_later(max(arguments.deadline_s - LAST_WORDS_S, 1.0))
    figures = Figures(arguments.child, arguments.out, arguments.deadline_s)
    small = arguments.small or not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    if small:
        torch.set_num_threads(1)
    home = arguments.folder / arguments.child
    (home / "pictures").mkdir(parents=True)
    job = tune_job.make(arguments.child, home / "pictures", device, small)
    figures.note(batch_size=job.batch_size)
    # A rehearsal's samples wait more than they compute: more workers than CPUs pay.
    cpus = 4 if small else len(os.sched_getaffinity(0))
    best = sweep(job, device, cpus, figures, 1.0 if small else POINT_S)
    study_job(job, home, device, best, figures, arguments.study_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", default="cod,clip")
    parser.add_argument("--deadline-s", type=float, default=580.0)
    parser.add_argument("--study-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return 0
    found: dict[str, dict[str, Any]] = {"machine": versions(("torch", "timm", "transformers"))}
    ends_s = process_start_s() + arguments.deadline_s
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-tune-", dir=IN_MEMORY))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: the table is still printed
    jobs = arguments.jobs.split(",")
    try:
        for name in jobs:
            left_s = ends_s - time.monotonic()
            if left_s < (5.0 if arguments.small else LEAST_S):
                found[name] = {"problem": f"left out: {left_s:.0f} s were left"}
                continue
            limit_s, out = min(LONGEST_S, left_s), arguments.out.with_suffix(f".{name}.json")
            given = ["--child", name, "--folder", str(folder), "--out", str(out), "--deadline-s", f"{limit_s:.0f}"]
            given += ["--study-s", str(arguments.study_s), *["--small"] * arguments.small]
            figures, problem = measured_in_child(__file__, given, out, limit_s)
            found[name] = {**figures, "problem": problem}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(table(found, jobs), flush=True)
    return 0


def table(found: dict[str, dict[str, Any]], jobs: list[str]) -> str:
    """The required figures of each job beside their targets."""
    lines = [f"{'':<34}{'target':>9}" + "".join(f"{job:>12}" for job in jobs)]
    for name, target, at_least in TARGETS:
        cells = []
        for job in jobs:
            value = found.get(job, {}).get(name)
            met = value is not None and (value >= target if at_least else value <= target)
            cells.append(f"{'not run' if value is None else f'{value:.3f}' + (' ok' if met else ' !!'):>12}")
        lines.append(f"{name:<34}{('≥ ' if at_least else '≤ ') + f'{target:g}':>9}" + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
