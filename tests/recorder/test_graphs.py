"""A step that the job has captured as a CUDA graph counts each time it is replayed, and not while it is captured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fulltilt
from fulltilt import store
from fulltilt.diagnosis import answer

WARM_UP, BATCH, BATCHES = 3, 8, 60


class Graph:
    """A CUDA graph on the CPU: it holds nothing, and a replay takes its time."""

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""

    def replay(self) -> None:
        """Compute."""
        time.sleep(0.005)


class Job:
    """A model and the parts of its step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.graph = torch.cuda.CUDAGraph()

    def backward(self, values: torch.Tensor) -> None:
        """Forward and backward."""
        self.model(values).sum().backward()

    def step(self, values: torch.Tensor) -> None:
        """All of it."""
        self.backward(values)
        self.optimizer.step()

    def captured(self, part: Callable[[torch.Tensor], None], values: torch.Tensor) -> None:
        """Capture ``part``."""
        self.graph.capture_begin()
        part(values)
        self.graph.capture_end()


@pytest.mark.parametrize("whole", [True, False], ids=["the whole step", "all but the optimizer"])
def test_replays_are_steps_with_their_samples(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    loader = DataLoader(TensorDataset(torch.randn(BATCH * BATCHES, 4)), BATCH)
    with fulltilt.record(tmp_path):
        job = Job()
        job.captured(lambda values: job.model(values).sum(), torch.zeros(BATCH, 4))  # one that holds no step
        for number, (values,) in enumerate(loader):
            if number == WARM_UP:
                job.captured(job.step if whole else job.backward, values)
            if number < WARM_UP:
                job.step(values)
                continue
            job.graph.replay()
            if not whole:
                job.optimizer.step()
    found = answer(store.load(tmp_path))
    assert (found.throughput.steps, found.throughput.samples) == (BATCHES, BATCHES * BATCH)
    assert found.ledger.buckets.compute_s > 0.6 * 0.005 * (BATCHES - WARM_UP)


def test_a_capture_that_fails_leaves_the_next_steps_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Graph):
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Failing)
    with fulltilt.record(tmp_path):
        job, values = Job(), torch.randn(BATCH, 4)
        job.step(values)
        with pytest.raises(RuntimeError, match="previous error"):
            job.captured(job.step, values)
        for _ in range(20):
            job.step(values)
            time.sleep(0.01)
    assert answer(store.load(tmp_path)).throughput.steps == 21
