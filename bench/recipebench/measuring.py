"""What the rows share: their figures, rates with the device drained at both ends, a plain step, GPU samples."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from children import IN_MEMORY, drain
from torch.utils.data import DataLoader

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.sampler import Sampler
from fulltilt.records import Sample
from fulltilt.train import TrainSettings
from fulltilt.train.cuda_graphs import GraphedModel
from fulltilt.train.step import set_tf32


class Bench:
    """Where a row notes its figures, its scratch folder, and how much of its time is left."""

    def __init__(self, out: Path, budget_s: float, *, smoke: bool, compiles: bool = False) -> None:
        self.out, self.smoke, self.compiles = out, smoke, compiles
        # What another batch size takes at least: a compiled model is compiled again for it.
        self.another_s = 0.0 if smoke else 120.0 if compiles else 15.0
        set_tf32(TrainSettings().tf32)  # as the engine does: compiled code depends on it
        self.device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
        self.figures: dict[str, Any] = {}
        self._ends_s = time.monotonic() + budget_s
        self.note("facts", {**facts(self.device), "compiled": compiles})
        self.work = Path(tempfile.mkdtemp(prefix="fulltilt-recipes-", dir=IN_MEMORY))

    def note(self, name: str, value: Any) -> None:
        """Keep a figure and write all of them. Ratios are made where both of their sides are there."""
        self.figures[name] = value
        for ratio, over, under in (
            ("fed_over_stock", "fed", "stock"),
            ("fed_at_stock_batch_over_stock", "fed_at_stock_batch", "stock"),
        ):
            if over in self.figures and under in self.figures:
                self.figures[ratio] = self.figures[over] / self.figures[under]
        self.out.write_text(json.dumps(self.figures, indent=1) + "\n")

    def note_all(self, figures: dict[str, Any]) -> None:
        """Keep several figures."""
        for name, value in figures.items():
            self.note(name, value)

    def begins(self, part: str) -> None:
        """Note which part comes next, in case the process dies in it."""
        self.note("doing", part)

    def remark(self, line: str) -> None:
        """Keep a sentence that belongs to the figures."""
        self.note("notes", [*self.figures.get("notes", []), line])

    def left_s(self) -> float:
        """Seconds left of the row's budget."""
        return self._ends_s - time.monotonic()

    def seconds(self, wanted: float) -> float:
        """How long to measure: as wanted, or hardly at all in a smoke test."""
        return 0.3 if self.smoke else wanted

    def trained(self, model: torch.nn.Module) -> Any:
        """The model on the device as the recipes train it: replayed from CUDA graphs, and compiled where asked for."""
        model = model.to(self.device).train()
        called: Any = torch.compile(model) if self.compiles else model
        if self.device.type == "cuda":
            GraphedModel(model, called, self.remark)
        return called

    def close(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self.work, ignore_errors=True)


def facts(device: torch.device) -> dict[str, Any]:
    """Interpreter, torch, device and machine of the process."""
    on_gpu = device.type == "cuda"
    return {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "kernel": platform.release(),
    }


def rate(step: Callable[[], int], seconds: float, device: torch.device, together: int = 1) -> float:
    """Samples per second of ``step``, which returns how many it did.

    Workers begin together and so deliver together: of ``together`` steps only whole rounds count.
    """
    for _ in range(max(5, together)):
        step()
    drain(device)
    began_s, samples, steps = time.perf_counter(), 0, 0
    while steps % together or time.perf_counter() - began_s < seconds:
        samples += step()
        steps += 1
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
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outcome = loss(model, batch)
        value = outcome[0] if isinstance(outcome, tuple) else outcome
        scaler.scale(value).backward()  # type: ignore[no-untyped-call, unused-ignore]
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def stock_rate(
    loader: DataLoader[Any], step: Callable[[Any], None], batch_size: int, seconds: float, device: torch.device
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

    return rate(once, seconds, device, together=max(1, loader.num_workers))


@contextmanager
def sampling(into: list[Sample]) -> Iterator[None]:
    """Look at the machine twice a second meanwhile."""
    sampler = Sampler(into.append, gpus=Gpus.open(), interval_s=0.5)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


def mean_of(values: list[float | None]) -> float | None:
    """The mean of what was measured; None for nothing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
