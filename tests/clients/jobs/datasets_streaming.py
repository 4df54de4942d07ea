"""Hugging Face datasets, streamed without any DataLoader."""

import torch
from datasets import IterableDataset
from slow_data import read_file, small_model, tell


def examples():
    for number in range(480):
        yield {"row": read_file(number), "label": number % 4}


data = IterableDataset.from_generator(examples).with_format("torch")
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = samples = 0
for batch in data.iter(batch_size=8):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch["row"]), batch["label"]).backward()
    optimizer.step()
    steps += 1
    samples += len(batch["row"])
tell(steps, samples)
