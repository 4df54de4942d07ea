"""Rates by the wall clock, the device drained at both ends, each figure written down as soon as it is known."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from children import IN_MEMORY, drain
from torch.utils.data import DataLoader

from fulltilt.train.cuda_graphs import GraphedModel

# How far the host may run ahead of the GPU.
AHEAD_S = 0.25
WARM_UP_ROUNDS, LEAST_ROUNDS = 2, 3
# Turns go on until their median is known to so much, or time is up.
MOST_TURNS, WANTED_ERROR = 96, 0.01
# What other figures of the job then need.
AFTER_TURNS_S = 60

Batches = Callable[[], Iterable[Any]]
Step = Callable[[Any], None]


class Bench:
    """What one job needs: the device, the sizes of a smoke run or a real one, and somewhere to note figures."""

    def __init__(self, out: Path, budget_s: float, asked: argparse.Namespace) -> None:
        self.out, self.smoke, self.turns, self.flips_only = out, asked.smoke, asked.turns, asked.flips_only
        self.workers, self.parts = [int(number) for number in asked.workers.split(",")], asked.parts.split(",")
        self.device = torch.device("cpu" if self.smoke or not torch.cuda.is_available() else "cuda")
        self.began_s = time.monotonic()
        self.deadline_s = self.began_s + budget_s
        self.results: dict[str, dict[str, Any]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="fulltilt-bench-", dir=IN_MEMORY))
        # The disk tier has to live on a disk, whatever the source files live on.
        self.cache_dir = Path(tempfile.mkdtemp(prefix="fulltilt-bench-cache-"))
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    def note(self, job: str, name: str, value: Any) -> None:
        """Write a figure down at once."""
        self.results.setdefault(job, {})[name] = round(value, 4) if isinstance(value, float) else value
        print(f"{time.monotonic() - self.began_s:6.1f} s  {job:<11} {name:<34} {shown(value)}", flush=True)
        self.out.write_text(json.dumps(self.results, indent=1))

    def has_time_for(self, seconds: float) -> bool:
        """Whether a measurement of ``seconds`` still fits; a smoke run has time for everything."""
        return self.smoke or self.deadline_s - time.monotonic() > seconds

    def drain(self) -> None:
        """Wait for the device."""
        drain(self.device)

    def rate(
        self, step: Step, batches: Batches, size: Callable[[Any], int], seconds: float, *, workers: int = 1
    ) -> tuple[float, float]:
        """Samples per second over ``seconds`` of endless epochs of ``batches``, and host CPU use in percent."""
        stream = endless(batches)
        try:
            for _ in range(self._warm_up(workers)):
                step(next(stream))
            psutil.cpu_percent()
            return self._turn(step, stream, size, seconds, workers), psutil.cpu_percent()
        finally:
            stream.close()

    def first_and_steady_rate(
        self, step: Step, batches: Batches, size: Callable[[Any], int], samples: int, seconds: float, workers: int
    ) -> tuple[float, float]:
        """Of a stock loader: its first epoch of ``samples``, the start of workers included, and its steady state.

        The epoch is not waited for: what is left of it after the first batches goes on at the steady rate.
        """
        began, early, first_s = time.perf_counter(), 0, None
        stream = endless(batches)
        for _ in range(self._warm_up(workers)):
            batch = next(stream)
            step(batch)
            early += size(batch)
            if first_s is None and early >= samples:
                self.drain()
                first_s = (time.perf_counter() - began) * samples / early
        self.drain()
        warm_s = time.perf_counter() - began
        steady = self._turn(step, stream, size, seconds, workers)
        stream.close()
        return samples / (first_s or warm_s + (samples - early) / steady), steady

    def _warm_up(self, workers: int) -> int:
        """Until the queue of a loader (two batches a worker) was filled by workers that all run."""
        return workers if self.smoke else max(5, WARM_UP_ROUNDS * workers)

    def epoch_rate(self, step: Step, batches: Iterable[Any], size: Callable[[Any], int]) -> float:
        """Samples per second over one whole epoch, the start of workers included."""
        began, samples = time.perf_counter(), 0
        for batch in batches:
            step(batch)
            samples += size(batch)
        self.drain()
        return samples / (time.perf_counter() - began)

    def against_compute(
        self, job: str, name: str, step: Step, ready: Batches, fed: Batches, size: Callable[[Any], int]
    ) -> float:
        """Compute-only and ``fed`` in many short turns; the ratio is their median. Returns the compute-only rate.

        A step that waits for the host takes up to a third longer from one second to the next, and the clock drifts.
        """
        turn_s, turns, warm_up = (0.05, 2, 1) if self.smoke else (0.5, self.turns, 10)
        streams = {"compute_only": endless(ready), name: endless(fed)}
        for stream in streams.values():
            for _ in range(warm_up):
                step(next(stream))
        rates: dict[str, list[float]] = {kind: [] for kind in streams}
        cpu = []
        order = list(streams)
        ratios: list[float] = []
        while len(ratios) < turns or (not self.smoke and not _settled(ratios) and self.has_time_for(AFTER_TURNS_S)):
            for kind in order:
                stream = streams[kind]
                psutil.cpu_percent()
                rates[kind].append(self._turn(step, stream, size, turn_s))
                if kind == name:
                    cpu.append(psutil.cpu_percent())
            order.reverse()  # what drifts on the machine favours neither
            ratios.append(rates[name][-1] / rates["compute_only"][-1])
        for stream in streams.values():
            stream.close()
        for kind, figures in rates.items():
            self.note(job, kind, statistics.median(figures))
        self.note(job, f"{name}_host_cpu_pct", statistics.fmean(cpu))
        self.note(job, "fed_over_compute", statistics.median(ratios))
        self.note(job, "fed_over_compute_error", median_error(ratios))
        self.note(job, "fed_over_compute_turns", [round(ratio, 4) for ratio in ratios])
        return statistics.median(rates["compute_only"])

    def _turn(
        self, step: Step, stream: Iterator[Any], size: Callable[[Any], int], seconds: float, workers: int = 1
    ) -> float:
        """Samples per second of a stretch; of a loader with workers at least some rounds."""
        seconds = min(seconds, 0.2) if self.smoke else seconds
        least = 1 if self.smoke or workers == 1 else LEAST_ROUNDS * workers
        return samples_per_s(step, stream, size, seconds, self.device, workers, least)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.cache_dir, ignore_errors=True)


def median_error(figures: list[float]) -> float:
    """The standard error of their median, from their distances to it, which outliers do not move."""
    middle = statistics.median(figures)
    spread = 1.4826 * statistics.median(abs(figure - middle) for figure in figures)
    return 1.2533 * spread / math.sqrt(len(figures))


def _settled(ratios: list[float]) -> bool:
    return len(ratios) >= MOST_TURNS or median_error(ratios) < WANTED_ERROR


def endless(batches: Batches) -> Generator[Any, None, None]:
    """Epoch after epoch."""
    while True:
        any_there = False
        for batch in batches():
            any_there = True
            yield batch
        if not any_there:
            raise ValueError("an epoch without a batch")


def shown(value: Any) -> str:
    """A figure as people read it."""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def first_of(batch: Any) -> int:
    """The samples of a batch whose first part is a tensor."""
    return len(batch[0])


def stock_loader(dataset: Any, batch_size: int, workers: int, device: torch.device, **options: Any) -> DataLoader[Any]:
    """torch's DataLoader as trainers set it up; ``options`` are its other arguments."""
    usual = {"shuffle": True, "drop_last": True, "persistent_workers": workers > 0}
    given = {**usual, "pin_memory": device.type == "cuda", **options}
    return DataLoader(dataset, batch_size, num_workers=workers, **given)


def on_device(loader: DataLoader[Any], device: torch.device) -> Iterator[Any]:
    """The batches of a stock DataLoader, moved the way everybody moves them."""
    for batch in loader:
        yield [part.to(device, non_blocking=True) for part in batch]


def samples_per_s(
    step: Step,
    stream: Iterator[Any],
    size: Callable[[Any], int],
    seconds: float,
    device: torch.device,
    together: int = 1,
    least: int = 1,
) -> float:
    """Samples per second of a stretch of ``least`` steps or more, the device drained at both ends and on the way.

    Workers begin together and so deliver together: of ``together`` steps only whole rounds count.
    """
    drain(device)
    began_s, samples, steps, drain_at = time.perf_counter(), 0, 0, 8
    while steps < least or steps % together or time.perf_counter() - began_s < seconds:
        batch = next(stream)
        step(batch)
        samples += size(batch)
        steps += 1
        if steps == drain_at:  # the host runs seconds ahead of a GPU that it gives whole graphs
            drain(device)
            drain_at += max(1, int(AHEAD_S * steps / (time.perf_counter() - began_s)))
    drain(device)
    return samples / (time.perf_counter() - began_s)


def plain_step(
    model: Any,
    loss_of: Callable[[Any, Any], Any],
    *,
    lr: float = 1e-4,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """A training step as one writes it by hand: autocast on a GPU, clipping, fused AdamW; fp16 with its scaler.

    Nothing in it waits for the GPU.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=on_gpu)
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu and dtype == torch.float16)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            outcome = loss_of(model, batch)
        value = outcome[0] if isinstance(outcome, tuple) else outcome
        scaler.scale(value).backward()  # type: ignore[no-untyped-call, unused-ignore]
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def trainer(model: Any, loss_of: Callable[[Any, Any], torch.Tensor]) -> Step:
    """The plain step of a model that is on its device, replayed from CUDA graphs there."""
    if next(model.parameters()).device.type == "cuda":
        GraphedModel(getattr(model, "_orig_mod", model), model, print)
    return plain_step(model, loss_of, lr=1e-5)
