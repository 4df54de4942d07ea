"""The whole validation set is gone through every 10 steps, properly: in eval mode and without gradients."""

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
            with watch.part("validation"), torch.no_grad():
                model.eval()
                hits = sum((model(x).argmax(1) == y).sum() for x, y in valid_loader)
                model.train()
watch.tell()
