"""Validation every 10 steps with neither eval mode nor no_grad: only the missing backward tells."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
samples = TensorDataset(torch.randn(64 * 60, 512), torch.randint(4, (64 * 60,)))
train_loader = DataLoader(samples, batch_size=64)
valid_loader = DataLoader(samples, batch_size=64)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

while watch.seconds < 2:
    for number, (inputs, labels) in enumerate(train_loader, start=1):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 2:
            break
        if number % 10 == 0:
            with watch.part("validation"):
                losses = []
                for x, y in valid_loader:
                    losses.append(torch.nn.functional.cross_entropy(model(x), y).item())
watch.tell()
