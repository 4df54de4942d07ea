"""A recorded run sees the feed's loaders as it sees a DataLoader: waits, batches, samples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import fulltilt
from fulltilt import batch_observer, feed
from fulltilt.records import LoaderRecord
from tests.faults import victim


class Slow:
    """Sixty-four samples, 2 ms each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((6,), float(index)), index


def loaders_of(folder: Path) -> list[LoaderRecord]:
    return [loader for rank in fulltilt.load(folder).ranks for loader in rank.loaders]


def test_a_loop_over_a_feed_loader_is_measured(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        fulltilt.record(tmp_path / "run"),
        feed.loader(Slow(), 8, residency="none", device="cpu", num_workers=0) as loader,
    ):
        for _ in range(2):
            for inputs, _ in loader:
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()
    (seen,) = loaders_of(tmp_path / "run")
    assert (seen.role, seen.dataset, seen.dataset_len, seen.batch_size) == ("train", "Slow", 64, 8)
    assert (seen.passes, seen.batches, seen.samples) == (2, 16, 128)
    assert seen.where is not None
    assert "test_batch_observer.py" in seen.where
    assert seen.wait_s + seen.first_wait_s + seen.restart_s > 128 * 0.002
    assert batch_observer.observe is None, "nobody looks on any more"


def test_the_engines_own_steps_are_counted_once(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data": victim.NoisySamples(40), "eval_data": None}
    victim.run_here(tmp_path / "run", changes=changes, epochs=2, record=True)
    trained = [loader for loader in loaders_of(tmp_path / "run") if loader.role == "train"]
    assert [(loader.batches, loader.samples) for loader in trained] == [(10, 80)]
