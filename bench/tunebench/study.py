"""The study against a full grid of the same trials: how much of the grid's best it finds, in how much of its time."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from PIL import Image

from fulltilt.probes.host import cpu_capacity
from fulltilt.records import Settings, Trial
from fulltilt.tune.interval import Patience
from fulltilt.tune.outcome import Attempt
from fulltilt.tune.space import Space, rid_of_none
from fulltilt.tune.study import Study
from fulltilt.tune.trial_run import Limits
from fulltilt.tune.trials import is_valid, rate
from fulltilt.tune.verify import winner

WORKERS = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
PREFETCH = (2, 4, 8)
JOB = Path(__file__).with_name("job.py")


@dataclass(frozen=True, slots=True)
class Sizes:
    """``grid`` is "full", or "workers": then only the numbers of workers are measured and the rest is counted."""

    pictures: int
    width: int
    height: int
    size: int
    batch: int
    grid: str
    patience: Patience


def _make(task: tuple[str, int, int, int]) -> None:
    path, width, height, seed = task
    random = numpy.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 16, width // 16, 3), dtype=numpy.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)


def make_pictures(folder: Path, sizes: Sizes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(str(folder / f"{n:05}.jpg"), sizes.width, sizes.height, n) for n in range(sizes.pictures)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_make, tasks, chunksize=8))


def grid_of(sizes: Sizes, on_gpu: bool) -> tuple[list[Settings], int]:
    """The settings to measure, and how many the full grid has."""
    most = round(2 * cpu_capacity().usable)
    workers = [count for count in WORKERS if count <= max(most, 2)]
    pins = (False, True) if on_gpu else (False,)
    full = [
        Settings(num_workers=w, prefetch_factor=p, pin_memory=pin, persistent_workers=keep)
        for w in workers
        for p, pin, keep in itertools.product(PREFETCH if w else (None,), pins, (False, True) if w else (None,))
    ]
    if sizes.grid == "full":
        return full, len(full)
    some = [Settings(num_workers=w, pin_memory=on_gpu or None, persistent_workers=True if w else None) for w in workers]
    return some, len(full)


class Bench:
    """One job: the study first, then the grid, then the winners of both in turns."""

    def __init__(self, folder: Path, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._say = say
        flags = ["--batch-size", str(sizes.batch), "--size", str(sizes.size)]
        self._command = [str(JOB), str(folder / "pictures"), *flags]

    def run(self, on_gpu: bool, budget_s: float) -> dict[str, Any]:
        make_pictures(self._folder / "pictures", self._sizes)
        cold_s = self._cold_start_s()
        study, study_s = self._study(budget_s)
        won = winner(study.trials)
        chosen = Settings() if won is None else won.candidate
        measured, grid_size = grid_of(self._sizes, on_gpu)
        began = time.monotonic()
        grid = [self._measure(study, settings) for settings in measured]
        grid_s = time.monotonic() - began
        valid = [trial for trial in grid if is_valid(trial)]
        best = max(valid, key=rate)
        turns = [(self._measure(study, chosen), self._measure(study, best.settings)) for _ in range(2)]
        study.close()
        each_s = grid_s / len(grid)
        return {
            "study_s": study_s,
            "study_trials": len(study.trials),
            "study_settings": rid_of_none(chosen),
            "study_verified": None if won is None else [won.ratio, won.low, won.high],
            "grid_settings": rid_of_none(best.settings),
            "grid_size": grid_size,
            "grid_measured": len(grid),
            "grid_rates": [[rid_of_none(trial.settings), trial.state, trial.samples_per_s] for trial in grid],
            "trial_s": each_s,
            "script_start_s": cold_s,
            "grid_s_forked": each_s * grid_size,
            "grid_s_started_anew": (each_s + cold_s) * grid_size,
            "found_of_best": fmean(rate(a) for a, _ in turns) / fmean(rate(b) for _, b in turns),
            "time_of_grid_forked": study_s / (each_s * grid_size),
            "time_of_grid_started_anew": study_s / ((each_s + cold_s) * grid_size),
        }

    def _study(self, budget_s: float) -> tuple[Study, float]:
        folder = self._folder / "study"
        folder.mkdir()
        began = time.monotonic()
        study = Study(
            self._command,
            [sys.executable, *self._command],
            folder,
            Space(cpu_capacity().usable),
            None,
            self._say,
            self._sizes.patience,
        )
        study.run(budget_s, lambda *_: None, lambda trial: self._say(_line(trial)))
        return study, time.monotonic() - began

    def _measure(self, study: Study, settings: Settings) -> Trial:
        """One more trial, started in the same way as those of the study and for as long."""
        trial = study.measure(Attempt(settings, "verify"), Limits(90.0))
        self._say(f"grid {_line(trial)}")
        return trial

    def _cold_start_s(self) -> float:
        """What the script needs before its first step when it is started anew: without the trial's own seconds."""
        import subprocess

        code = f"import sys, runpy; sys.argv = {[*self._command]!r}; import torch\n"
        code += "class Stop(Exception): pass\ndef stop(*_, **__): raise Stop\n"
        code += "torch.optim.Optimizer.zero_grad = stop\n"
        code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept Stop: pass\n"
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.monotonic() - began


def _line(trial: Trial) -> str:
    shown = f"{trial.samples_per_s:.0f} samples/s" if trial.samples_per_s else trial.state
    return f"{rid_of_none(trial.settings)}: {shown}, {trial.wall_s or 0:.1f} s"


FULL_SIZE = Sizes(pictures=512, width=960, height=720, size=384, batch=64, grid="workers", patience=Patience())
SMOKE = Sizes(
    pictures=16,
    width=320,
    height=240,
    size=64,
    batch=8,
    grid="workers",
    patience=Patience(wanted_error=0.1, least_blocks=3, least_s=0.5, most_s=1.5, block_s=0.1),
)


def bench(arguments: Any) -> dict[str, Any]:
    """The whole comparison, with the peers that can be imported beside it."""
    import dataclasses
    import tempfile

    import torch

    from tunebench import peers

    sizes = dataclasses.replace(SMOKE if arguments.smoke else FULL_SIZE, grid=arguments.grid)
    on_gpu = torch.cuda.is_available()
    home = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=home) as folder:
        answer = Bench(Path(folder), sizes, lambda text: print(text, file=sys.stderr, flush=True)).run(
            on_gpu, arguments.budget_s
        )
    return {**answer, "peers": peers.batch_finders(smoke=arguments.smoke)}
