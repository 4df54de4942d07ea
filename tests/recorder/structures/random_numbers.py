"""Draws random numbers in every way, in the training process and in workers; prints what they came to."""

import hashlib
import random

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)


def draw():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


class Augmented(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        sum(i * i for i in range(5_000))  # long enough to be sampled
        return torch.tensor([*draw(), index])


model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
seen = hashlib.sha256()
for workers in (0, 1):
    for _epoch in range(2):
        for batch in DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers):
            seen.update(batch.numpy().tobytes())
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
print(seen.hexdigest(), draw(), [float(p.sum()) for p in model.parameters()])
