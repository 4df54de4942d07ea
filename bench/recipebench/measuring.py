"""What the rows share: their figures, the rate of a stock loader, GPU samples."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from children import IN_MEMORY
from feedbench.measuring import endless, on_device, samples_per_s
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
        self.work = Path(tempfile.mkdtemp(prefix="fulltilt-recipes-", dir=IN_MEMORY))

    def note(self, **figures: Any) -> None:
        """Keep figures and write all of them. Ratios are made where both of their sides are there."""
        self.figures |= figures
        for ratio, over, under in (
            ("fed_over_stock", "fed", "stock"),
            ("fed_at_stock_batch_over_stock", "fed_at_stock_batch", "stock"),
        ):
            if over in self.figures and under in self.figures:
                self.figures[ratio] = self.figures[over] / self.figures[under]
        self.out.write_text(json.dumps(self.figures, indent=1) + "\n")

    def remark(self, line: str) -> None:
        """Keep a sentence that belongs to the figures."""
        self.note(notes=[*self.figures.get("notes", []), line])

    def left_s(self) -> float:
        """Seconds left of the row's budget."""
        return self._ends_s - time.monotonic()

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


def stock_rate(
    bench: Bench, loader: DataLoader[Any], step: Callable[[Any], None], batch_size: int, seconds: float
) -> float:
    """Samples per second over a stock loader, epoch after epoch; the first batches and their wait are not counted."""
    stream = endless(partial(on_device, loader, bench.device))
    for _ in range(max(5, loader.num_workers)):
        step(next(stream))
    seconds, together = 0.3 if bench.smoke else seconds, max(1, loader.num_workers)
    return samples_per_s(step, stream, lambda _: batch_size, seconds, bench.device, together)


class Repeated(torch.utils.data.Dataset[Any]):
    """The same samples several times over: a longer epoch."""

    def __init__(self, samples: Any, times: int) -> None:
        self.samples, self.times = samples, times

    def __len__(self) -> int:
        return len(self.samples) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


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
