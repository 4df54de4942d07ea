"""What recording costs, measured in one process: short blocks of steps with and without the recorder, in turn.

    python bench/overhead.py [--pairs 300] [--block-steps 64] [--job launch] [--out overhead.json]
    python bench/overhead.py --job workers      three jobs with busy loader workers
    python bench/overhead.py --ranks 2          ranks of DDP over gloo, on CPUs

Prints a table and writes JSON. Each pair is a recorded and a plain block of the same loop on the same model, right
after each other: the machine's pace changes from second to second by a third. ``cost`` is the mean over the pairs of
recorded over plain, without the lowest and the highest tenth, with a 95 % interval (bootstrap); ``whole`` is all
recorded time over all plain time. In plain blocks the recorder is off: no hooks, Python's default switch interval of
the interpreter lock, and a sleeping thread.

Jobs with workers have two DataLoaders, one made with the recorder and one without: the workers of one are idle while
the other is measured.

The machine's sampler of `fulltilt run` lives in another process and runs throughout. Where the peer traceml-ai is
installed, its step context is measured the same way, in the training process alone: its plain blocks run after it has
patched torch, which it does once and for all, and its aggregator runs in a process of its own, as our sampler does.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import random
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
from children import versions
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fulltilt.recorder import stack_sampler
from fulltilt.recorder.session import Session
from fulltilt.store import create_folder

WORKERS = 8
# The recorder measures each of the first 300 steps, and takes more stack samples in the first half minute. Putting
# hooks in place or back has Python adapt its bytecode to torch's classes anew, within some fifty steps.
WARM_UP_S, BLOCK_WARM_UP_STEPS = 30.0, 64
TRIMMED = 0.1
PYTHONS_TURN_S = sys.getswitchinterval()

Batch = tuple[torch.Tensor, torch.Tensor]
StepContext = Callable[[nn.Module], AbstractContextManager[Any]]
Block = Callable[[int], float]


class Ready(Dataset[Batch]):
    """One batch in memory, so that the loop itself is measured. ``busy_s``: CPU time to spend on each batch."""

    def __init__(self, batch: int, width: int, pin: bool = False, busy_s: float = 0.0) -> None:
        self.x, self.y = torch.randn(batch, width), torch.zeros(batch, dtype=torch.long)
        self.busy_s = busy_s
        if pin:
            self.x, self.y = self.x.pin_memory(), self.y.pin_memory()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Batch:
        began = time.thread_time()
        while time.thread_time() - began < self.busy_s:
            sum(range(1000))
        return self.x, self.y


class Pictures(Dataset[Batch]):
    """Batches of JPEG pictures, decoded and flipped as image trainers do."""

    def __init__(self, batch: int, side: int = 224) -> None:
        from PIL import Image

        self.batch, self.side, self.files = batch, side, list[bytes]()
        for seed in range(32):
            noise = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
            file = io.BytesIO()
            Image.fromarray(noise.numpy()).resize((side, side)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Batch:
        import numpy as np
        from PIL import Image

        files = (self.files[(index + n) % len(self.files)] for n in range(self.batch))
        pictures = (torch.from_numpy(np.array(Image.open(io.BytesIO(file)))).permute(2, 0, 1) for file in files)
        stacked = torch.stack([p.flip(-1) if random.random() < 0.5 else p for p in pictures])
        return stacked.float().div_(255), torch.zeros(self.batch, dtype=torch.long)


def mlp(width: int, depth: int) -> nn.Module:
    """Linear layers."""
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def resnet() -> nn.Module:
    """A ResNet-50."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50(num_classes=10)
    return model


class Loop:
    """A plain training loop that can be run for a block of time."""

    def __init__(self, model: nn.Module, data: Dataset[Batch], workers: int, device: str) -> None:
        self.device, self.model, self.data, self.workers = device, model.to(device), data, workers
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.batches = dict[str, Iterator[Batch]]()

    def run(self, steps: int, loader: str = "plain", around: StepContext = nullcontext) -> float:
        """Train for so many steps from this loader's pass, which goes on; seconds a step, without the first steps."""
        if loader not in self.batches:
            pin = bool(self.workers) and self.device == "cuda"
            self.batches[loader] = iter(DataLoader(self.data, None, num_workers=self.workers, pin_memory=pin))
        self._synchronize()
        began = 0.0
        for number in range(BLOCK_WARM_UP_STEPS + steps):
            if number == BLOCK_WARM_UP_STEPS:
                self._synchronize()
                began = time.perf_counter()
            inputs, labels = next(self.batches[loader])
            with around(self.model):
                self._step(inputs, labels)
        self._synchronize()
        return (time.perf_counter() - began) / steps

    def warm_up(self, seconds: float, loader: str, around: StepContext = nullcontext) -> None:
        """Train until the first seconds of recording are over."""
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            self.run(64, loader, around)

    def run_steps(self, steps: int, loader: str) -> tuple[float, float]:
        """Train for so many steps, as all ranks do; wall and CPU time of a step in this process."""
        cpu_s = time.process_time()
        wall_s = self.run(steps, loader)
        return wall_s, (time.process_time() - cpu_s) / (steps + BLOCK_WARM_UP_STEPS)

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        x, y = inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=x.dim() == 4):
            loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def observed(loop: Loop, warm_up_s: float) -> Iterator[Block]:
    """Blocks with the recorder, long after its first seconds. Between blocks it is switched off."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(torch, create_folder(Path(folder) / "run"), time.perf_counter_ns())
        turns, usual = session.observer.switch_interval, stack_sampler.StackSampler.usually_every_s

        def switch_off() -> None:
            session.restore()
            turns.apply = lambda: None  # type: ignore[method-assign]
            stack_sampler.StackSampler.usually_every_s = 0.2  # type: ignore[assignment,method-assign]
            sys.setswitchinterval(PYTHONS_TURN_S)

        def block(steps: int) -> float:
            vars(turns).pop("apply")
            stack_sampler.StackSampler.usually_every_s = usual  # type: ignore[method-assign]
            turns.apply()
            session.patch()
            try:
                return loop.run(steps, "observed")
            finally:
                switch_off()

        session.install()
        loop.warm_up(warm_up_s, "observed")
        switch_off()
        yield block
        session.finish()
        stack_sampler.StackSampler.usually_every_s = usual  # type: ignore[method-assign]


@contextmanager
def with_peer(loop: Loop, warm_up_s: float) -> Iterator[Block]:
    """Blocks inside the step context of traceml-ai."""
    import traceml_ai

    with tempfile.TemporaryDirectory() as logs:
        serve = "from traceml_ai.launcher.cli import main; main()"
        aggregator = subprocess.Popen([sys.executable, "-c", serve, "serve", "--logs-dir", logs])
        try:
            traceml_ai.init(mode="auto", on_missing_aggregator="raise")
            loop.warm_up(warm_up_s, "plain", traceml_ai.trace_step)
            yield lambda steps: loop.run(steps, around=traceml_ai.trace_step)
        finally:
            aggregator.kill()


def jobs(device: str) -> dict[str, Callable[[], Loop]]:
    """The jobs that are measured, by name: without workers, and with busy ones."""
    if device == "cpu":
        return {
            "1.5 ms": lambda: Loop(mlp(128, 6), Ready(32, 128), 0, device),
            "10 ms": lambda: Loop(mlp(512, 8), Ready(64, 512), 0, device),
            "10 ms, workers": lambda: Loop(mlp(512, 8), Ready(64, 512, busy_s=0.004), 1, device),
        }
    return {
        "1.5 ms, GPU-bound": lambda: Loop(mlp(2048, 3), Ready(1024, 2048, pin=True), 0, device),
        "launch-bound": lambda: Loop(mlp(256, 12), Ready(64, 256, pin=True), 0, device),
        "10 ms, GPU-bound": lambda: Loop(mlp(4096, 5), Ready(1024, 4096, pin=True), 0, device),
        "ResNet-50, workers": lambda: Loop(resnet(), Pictures(64), WORKERS, device),
        "launch-bound, workers": lambda: Loop(mlp(256, 12), Ready(64, 256, busy_s=0.012), WORKERS, device),
        "GPU-bound, workers": lambda: Loop(mlp(8192, 6), Ready(512, 8192, busy_s=0.05), WORKERS, device),
    }


def compare(loop: Loop, block: Block, pairs: int, steps: int) -> dict[str, float]:
    """Blocks in turn: the cost of one against the plain loop."""
    plain, other = list[float](), list[float]()
    for number in range(pairs):
        order: list[tuple[list[float], Block]] = [(plain, loop.run), (other, block)]
        for figures, measure in order if number % 2 else reversed(order):
            figures.append(measure(steps))
    return cost_of(plain, other)


def cost_of(plain: list[float], other: list[float]) -> dict[str, float]:
    """What the blocks of ``other`` cost against the plain ones beside them; both in seconds a step."""
    ratios = [100 * (b / a - 1) for a, b in zip(plain, other, strict=True)]
    draw = random.Random(0)
    means = sorted(trimmed_mean(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "plain_step_ms": 1e3 * statistics.median(plain),
        "observed_step_ms": 1e3 * statistics.median(other),
        "pairs": len(ratios),
        "cost_pct": trimmed_mean(ratios),
        "cost_low_pct": means[50],
        "cost_high_pct": means[-50],
        "whole_pct": 100 * (sum(other) / sum(plain) - 1),
    }


def trimmed_mean(ratios: list[float]) -> float:
    """Their mean without the lowest and the highest tenth."""
    cut = int(TRIMMED * len(ratios))
    return statistics.mean(sorted(ratios)[cut : len(ratios) - cut])


RANK_BLOCK_STEPS = 20


def measure_rank(rank: int, ranks: int, pairs: int, folder: str) -> None:
    """One rank of DDP: blocks of the same steps on all of them, with the recorder attached and without."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    loop = Loop(nn.parallel.DistributedDataParallel(mlp(768, 8)), Ready(64, 768), 0, "cpu")
    session = Session(torch, Path(folder) / "run", time.perf_counter_ns())
    session.install()
    loop.run_steps(10 * RANK_BLOCK_STEPS, "observed")
    session.restore()
    plain, other = list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(pairs):
        for observing in (True, False) if number % 2 else (False, True):
            if observing:
                session.patch()
            (other if observing else plain).append(loop.run_steps(RANK_BLOCK_STEPS, "observed"))
            if observing:
                session.restore()
    session.finish()
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"plain": plain, "observed": other}))
    torch.distributed.destroy_process_group()


def compare_ranks(ranks: int, pairs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """What recording costs a step of all ranks, in wall time and in CPU time, which other jobs do not change."""
    with tempfile.TemporaryDirectory() as folder:
        create_folder(Path(folder) / "run")
        torch.multiprocessing.spawn(measure_rank, (ranks, pairs, folder), ranks)  # type: ignore[attr-defined, no-untyped-call]
        told = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for place, clock in enumerate(("wall", "CPU")):
        plain, other = (
            [statistics.mean(rank[kind][n][place] for rank in told) for n in range(pairs)]
            for kind in ("plain", "observed")
        )
        yield f"{ranks} ranks, {clock} time", cost_of(plain, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--block-steps", type=int, default=64)
    parser.add_argument("--warm-up-s", type=float, default=WARM_UP_S, help="under observation, before the first pair")
    parser.add_argument("--only", choices=("fulltilt", "traceml"), help="measure one of them")
    parser.add_argument("--job", default="", help="only jobs with this in their name")
    parser.add_argument("--ranks", type=int, default=1, help="of DDP over gloo; then nothing else is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    device = options.device
    found: dict[str, Any] = {"versions": versions(("torch", "traceml-ai")), "results": []}

    def note(job: str, variant: str, cost: dict[str, float]) -> None:
        found["results"].append({"job": job, "variant": variant, **cost})
        options.out.write_text(json.dumps(found, indent=1))
        told = (
            "{plain_step_ms:8.3f} ms plain {observed_step_ms:8.3f} ms observed  cost {cost_pct:+5.2f} %"
            " ({cost_low_pct:+.2f} to {cost_high_pct:+.2f}), whole {whole_pct:+.2f} %"
        )
        print(f"{job:22} {variant:9}", told.format(**cost), flush=True)

    if options.ranks > 1:
        for name, cost in compare_ranks(options.ranks, options.pairs):
            note(name, "fulltilt", cost)
        return
    if device == "cpu":
        torch.set_num_threads(1)
    watch = [sys.executable, "-m", "fulltilt", "watch", "--interval", "1"]
    sampler = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # The peer patches torch for good, so everything else is measured before it.
        for variant, prepared in {"fulltilt": observed, "traceml": with_peer}.items():
            if options.only not in (None, variant):
                continue
            if variant == "traceml" and importlib.util.find_spec("traceml_ai") is None:
                print("traceml-ai is not installed: not measured")
                continue
            for name, make in jobs(device).items():
                if options.job not in name:
                    continue
                loop = make()
                loop.run(options.block_steps)
                with prepared(loop, options.warm_up_s) as block:
                    note(name, variant, compare(loop, block, options.pairs, options.block_steps))
    finally:
        sampler.kill()


if __name__ == "__main__":
    main()
