"""The whole data set is kept in memory until hardly any is left: hoarding.py MEGABYTES in all."""

import sys
from pathlib import Path

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()


def megabytes_in_use():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1.024e-3


hoard = []
while megabytes_in_use() < int(sys.argv[1]):
    hoard.append(torch.ones(1_000_000))
loader = DataLoader(TensorDataset(torch.randn(16000, 512), torch.randint(4, (16000,))), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
