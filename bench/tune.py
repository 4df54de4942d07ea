"""Tuning measured: the study against a full grid, and live tuning against an exhaustive sweep.

    python bench/tune.py study                 on a GPU; about five minutes on an H200 with 16 CPUs
    python bench/tune.py study --grid full     every point of the grid measured instead of counted
    python bench/tune.py study --smoke         tiny, on the CPU: does the benchmark itself work?
    python bench/tune.py live [--smoke]        the same; about five minutes

Prints a JSON object and writes it to --out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("study", "live"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--grid", choices=("workers", "full"), default="workers")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    answer = importlib.import_module(f"tunebench.{arguments.part}").bench(arguments)
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    answer = {"machine": on, "torch": torch.__version__, "python": platform.python_version(), **answer}
    text = json.dumps(answer, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
