"""What the rows share: rates with the device drained at both ends, the engine in steady state, the GPU beside it."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import StoppedEarly
from fulltilt.probes.sampler import Sampler
from fulltilt.records import Sample
from fulltilt.train import Job, StepEnd, TrainSettings, train
from fulltilt.train.progress import Silence


class Bench:
    """Where a row notes its figures, its scratch folder, and how much of its time is left."""

    def __init__(self, out: Path, budget_s: float, *, smoke: bool) -> None:
        self.out, self.smoke = out, smoke
        self.device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
        self.figures: dict[str, Any] = {}
        self._ends_s = time.monotonic() + budget_s
        shared = Path("/dev/shm")
        self.work = Path(tempfile.mkdtemp(prefix="fulltilt-recipes-", dir=shared if shared.is_dir() else None))

    def note(self, name: str, value: Any) -> None:
        """Keep a figure and write all of them. Ratios are made where both of their sides are there."""
        self.figures[name] = value
        for ratio, over, under in (
            ("fed_over_compute", "fed", "compute_only"),
            ("fed_over_guide", "fed", "guide"),
            ("fed_at_guide_batch_over_guide", "fed_at_guide_batch", "guide"),
        ):
            if over in self.figures and under in self.figures:
                self.figures[ratio] = self.figures[over] / self.figures[under]
        self.out.write_text(json.dumps(self.figures, indent=1) + "\n")

    def remark(self, line: str) -> None:
        """Keep a sentence that belongs to the figures."""
        self.note("notes", [*self.figures.get("notes", []), line])

    def left_s(self) -> float:
        """Seconds left of the row's budget."""
        return self._ends_s - time.monotonic()

    def seconds(self, wanted: float) -> float:
        """How long to measure: as wanted, or hardly at all in a smoke test."""
        return 0.3 if self.smoke else wanted

    def close(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self.work, ignore_errors=True)


def drain(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(step: Callable[[], int], seconds: float, device: torch.device, warmup: int = 5) -> float:
    """Samples per second of ``step``, which returns how many it did."""
    for _ in range(warmup):
        step()
    drain(device)
    began_s, samples = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        samples += step()
    drain(device)
    return samples / (time.perf_counter() - began_s)


def plain_step(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Any], Any],
    *,
    lr: float = 1e-4,
    clip_norm: float | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Callable[[Any], None]:
    """A training step as one writes it by hand: autocast, backward, clipping, fused AdamW; fp16 with its scaler."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    parameters = list(model.parameters())

    def step(batch: Any) -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outcome = loss(model, batch)
        value = outcome[0] if isinstance(outcome, tuple) else outcome
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(value).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def stock_rate(
    loader: Iterable[Any], step: Callable[[Any], None], batch_size: int, seconds: float, device: torch.device
) -> float:
    """Samples per second over a stock loader, epoch after epoch; the first batches and their wait are not counted."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()

    def once() -> int:
        batch = next(batches)
        step([part.to(device, non_blocking=True) for part in batch])
        return batch_size

    return rate(once, seconds, device)


def engine_rate(
    job: Job, settings: TrainSettings, out: Path, seconds: float
) -> tuple[float, float | None, float | None]:
    """Samples per second of the engine from its second epoch on, and mean GPU use and SM activity meanwhile (%)."""
    samples: list[Sample] = []
    window: dict[str, float] = {}
    done = 0

    def on_step(end: StepEnd) -> None:
        nonlocal done
        if end.epoch == 0:
            return
        if not window:
            drain(end.rig.device)
            window["began_s"] = time.perf_counter()
            samples.clear()
            return
        done += 1
        if time.perf_counter() - window["began_s"] >= seconds:
            drain(end.rig.device)
            window["ended_s"] = time.perf_counter()
            raise StoppedEarly("enough")

    with sampling(samples):
        try:
            train(job, settings, out, fresh=True, screen=Silence(out), on_step=on_step)
        except StoppedEarly:
            pass
    if "ended_s" not in window:
        raise RuntimeError("the run ended before it was measured: give it more epochs")
    wall_s = window["ended_s"] - window["began_s"]
    gpus = [sample.gpus[0] for sample in samples if sample.gpus]
    return (
        done * settings.batch_size * settings.accumulation / wall_s,
        mean_of([gpu.util_pct for gpu in gpus]),
        mean_of([gpu.sm_active_pct for gpu in gpus]),
    )


@contextmanager
def sampling(into: list[Sample]) -> Iterator[None]:
    """Look at the machine twice a second meanwhile."""
    sampler = Sampler(into.append, interval_s=0.5)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


def mean_of(values: list[float | None]) -> float | None:
    """The mean of what was measured; None for nothing."""
    # The first reading covers the time before the window.
    known = [value for value in values[1:] if value is not None]
    return statistics.fmean(known) if known else None
