"""How close to compute-only a fed job runs: stock DataLoader against feed.loader on every tier, all in one run.

    python bench/feed.py                              all jobs, on the GPU
    python bench/feed.py --jobs cod,hdf5 --out x.json
    python bench/feed.py --smoke                      tiny models on the CPU: does the benchmark itself work?

Each job runs in a process of its own and writes its figures as it gets them (OUT.<job>.json), so that a job that fails
or is cut off loses only what it had not measured yet. What has a target is measured first. Rates are samples per
second, by the wall clock, the device drained at both ends. "compute-only" is the same step on a batch that is already
on the device, measured in turn with the fed one.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from children import measured_in_child, versions
from feedbench.decode import run_decode
from feedbench.images import run_clip, run_cod
from feedbench.measuring import Bench, shown
from feedbench.text import run_text
from feedbench.windows import run_hdf5

from fulltilt.feed.tiers import default_workers

RUN = {"cod": run_cod, "clip": run_clip, "text": run_text, "hdf5": run_hdf5, "decode": run_decode}
# Seconds a job may take, start and compilation included (cod: two minutes and a half of it on an H200).
BUDGET_S = {"cod": 320, "clip": 140, "text": 75, "hdf5": 115, "decode": 50}
TARGETS = {
    "cod": {
        "fed_over_compute": 0.97,
        "fed_over_best_stock": 2.5,
        "disk_over_compute": 0.90,
        "first_epoch_over_best_stock_first": 1.0,
    },
    "clip_b256": {"fed_over_compute": 0.97, "first_epoch_over_best_stock_first": 1.0},
    "clip_b1024": {"fed_over_compute": 0.97},
    "text": {"fed_over_compute": 0.97, "fed_over_pad_to_128": 1.5},
    "hdf5": {"fed_over_compute": 0.95, "fed_over_guide_5": 100.0},
}
PACKAGES = ("torch", "torchvision", "timm", "transformers", "h5py", "pillow", "webdataset", "spdl-core")
HOST_CPU_PCT_AT_MOST = 40.0


def child(arguments: argparse.Namespace) -> int:
    """Run one job in this process."""
    workers = [int(number) for number in arguments.workers.split(",")]
    parts = arguments.parts.split(",")
    bench = Bench(Path(arguments.out), arguments.budget_s, smoke=arguments.smoke, workers=workers, parts=parts)
    try:
        RUN[arguments.child](bench)
    except Exception as error:
        traceback.print_exc()
        bench.note(arguments.child, "failed", f"{type(error).__name__}: {str(error)[:300]}")
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
            wanted = f"<= {HOST_CPU_PCT_AT_MOST:.0f}"
            print(_line(job, name, wanted, figures[name], lambda v: v <= HOST_CPU_PCT_AT_MOST), file=out)
    return out.getvalue()


def _line(job: str, name: str, wanted: str, measured: float | None, met: Any) -> str:
    verdict = "not measured" if measured is None else f"{measured:.3f} {'ok' if met(measured) else 'MISSED'}"
    return f"{job:<11} {name:<34} {wanted:>14} {verdict:>16}"


def run(job: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """One job in a child process: its figures, and what went wrong."""
    budget_s = arguments.budget_s or BUDGET_S[job]
    out = Path(arguments.out).with_suffix(f".{job}.json")
    given = ["--child", job, "--out", str(out), "--budget-s", str(budget_s)]
    given += ["--workers", arguments.workers, "--parts", arguments.parts, *(["--smoke"] if arguments.smoke else [])]
    return measured_in_child(__file__, given, out, budget_s + 25)


def main() -> int:
    """Run the jobs asked for, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(RUN), help="comma-separated: " + ", ".join(RUN))
    parser.add_argument("--out", default="feed-bench.json", help="where the figures are written after each job")
    parser.add_argument("--workers", default="4,8,12,16", help="worker counts of the stock DataLoader")
    parser.add_argument("--parts", default="stock,tiers,jpeg,peers", help="what to measure of cod and clip beside vram")
    parser.add_argument("--budget-s", type=float, default=None, help="seconds for each job (default: its own)")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--child", choices=RUN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    chosen = [job for job in arguments.jobs.split(",") if job]
    if unknown := set(chosen) - set(RUN):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    if arguments.smoke:
        arguments.workers = "1"
    result: dict[str, Any] = {
        "versions": {**versions(PACKAGES), "workers": default_workers()},
        "command": sys.argv,
        "jobs": {},
        "problems": {},
    }
    for job in chosen:
        figures, problem = run(job, arguments)
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
