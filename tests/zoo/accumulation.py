"""Gradients of 4 batches make one step."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(16000, 512), torch.randint(4, (16000,))), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

seen = 0
for number, (inputs, labels) in enumerate(loader, start=1):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels) / 4
    loss.backward()
    seen += len(inputs)
    if number % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
        watch.step(seen)
        seen = 0
        if watch.seconds > 2:
            break
watch.tell()
