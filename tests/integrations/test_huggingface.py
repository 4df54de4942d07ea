"""The Hugging Face callback records a real Trainer's run: its steps, its evaluations and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fulltilt
from fulltilt.diagnosis import answer

transformers = pytest.importorskip("transformers")


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) % 50
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(index % 2)}


def test_a_trainers_run_is_recorded(tmp_path: Path) -> None:
    from fulltilt.integrations.huggingface import FulltiltCallback

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Words(),
        eval_dataset=Words(),
        callbacks=[FulltiltCallback(tmp_path / "run")],
    )
    trainer.train()
    run = fulltilt.load(tmp_path / "run")
    result = answer(run)
    assert result.throughput.steps == trainer.state.global_step == 12
    assert result.throughput.samples == 96
    assert result.ledger.buckets.validation_s > 0
    assert result.ledger.buckets.checkpoint_s > 0
    assert result.ledger.buckets.total_s == pytest.approx(result.ledger.wall_s, rel=1e-6)
    assert (result.checklist[0].state, result.checklist[0].figure) == ("ok", "Batch size: 4 (expected: 4)")
    assert (run.run.asked.accumulation, run.run.asked.precision) == (2, "fp32")
    assert (tmp_path / "run" / "report.html").exists()
    assert torch.save.__module__ == "torch.serialization"
    assert not hasattr(torch.save, "__wrapped__")  # every patch is out again
