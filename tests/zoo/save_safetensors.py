"""A large model is written as safetensors every 5 steps."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randint(100_000, (4000, 16)), torch.randint(4, (4000,))), batch_size=8)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(100_000, 200, sparse=True), torch.nn.Linear(200, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with tempfile.TemporaryDirectory() as folder:
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 2:
            break
        if number % 5 == 0:
            with watch.part("checkpoint"):
                save_file(model.state_dict(), Path(folder) / "latest.safetensors")  # <- here
watch.tell()
