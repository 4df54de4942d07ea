"""Tuning measured on the COD and CLIP jobs: live tuning against an exhaustive sweep, the study against a full grid.

    python bench/tune.py --out tune.json            on a GPU; eight minutes and a half on an H200 with 16 CPUs
    python bench/tune.py --small --out tune.json    rehearsed on a CPU, tiny: does the benchmark itself work?

For each job: the sweep (each number of workers for some seconds), one training run from 0 workers under live tuning, a
study of the script, and the settings found against the best of the sweep in turns. Then the batch finders of Lightning
and accelerate and the peer loadtune, where they can be imported. Every figure is in --out as soon as it is known; what
there is no time for is left out, and said to be.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from tunebench import job as jobs
from tunebench import live, peers, study
from tunebench.figures import Figures, table
from tunebench.sweep import POINT_S, sweep

from fulltilt.timeline.session import Session

PARTS = ("live", "study", "peers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", default="cod,clip")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--deadline-s", type=float, default=550.0)
    parser.add_argument("--study-s", type=float, default=90.0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    small = arguments.small or not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    if small:
        torch.set_num_threads(1)
    cpus = len(os.sched_getaffinity(0))
    counts = [1, 2, 4] if small else sorted({max(cpus * part // 16, 1) for part in (4, 6, 8, 10, 12, 14, 16)})
    names, parts = arguments.jobs.split(","), arguments.parts.split(",")
    figures = Figures(arguments.out, arguments.deadline_s)
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-tune-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    session = Session(torch, folder, time.perf_counter_ns())
    session.install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: the table is still printed
    try:
        for name in names:
            measure(name, folder, session, device, counts, parts, figures, arguments.study_s, small)
        if "peers" in parts and figures.has_time_for("peers", "peers", 45.0):
            peers.measure(folder, figures, small)
    finally:
        session.finish()
        shutil.rmtree(folder, ignore_errors=True)
        print(table(figures.all, names), flush=True)
    return 0


def measure(
    name: str,
    folder: Path,
    session: Session,
    device: torch.device,
    counts: list[int],
    parts: list[str],
    figures: Figures,
    study_s: float,
    small: bool,
) -> None:
    home = folder / name
    (home / "pictures").mkdir(parents=True)
    job = jobs.make(name, home / "pictures", device, small)
    figures.note(name, batch_size=job.batch_size)
    point_s = 1.5 if small else POINT_S
    best = sweep(job, device, counts, figures, point_s)
    if "live" in parts and figures.has_time_for(name, "live", live.LIVE_S + 2 * point_s):
        live.measure(job, session, device, best, figures, small)
    if "study" in parts and figures.has_time_for(name, "study", 0.7 * study_s):
        study.measure(job, home, device, best, figures, study_s, small)


if __name__ == "__main__":
    sys.exit(main())
