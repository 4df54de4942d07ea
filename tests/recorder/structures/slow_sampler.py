"""A batch sampler of the script's own that takes its time, in front of a worker."""

import json
import time

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_num_threads(1)


class Hardest(Sampler):
    def __len__(self):
        return 100

    def __iter__(self):
        for first in range(100):
            time.sleep(0.02)
            yield range(first, first + 16)


model = torch.nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = samples = 0
for (inputs,) in DataLoader(TensorDataset(torch.randn(128, 64)), batch_sampler=Hardest(), num_workers=1):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    steps += 1
    samples += len(inputs)
print(json.dumps({"steps": steps, "samples": samples}))
