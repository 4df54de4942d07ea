"""Hugging Face: Trainer with its own loaders."""

import tempfile

import torch
from slow_data import EPOCHS, SlowRows, numbers, small_model, tell
from transformers import Trainer, TrainingArguments

SAMPLES = 640
order = []


class Rows(SlowRows):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return {"rows": row, "labels": label}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = small_model()

    def forward(self, rows, labels):
        if self.training:
            order.extend(numbers(rows, SAMPLES))
        logits = self.model(rows)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=8,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    logging_steps=20,
    disable_tqdm=True,
)
trainer = Trainer(model=Classifier(), args=arguments, train_dataset=Rows(SAMPLES))
trainer.train()
tell(trainer.state.global_step, len(order), order)
