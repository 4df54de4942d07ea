"""The recipes with full-size models: fed against compute-only, and end to end against the usual settings.

    python bench/recipes.py                      all rows, on a GPU; about six minutes on an H200
    python bench/recipes.py --only cod           one row; may be given again
    python bench/recipes.py --compile            the image recipes with torch.compile
    python bench/recipes.py --only cod --run     after the row: the command itself, from its start to its last epoch
    python bench/recipes.py --smoke              tiny models on the CPU: does the benchmark itself work?

Each row runs in a process of its own and writes its figures as it gets them (OUT.<row>.json). Rates are samples per
second by the wall clock, the device drained at both ends. "compute-only" is the plain torch step of the same model on
a batch that is on the device already, replayed from CUDA graphs where the recipe does so. It takes turns with the fed
steps within one process; fed turns lie inside an epoch, without validation and checkpoints; "fed ÷ compute" is the
median over the turns. "stock" is a stock DataLoader with the usual batch, workers and precision. Weights are
random: their values do not change the speed. With --run, "run" is samples over wall time after start-up with first
epoch, evaluation, saves and the turn of epochs on the clock, by the run's own ledger.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from children import measured_in_child, versions

# Row → the seconds it may take, with what compiling would add.
ROWS = {"cod": 120.0, "carclip": 110.0, "visobert": 95.0, "hdf5": 75.0}
COMPILING_S = 170.0
# What a row measures, with the heading of its column.
COLUMNS = {
    "compute_only": "compute-only/s",
    "fed": "fed/s",
    "fed_over_compute": "fed ÷ compute",
    "gpu_util_pct": "GPU %",
    "sm_active_pct": "SM %",
    "stock": "stock/s",
    "fed_over_stock": "× stock",
    "fed_at_stock_batch": "at its batch/s",
    "fed_at_stock_batch_over_stock": "× stock",
    "promised": "promised",
}
WANTED_FED_OVER_COMPUTE = 0.97
# For --run: what make-data calls the data, how many samples (COD10K has 6,000 to train on), and the recipe's options.
WHOLE_RUNS: dict[str, tuple[str, int, list[str]]] = {
    "cod": (
        "cod",
        8000,
        ["--skip-stage1", "--no-progressive-unfreeze", "--batch-size", "64", "--epochs", "16", "--eval-every", "4"],
    ),
    "carclip": ("cars", 8000, ["--model", "vit-b-32", "--batch-size", "256", "--epochs", "8"]),
    "visobert": ("text", 60_000, ["--batch-size", "512", "--epochs", "4"]),
    "hdf5": ("hdf5", 200_000, ["--batch-size", "8192", "--epochs", "8"]),
}
SMALL_RUNS: dict[str, list[str]] = {"cod": ["--backbone", "test_resnet", "--img-size", "32"], "carclip": []}
PACKAGES = ("torch", "timm", "transformers", "h5py", "pillow", "fulltilt")


def child(arguments: argparse.Namespace) -> int:
    """Measure one row in this process."""
    from recipebench.measuring import Bench

    bench = Bench(Path(arguments.out), arguments.budget_s, smoke=arguments.smoke, compiles=arguments.compile)
    try:
        importlib.import_module(f"recipebench.{arguments.child}").run(bench)
    except Exception as error:
        traceback.print_exc()
        bench.note(failed=f"{type(error).__name__}: {str(error)[:300]}")
        return 1
    finally:
        bench.close()
    return 0


def measure(row: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """One row in a child process: its figures, and what went wrong."""
    out = Path(arguments.out).with_suffix(f".{row}.json")
    budget_s = arguments.budget_s or ROWS[row] + (COMPILING_S if arguments.compile else 0.0)
    given = ["--child", row, "--out", str(out), "--budget-s", str(budget_s)]
    given += [f"--{name}" for name in ("smoke", "compile") if getattr(arguments, name)]
    return measured_in_child(__file__, given, out, budget_s + 20)


def whole_run(row: str, figures: dict[str, Any], *, smoke: bool) -> str:
    """The recipe's own command on made data, from its start to its last epoch, in words."""
    kind, size, options = WHOLE_RUNS[row]
    if smoke:
        size, options = 60, [*SMALL_RUNS.get(row, []), "--batch-size", "8", "--epochs", "2"]
    with tempfile.TemporaryDirectory(prefix="fulltilt-recipes-") as folder:
        data, out = f"{folder}/data", f"{folder}/out"
        fulltilt("make-data", kind, data, "--size", str(size))
        workers = ["--workers", str(max(1, len(os.sched_getaffinity(0)) - 2))]
        began_s = time.perf_counter()
        fulltilt("train", row, "--data", data, "--out", out, *workers, *options)
        trained_s = time.perf_counter() - began_s
        report = json.loads(fulltilt("report", out, "--json"))
    ledger, samples = report["ledger"], report["throughput"]["samples"]
    spent = {name: seconds for name, seconds in ledger["buckets"].items() if seconds >= 0.05}
    rate = samples / (ledger["wall_s"] - ledger["buckets"]["startup_s"])
    figures["run"] = {"trained_s": trained_s, "samples": samples, "run": rate, "buckets": spent}
    compute, stock = figures.get("compute_only"), figures.get("stock")
    return (
        f"{row}: {' '.join(options)}: {samples:,} samples in {trained_s:.1f} s from the command to its end; after "
        f"start-up {rate:,.0f}/s"
        + (f", {rate / compute:.3f} of compute-only" if compute else "")
        + (f"; {samples / stock:.0f} s at the usual settings" if stock else "")
        + f"; {', '.join(f'{name} {seconds:.1f}' for name, seconds in spent.items())}"
    )


def fulltilt(*arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "fulltilt", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of the figures, and whether each recipe runs at its compute-only rate."""
    lines = ["| recipe | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row, figures in rows.items():
        lines.append(f"| {row} | " + " | ".join(shown(figures.get(name)) for name in COLUMNS) + " |")
    for row, figures in rows.items():
        share = figures.get("fed_over_compute")
        turns = f" (turn by turn: {', '.join(map(str, ratios))})" if (ratios := figures.get("ratios")) else ""
        verdict = "not measured" if share is None else "ok" if share >= WANTED_FED_OVER_COMPUTE else "MISSED"
        lines.append(f"{row}: fed ÷ compute-only ≥ {WANTED_FED_OVER_COMPUTE}: {shown(share)} {verdict}{turns}")
        lines += [f"{row}: {note}" for note in figures.get("notes", ())]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A figure for people; a dash where nothing was measured."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> int:
    """Measure the rows asked for, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ROWS, help="a row; may be given more than once")
    parser.add_argument("--out", default="recipes-bench.json", help="where the figures are written after each row")
    parser.add_argument("--budget-s", type=float, default=None, help="seconds for each row (default: its own)")
    parser.add_argument("--run", action="store_true", help="the recipe's command as well, from start to end")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--compile", action="store_true", help="with torch.compile, fed and compute-only alike")
    parser.add_argument("--child", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    result: dict[str, Any] = {"versions": versions(PACKAGES), "command": sys.argv, "rows": {}, "problems": {}}
    for row in arguments.only or ROWS:
        result["rows"][row], problem = measure(row, arguments)
        if problem is not None:
            known = ", ".join(result["rows"][row]) or "nothing"
            result["problems"][row] = f"{problem}; known by then: {known}"
        if arguments.run:
            print(whole_run(row, result["rows"][row], smoke=arguments.smoke))
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    for row, problem in result["problems"].items():
        print(f"{row}: {problem}")
    print(f"figures: {arguments.out}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
