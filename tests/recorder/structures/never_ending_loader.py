"""As with timm: workers that live through all epochs, behind a generator that hands over a batch after the next."""

import json
import time

import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(64), index % 4


class Forever:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.batches = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)


def prefetched(loader):
    previous = None
    for inputs, labels in loader:
        if previous is not None:
            yield previous
        previous = inputs.float(), labels
    yield previous


loader = MultiEpochsLoader(Samples(), batch_size=8, shuffle=True, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps = samples = 0
for _epoch in range(4):
    for inputs, labels in prefetched(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        steps += 1
        samples += len(inputs)

print(json.dumps({"steps": steps, "samples": samples}))
