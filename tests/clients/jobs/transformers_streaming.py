"""Hugging Face: Trainer on a streamed data set, with a collator of the script's own and an evaluation."""

import tempfile

import torch
from datasets import Dataset
from slow_data import read_file, small_model, tell
from transformers import Trainer, TrainingArguments

samples = 0


def load(example):
    return {"row": read_file(example["number"]).tolist(), "label": example["number"] % 4}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = small_model()

    def forward(self, rows, labels):
        global samples
        samples += len(rows) if self.training else 0
        logits = self.model(rows)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(examples):
    rows, labels = ([example[name] for example in examples] for name in ("row", "label"))
    return {"rows": torch.tensor(rows), "labels": torch.tensor(labels)}


data = Dataset.from_dict({"number": list(range(404))}).to_iterable_dataset(num_shards=4).map(load)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=40,
    per_device_train_batch_size=8,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=20,
    disable_tqdm=True,
    remove_unused_columns=False,
    label_names=["labels"],
)
trainer = Trainer(Classifier(), arguments, train_dataset=data, eval_dataset=data.take(32), data_collator=collate)
trainer.train()
tell(trainer.state.global_step, samples)
