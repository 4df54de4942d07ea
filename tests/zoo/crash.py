"""A damaged record ends the training with a traceback of the script's own."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class DamagedSamples(Dataset):
    def __len__(self):
        return 1200

    def __getitem__(self, index):
        time.sleep(0.002)
        if index == 1000:
            watch.tell()
            raise ValueError("record 1000 is damaged")
        return torch.randn(64), index % 4


loader = DataLoader(DamagedSamples(), batch_size=16)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for inputs, labels in loader:
    watch.arrived()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
