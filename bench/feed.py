"""How close to compute-only a fed job runs: stock DataLoader against feed.loader on every tier, all in one run.

    python bench/feed.py --jobs cod                   under 290 s on an H200, 100 s of them compiling
    python bench/feed.py --jobs hdf5,text             under 230 s
    python bench/feed.py --jobs clip --budget-s 300   under 310 s
    python bench/feed.py --smoke                      tiny models on the CPU: does the benchmark itself work?

Each job runs in a process of its own, which has the GPU to itself, and writes its figures as it gets them
(OUT.<job>.json), so that a job that fails or overruns loses only what it had not measured yet. Figures with a target
come first. Rates are samples per second, by the wall clock, the device drained at both ends. "compute-only" is the
same step on a batch that is already on the device, measured in turn with the fed one.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from children import measured_in_child, process_start_s, versions
from feedbench.images import run_clip, run_cod
from feedbench.measuring import Bench, shown
from feedbench.text import run_text
from feedbench.windows import run_hdf5

from fulltilt.feed.worker_pool import default_workers

RUN = {"cod": run_cod, "hdf5": run_hdf5, "clip": run_clip, "text": run_text}
# Seconds a job may take at most, imports and compilation included; all together they end before --budget-s.
BUDGET_S = {"cod": 265, "hdf5": 150, "clip": 300, "text": 80}
# Rows that begin too late are left out; one that overruns is ended so much after its budget.
GRACE_S = 8
TARGETS = {
    "cod": {
        "fed_over_compute": 0.97,
        "fed_over_best_stock": 2.5,
        "disk_over_compute": 0.90,
        "first_epoch_over_best_stock_first": 1.0,
    },
    "clip_b256": {"fed_over_compute": 0.97, "first_epoch_over_best_stock_first": 1.0},
    "clip_b1024": {"fed_over_compute": 0.97, "first_epoch_over_best_stock_first": 1.0},
    "text": {"fed_over_compute": 0.97, "fed_over_pad_to_128": 1.5},
    "hdf5": {"fed_over_compute": 0.95, "fed_over_sample_by_sample": 100.0},
}
PACKAGES = ("torch", "torchvision", "timm", "transformers", "h5py", "pillow", "webdataset", "spdl-core")
HOST_CPU_PCT_AT_MOST = 40.0


def measure(job: str, out: Path, budget_s: float, arguments: argparse.Namespace) -> int:
    """Run one job in this process; returns its exit code."""
    bench = Bench(out, budget_s, arguments)
    try:
        bench.note("machine", "versions", {**versions(PACKAGES), "workers": default_workers()})
        RUN[job](bench)
    except Exception as error:
        traceback.print_exc()
        bench.note(job, "failed", f"{type(error).__name__}: {str(error)[:300]}")
        return 1
    finally:
        bench.close()
    return 0


def table(jobs: dict[str, dict[str, Any]]) -> str:
    """Rates of each job beside its compute-only rate, then the targets."""
    out = io.StringIO()
    print(f"\n{'job':<11} {'what':<34} {'samples/s':>14} {'of compute-only':>16}", file=out)
    for job, figures in jobs.items():
        compute = figures.get("compute_only")
        for name, value in figures.items():
            is_rate = isinstance(value, float) and value > 0 and not name.endswith(("_pct", "_s"))
            if is_rate and not any(part in name for part in ("_over_", "waste", "mean_", "mixing")):
                share = f"{value / compute:>15.1%}" if compute else ""
                print(f"{job:<11} {name:<34} {shown(value):>14} {share:>16}", file=out)
    print(f"\n{'job':<11} {'target':<34} {'wanted':>14} {'measured':>16}", file=out)
    for job, figures in jobs.items():
        for name, wanted in TARGETS.get(job, {}).items():
            print(_line(job, name, f">= {wanted}", figures.get(name), lambda v, w=wanted: v >= w), file=out)
        for name in (name for name in figures if name.endswith("vram_host_cpu_pct")):
            at_most = f"<= {HOST_CPU_PCT_AT_MOST:.0f}"
            print(_line(job, name, at_most, figures[name], lambda v: v <= HOST_CPU_PCT_AT_MOST), file=out)
    return out.getvalue()


def _line(job: str, name: str, wanted: str, measured: float | None, met: Any) -> str:
    verdict = "not measured" if measured is None else f"{measured:.3f} {'ok' if met(measured) else 'MISSED'}"
    return f"{job:<11} {name:<34} {wanted:>14} {verdict:>16}"


def main() -> int:
    """Run the jobs asked for, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="cod,hdf5,text,clip", help="comma-separated: " + ", ".join(RUN))
    parser.add_argument("--out", default="feed-bench.json", help="where the figures are written after each job")
    parser.add_argument("--workers", default="8,12,16,4", help="worker counts of the stock DataLoader, in this order")
    parser.add_argument("--parts", default="stock,tiers,peers", help="what to measure of cod and clip beside vram")
    parser.add_argument("--flips-only", action="store_true", help="cod with a flip in the place of the recipe's chain")
    parser.add_argument("--turns", type=int, default=24, help="how often fed and compute-only take turns, at least")
    parser.add_argument("--budget-s", type=float, default=280.0, help="seconds for all jobs together")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--child", choices=RUN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.workers = "1"
    if arguments.child:
        faulthandler.dump_traceback_later(arguments.budget_s)  # where it is, before it is ended
        left_s = process_start_s() + arguments.budget_s - time.monotonic()
        return measure(arguments.child, Path(arguments.out), left_s, arguments)
    chosen = [job for job in arguments.jobs.split(",") if job]
    if unknown := set(chosen) - set(RUN):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    result: dict[str, Any] = {"versions": {}, "command": sys.argv, "jobs": {}, "problems": {}}
    deadline_s = process_start_s() + arguments.budget_s
    for job in chosen:
        left_s = deadline_s - GRACE_S - time.monotonic()
        if left_s < 10:
            result["problems"][job] = "no time left"
            continue
        budget_s, out = min(BUDGET_S[job], left_s), Path(arguments.out).with_suffix(f".{job}.json")
        given = [*sys.argv[1:], "--child", job, "--out", str(out), "--budget-s", str(budget_s)]
        figures, problem = measured_in_child(__file__, given, out, budget_s + GRACE_S)
        result["versions"] = figures.pop("machine", {}).get("versions", result["versions"])
        result["jobs"].update(figures)
        if problem is not None:
            result["problems"][job] = problem
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["jobs"]))
    for job, problem in result["problems"].items():
        print(f"{job}: {problem}")
    print(f"figures: {arguments.out}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
