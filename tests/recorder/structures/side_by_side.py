"""Two loaders drawn side by side in steps so short that most are only counted; the samples of the first count."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
labelled, unlabelled = TensorDataset(torch.randn(1600, 8)), TensorDataset(torch.randn(4800, 8))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
steps = samples = 0
for _ in range(6):
    for (some,), (more,) in zip(DataLoader(labelled, batch_size=8), DataLoader(unlabelled, batch_size=24), strict=True):
        optimizer.zero_grad()
        (model(some).square().mean() + model(more).abs().mean()).backward()
        optimizer.step()
        steps += 1
        samples += len(some)
print(json.dumps({"steps": steps, "samples": samples}))
