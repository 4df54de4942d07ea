"""Tuning measured on the COD and CLIP jobs: live tuning against an exhaustive sweep, the study against a full grid.

    python bench/tune.py --parts live --out tune.json     on a GPU; ten minutes on an H200 with 16 CPUs
    python bench/tune.py --parts study --out tune.json    nine minutes
    python bench/tune.py --parts peers --out tune.json    six minutes at most
    python bench/tune.py --small --out tune.json          rehearsed on a CPU, tiny: does the benchmark itself work?

For each job: the sweep (each number of workers for some seconds) and one training run from 0 workers under live tuning;
then, for each job, a study of the script, and the settings found against the best of the sweep in turns; then the batch
finders of Lightning and accelerate and the peer loadtune, where they can be imported. Each part runs in a process of
its own, which prints its progress and is killed with all its children when it overruns. Every figure is written as soon
as it is known, to OUT.<part>.json and then to OUT; parts without time left are noted as left out. A sweep that is
already in OUT is used.
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
from pathlib import Path

from children import IN_MEMORY, measured_in_child, versions
from tunebench.figures import Figures, table

PARTS = ("live", "study", "peers")
PEERS = ("accelerate", "lightning", "loadtune")
# Part → the seconds that it may take, and those without which it is not begun.
LIMITS_S = {"live": (290.0, 150.0), "study": (400.0, 120.0), "peers": (110.0, 20.0)}
# Before a part is ended for overrunning, it prints where each of its threads stands.
LAST_WORDS_S = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", default="cod,clip")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--deadline-s", type=float, default=580.0)
    parser.add_argument("--study-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--child", nargs=3, metavar=("PART", "NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--known", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    figures = Figures(arguments.out, arguments.deadline_s, _read(arguments.out))
    figures.note("machine", **versions(("torch", "timm", "transformers", "accelerate", "lightning", "loadtune")))
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-tune-", dir=IN_MEMORY))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: the table is still printed
    jobs = arguments.jobs.split(",")
    try:
        # Parts with a target come first.
        for part in (part for part in PARTS if part in arguments.parts.split(",")):
            for name in arguments.peers.split(",") if part == "peers" else jobs:
                run(part, name, folder, figures, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        print(table(figures.all, jobs), flush=True)
    return 0


def run(part: str, name: str, folder: Path, figures: Figures, arguments: argparse.Namespace) -> None:
    """Measure a part in a child and take its figures over."""
    longest_s, least_s = LIMITS_S[part]
    of = "peers" if part == "peers" else name
    if not figures.has_time_for(of, f"{part}_{name}" if part == "peers" else part, 5.0 if arguments.small else least_s):
        return
    limit_s = min(longest_s, figures.left_s)
    out = arguments.out.with_suffix(f".{part}-{name}.json")
    flags = ["--out", str(out), "--known", str(arguments.out), "--deadline-s", f"{limit_s:.0f}"]
    flags += ["--study-s", str(arguments.study_s), *(["--small"] if arguments.small else [])]
    found, problem = measured_in_child(__file__, [*flags, "--child", part, name, str(folder)], out, limit_s)
    figures.all.setdefault(of, {}).update(found.get(of, {}))
    figures.note(of, **{f"{part}_{name}_problem" if part == "peers" else f"{part}_problem": problem})


def child(arguments: argparse.Namespace) -> int:
    """Measure one part in this process."""
    part, name, folder = arguments.child[0], arguments.child[1], Path(arguments.child[2])
    faulthandler.dump_traceback_later(max(arguments.deadline_s - LAST_WORDS_S, 1.0))
    figures = Figures(arguments.out, arguments.deadline_s, _read(arguments.known))
    import torch
    from tunebench import job as jobs
    from tunebench import live, peers, study
    from tunebench.sweep import POINT_S, sweep, with_workers

    small = arguments.small or not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    if small:
        torch.set_num_threads(1)
    if part == "peers":
        peers.measure(name, folder, figures, small)
        return 0
    home = folder / name
    (home / "pictures").mkdir(parents=True, exist_ok=True)
    job = jobs.make(name, home / "pictures", device, small)
    figures.note(name, batch_size=job.batch_size)
    known = figures.all[name]
    if "best_workers" not in known:
        # A rehearsal's samples wait more than they compute: more workers than CPUs pay.
        cpus = 4 if small else len(os.sched_getaffinity(0))
        after_s = live.MINUTE_S + live.REACHED_S + 2 * live.TURN_S if part == "live" and not small else 0.0
        best = sweep(job, device, cpus, figures, 1.0 if small else POINT_S, after_s)
    else:
        best = with_workers(known["best_workers"], device, known["best_prefetch"])
    if part == "live":
        live.measure(job, folder, device, best, figures, small)
    else:
        budget_s = min(arguments.study_s, figures.left_s - study.AFTERWARDS_S)
        study.measure(job, home, device, best, figures, budget_s, small)
    return 0


def _read(path: Path) -> dict[str, dict[str, object]]:
    """Earlier figures."""
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
