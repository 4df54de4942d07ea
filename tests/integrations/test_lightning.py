"""The Lightning callback records a real fit: its steps, and its validation including the sanity check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fulltilt
from fulltilt.diagnosis import answer

lightning = pytest.importorskip("lightning.pytorch")


class Small(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def _loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_fit_is_recorded(tmp_path: Path) -> None:
    from fulltilt.integrations.lightning import FulltiltCallback

    data = TensorDataset(torch.randn(40, 8), torch.zeros(40, dtype=torch.long))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[FulltiltCallback(tmp_path / "run")],
    )
    trainer.fit(Small(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    result = answer(fulltilt.load(tmp_path / "run"))
    assert result.throughput.steps == trainer.global_step == 10
    assert result.throughput.samples == 80
    assert result.ledger.buckets.validation_s > 0
