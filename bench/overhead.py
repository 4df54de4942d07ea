"""What observing costs: the same job plain and under `fulltilt run`, alternating, at several step times.

    python bench/overhead.py [--rounds 4] [--seconds 6] [--out overhead.json]

Prints a table and writes JSON. Each figure is the median step time of the job's own stopwatch; the cost is the ratio of
observed to plain, pair by pair, with the spread over the pairs. Where the peer traceml-ai is installed it runs as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

width, depth, batch = (int(a) for a in sys.argv[1:4])
seconds, device = float(sys.argv[4]), sys.argv[5]
if device == "cpu":
    torch.set_num_threads(1)

class Ready(Dataset):
    def __init__(self):
        self.x = torch.randn(batch, width)
        self.y = torch.zeros(batch, dtype=torch.long)
        if device == "cuda":
            self.x, self.y = self.x.pin_memory(), self.y.pin_memory()
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        return self.x, self.y

layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
class Order:
    def __iter__(self):
        return iter(range(10**9))
    def __len__(self):
        return 10**9
times, last, began = [], None, None
for x, y in DataLoader(Ready(), batch_size=None, sampler=Order()):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    now = time.perf_counter()
    if began is None:
        began = now
    if now - began > 2.0:
        times.append(now - last)
    last = now
    if now - began > 2.0 + seconds:
        break
if device == "cuda":
    torch.cuda.synchronize()
print("STEP", sum(times) / len(times), len(times), flush=True)
"""
# name, width, depth, batch
SIZES = {
    "cuda": [
        ("1.5 ms, host-limited", 256, 12, 64),
        ("3 ms, host-limited", 512, 30, 64),
        ("10 ms, GPU-limited", 8192, 4, 2048),
    ],
    "cpu": [("1.5 ms", 256, 4, 32), ("10 ms", 512, 8, 128)],
}


def step_s(command: list[str], job: Path, size: tuple[str, int, int, int], seconds: float, device: str) -> float | None:
    """The job's own mean step time under a command prefix; None when it did not run."""
    arguments = [str(value) for value in size[1:]]
    done = subprocess.run(
        [*command, str(job), *arguments, str(seconds), device], capture_output=True, text=True, check=False, timeout=300
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("STEP")]
    if not lines:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return float(lines[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.py"
        job.write_text(JOB)
        variants = {
            "plain": [sys.executable],
            "fulltilt": [sys.executable, "-m", "fulltilt", "run", "--out", f"{folder}/run", "--"],
        }
        if shutil.which("traceml"):
            variants["traceml"] = ["traceml", "run"]
        for size in SIZES[device]:
            seen: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(options.rounds):
                for name, command in variants.items():
                    took = step_s(command, job, size, options.seconds, device)
                    if took is not None:
                        seen[name].append(took)
                    shutil.rmtree(f"{folder}/run", ignore_errors=True)
            for name, figures in seen.items():
                pairs = [a / b - 1 for a, b in zip(figures, seen["plain"], strict=False)]
                if name != "plain" and pairs:
                    results.append(
                        {
                            "size": size[0],
                            "variant": name,
                            "plain_step_ms": 1e3 * statistics.median(seen["plain"]),
                            "step_ms": 1e3 * statistics.median(figures),
                            "cost_pct": 100 * statistics.median(pairs),
                            "cost_low_pct": 100 * min(pairs),
                            "cost_high_pct": 100 * max(pairs),
                        }
                    )
                    row = results[-1]
                    print(
                        f"{row['size']:24} {name:10} plain {row['plain_step_ms']:8.3f} ms  observed {row['step_ms']:8.3f} ms"
                        f"  cost {row['cost_pct']:+6.2f} %  ({row['cost_low_pct']:+.2f} to {row['cost_high_pct']:+.2f})",
                        flush=True,
                    )
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine,
        "cpus": os.cpu_count(),
    }
    options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
