"""Metrics over the whole evaluation set."""

from __future__ import annotations

from pathlib import Path

import torch

from fulltilt.train import Job, TrainSettings, train
from fulltilt.train.progress import TrainingScreen


def test_what_is_kept_of_each_sample_arrives_once_also_when_a_batch_had_to_be_halved(tmp_path: Path) -> None:
    seen: dict[str, torch.Tensor] = {}

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def eval_loss(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict, dict]:
        if len(batch) > 2 and 0.0 not in batch:  # the second batch is too large after the first one went through
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch), {}, {"value": batch[:, 0]}

    def metrics(kept: dict[str, torch.Tensor]) -> dict[str, float]:
        seen.update(kept)
        return {"largest": float(kept["value"].max())}

    data = [torch.tensor([float(i)]) for i in range(10)]
    job = Job(torch.nn.Linear(1, 1), loss, data, eval_data=data, eval_loss=eval_loss, eval_metrics=metrics)
    outcome = train(
        job, TrainSettings(batch_size=4, device="cpu"), tmp_path, screen=TrainingScreen(tmp_path, speaks=False)
    )
    assert sorted(seen["value"].tolist()) == [float(i) for i in range(10)]
    assert outcome.metrics["eval_largest"] == 9.0
