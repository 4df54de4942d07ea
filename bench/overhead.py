"""What observing costs, measured in one process: blocks of steps with the recorder attached and without, alternating.

    python bench/overhead.py [--pairs 20] [--block-s 0.5] [--job launch] [--out overhead.json]

Prints a table and writes JSON. Each pair is one observed and one plain block of the same loop on the same model. A
block is timed in chunks of 256 steps, a whole cycle of measuring and resting. Neighbours on the machine only ever add
time, and to a step that waits for the host up to a third of it; so the cost compares the lower quartile of all observed
chunks with that of all plain ones. Median and quartiles of the ratio over the pairs stand beside it.

The machine's sampler of `fulltilt run` lives in another process and runs throughout. Where the peer traceml-ai is
installed, its step context is measured the same way, in the training process alone: its plain blocks run after it has
patched torch, which it does once and for all, and its aggregator runs in a process of its own, as our sampler does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fulltilt.recorder.session import Session
from fulltilt.recorder.stacks import stack_sampler

# name, width, depth, batch
SIZES = {
    "cuda": [
        ("1.5 ms, GPU-bound", 2048, 3, 1024),
        ("launch-bound", 256, 12, 64),
        ("10 ms, GPU-bound", 4096, 5, 1024),
    ],
    "cpu": [("1.5 ms", 128, 6, 32), ("10 ms", 512, 8, 64)],
}
CHUNK_STEPS = 256
# The recorder measures the first 300 steps one and all and writes 100 of them singly: a matter of the first seconds.
WARM_UP_STEPS, WARM_UP_S = 2000, 3.0
BLOCK_WARM_UP_STEPS = 50

StepContext = Callable[[nn.Module], AbstractContextManager[Any]]
Block = Callable[[float], list[float]]


class Ready(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One batch, ready in memory: the loop itself is what is measured."""

    def __init__(self, batch: int, width: int, pin: bool) -> None:
        self.x, self.y = torch.randn(batch, width), torch.zeros(batch, dtype=torch.long)
        if pin:
            self.x, self.y = self.x.pin_memory(), self.y.pin_memory()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y


class Loop:
    """A plain training loop that can be run for a block of time."""

    def __init__(self, width: int, depth: int, batch: int, device: str) -> None:
        layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
        self.device = device
        self.model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.data = Ready(batch, width, pin=device == "cuda")

    def run(
        self, seconds: float, warm_up_steps: int = BLOCK_WARM_UP_STEPS, around: StepContext = nullcontext
    ) -> list[float]:
        """Train for a while; the mean step time of each chunk in seconds, without the first steps."""
        entered = time.perf_counter()
        began = chunk_began = 0.0
        steps, chunks = 0, list[float]()
        for number, (inputs, labels) in enumerate(DataLoader(self.data, batch_size=None)):
            with around(self.model):
                x, y = inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            if not began and (number == warm_up_steps or time.perf_counter() - entered > WARM_UP_S):
                self._synchronize()
                began = chunk_began = time.perf_counter()
            elif began:
                steps += 1
                if steps % CHUNK_STEPS == 0:
                    self._synchronize()
                    now = time.perf_counter()
                    chunks.append((now - chunk_began) / CHUNK_STEPS)
                    chunk_began = now
                    if now - began > seconds:
                        break
        return chunks

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def observed(loop: Loop) -> Iterator[Block]:
    """Blocks under Fulltilt's recorder, long after its first seconds. Between them it is put aside altogether."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(torch, Path(folder), time.perf_counter_ns())
        session.install()
        loop.run(0.0, WARM_UP_STEPS)
        session.restore()
        sample_every_s = stack_sampler.SAMPLE_EVERY_S

        def block(seconds: float) -> list[float]:
            stack_sampler.SAMPLE_EVERY_S = sample_every_s
            session.patch()
            try:
                return loop.run(seconds)
            finally:
                session.restore()
                stack_sampler.SAMPLE_EVERY_S = 0.2

        yield block
        session.finish()


@contextmanager
def with_peer(loop: Loop) -> Iterator[Block]:
    """Blocks inside the step context of traceml-ai."""
    import traceml_ai

    with tempfile.TemporaryDirectory() as logs:
        serve = "from traceml_ai.launcher.cli import main; main()"
        aggregator = subprocess.Popen([sys.executable, "-c", serve, "serve", "--logs-dir", logs])
        try:
            traceml_ai.init(mode="auto", on_missing_aggregator="raise")
            loop.run(0.0, WARM_UP_STEPS, traceml_ai.trace_step)
            yield lambda seconds: loop.run(seconds, around=traceml_ai.trace_step)
        finally:
            aggregator.kill()


def compare(loop: Loop, block: Block, pairs: int, seconds: float) -> dict[str, float]:
    """Alternating blocks: the cost of one against the plain loop."""
    plain, other = list[list[float]](), list[list[float]]()
    for number in range(pairs):
        order: list[tuple[list[list[float]], Block]] = [(plain, loop.run), (other, block)]
        for figures, measure in order if number % 2 else reversed(order):
            figures.append(measure(seconds))
    ratios = [100 * (statistics.mean(b) / statistics.mean(a) - 1) for a, b in zip(plain, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    quiet, quiet_other = (lower_quartile([chunk for block in blocks for chunk in block]) for blocks in (plain, other))
    means = [statistics.mean(block) for block in plain]
    return {
        "plain_step_ms": 1e3 * quiet,
        "observed_step_ms": 1e3 * quiet_other,
        "cost_pct": 100 * (quiet_other / quiet - 1),
        "pairs_median_pct": middle,
        "pairs_q1_pct": low,
        "pairs_q3_pct": high,
        "plain_spread_pct": 100 * (max(means) / min(means) - 1),
    }


def lower_quartile(chunks: list[float]) -> float:
    """The time of a chunk in a quiet moment."""
    return sorted(chunks)[len(chunks) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-s", type=float, default=0.5)
    parser.add_argument("--only", choices=("fulltilt", "traceml"), help="measure one of them")
    parser.add_argument("--job", default="", help="only jobs with this in their name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        torch.set_num_threads(1)
    watch = [sys.executable, "-m", "fulltilt", "watch", "--interval", "1"]
    sampler = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results: list[dict[str, Any]] = []
    try:
        # The peer patches torch for good, so everything else is measured before it.
        for variant, prepared in {"fulltilt": observed, "traceml": with_peer}.items():
            if options.only not in (None, variant):
                continue
            if variant == "traceml" and importlib.util.find_spec("traceml_ai") is None:
                print("traceml-ai is not installed: not measured")
                continue
            for name, width, depth, batch in SIZES[device]:
                if options.job not in name:
                    continue
                loop = Loop(width, depth, batch, device)
                loop.run(options.block_s)
                with prepared(loop) as block:
                    row = {"job": name, "variant": variant, **compare(loop, block, options.pairs, options.block_s)}
                results.append(row)
                spread = f"{row['pairs_median_pct']:+.2f}, {row['pairs_q1_pct']:+.2f} to {row['pairs_q3_pct']:+.2f}"
                print(
                    f"{name:22} {variant:9} {row['plain_step_ms']:8.3f} ms plain {row['observed_step_ms']:8.3f} ms"
                    f" observed  cost {row['cost_pct']:+5.2f} % (pairs {spread})",
                    flush=True,
                )
    finally:
        sampler.kill()
        machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": machine}
        options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
